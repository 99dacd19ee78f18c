"""What the first transfer of a program would wait for, done ahead: compiled loops, kernels and run tables."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from kvplan.base.process import compiling
from kvplan.plan import loops as compiled
from kvplan.plan.layers import split_layers
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime


def prepare(runtime: Runtime, plan: Plan | None, *, most_groups: int) -> None:
    """Make ready every path that plans of these programs may take; nothing moves.

    Args:
        runtime: of the GPU.
        plan: one of them; None for the loops alone.
        most_groups: of layers that a transfer is cut into; 1 for those that are not.

    Raises:
        KVPlanError: whatever a submit of the plan would be refused with.
    """
    me = object()
    try:
        # Keep what is being made from being torn down by a close: that waits, as it does for transfers.
        with runtime.lanes["load"].lock:  # which the end takes, too
            runtime.check_open()
            runtime.preparing[me] = get_ident()
        with runtime.device.current(), compiling():  # weighing paths loads loops, too
            _make_ready(runtime, plan, most_groups)
    finally:
        runtime.preparing.pop(me, None)


def _make_ready(runtime: Runtime, plan: Plan | None, most_groups: int) -> None:
    names = [] if plan is None else _paths_for(runtime, plan)
    compiled.load()
    runtime.device.load_loops()
    if plan is None or not plan.nbytes:
        return
    parts = [part for _, part in split_layers(plan, most_groups)] if most_groups > 1 else [plan]
    for part in parts:
        for name in names:
            runtime.paths[name].make_ready(part)


def _paths_for(runtime: Runtime, plan: Plan) -> list[str]:
    """The path of the policy; of ``auto``, what plans may take that are larger or smaller, or merge less."""
    chosen = runtime.candidates.choose(plan, capturing=False)
    if chosen.predicted is None:
        return [chosen.path.name]
    return [one.path for one in runtime.candidates.all(plan) if not one.refused]
