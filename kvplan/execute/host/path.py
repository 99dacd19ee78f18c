"""The host path: CPU memory to CPU memory, by threads that hold no interpreter lock while they copy."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Latch, waking
from kvplan.base.line import Line
from kvplan.base.process import check_process, compiles, compiling, generation
from kvplan.errors import PathError, TransferError
from kvplan.execute.host.crew import Crew, Task
from kvplan.execute.host.runner import Runner, live
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import CLOSED_ERROR, HostTransfer, Stopwatch, Transfer, TransferResult, check_layouts
from kvplan.plan import loops as compiled
from kvplan.plan.conflicts import conflict
from kvplan.plan.loops import spares, sparing
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cost.model import Candidate

# Bytes a task: large enough that handing it to a thread costs nothing beside it, small enough to share evenly.
TASK_NBYTES = 4 << 20
MAX_THREADS = 8
# Transfers from here on bypass the CPU's caches: they would only push out what others keep there.
STREAMING_NBYTES = 16 << 20
EXIT_SECONDS = 5.0  # that an interpreter's exit waits when nothing is left but waiting


def refusal(plan: Plan) -> str | None:
    """Why the host path cannot serve a plan, or None."""
    if plan.direction != "host":
        return f"copies between CPU memories only, and this plan is a {plan.direction!r}"
    return None


def tasks(plan: Plan) -> tuple[list[Task], int]:
    """The plan as independent pieces of work, and how many contiguous copies they make in all.

    Each loop is called for nothing first, so that one not loaded yet, for the types of these arrays, is loaded here.
    Runs are copied as the program has them; where they are longer than a task, as flat descriptors cut to size.
    """
    work: list[Task] = []
    copies = sum(part.group.offsets[0].size * part.units.shape[1] for part in plan.parts)
    memcpy = _hands(copies + plan.nbytes // TASK_NBYTES)
    copies = 0
    streaming = plan.nbytes >= STREAMING_NBYTES
    if any(run.nbytes > TASK_NBYTES for group, _ in plan.parts for run in group.runs):
        made = plan.descriptors(max_nbytes=TASK_NBYTES)
        copies = made.size.size
        per_task = max(1, copies * TASK_NBYTES // max(plan.nbytes, 1))
        memcpy.copy_flat(*made, 0, 0, streaming)
        for first, last in _ranges(copies, per_task):
            work.append(partial(memcpy.copy_flat, *made, first, last, streaming))
        return work, copies
    for part in plan.parts:
        count = part.group.offsets[0].size * part.units.shape[1]
        copies += count
        per_task = max(1, count * TASK_NBYTES // max(part.nbytes, 1))
        memcpy.copy_units(part.units, *part.group.offsets, 0, 0, streaming)
        for first, last in _ranges(count, per_task):
            work.append(partial(memcpy.copy_units, part.units, *part.group.offsets, first, last, streaming))
    return work, copies


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, count)) for first in range(0, count, step))


class HostPath:
    """Runs transfers one after another, in the order of their submits, each on all threads.

    Its thread, the runner, keeps it alive until it is told to stop, by :meth:`stop` or :meth:`close`. Urgent transfers
    have a runner of their own, with threads of its own, made with the first of them: while that copies, no other
    transfer begins. Across the two, only what conflicts waits for one another.

    A submit is one entry in one line; all that follows from it is worked out by the runners, in whose threads no
    signal's handler runs. No lock is held that a submit, a cancel or a question takes.

    Args:
        threads: CPU threads; by default one a core, at most 8.

    Attributes:
        inside: identifiers of its own threads, which cannot wait for its end.
        loaded: the loops that copy are loaded, or cannot be.
        waiting: transfers that are submitted, and not dealt out to their runners.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.generation = generation()
        self.tally = Tally()
        self.inside: set[int] = set()
        self.loaded = Latch()
        self._sparing = spares(0)  # as whoever makes it; a runner is a thread of its own
        self.waiting: Line[HostTransfer] = Line()
        self.normal, self.urgent = Runner(self, urgent=False), Runner(self, urgent=True)
        self._wake_normal, self._wake_urgent = (partial(one.wake.put, None) for one in (self.normal, self.urgent))
        self.stir: Callable[[], object] = self._wake_normal  # the normal runner waits for the urgent one, too
        self._dealing = threading.Lock()  # of the two runners
        self._owner: weakref.ref[object] | None = None

    def own(self, executor: object) -> None:
        """End when this object is no more, also where its finalizer is broken off."""
        self._owner = weakref.ref(executor, self.normal.wake.put)  # one call of C

    def look(self) -> None:
        """Stop where nobody can submit any more."""
        if self._owner is not None and self._owner() is None and not self.waiting.closed:
            self.stop()

    def start(self) -> None:
        """Start its runner.

        Raises:
            TransferError: there is no thread for it.
        """
        _hook_exit()
        self.normal.thread.start()

    def check_open(self) -> None:
        """Transfers can be submitted.

        Raises:
            TransferError: they cannot: it is closed, or its threads stayed in another process.
        """
        check_process(self.generation)
        if self.waiting.closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan) -> list[Candidate]:
        """None: there is one path.

        Raises:
            PathError: always.
        """
        raise PathError(f"{plan!r} has one path on the CPU, 'host', and no cost model; give an executor of a GPU")

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """Load the loops that plan and copy.

        Raises:
            LayoutError, PathError: whatever a submit of the plan would be refused with.
            TransferError: it is closed, or this is a fork's child.
        """
        del by_layer
        self.check_open()
        if plan is not None:
            _check(plan)
        with compiling():
            compiled.load()
            import_module("kvplan.execute.host.memcpy").load()

    def submit(self, plan: Plan, after: Any, *, by_layer: bool = False, urgent: bool = False) -> Transfer:
        """Queue a plan; returns at once. All layers are there at its end, none before.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            PathError: the plan touches memory that is not the CPU's.
            TransferError: it is closed, or this is a fork's child; or the first urgent one gets no thread.
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
        """Take back a transfer that has not begun; whether it will not run."""
        fates = transfer.fates
        if not fates:
            mine = object()
            wakes, count = waking(transfer.sleepers), self.tally.ends.append
            wake = self._wake_urgent if transfer.urgent else self._wake_normal
            try:
                fates.append(mine)
            finally:  # each is one call of C, so that all are made whatever is raised meanwhile
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
        """Take no more; finish what was submitted, then end the threads. Returns at once."""
        if self.generation == generation():
            try:
                self.waiting.close(self._wake_normal)
            finally:
                self._wake_urgent()

    def close(self) -> None:
        """Stop, and wait until all is finished.

        Its own threads, in an ``after``'s code, cannot wait for that; nor can a signal's handler within what compiles
        loops, which the runners may need.
        """
        self.stop()
        if self.generation == generation() and threading.get_ident() not in self.inside and not compiles():
            self.join(None)

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of what was submitted, at most ``timeout`` seconds a runner; whether it has come."""
        return self.normal.thread.join(timeout) and self.urgent.thread.join(timeout)

    def in_flight(self) -> int:
        """Transfers not finished."""
        known = dict.fromkeys(self.waiting.entries())  # first: from here they go to the runners, where they stay
        known |= dict.fromkeys([*self.normal.queue.copy(), *self.urgent.queue.copy()])
        return sum(not transfer.done() for transfer in known)

    # What the runners ask for.

    def load(self) -> None:
        """Load the loops that copy, before there is anything to copy."""
        # What fails here fails again in the transfers that need it, where it is reported.
        with sparing(wanted=self._sparing), contextlib.suppress(Exception):
            if not self.waiting.closed or self.waiting.first() is not None:
                with compiling():
                    _hands(0).load()
        self.loaded.set()

    def deal_out(self) -> None:
        """Give each runner its transfers, with what they wait for: what conflicts of those submitted earlier."""
        with self._dealing:
            while (transfer := self.waiting.first()) is not None:
                mine, other = (self.urgent, self.normal) if transfer.urgent else (self.normal, self.urgent)
                others = list(other.queue)
                try:
                    transfer.behind = [one for one in others if not one.done() and conflict(one.plan, transfer.plan)]
                except MemoryError:  # it waits for more than it must
                    transfer.behind = others
                mine.queue.append(transfer)
                self.waiting.take()

    def dealt_out(self) -> bool:
        """Whether it is closed, and each runner has its transfers."""
        return self.waiting.ended()

    def run(self, transfer: HostTransfer, crew: Crew, error: BaseException | None) -> None:
        """Copy what has begun; or end it with what was wrong with what it waited for."""
        if error is None:
            try:
                with sparing(wanted=self._sparing):
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


