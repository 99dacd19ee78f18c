"""kvplan's plugin for SGLang: HiCache's transfers with ``KVPLAN_SGLANG``, staging with ``KVPLAN_SGLANG_STAGING``.

Source: SGLang 0.5.23, ``srt/plugins`` (entry points of ``sglang.srt.plugins``, ``HookRegistry``). SGLang
loads installed plugins in each of its processes. kvplan's entry point calls :func:`plugin` if the variable is set.
"""

from __future__ import annotations

from typing import Any

from kvplan.engines.after_import import show_lines
from kvplan.engines.asked_policy import asked_policy
from kvplan.engines.sglang.hicache import attach, logger
from kvplan.engines.sglang.staging_hooks import VARIABLE as STAGING
from kvplan.engines.sglang.staging_hooks import hook_staging

VARIABLE = "KVPLAN_SGLANG"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController.__init__"


def plugin() -> None:
    """Serve the parts of SGLang that variables of the environment ask for. SGLang calls this in each of its processes.

    ``KVPLAN_SGLANG`` attaches kvplan to each HiCache controller when it is built. ``KVPLAN_SGLANG_STAGING`` lets kvplan
    gather and scatter for staging between prefill and decode. With ``auto``, the cost model chooses the path; the name
    of a path selects that path. ``0`` or an empty value leaves the engine unchanged.

    Raises:
        KVPlanError: a variable has another value; or staging is asked for and SGLang's functions differ.
    """
    policy, staging = asked_policy(VARIABLE), asked_policy(STAGING)
    if policy is None and staging is None:
        return
    show_lines(logger)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def built(result: Any, controller: Any, *given: Any, **more: Any) -> None:
        del result, given, more
        attach(controller, policy=policy)

    if policy is not None:
        HookRegistry.register(CONTROLLER, built, HookType.AFTER)
    if staging is not None:
        hook_staging(staging, lambda target, hook: HookRegistry.register(target, hook, HookType.AROUND))
