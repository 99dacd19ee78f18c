"""The host path: threads copy between CPU memories, and release the interpreter lock while they copy."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvplan.base.process import EXECUTORS, at_exit, check_process, compiling, generation
from kvplan.base.threads import Call, Latch, Worker
from kvplan.errors import PathError, TransferError
from kvplan.execute.host.tasks import Crew, check_plan, copy_loops
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import (
    CLOSED_ERROR,
    WITHIN_ERROR,
    StreamlessTransfer,
    Transfer,
    TransferResult,
    call_when_done,
    cancellation,
)
from kvplan.plan import loops
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate

MAX_THREADS = 8
EXIT_SECONDS = 10.0  # time that an exit waits for all executors


def load_loops() -> None:
    """Load the compiled loops of plans and of copies, so that the first transfer need not wait for a compiler."""
    with compiling():
        loops.load()
        with loops.sparing(wanted=False):
            copy_loops(0).load()


class HostTransfer(StreamlessTransfer):
    """A transfer of the host path: it is pending, then it has begun or is cancelled, then it is over.

    Args:
        plan: the plan to move.
        after: the ``after`` of the submit.
        host: the path that moves it.

    Attributes:
        after: what it waits for; None from then on.
    """

    def __init__(self, plan: Plan, after: Any, host: HostPath) -> None:
        self.plan, self.after = plan, after
        self._host = host
        self._lock, self._over = threading.Lock(), Latch()
        self._taken = self._cancelled = False
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Return whether it has finished; see :meth:`Transfer.done`."""
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
        if self._cancelled:
            raise TransferError(cancellation(self.plan))
        if self._error is not None:
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`Transfer.cancel`."""
        if self.take(cancel=True):
            self._host.tally.ends.append("cancelled")
            self.end()
        return self._cancelled

    def take(self, *, cancel: bool = False) -> bool:
        """Begin or cancel it; return False if it has begun or was cancelled before."""
        with self._lock:
            pending, self._taken = not self._taken, True
            self._cancelled = self._cancelled or (pending and cancel)
        return pending

    def finish(self, result: TransferResult | None, error: BaseException | None) -> None:
        """End it with a result or an error, in its runner's thread."""
        tally = self._host.tally
        if result is not None:
            tally.add(result)
        else:
            tally.fail(self.plan, "host", error)
        self._result, self._error = result, error and error.with_traceback(None)
        self.end()

    def end(self) -> None:
        """Wake those that wait for its end; it may be called twice."""
        self._host.flying.discard(self)
        self._over.set()

    def __repr__(self) -> str:
        ended = "cancelled" if self._cancelled else "failed" if self._error else "done"
        return f"Transfer({self.plan!r}, {ended if self.done() else 'in flight'})"