def _hands(copies: int) -> ModuleType:
    """The loops that copy: compiled, or for so few copies that numba is spared, without it."""
    name = "memmove" if spares(copies) else "memcpy"
    return import_module(f"kvplan.execute.host.{name}")


def _run(plan: Plan, crew: Crew) -> TransferResult:
    work, copies = tasks(plan) if plan.nbytes else ([], 0)
    watch = Stopwatch()
    crew.run(work)
    return TransferResult(plan.nbytes, watch.seconds(), "host", copies, len(work))


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all that was submitted; give up what waits for something that does not come."""
    runners = [runner for runner in live.copy() if runner.host.generation == generation()]
    for runner in runners:
        runner.host.stop()
    begun = time.monotonic()
    while runners := [runner for runner in runners if not runner.thread.join(0)]:
        # One that copies may be what another waits for: only when all wait does nothing more happen.
        since = [runner.waiting_since for runner in runners]
        idle = [max(begun, when) for when in since if when is not None]
        if len(idle) == len(runners) and time.monotonic() - max(idle) > EXIT_SECONDS:
            left = sum(host.in_flight() for host in {runner.host for runner in runners})
            message = f"at exit, {left} transfers were given up: what they wait for (after=) has not come"
            warnings.warn(message, RuntimeWarning, stacklevel=1)
            return
        runners[0].thread.join(0.01)
