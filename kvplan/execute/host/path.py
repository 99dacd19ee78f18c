"""The host path: threads copy between CPU memories, and release the interpreter lock while they copy."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections import deque
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Latch, Wake, wake_all
from kvplan.base.process import EXECUTORS, at_exit, check_process, compiling, generation
from kvplan.base.threads import Standby, Worker, held_here
from kvplan.errors import PathError, TransferError
from kvplan.execute.host.crew import Crew
from kvplan.execute.host.host_transfer import HostTransfer
from kvplan.execute.host.tasks import check_plan, copy_loops, run_plan
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import CLOSED_ERROR, Transfer, wait_on_cpu
from kvplan.plan import loops
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
    begins.

    Args:
        threads: number of CPU threads; by default one per core, at most 8.

    Attributes:
        inside: identifiers of its own threads, which cannot wait for its end.
        loaded: set when the copy loops are loaded, or cannot be loaded.
        closed: whether it accepts no more transfers.
        lock: held while a submit queues a transfer.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.generation = generation()
        self.tally = Tally()
        self.inside: set[int] = set()
        self.loaded = Latch()
        self._sparing = loops.spares(0)  # the setting of the thread that makes this object; each thread has its own
        self.closed = False
        self.lock = threading.RLock()
        self._within = held_here(self.lock)
        self.normal, self.urgent = Runner(self, urgent=False), Runner(self, urgent=True)
        self.stir = partial(self.normal.wake.put, None)  # the normal runner waits for the urgent runner, too
        self._cancel = self.cancel  # one bound method for all submits

    def start(self) -> None:
        """Start the runner; raise TransferError if the system cannot start its thread."""
        at_exit(EXECUTORS, _drain_at_exit)
        self.normal.thread.start()

    def check_open(self) -> None:
        """Raise TransferError if the path is closed or belongs to another process."""
        check_process(self.generation)
        if self.closed:
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
        transfer = HostTransfer(plan, after, urgent, self._cancel, self.generation)
        runner = self.urgent if urgent else self.normal
        with self.lock:
            self.check_open()
            if not runner.thread.started:
                runner.thread.start()
            runner.queue.append(transfer)
        runner.wake.put(None)
        return transfer

    def cancel(self, transfer: HostTransfer) -> bool:
        """Cancel a transfer that has not begun; return whether it will not run."""
        fates = transfer.fates
        if not fates:
            fates.append(mine := object())
            if fates[0] is mine:
                self.tally.ends.append("cancelled")
            wake_all(transfer.sleepers)
            (self.urgent if transfer.urgent else self.normal).wake.put(None)
        return transfer.cancelled

    def stop(self) -> None:
        """Accept no more transfers, and return at once. The threads finish the submitted transfers, then end."""
        if self.generation == generation():
            self.closed = True
            self.normal.wake.put(None)
            self.urgent.wake.put(None)

    def close(self) -> None:
        """Stop, and wait until all transfers are finished.

        It does not wait in the path's own threads, which run the code of an ``after``, or within a submit, which a
        finalizer may have interrupted.
        """
        self.stop()
        if self.generation == generation() and threading.get_ident() not in self.inside and not self._within():
            self.join(None)

    def join(self, timeout: float | None) -> bool:
        """Wait until all transfers have ended, at most ``timeout`` seconds per runner; return whether they have."""
        return self.normal.thread.join(timeout) and self.urgent.thread.join(timeout)

    def in_flight(self) -> int:
        """Count the transfers that have not ended."""
        return sum(not transfer.done() for runner in (self.normal, self.urgent) for transfer in runner.queue.copy())

    # The runners call these methods.

    def load(self) -> None:
        """Load the copy loops before the first transfer."""
        # An error is ignored here: the transfers that need the loops raise it again.
        with loops.sparing(wanted=self._sparing), contextlib.suppress(Exception):
            if not self.closed or self.normal.queue:
                with compiling():
                    copy_loops(0).load()
        self.loaded.set()

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
        waiting_since: when its wait for a transfer's ``after=`` began; None while it does not wait.
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
            with host.lock:  # every submit that found the path open has queued its transfer
                if self.queue:
                    return self.queue[0]
                if host.closed:
                    return None
            self.wake.get()

    def _serve_one(self, transfer: HostTransfer) -> None:
        """Wait until a transfer may begin, and run it, unless it is cancelled before."""
        error: BaseException | None = None
        if transfer.after is not None:
            error = self._wait(transfer)
        if not self._urgent:
            self._let_pass(transfer)
        began = transfer.begin()
        transfer.forget_after()
        if began:
            self.host.run(transfer, self._crew, error)

    def _let_pass(self, transfer: HostTransfer) -> None:
        """Wait while urgent transfers are copied, or until this transfer is cancelled."""
        urgent = self.host.urgent
        while urgent.busy() and not transfer.cancelled:
            self.wake.get()

    def _wait(self, transfer: HostTransfer) -> BaseException | None:
        """Wait for a transfer's ``after=``; return the error that it raised, or None."""
        if transfer.cancelled:
            return None
        self.waiting_since = monotonic()
        self.host.stir()
        try:
            return wait_on_cpu(transfer.after, self._standby, self.wake, lambda: transfer.cancelled)
        finally:
            self.waiting_since = None


live: set[Runner] = set()  # runners whose thread may still have work; an exit waits for them


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
