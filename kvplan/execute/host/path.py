"""The host path: threads copy between CPU memories, and release the interpreter lock while they copy."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Latch, Wake, sleep, waking
from kvplan.base.line import Line
from kvplan.base.process import check_process, compiles, compiling, generation
from kvplan.base.threads import Standby, Worker
from kvplan.errors import PathError, TransferError
from kvplan.execute.host.crew import Crew
from kvplan.execute.host.host_transfer import HostTransfer
from kvplan.execute.host.tasks import check_plan, copy_loops, run_plan
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import CLOSED_ERROR, Transfer, wait_on_cpu
from kvplan.plan import loops
from kvplan.plan.conflicts import conflict
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate

MAX_THREADS = 8
EXIT_SECONDS = 5.0  # time that an exit waits after all remaining transfers wait for their after=


def load_loops() -> None:
    """Load the compiled loops of plans and of copies, so that the first transfer need not wait for a compiler."""
    with compiling():
        loops.load()
        import_module("kvplan.execute.host.memcpy").load()


class HostPath:
    """The backend of a CPU executor. It runs transfers one by one, in order of submits, each on all threads.

    Its thread, the runner, keeps it alive until :meth:`stop` or :meth:`close`. Urgent transfers have a second runner
    with its own threads, which starts with the first urgent transfer. While the urgent runner copies, no other transfer
    begins. A transfer waits for a transfer of the other runner only if their bytes conflict.

    A submit adds one entry to one queue. The runners do all other work, in threads where no signal handler runs. A
    submit, a cancel and a query take no lock that a runner holds.

    Args:
        threads: number of CPU threads; by default one per core, at most 8.

    Attributes:
        inside: identifiers of its own threads, which cannot wait for its end.
        loaded: set when the copy loops are loaded, or cannot be loaded.
        waiting: submitted transfers that have not been given to a runner.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.generation = generation()
        self.tally = Tally()
        self.inside: set[int] = set()
        self.loaded = Latch()
        self._sparing = loops.spares(0)  # the setting of the thread that makes this object; each thread has its own
        self.waiting: Line[HostTransfer] = Line()
        self.normal, self.urgent = Runner(self, urgent=False), Runner(self, urgent=True)
        self._wake_normal, self._wake_urgent = (partial(one.wake.put, None) for one in (self.normal, self.urgent))
        self.stir: Callable[[], object] = self._wake_normal  # the normal runner waits for the urgent runner, too
        self._dealing = threading.Lock()  # one runner at a time deals out
        self._cancel = self.cancel  # one bound method for all submits
        self._owner: weakref.ref[object] | None = None

    def own(self, executor: object) -> None:
        """End when this executor is garbage-collected, even if its finalizer is interrupted."""
        self._owner = weakref.ref(executor, self.normal.wake.put)  # one C call

    def look(self) -> None:
        """Stop if the executor was garbage-collected, so that there can be no more submits."""
        if self._owner is not None and self._owner() is None and not self.waiting.closed:
            self.stop()

    def start(self) -> None:
        """Start the runner; raise TransferError if the system cannot start its thread."""
        _hook_exit()
        self.normal.thread.start()

    def check_open(self) -> None:
        """Raise TransferError if the path is closed or belongs to another process."""
        check_process(self.generation)
        if self.waiting.closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan, *, by_layer: bool, beside_seconds: float | None) -> list[Candidate]:
        """Raise PathError: the CPU has one path and no cost model."""
        del by_layer, beside_seconds
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
        beside_seconds: float | None = None,
    ) -> Transfer:  # fmt: skip
        """Queue a plan and return at once; see :meth:`kvplan.Executor.submit`. All layers arrive at its end."""
        del by_layer, beside_seconds
        check_plan(plan)
        self.check_open()
        if urgent and not self.urgent.thread.started:
            self.urgent.thread.start()
        transfer = HostTransfer(plan, after, urgent, self._cancel, self.generation)
        self.waiting.append(transfer, self._wake_urgent if urgent else self._wake_normal)
        if self.waiting.closed and self.waiting.withdraws(transfer):
            raise TransferError(CLOSED_ERROR)
        return transfer

    def cancel(self, transfer: HostTransfer) -> bool:
        """Cancel a transfer that has not begun; return whether it will not run."""
        fates = transfer.fates
        if not fates:
            mine = object()
            wakes, count = waking(transfer.sleepers), self.tally.ends.append
            wake = self._wake_urgent if transfer.urgent else self._wake_normal
            try:
                fates.append(mine)
            finally:  # each is one C call, so that all are made even if a signal handler raises an error
                try:
                    any(wakes)
                finally:
                    try:
                        wake()
                    finally:
                        if fates and fates[0] is mine:
                            count("cancelled")
        return transfer.cancelled

    def stop(self) -> None:
        """Accept no more transfers, and return at once. The threads finish the submitted transfers, then end."""
        if self.generation == generation():
            try:
                self.waiting.close(self._wake_normal)
            finally:
                self._wake_urgent()

    def close(self) -> None:
        """Stop, and wait until all transfers are finished.

        It does not wait in the path's own threads, which run the code of an ``after``. It also does not wait in a
        signal handler that interrupted a compiler, because the runners may need the compiler's lock.
        """
        self.stop()
        if self.generation == generation() and threading.get_ident() not in self.inside and not compiles():
            self.join(None)

    def join(self, timeout: float | None) -> bool:
        """Wait until all transfers have ended, at most ``timeout`` seconds per runner; return whether they have."""
        return self.normal.thread.join(timeout) and self.urgent.thread.join(timeout)

    def in_flight(self) -> int:
        """Count the transfers that have not ended."""
        known = dict.fromkeys(self.waiting.entries())  # read first, because transfers move from here to the runners
        known |= dict.fromkeys([*self.normal.queue.copy(), *self.urgent.queue.copy()])
        return sum(not transfer.done() for transfer in known)

    # The runners call these methods.

    def load(self) -> None:
        """Load the copy loops before the first transfer."""
        # An error is ignored here: the transfers that need the loops raise it again.
        with loops.sparing(wanted=self._sparing), contextlib.suppress(Exception):
            if not self.waiting.closed or self.waiting.first() is not None:
                with compiling():
                    copy_loops(0).load()
        self.loaded.set()

    def deal_out(self) -> None:
        """Give each runner its transfers, each with the other runner's earlier transfers that conflict with it."""
        with self._dealing:
            while (transfer := self.waiting.first()) is not None:
                mine, other = (self.urgent, self.normal) if transfer.urgent else (self.normal, self.urgent)
                others = list(other.queue)
                try:
                    transfer.follow([one for one in others if not one.done() and conflict(one.plan, transfer.plan)])
                except MemoryError:  # then it waits for all transfers of the other runner
                    transfer.follow(others)
                mine.queue.append(transfer)
                self.waiting.take()

    def dealt_out(self) -> bool:
        """Return whether the path is closed and each runner has its transfers."""
        return self.waiting.ended()

    def run(self, transfer: HostTransfer, crew: Crew, error: BaseException | None) -> None:
        """Copy a transfer that has begun, or end it with the error of its ``after=``."""
        if error is None:
            try:
                with loops.sparing(wanted=self._sparing):
                    result = run_plan(transfer.plan, crew)
                self.tally.add(result)
                transfer.finish(result)
            except BaseException as problem:  # noqa: BLE001  # the next transfer must still run
                error = problem
        if error is not None:
            self.tally.fail(transfer.plan, "host", error)
            transfer.finish(None, error)


