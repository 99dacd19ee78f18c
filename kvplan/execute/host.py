"""The host path: threads copy between CPU memories, and release the interpreter lock while they copy."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.base.process import check_process, compiling
from kvplan.base.threads import Call, Latch, error_of
from kvplan.errors import PathError, TransferError
from kvplan.execute.backend import Backend
from kvplan.execute.transfer import OwnTransfer, TransferResult, cancellation, check_layouts
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate

MAX_THREADS = 8
# Bytes of a task: large enough to hide the cost of passing it to a thread, small enough to share work evenly.
TASK_NBYTES = 4 << 20
# Transfers of this size or more bypass the CPU's caches; otherwise they would evict other data.
STREAMING_NBYTES = 16 << 20


class HostTransfer(OwnTransfer):
    """A transfer of the host path: it is pending, then it has begun or is cancelled, then it is over.

    Args:
        plan: the plan to move.
        after: the ``after`` of the submit.
        host: the path that moves it.
        urgent: whether it is of high priority.
    """

    def __init__(self, plan: Plan, after: Any, host: HostPath, *, urgent: bool) -> None:
        self.plan, self.after, self.urgent = plan, after, urgent
        self._host, self._begun, self._end = host, False, Latch()

    def done(self) -> bool:
        """Return whether it has finished; see :meth:`Transfer.done`."""
        if not self.over:
            check_process(self._host.generation)  # in a forked child, no thread would end it
        return self.over

    def add_done_callback(self, function: Call) -> bool:
        """Call a function at its end; see :meth:`Transfer.add_done_callback`."""
        self._end.call(function)
        return True

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has finished; see :meth:`Transfer.synchronize`."""
        if not self.done() and not self._end.wait(timeout):
            raise self._late(timeout)
        self._raise_error()

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`Transfer.cancel`."""
        check_process(self._host.generation)
        with self._host.lock:
            if not (self._begun or self.cancelled):
                self.cancelled, self.error = True, TransferError(cancellation(self.plan))
                self._host.tally.cancel()
        if self.cancelled:
            self._finish()
            self._host.bell.ring()  # for those behind it
        return self.cancelled

    def run(self) -> None:
        """Begin and end it, unless it was cancelled; in the path's thread."""
        with self._host.lock:
            self._begun = not self.cancelled
        if self._begun:
            error = (self.answers and self.answers[0]) or error_of(self._copy)  # the next transfer must still run
            if error is not None:
                self._host.tally.fail(self.plan, "host", error)
                self.error = TransferError(f"transfer of {self.plan.nbytes} bytes failed: {error}")
                self.error.__cause__ = error.with_traceback(None)
        self._finish()  # also of a cancelled one, whose cancel() may have been interrupted

    def _finish(self) -> None:
        self.over = True
        self._end.set()

    def _copy(self) -> None:
        self._result = self._host.copy(self.plan, urgent=self.urgent)
        self._host.tally.add(self._result)


