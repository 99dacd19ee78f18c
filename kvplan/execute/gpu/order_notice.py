"""Log once a program that another order of the host side would be much faster, by the cost model."""

from __future__ import annotations

import logging

from kvplan.base.latch import thread_started
from kvplan.base.numbers import duration
from kvplan.cost.policy import HOST_ROUTES, Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.records import record_of
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.plan import Plan

log = logging.getLogger("kvplan.execute")
# A plan is looked at if it takes at least twice the time of one large copy, and at least this many seconds longer.
WASTED = 1e-4


def notice(plan: Plan, route: str, predicted: float, profile: DeviceProfile, policy: Policy) -> None:
    """Let a thread search a faster order for each program of a plan that is slow for its bytes; each program once.

    The search takes a tenth of a second of Python, so no submit waits for it. It holds no memory of the layouts.

    Args:
        plan: the plan, for which a path was just chosen.
        route: route of the plan.
        predicted: predicted seconds on the GPU.
        profile: profile of the device.
        policy: policy of the executor.
    """
    if route not in HOST_ROUTES or not log.isEnabledFor(logging.WARNING):
        return
    least = plan.nbytes / (profile.ceilings[route] * 1e9)
    if predicted < max(2 * least, least + WASTED):
        return
    for program in plan.programs:
        if isinstance(program, CopyProgram) and not program.advised:
            program.advised = True
            src, dst = (KVLayout(record_of(side.built)) for side in (program.src, program.dst))
            thread_started(_search, (src, dst, route, profile, policy))


def _search(src: KVLayout, dst: KVLayout, route: str, profile: DeviceProfile, policy: Policy) -> None:
    """Search a faster order and log it; an error is logged and changes nothing else."""
    from kvplan.advise.faster_order import faster_order
    from kvplan.advise.host_order import TOKENS

    try:
        found = faster_order(src, dst, route, profile, policy)
        if found is None:
            return
        host = src if route == "load" else dst
        log.warning(
            "a %s of %s tokens is predicted to take %s by %s; with host order %r and blocks of %d tokens, %s by %s. "
            "The present order is %r, blocks of %d tokens. kvplan advise writes the order as code and as a spec",
            route, f"{TOKENS:,}", duration(found.now.wall), found.now.path, found.notation, found.block_tokens,
            duration(found.then.wall), found.then.path, host.notation, host.block_tokens,
            extra={"kvplan_notation": found.notation, "kvplan_seconds": found.then.wall},
        )  # fmt: skip
    except Exception:
        log.debug("no faster order was searched", exc_info=True)
