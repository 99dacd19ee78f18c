"""The host path: threads copy between CPU memories, and release the interpreter lock while they copy."""

from __future__ import annotations

import os
import threading
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
from kvplan.execute.backend import WITHIN_ERROR, Backend
from kvplan.execute.host.tasks import tasks_of
from kvplan.execute.transfer import (
    Transfer,
    TransferResult,
    cancellation,
    check_layouts,
)  # fmt: skip
from kvplan.plan import loops
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate

MAX_THREADS = 8
URGENT, NORMAL = 0, 1  # the lines of a path, the more urgent one first


def load_loops() -> None:
    """Load the compiled loops of plans and of copies, so that the first transfer need not wait for a compiler."""
    with compiling():
        from kvplan.execute.host.memcpy import copy

        loops.load()
        one = np.zeros(1, np.int64)
        copy(np.zeros((2, 1), np.int64), one, one, one, 0, 0, streaming=False)


class HostTransfer(Transfer):
    """A transfer of the host path: it is pending, then it has begun or is cancelled, then it is over.

    Args:
        plan: the plan to move.
        after: the ``after`` of the submit.
        host: the path that moves it.
        number: of its line.

    Attributes:
        after: what it waits for; None from the time when something waits for that.
        answers: the error of ``after``, or None, once it has completed.
        cancelled: whether it was cancelled.
    """

    def __init__(self, plan: Plan, after: Any, host: HostPath, number: int) -> None:
        self.plan, self.after = plan, after
        self.answers: list[BaseException | None] = [None] if after is None else []
        self.cancelled = self._begun = False
        self._host, self._number, self._over = host, number, Latch()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it has finished; see :meth:`Transfer.done`."""
        if not self._over.happened:
            check_process(self._host.generation)
        return self._over.happened

    def add_done_callback(self, function: Call) -> bool:
        """Call a function at its end; see :meth:`Transfer.add_done_callback`."""
        self._over.call(function)
        return True

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has finished; see :meth:`Transfer.synchronize`."""
        if not self._over.happened:
            check_process(self._host.generation)  # in a forked child, no thread would end it
            if not self._over.wait(timeout):
                raise self._late(timeout)
        if self.cancelled:
            raise TransferError(cancellation(self.plan))
        if self._error is not None:
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`Transfer.cancel`."""
        check_process(self._host.generation)
        with self._host.lock:
            first = not (self._begun or self.cancelled)
            self.cancelled = not self._begun
        if first:
            self._host.tally.cancel()
            self._over.set()
        self._host.bell.ring()  # for those behind it
        return self.cancelled

    def run(self) -> None:
        """Begin and end it, unless it was cancelled; in the path's thread."""
        with self._host.lock:
            self._begun = not self.cancelled
        if self._begun:
            error = self.answers[0] or error_of(self._copy)  # the next transfer must still run
            if error is not None:
                self._error = error.with_traceback(None)
                self._host.tally.fail(self.plan, "host", error)
        self._over.set()  # also of a cancelled one, whose cancel() may have been interrupted

    def _copy(self) -> None:
        self._result = self._host.copy(self.plan, self._number)
        self._host.tally.add(self._result)

    def __repr__(self) -> str:
        ended = "cancelled" if self.cancelled else "failed" if self._error else "done"
        return f"Transfer({self.plan!r}, {ended if self.done() else 'in flight'})"


class HostPath(Backend):
    """The backend of a CPU executor. It runs transfers one by one, in order of submits, each on all threads.

    Urgent transfers have a line of their own. While a normal one is copied, its threads take the tasks of an urgent one
    first. The path's thread starts with the first submit, keeps the path alive, and ends once it is stopped and no
    transfer is left; others help it from the first transfer on that has several tasks.

    Args:
        threads: number of CPU threads; by default one per core, at most 8.

    Attributes:
        lock: also held while a transfer begins or is cancelled.
    """

    def __init__(self, threads: int | None = None) -> None:
        super().__init__("kvplan-host", "no thread runs a CPU executor's transfers")
        self._threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        # A pool takes no more work when the interpreter exits; the path's thread then copies alone.
        self._pool = ThreadPoolExecutor(self._threads, "kvplan-copy")
        self._lines: tuple[deque[HostTransfer], ...] = (deque(), deque())
        self._tasks: tuple[deque[Call], ...] = (deque(), deque())  # of the transfer of each line that is copied
        self._sparing = loops.spares(0)  # as the thread that makes the path

    def held(self) -> tuple[int, int]:
        """Return 0 and 0: it holds no memory of a GPU, and pins none."""
        return 0, 0

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
        _check_plan(plan)
        number = URGENT if urgent else NORMAL
        transfer = HostTransfer(plan, after, self, number)
        with self.lock:
            if self.submitter:
                raise TransferError(WITHIN_ERROR)
            try:
                self.submitter = threading.get_ident()
                self.check_open()
                self.start()
                self._lines[number].append(transfer)
            finally:
                self.submitter = 0
        self.bell.ring()
        return transfer

    def _flying(self) -> int:
        return sum(not transfer.done() for line in self._lines for transfer in line.copy())

    # The path's thread.

    def _serve(self) -> None:
        with loops.sparing(wanted=self._sparing), self._pool:
            while not self.closed or self._left():
                if not (self._advance(URGENT) or self._advance(NORMAL)):
                    self.bell.wait()

    def _left(self) -> bool:
        with self.lock:  # a submit that found the path open has queued its transfer
            return any(self._lines)

    def _advance(self, number: int) -> bool:
        """Run the first transfer of a line if nothing holds it up; return whether the line has moved on."""
        line = self._lines[number]
        if not line:
            return False
        transfer = line[0]
        if not transfer.answers and not transfer.cancelled:
            after, transfer.after = transfer.after, None
            if after is not None:
                self.await_on_cpu(after, transfer.answers)
            return bool(transfer.answers)
        transfer.run()
        line.popleft()
        return True

    def copy(self, plan: Plan, number: int) -> TransferResult:
        """Copy the bytes of a plan, with helpers; raise the first error of its tasks, once all have ended.

        Args:
            plan: the plan.
            number: of the line of its transfer.
        """
        tasks, copies = tasks_of(plan)
        errors: SimpleQueue[BaseException | None] = SimpleQueue()
        begun = perf_counter()
        self._tasks[number].extend(partial(_report, task, errors) for task in tasks)
        with suppress(RuntimeError):  # no more threads: the limit of the system, or an interpreter that exits
            for _ in range(min(len(tasks), self._threads) - 1):
                self._pool.submit(self._help)
        while self._make(number):
            while number == NORMAL and self._advance(URGENT):
                pass
        for error in [errors.get() for _ in tasks]:
            if error is not None:
                raise error
        return TransferResult(plan.nbytes, perf_counter() - begun, "host", copies, len(tasks))

    def _help(self) -> None:
        while self._make(NORMAL):  # an exit waits for the pool: for the transfer that is being copied
            pass

    def _make(self, number: int) -> bool:
        """Make a task of this line, or of a more urgent one; return False if none is left."""
        for tasks in self._tasks[: number + 1]:
            if tasks:
                with suppress(IndexError):  # another thread was faster
                    report = tasks.popleft()
                    report()
                    return True
        return False


def _check_plan(plan: Plan) -> None:
    """Check that the host path can serve a plan; raise LayoutError or PathError."""
    check_layouts(plan)
    if plan.direction != "host":
        raise PathError(f"path 'host' copies between CPU memories only, and this plan is a {plan.direction!r}")


def _report(task: Call, errors: SimpleQueue[BaseException | None]) -> None:
    errors.put(error_of(task))
