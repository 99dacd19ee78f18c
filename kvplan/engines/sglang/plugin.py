"""SGLang's plugin: it attaches kvplan to every HiCache controller, if the environment asks for it.

Source: SGLang 0.5.23, ``srt/plugins`` (entry points of ``sglang.srt.plugins``, ``HookRegistry``). SGLang
loads installed plugins in each of its processes. kvplan's entry point is :func:`plugin`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, PATHS
from kvplan.engines.sglang.hicache import attach
from kvplan.errors import KVPlanError

VARIABLE = "KVPLAN_SGLANG"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController.__init__"


def plugin() -> None:
    """Attach kvplan to HiCache controllers as they are built, if ``KVPLAN_SGLANG`` is set. The engine calls this.

    ``KVPLAN_SGLANG=auto`` lets the cost model choose the path, and a path's name takes that path. ``0`` or an empty
    value leaves the engine as it is.

    Raises:
        KVPlanError: ``KVPLAN_SGLANG`` has another value.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked in {"", "0"}:
        return
    if asked not in {"auto", *PATHS}:
        raise KVPlanError(f"{VARIABLE} is {asked!r}; give 'auto' or a path: {', '.join(PATHS)}; or '0' to do nothing")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def built(result: Any, controller: Any, *given: Any, **more: Any) -> None:
        del result, given, more
        attach(controller, policy=replace(BESIDE_COMPUTE, path=asked))

    HookRegistry.register(CONTROLLER, built, HookType.AFTER)
