"""What the first transfer of a program would wait for, done ahead: compiled loops, kernels and run tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan import compiled
from kvplan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.runtime import Runtime


def prepare(runtime: Runtime, plan: Plan | None) -> None:
    """Make ready every path that plans of these programs may take; the device is current.

    Raises:
        KVPlanError: whatever a submit of the plan would be refused with.
    """
    compiled.load()
    runtime.device.load_loops()
    if plan is None or not plan.nbytes:
        return
    for name in _paths_for(runtime, plan):
        runtime.paths[name].load(plan)


def _paths_for(runtime: Runtime, plan: Plan) -> list[str]:
    """The path of the policy; of ``auto``, what plans may take that are larger or smaller, or merge less."""
    chosen = runtime.candidates.choose(plan, capturing=False)
    if runtime.policy.path != "auto" or chosen.predicted is None:
        return [chosen.path.name]
    return [one.path for one in runtime.candidates.all(plan) if not one.refused]