class HostPath(Backend):
    """The backend of a CPU executor. It runs transfers one by one, in order of submits, each on all threads.

    Urgent transfers have a line of their own. While a normal one is copied, its threads take the tasks of an urgent one
    first. The path's thread starts with the first submit, keeps the path alive, and ends once it is stopped and no
    transfer is left; others help it from the first transfer on that has several tasks.

    Args:
        threads: number of CPU threads; by default one per core, at most 8.
    """

    def __init__(self, threads: int | None = None) -> None:
        super().__init__("kvplan-host", "no thread runs a CPU executor's transfers")
        self._threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        # A pool takes no more work when the interpreter exits; the path's thread then copies alone.
        self._pool = ThreadPoolExecutor(self._threads, "kvplan-copy")
        # Urgent and normal: transfers in order of submits, and the tasks of the one that is copied.
        self._lines: tuple[deque[HostTransfer], ...] = (deque(), deque())
        self._tasks: tuple[deque[Call], ...] = (deque(), deque())
        self._sparing = loops.spares(0)  # as the thread that makes the path

    def candidates_of(self, plan: Plan, *, by_layer: bool) -> list[Candidate]:
        """Raise PathError: the CPU has one path and no cost model."""
        del by_layer
        raise PathError(f"{plan!r} has one path on the CPU, 'host', and no cost model; give an executor of a GPU")

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """Load the loops of plans and copies; see :meth:`kvplan.Executor.prepare`."""
        del by_layer
        self.check_open()
        if plan is not None:
            _check_plan(plan)
        load_loops()

    def submit(self, plan: Plan, after: Any, *, by_layer: bool = False, urgent: bool = False) -> HostTransfer:
        """Queue a plan and return at once; see :meth:`kvplan.Executor.submit`. All layers arrive at its end."""
        del by_layer
        self.check_open()
        _check_plan(plan)
        transfer = HostTransfer(plan, after, self, urgent=urgent)
        self.take(transfer, self._lines[not urgent].append)
        self.bell.ring()
        return transfer

    def _flying(self) -> int:
        return sum(not transfer.done() for line in self._lines for transfer in line.copy())

    # The path's thread.

    def _serve(self) -> None:
        with loops.sparing(wanted=self._sparing), self._pool:
            while not self.closed or self._left():
                if not (self._advance(urgent=True) or self._advance(urgent=False)):
                    self.bell.wait()

    def _left(self) -> bool:
        with self.lock:  # a submit that found the path open has queued its transfer
            return any(self._lines)

    def _advance(self, *, urgent: bool) -> bool:
        """Run the first transfer of a line if nothing holds it up; return whether the line has moved on."""
        line = self._lines[not urgent]
        if not line:
            return False
        transfer = line[0]
        if not (transfer.after is None or transfer.cancelled or self.completed(transfer, transfer.after)):
            return False
        transfer.after = None
        transfer.run()
        line.popleft()
        return True

    def copy(self, plan: Plan, *, urgent: bool) -> TransferResult:
        """Copy the bytes of a plan, with helpers; raise the first error of its tasks, once all have ended."""
        tasks, copies = tasks_of(plan)
        errors: SimpleQueue[BaseException | None] = SimpleQueue()

        def work(task: Call) -> None:
            errors.put(error_of(task))

        begun = perf_counter()
        self._tasks[not urgent].extend(partial(work, task) for task in tasks)
        with suppress(RuntimeError):  # no more threads: the limit of the system, or an interpreter that exits
            for _ in tasks[1 : self._threads]:
                self._pool.submit(self._help)
        while self._work(urgent=urgent):
            while not urgent and self._advance(urgent=True):
                pass
        for error in filter(None, [errors.get() for _ in tasks]):
            raise error
        return TransferResult(plan.nbytes, perf_counter() - begun, "host", copies, len(tasks))

    def _help(self) -> None:
        while self._work(urgent=False):  # an exit waits for the pool: for the transfer that is being copied
            pass

    def _work(self, *, urgent: bool) -> bool:
        """Do a task, an urgent one first; return False if none is left that is as urgent."""
        for tasks in self._tasks[: 1 if urgent else 2]:
            with suppress(IndexError):  # none is left; a task raises no error
                tasks.popleft()()
                return True
        return False


def _check_plan(plan: Plan) -> None:
    """Check that the host path can serve a plan; raise LayoutError or PathError."""
    check_layouts(plan)
    if plan.direction != "host":
        raise PathError(f"path 'host' copies between CPU memories only, and this plan is a {plan.direction!r}")


def tasks_of(plan: Plan) -> tuple[list[Call], int]:
    """Cut a plan into independent tasks; return them and the number of contiguous copies that they make."""
    runs = [_cut(part.group) for part in plan.moving]
    counts = [sizes.size * part.units.shape[1] for part, (_, _, sizes) in zip(plan.moving, runs, strict=True)]
    loop, streaming = copy_loop(sum(counts)), plan.nbytes >= STREAMING_NBYTES
    tasks: list[Call] = []
    for part, columns, count in zip(plan.moving, runs, counts, strict=True):
        copy = partial(loop, part.units, *columns)
        copy(0, 0, streaming)  # loads the loop before the copying is timed
        step = max(1, count * TASK_NBYTES // part.nbytes)
        tasks += [partial(copy, first, min(first + step, count), streaming) for first in range(0, count, step)]
    return tasks, sum(counts)


def _cut(group: RunGroup) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the offsets and bytes of the copies of a unit; those longer than a task are cut."""
    src, dst, size = group.packed
    pieces = -(-size // TASK_NBYTES)
    if pieces.max(initial=1) == 1:
        return src, dst, size
    skips = TASK_NBYTES * np.concatenate([np.arange(count) for count in pieces])
    src, dst, size = (column.repeat(pieces) for column in (src, dst, size))
    return src + skips, dst + skips, np.minimum(size - skips, TASK_NBYTES)


def copy_loop(copies: int) -> Any:
    """Return the loop that copies: without numba for few copies in a short process, otherwise compiled."""
    if loops.spares(copies):
        return copy_by_memmove
    with compiling():
        from kvplan.execute import memcpy

        return memcpy.copy


def load_loops() -> None:
    """Load the compiled loops of plans and of copies, so that the first transfer need not wait for a compiler."""
    loops.load()
    one = np.zeros(1, np.int64)
    copy_loop(loops.LITTLE + 1)(np.zeros((2, 1), np.int64), one, one, one, 0, 0, streaming=False)


def copy_by_memmove(
    units: Int64Array, run_src: Int64Array, run_dst: Int64Array, run_size: Int64Array, first: int, last: int,
    streaming: bool,  # an argument of the compiled loop
) -> None:  # fmt: skip
    """Do as the compiled loop, with a C call per copy: the start of numba would cost more time than it saves."""
    for number in range(first, last):
        unit, run = divmod(number, run_size.size)
        src, dst = units[:, unit].tolist()
        ctypes.memmove(dst + int(run_dst[run]), src + int(run_src[run]), int(run_size[run]))
