"""The host path: copies between CPU memories, by threads that release the interpreter lock while they copy."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import monotonic, perf_counter
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Latch, waking
from kvplan.base.line import Line
from kvplan.base.process import check_process, compiles, compiling, generation
from kvplan.errors import PathError, TransferError
from kvplan.execute.host.crew import Crew, Task
from kvplan.execute.host.host_transfer import HostTransfer
from kvplan.execute.host.runner import Runner, live
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import CLOSED_ERROR, Transfer, TransferResult, check_layouts
from kvplan.plan import loops
from kvplan.plan.conflicts import conflict
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate

# Bytes of a task: large enough to hide the cost of handing it to a thread, small enough to share work evenly.
TASK_NBYTES = 4 << 20
MAX_THREADS = 8
# Transfers of this size or more bypass the CPU's caches, where they would only evict other data.
STREAMING_NBYTES = 16 << 20
EXIT_SECONDS = 5.0  # time that an exit waits once every transfer left waits for its after=


def refusal(plan: Plan) -> str | None:
    """Why the host path cannot serve a plan, or None."""
    if plan.direction != "host":
        return f"copies between CPU memories only, and this plan is a {plan.direction!r}"
    return None


def tasks(plan: Plan) -> tuple[list[Task], int]:
    """Cut a plan into independent tasks; return them and the number of contiguous copies that they make.

    Each loop is first called with nothing to copy. So a loop not yet loaded for these array types is loaded here, and
    not while the copying is timed. Runs longer than a task are cut into flat descriptors.
    """
    counts = [part.group.offsets[0].size * part.units.shape[1] for part in plan.parts]
    copies = sum(counts)
    memcpy = _copy_loops(copies + plan.nbytes // TASK_NBYTES)
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


class HostPath:
    """Runs transfers one after another, in the order of their submits, each on all threads.

    Its thread, the runner, keeps it alive until :meth:`stop` or :meth:`close`. Urgent transfers have a second runner
    with its own threads, made with the first of them. While that one copies, no other transfer begins. A transfer waits
    for one of the other runner only if their bytes conflict.

    A submit adds one entry to one line. The runners do the rest, in threads where no signal's handler runs. No lock is
    held that a submit, a cancel or a query takes.

    Args:
        threads: number of CPU threads; by default one per core, at most 8.

    Attributes:
        inside: identifiers of its own threads, which cannot wait for its end.
        loaded: set when the loops that copy are loaded, or cannot be.
        waiting: submitted transfers that no runner has yet.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.generation = generation()
        self.tally = Tally()
        self.inside: set[int] = set()
        self.loaded = Latch()
        self._sparing = loops.spares(0)  # as in the thread that makes it: the setting belongs to a thread
        self.waiting: Line[HostTransfer] = Line()
        self.normal, self.urgent = Runner(self, urgent=False), Runner(self, urgent=True)
        self._wake_normal, self._wake_urgent = (partial(one.wake.put, None) for one in (self.normal, self.urgent))
        self.stir: Callable[[], object] = self._wake_normal  # the normal runner waits for the urgent one, too
        self._dealing = threading.Lock()  # of the two runners
        self._owner: weakref.ref[object] | None = None

    def own(self, executor: object) -> None:
        """End when this executor is gone, even if its finalizer is interrupted."""
        self._owner = weakref.ref(executor, self.normal.wake.put)  # one call of C

    def look(self) -> None:
        """Stop if the executor is gone, so that nobody can submit any more."""
        if self._owner is not None and self._owner() is None and not self.waiting.closed:
            self.stop()

    def start(self) -> None:
        """Start the runner.

        Raises:
            TransferError: the system starts no more threads.
        """
        _hook_exit()
        self.normal.thread.start()

    def check_open(self) -> None:
        """Check that transfers can be submitted.

        Raises:
            TransferError: the path is closed, or belongs to another process.
        """
        check_process(self.generation)
        if self.waiting.closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan) -> list[Candidate]:
        """Refuse: the CPU has one path and no cost model.

        Raises:
            PathError: always.
        """
        raise PathError(f"{plan!r} has one path on the CPU, 'host', and no cost model; give an executor of a GPU")

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """Load the loops that plan and copy.

        Raises:
            LayoutError, PathError: a submit of the plan would be refused.
            TransferError: the path is closed, or this is a forked child.
        """
        del by_layer
        self.check_open()
        if plan is not None:
            _check(plan)
        with compiling():
            loops.load()
            import_module("kvplan.execute.host.memcpy").load()

    def submit(self, plan: Plan, after: Any, *, by_layer: bool = False, urgent: bool = False) -> Transfer:
        """Queue a plan and return at once. All layers arrive at its end, none before.

        Raises:
            LayoutError: the destination is read-only, or addresses are not this process's.
            PathError: the plan touches memory that is not the CPU's.
            TransferError: the path is closed, this is a forked child, or no thread starts for urgent transfers.
        """
        del by_layer
        _check(plan)
        self.check_open()
        if urgent and not self.urgent.thread.started:
            self.urgent.thread.start()
        transfer = HostTransfer(plan, self, after, urgent=urgent)
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
            finally:  # each is one C call, so that all are made even if a signal's handler raises
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
        """Take no more transfers, finish the submitted ones, then end the threads; returns at once."""
        if self.generation == generation():
            try:
                self.waiting.close(self._wake_normal)
            finally:
                self._wake_urgent()

    def close(self) -> None:
        """Stop, and wait until all transfers are finished.

        It does not wait in the path's own threads, which run the code of an ``after``. Nor does it wait in a signal's
        handler that interrupted a compiler: the runners may need the compiler's lock.
        """
        self.stop()
        if self.generation == generation() and threading.get_ident() not in self.inside and not compiles():
            self.join(None)

    def join(self, timeout: float | None) -> bool:
        """Wait until all transfers have ended, at most ``timeout`` seconds per runner; return whether they have."""
        return self.normal.thread.join(timeout) and self.urgent.thread.join(timeout)

    def in_flight(self) -> int:
        """Count the transfers that have not ended."""
        known = dict.fromkeys(self.waiting.entries())  # first: transfers move from here to the runners
        known |= dict.fromkeys([*self.normal.queue.copy(), *self.urgent.queue.copy()])
        return sum(not transfer.done() for transfer in known)

    # For the runners; see kvplan.execute.host.runner.Dealer.

    def load(self) -> None:
        """Load the loops that copy, before the first transfer comes."""
        # An error here comes again in the transfers that need the loops, and is reported there.
        with loops.sparing(wanted=self._sparing), contextlib.suppress(Exception):
            if not self.waiting.closed or self.waiting.first() is not None:
                with compiling():
                    _copy_loops(0).load()
        self.loaded.set()

    def deal_out(self) -> None:
        """Give each runner its transfers, each with the earlier ones of the other runner that it conflicts with."""
        with self._dealing:
            while (transfer := self.waiting.first()) is not None:
                mine, other = (self.urgent, self.normal) if transfer.urgent else (self.normal, self.urgent)
                others = list(other.queue)
                try:
                    transfer.behind = [one for one in others if not one.done() and conflict(one.plan, transfer.plan)]
                except MemoryError:  # then it waits for all of them
                    transfer.behind = others
                mine.queue.append(transfer)
                self.waiting.take()

    def dealt_out(self) -> bool:
        """Whether the path is closed and each runner has its transfers."""
        return self.waiting.ended()

    def run(self, transfer: HostTransfer, crew: Crew, error: BaseException | None) -> None:
        """Copy a transfer that has begun, or end it with the error of what it waited for."""
        if error is None:
            try:
                with loops.sparing(wanted=self._sparing):
                    result = _run(transfer.plan, crew)
                self.tally.add(result)
                transfer.finish(result)
            except BaseException as problem:  # noqa: BLE001  # the next one must still run
                error = problem
        if error is not None:
            self.tally.fail(transfer.plan, "host", error)
            transfer.finish(None, error)


