"""Check the plans of the host path, cut them into independent tasks, and copy their bytes with several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from time import perf_counter
from types import ModuleType

from kvplan.base.process import compiling
from kvplan.base.threads import error_of
from kvplan.errors import PathError
from kvplan.execute.transfer import TransferResult, check_layouts
from kvplan.plan import loops
from kvplan.plan.plan import Plan

# Bytes of a task: large enough to hide the cost of passing it to a thread, small enough to share work evenly.
TASK_NBYTES = 4 << 20
# Transfers of this size or more bypass the CPU's caches; otherwise they would evict other data.
STREAMING_NBYTES = 16 << 20

Task = Callable[[], object]


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
    with compiling():
        return import_module("kvplan.execute.host." + ("memmove" if loops.spares(copies) else "memcpy"))


class Crew:
    """The threads that copy: the thread that calls :meth:`run`, and helpers, which start with their first tasks.

    An executor of concurrent.futures cannot be used: it accepts no work after the interpreter begins to exit.

    Args:
        helpers: number of helpers.
    """

    def __init__(self, helpers: int) -> None:
        self._most = helpers
        self._helpers: list[threading.Thread] = []
        self._calls: SimpleQueue[Task | None] = SimpleQueue()

    def run(self, plan: Plan) -> TransferResult:
        """Copy the bytes of a plan; raise the first error of its tasks, once all have ended."""
        tasks, copies = tasks_of(plan) if plan.nbytes else ([], 0)
        begun = perf_counter()
        left, errors = deque(tasks), SimpleQueue[BaseException | None]()
        wanted = min(len(tasks) - 1, self._most)
        self._hire(wanted)
        for _ in self._helpers[: max(wanted, 0)]:
            self._calls.put(partial(_share, left, errors))
        _share(left, errors)
        for error in [errors.get() for _ in tasks]:
            if error is not None:
                raise error
        return TransferResult(plan.nbytes, perf_counter() - begun, "host", copies, len(tasks))

    def dismiss(self) -> None:
        """End the helpers, and wait until they have ended."""
        for _ in self._helpers:
            self._calls.put(None)
        for helper in self._helpers:
            helper.join()

    def _hire(self, wanted: int) -> None:
        while len(self._helpers) < wanted:
            helper = threading.Thread(target=_help, args=(self._calls,), name="kvplan-copy", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no more threads: the limit of the system, or an interpreter that exits
                return
            self._helpers.append(helper)


def _share(left: deque[Task], errors: SimpleQueue[BaseException | None]) -> None:
    """Run tasks until none is left that another thread has not taken."""
    while left:
        try:
            task = left.popleft()
        except IndexError:  # another thread was faster
            return
        errors.put(error_of(task))


def _help(calls: SimpleQueue[Task | None]) -> None:
    while (share := calls.get()) is not None:
        share()
        del share  # it holds a plan's memory
