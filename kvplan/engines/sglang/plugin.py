"""SGLang's plugin: attaches kvplan to every HiCache controller, where the environment asks for it.

Source: SGLang 0.5.23, ``srt/plugins`` (entry points of ``sglang.srt.plugins``, ``HookRegistry``), which loads what is
installed in each of its processes. kvplan's entry point is this module's :func:`plugin`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, PATHS
from kvplan.engines.sglang import attach
from kvplan.errors import KVPlanError

VARIABLE = "KVPLAN_SGLANG"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController.__init__"


def plugin() -> None:
    """Have kvplan attached to HiCache controllers as they are built; nothing where ``KVPLAN_SGLANG`` is not set.

    The engine calls it. ``KVPLAN_SGLANG=auto`` lets the cost model choose how to move, a path's name takes that path;
    ``0`` or nothing leaves the engine alone.

    Raises:
        KVPlanError: a value that is neither.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in {"", "0"}:
        return
    if asked not in {"auto", *PATHS}:
        raise KVPlanError(f"{VARIABLE} is {asked!r}; give 'auto' or a path: {', '.join(PATHS)}; or '0', to do nothing")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def built(result: Any, controller: Any, *given: Any, **more: Any) -> None:
        del result, given, more
        attach(controller, policy=replace(BESIDE_COMPUTE, path=asked))

    HookRegistry.register(CONTROLLER, built, HookType.AFTER)