class HostPath:
    """The backend of a CPU executor. It runs transfers one by one, in order of submits, each on all threads.

    Urgent transfers have a runner with threads of its own. While it copies, no other transfer begins. Each runner
    starts with its first transfer, and keeps the path alive until :meth:`stop` or :meth:`close`.

    Args:
        threads: number of CPU threads; by default one per core, at most 8.

    Attributes:
        generation: generation of the process that made it.
        inside: identifiers of its own threads, which cannot wait for its end.
        flying: transfers that have not ended.
        lock: held while a submit queues a transfer.
        turn: held while the urgent runner copies.
        sparing: the setting of the thread that makes this object; see :func:`kvplan.plan.loops.sparing`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.generation = generation()
        self.tally = Tally()
        self.inside: set[int] = set()
        self.flying: set[HostTransfer] = set()
        self.lock, self.turn = threading.RLock(), threading.Lock()
        self.sparing = loops.spares(0)
        self._closed = self._submitting = False
        threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.normal, self.urgent = Runner(self, "kvplan-host", threads), Runner(self, "kvplan-urgent", threads)
        at_exit(EXECUTORS, _drain_at_exit)
        _paths.add(self)

    def held(self) -> tuple[int, int]:
        """Return 0 and 0: it holds no memory of a GPU, and pins none."""
        return 0, 0

    def check_open(self) -> None:
        """Raise TransferError if the path is closed or belongs to another process."""
        check_process(self.generation)
        if self._closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan, *, by_layer: bool) -> list[Candidate]:
        """Raise PathError: the CPU has one path and no cost model."""
        del by_layer
        raise PathError(f"{plan!r} has one path on the CPU, 'host', and no cost model; give an executor of a GPU")

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """Load the loops of plans and copies; see :meth:`kvplan.Executor.prepare`."""
        del by_layer
        self.check_open()
        if plan is not None:
            check_plan(plan)
        load_loops()

    def submit(
        self, plan: Plan, after: Any, *, by_layer: bool = False, urgent: bool = False,
    ) -> Transfer:  # fmt: skip
        """Queue a plan and return at once; see :meth:`kvplan.Executor.submit`. All layers arrive at its end."""
        del by_layer
        check_plan(plan)
        runner = self.urgent if urgent else self.normal
        transfer = HostTransfer(plan, after, self)
        with self.lock:
            if self._submitting:  # by this thread
                raise TransferError(WITHIN_ERROR)
            self._submitting = True
            try:
                self.check_open()
                if not runner.worker.started:
                    runner.worker.start()
                self.flying.add(transfer)
                runner.queue.put(transfer)
            finally:
                self._submitting = False
        return transfer

    def in_flight(self) -> int:
        """Count the transfers that have not ended."""
        return len(self.flying)

    def stop(self) -> None:
        """Accept no more transfers, and return at once. The threads finish the submitted transfers, then end."""
        if self.generation != generation():
            return
        with self.lock:
            if not self._closed:
                self._closed = True
                for runner in (self.normal, self.urgent):
                    runner.queue.put(None)

    def close(self) -> None:
        """Stop, and wait until all transfers are finished.

        It does not wait in a thread that waits for an ``after``, or in a signal handler that interrupted a submit: the
        end of the transfers needs these threads.
        """
        self.stop()
        if self.generation != generation() or threading.get_ident() in self.inside:
            return
        with self.lock:
            within = self._submitting
        if not within:
            self.join()

    def join(self, timeout: float = threading.TIMEOUT_MAX) -> bool:
        """Wait until all transfers of a stopped path have ended, at most so many seconds; return whether they have."""
        until = monotonic() + timeout
        return all(one.worker.join(max(until - monotonic(), 0)) for one in (self.normal, self.urgent))


class Runner:
    """A thread, and the transfers that it runs in order. The thread ends with the path.

    Attributes:
        host: the path whose transfers it runs.
        queue: its transfers in the order of their submits, cancelled transfers included; None when the path stops.
        worker: its thread.
    """

    def __init__(self, host: HostPath, name: str, threads: int) -> None:
        self.host = host
        self.queue: SimpleQueue[HostTransfer | None] = SimpleQueue()
        self.worker = Worker(name, self._serve, "no thread runs the transfers of a CPU executor", host.inside)
        self._crew = Crew(threads - 1)

    def _serve(self) -> None:
        with loops.sparing(wanted=self.host.sparing):
            while self._serve_next():
                self.host.tally.settle()
        self._crew.dismiss()

    def _serve_next(self) -> bool:
        """Take the next entry of the queue, and run it if it is a transfer; return False if it is the last."""
        transfer = self.queue.get()
        if transfer is None:
            with self.host.lock:
                if self.queue.empty():
                    return False
                self.queue.put(None)  # behind the transfer of a submit that the stop interrupted
            return True
        error = self._wait(transfer)
        with self.host.turn:
            if self is self.host.urgent:
                self._run(transfer, error)
        if self is self.host.normal:
            self._run(transfer, error)
        return True

    def _run(self, transfer: HostTransfer, error: BaseException | None) -> None:
        if not transfer.take():
            transfer.end()  # its cancel() may have been interrupted
            return
        result = None
        if error is None:
            try:
                result = self._crew.run(transfer.plan)
            except BaseException as problem:  # noqa: BLE001  # the next transfer must still run
                error = problem
        transfer.finish(result, error)

    def _wait(self, transfer: HostTransfer) -> BaseException | None:
        """Wait until a transfer's ``after=`` has completed, or it is cancelled; return the error of the ``after=``."""
        after, transfer.after = transfer.after, None
        if after is None or transfer.done():
            return None
        answers: SimpleQueue[BaseException | None] = SimpleQueue()
        transfer.add_done_callback(partial(answers.put, None))
        call_when_done(after, answers.put, self.host.inside)
        return answers.get()


_paths: weakref.WeakSet[HostPath] = weakref.WeakSet()


def _drain_at_exit() -> None:
    """Finish all submitted transfers, and tell of those that do not end in time."""
    paths = [path for path in list(_paths) if path.generation == generation()]
    for path in paths:
        path.stop()
    until = monotonic() + EXIT_SECONDS
    left = sum(path.in_flight() for path in paths if not path.join(max(until - monotonic(), 0)))
    if left:
        message = f"at exit, {left} transfers were given up: they did not end within {EXIT_SECONDS} seconds"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
