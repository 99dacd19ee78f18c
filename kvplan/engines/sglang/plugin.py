"""kvplan's plugin for SGLang: HiCache's transfers with ``KVPLAN_SGLANG``.

Source: SGLang 0.5.23, ``srt/plugins`` (entry points of ``sglang.srt.plugins``, ``HookRegistry``). SGLang
loads installed plugins in each of its processes. kvplan's entry point calls :func:`plugin` if the variable is set.
"""

from __future__ import annotations

from typing import Any

from kvplan.engines.after_import import show_lines
from kvplan.engines.asked_policy import asked_policy
from kvplan.engines.sglang.hicache import attach, logger

VARIABLE = "KVPLAN_SGLANG"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController.__init__"


def plugin() -> None:
    """Attach kvplan to each HiCache controller when it is built. SGLang calls this in each of its processes.

    With ``KVPLAN_SGLANG=auto``, the cost model chooses the path; the name of a path selects that path. ``0`` or an
    empty value leaves the engine unchanged.

    Raises:
        KVPlanError: the variable has another value.
    """
    policy = asked_policy(VARIABLE)
    if policy is None:
        return
    show_lines(logger)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def built(_result: Any, controller: Any, *_given: Any, **_more: Any) -> None:
        attach(controller, policy=policy)

    HookRegistry.register(CONTROLLER, built, HookType.AFTER)
