"""Check the plans of the host path, cut them into independent tasks, and copy their bytes."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from time import perf_counter
from types import ModuleType

from kvplan.errors import PathError
from kvplan.execute.host.crew import Crew, Task
from kvplan.execute.transfer import TransferResult, check_layouts
from kvplan.plan import loops
from kvplan.plan.plan import Plan

# Bytes of a task: large enough to hide the cost of passing it to a thread, small enough to share work evenly.
TASK_NBYTES = 4 << 20
# Transfers of this size or more bypass the CPU's caches; otherwise they would evict other data.
STREAMING_NBYTES = 16 << 20


def check_plan(plan: Plan) -> None:
    """Check that the host path can serve a plan.

    Raises:
        LayoutError: the destination is read-only, or addresses are not this process's.
        PathError: the plan touches memory of a GPU.
    """
    check_layouts(plan)
    if plan.direction != "host":
        raise PathError(f"path 'host' copies between CPU memories only, and this plan is a {plan.direction!r}")


def tasks_of(plan: Plan) -> tuple[list[Task], int]:
    """Cut a plan into independent tasks; return them and the number of contiguous copies that they make.

    Each loop is first called without copies, so that it is loaded for these array types before the copying is timed.
    Runs longer than a task are cut into flat descriptors.
    """
    counts = [part.group.offsets[0].size * part.units.shape[1] for part in plan.parts]
    copies = sum(counts)
    memcpy = copy_loops(copies + plan.nbytes // TASK_NBYTES)
    streaming = plan.nbytes >= STREAMING_NBYTES
    if any(run.nbytes > TASK_NBYTES for group, _ in plan.parts for run in group.runs):
        made = plan.descriptors(max_nbytes=TASK_NBYTES)
        copies = made.size.size
        calls = [(partial(memcpy.copy_flat, *made), copies, plan.nbytes)]
    else:
        calls = [
            (partial(memcpy.copy_units, part.units, *part.group.offsets), count, part.nbytes)
            for part, count in zip(plan.parts, counts, strict=True)
        ]
    work: list[Task] = []
    for copy, count, nbytes in calls:
        copy(0, 0, streaming)
        step = max(1, count * TASK_NBYTES // max(nbytes, 1))
        work += [partial(copy, first, min(first + step, count), streaming) for first in range(0, count, step)]
    return work, copies


def copy_loops(copies: int) -> ModuleType:
    """Return the module with the copy loops: without numba for few copies in a short process, otherwise compiled."""
    name = "memmove" if loops.spares(copies) else "memcpy"
    return import_module(f"kvplan.execute.host.{name}")


def run_plan(plan: Plan, crew: Crew) -> TransferResult:
    """Copy the bytes of a plan with all threads of a crew; return the result."""
    work, copies = tasks_of(plan) if plan.nbytes else ([], 0)
    begun = perf_counter()
    crew.run(work)
    return TransferResult(plan.nbytes, perf_counter() - begun, "host", copies, len(work))