class Runner:
    """A thread, and the transfers that it runs in order. The thread ends with the path.

    Args:
        host: the path whose transfers it runs.
        urgent: whether it runs the transfers of high priority.

    Attributes:
        host: as given.
        queue: its transfers that have not ended, in order of their submits, cancelled transfers included.
        wake: queue that gets an entry when a condition that it waits for may have changed.
        waiting_since: when its wait for a transfer's ``after=`` or conflicts began; None while it does not wait.
        thread: its thread.
    """

    def __init__(self, host: HostPath, *, urgent: bool) -> None:
        self.host = host
        self._urgent = urgent
        self.queue: deque[HostTransfer] = deque()
        self.wake: Wake = SimpleQueue()
        self.waiting_since: float | None = None
        name = "kvplan-urgent" if urgent else "kvplan-host"
        what = "no thread runs the transfers of " + ("high priority" if urgent else "a CPU executor")
        self.thread = Worker(
            name, self._serve, what, host.inside, enter=partial(live.add, self), leave=partial(live.discard, self)
        )
        self._crew = Crew(host.threads - 1, host.inside)
        self._standby = Standby(host.inside)

    def busy(self) -> bool:
        """Return whether it copies a transfer, or will copy one as soon as its thread runs."""
        self.host.deal_out()
        return bool(self.queue) and self.waiting_since is None

    def _serve(self) -> None:
        host = self.host
        if not self._urgent:
            host.load()
        while (transfer := self._next()) is not None:
            self._serve_one(transfer)
            self.queue.popleft()
            del transfer  # otherwise its memory would stay alive until the next transfer
            host.tally.settle()
            if self._urgent:
                host.stir()
        self._standby.dismiss()
        self._crew.dismiss()

    def _next(self) -> HostTransfer | None:
        """Wait for the next transfer and return it; return None if there can be no more."""
        host = self.host
        while True:
            for _ in range(self.wake.qsize()):  # the changes that these entries report are checked below
                self.wake.get()
            host.look()
            host.deal_out()
            last = host.dealt_out()  # before the queue is read, because the other runner deals out, too
            if self.queue:
                return self.queue[0]
            if last:
                return None
            self.wake.get()

    def _serve_one(self, transfer: HostTransfer) -> None:
        """Wait until a transfer may begin, and run it, unless it is cancelled before."""
        error: BaseException | None = None
        if transfer.after is not None or transfer.behind:
            error = self._wait(transfer)
        if not self._urgent:
            self._let_pass(transfer)
        began = transfer.begin()
        transfer.forget_waits()
        if began:
            self.host.run(transfer, self._crew, error)

    def _let_pass(self, transfer: HostTransfer) -> None:
        """Wait while urgent transfers are copied, or until this transfer is cancelled."""
        urgent = self.host.urgent
        while urgent.busy() and not transfer.cancelled:
            self.wake.get()

    def _wait(self, transfer: HostTransfer) -> BaseException | None:
        """Wait for a transfer's conflicts and its ``after=``; return the error of its ``after=``, or None."""
        if transfer.cancelled:
            return None
        self.waiting_since = monotonic()
        self.host.stir()
        try:
            for other in transfer.behind:  # whether they succeed or fail
                sleep(lambda other=other: other.done() or transfer.cancelled, other.sleepers, None, self.wake)  # type: ignore[misc]
            return wait_on_cpu(transfer.after, self._standby, self.wake, lambda: transfer.cancelled)
        finally:
            self.waiting_since = None


live: set[Runner] = set()  # runners whose thread may still have work; an exit waits for them


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all submitted transfers; give up transfers whose ``after=`` does not complete in time."""
    runners = [runner for runner in live.copy() if runner.host.generation == generation()]
    for runner in runners:
        runner.host.stop()
    begun = monotonic()
    while runners := [runner for runner in runners if not runner.thread.join(0)]:
        # A runner may wait for a runner that copies. So the exit gives up only if all runners wait.
        since = [runner.waiting_since for runner in runners]
        idle = [max(begun, when) for when in since if when is not None]
        if len(idle) == len(runners) and monotonic() - max(idle) > EXIT_SECONDS:
            left = sum(host.in_flight() for host in {runner.host for runner in runners})
            message = f"at exit, {left} transfers were given up: what they wait for (after=) has not come"
            warnings.warn(message, RuntimeWarning, stacklevel=1)
            return
        runners[0].thread.join(0.01)