def _check(plan: Plan) -> None:
    check_layouts(plan)
    why_not = refusal(plan)
    if why_not:
        raise PathError(f"path 'host' {why_not}")


def _copy_loops(copies: int) -> ModuleType:
    """The module with the loops that copy: without numba for few copies in a short process, otherwise compiled."""
    name = "memmove" if loops.spares(copies) else "memcpy"
    return import_module(f"kvplan.execute.host.{name}")


def _run(plan: Plan, crew: Crew) -> TransferResult:
    work, copies = tasks(plan) if plan.nbytes else ([], 0)
    begun = perf_counter()
    crew.run(work)
    return TransferResult(plan.nbytes, perf_counter() - begun, "host", copies, len(work))


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all submitted transfers; give up those that only wait for an ``after=`` that does not come."""
    runners = [runner for runner in live.copy() if runner.host.generation == generation()]
    for runner in runners:
        runner.host.stop()
    begun = monotonic()
    while runners := [runner for runner in runners if not runner.thread.join(0)]:
        # A runner that copies may be what another waits for. Only when all wait will nothing more happen.
        since = [runner.waiting_since for runner in runners]
        idle = [max(begun, when) for when in since if when is not None]
        if len(idle) == len(runners) and monotonic() - max(idle) > EXIT_SECONDS:
            left = sum(host.in_flight() for host in {runner.host for runner in runners})
            message = f"at exit, {left} transfers were given up: what they wait for (after=) has not come"
            warnings.warn(message, RuntimeWarning, stacklevel=1)
            return
        runners[0].thread.join(0.01)
