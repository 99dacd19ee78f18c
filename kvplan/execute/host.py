"""The host path: CPU memory to CPU memory, by threads that hold no interpreter lock while they copy."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvplan import compiled
from kvplan.compiled import spares, sparing
from kvplan.conflicts import conflict
from kvplan.errors import PathError, TransferError
from kvplan.execute.crew import Crew, Task
from kvplan.execute.forks import check_process, compiling, generation
from kvplan.execute.tally import Tally
from kvplan.execute.transfer import HostTransfer, Stopwatch, Transfer, TransferResult, check_layouts, wait_for
from kvplan.plan import Plan

if TYPE_CHECKING:
    from kvplan.tune.cost import Candidate

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


_Job = tuple[HostTransfer, Any, Sequence[HostTransfer]]  # a transfer, and what it waits for


class HostPath:
    """Runs transfers one after another, in the order of their submits, each on all threads.

    Its thread, the runner, keeps it alive until it is told to stop, by :meth:`stop` or :meth:`close`. Urgent transfers
    have a path of their own, with threads of its own, made with the first of them: while that copies, no other begins.
    Across the two, only what conflicts waits for one another.

    Args:
        threads: CPU threads; by default one a core, at most 8.
        tally: of the path whose urgent transfers it runs; by default it is a path of its own, with its own tally.
    """

    def __init__(self, threads: int | None = None, tally: Tally | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self.generation = generation()
        self.tally = tally or Tally()
        self.waiting_since: float | None = None
        self.loaded = threading.Event()
        self._sparing = spares(0)  # as whoever makes it; the runner is a thread of its own
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unfinished: deque[HostTransfer] = deque()  # in the order of their submits; ended ones may be among them
        self._urgent: HostPath | None = None
        self._idle = threading.Event()  # of urgent ones, nothing is copied, and nothing could be
        self._idle.set()
        self._tells = tally is not None  # of its own transfers, nobody asks
        self._waiting: HostTransfer | None = None  # that the runner waits for the turn of
        self._turn = threading.Lock()  # a transfer begins, or is cancelled
        self._closed = False
        self._lock = threading.Lock()  # no job goes behind the None that ends them
        self._crew = Crew(self.threads - 1)
        # Daemons: those that are not would be waited for at exit before anybody could tell them to stop.
        self._runner = threading.Thread(target=self._serve, name="kvplan-host", daemon=True)
        _hook_exit()
        self._runner.start()
        _live.add(self)

    def check_open(self) -> None:
        """Transfers can be submitted.

        Raises:
            TransferError: they cannot: it is closed, or its threads stayed in another process.
        """
        check_process(self.generation)
        if self._closed:
            raise TransferError("the executor is closed; submit before close()")

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
            import_module("kvplan.execute.memcpy").load()

    def submit(self, plan: Plan, after: Any, *, by_layer: bool = False, urgent: bool = False) -> Transfer:
        """Queue a plan; returns at once. All layers are there at its end, none before.

        Raises:
            LayoutError: a destination that is read-only, or addresses that are not this process's.
            PathError: the plan touches memory that is not the CPU's.
            TransferError: it is closed, or this is a fork's child.
        """
        del by_layer
        _check(plan)
        self.check_open()  # before the lock: in a fork's child it may be held by a thread that is not there
        with self._lock:
            self.check_open()
            if urgent and self._urgent is None:
                self._urgent = HostPath(self.threads, self.tally)
            path, other = (self._urgent, self) if urgent and self._urgent else (self, self._urgent)
            return path._put(plan, after, other._before(plan) if other else ())

    def _put(self, plan: Plan, after: Any, behind: Sequence[HostTransfer]) -> HostTransfer:
        transfer = HostTransfer(plan, self)
        self._unfinished.append(transfer)
        if self._tells:
            with self._turn:
                if self._waiting is None:
                    self._idle.clear()
        self._jobs.put((transfer, after, behind))
        return transfer

    def _before(self, plan: Plan) -> list[HostTransfer]:
        """What has not ended and conflicts with a plan."""
        return [one for one in tuple(self._unfinished) if not one.done() and conflict(one.plan, plan)]

    def cancel(self, transfer: HostTransfer) -> bool:
        """Take back a transfer that has not begun; whether it will not run."""
        with self._turn:
            if transfer._begun or transfer.done():
                return transfer._cancelled
            transfer._cancelled = True
            self.tally.cancel()
            transfer._finish(None)
            if self._waiting is transfer:
                self._relieve()
        return True

    def _relieve(self) -> None:
        """Another runner in place of the one that waits for what nobody needs any more; that one ends with its wait."""
        runner, old = threading.Thread(target=self._serve, name="kvplan-host", daemon=True), self._runner
        self._runner = runner  # it may be done before the next line
        self._waiting = self.waiting_since = None
        cancelled = self._unfinished.popleft()
        try:
            runner.start()
        except RuntimeError:  # no more threads: then the old one goes on after its wait
            self._runner = old
            self._unfinished.appendleft(cancelled)

    def stop(self) -> None:
        """Take no more; finish what was submitted, then end the threads. Returns at once."""
        if self.generation != generation():
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
                if self._urgent is not None:
                    self._urgent.stop()

    def close(self) -> None:
        """Stop, and wait until all is finished. The runner itself, in an ``after``'s code, cannot wait for that."""
        self.stop()
        paths = [path for path in (self, self._urgent) if path is not None]
        if self.generation != generation() or any(threading.current_thread() is path._runner for path in paths):
            return
        for path in paths:
            while not path.join(None):
                pass  # its runner was relieved meanwhile

    def join(self, timeout: float | None) -> bool:
        """Wait for the end of what was submitted, at most ``timeout`` seconds; whether it has come."""
        with self._turn:  # else it may be one that relieves another and has not been started
            runner = self._runner
        runner.join(timeout)
        with self._turn:
            return runner is self._runner and not runner.is_alive()

    def unfinished(self) -> int:
        """Transfers not finished."""
        return sum(not transfer.done() for transfer in tuple(self._unfinished))

    def in_flight(self) -> int:
        """Transfers not finished, urgent ones too."""
        return self.unfinished() + (self._urgent.unfinished() if self._urgent is not None else 0)

    def _serve(self) -> None:
        with sparing(wanted=self._sparing):
            self._serve_all()

    def _serve_all(self) -> None:
        # What fails here fails again in the transfers that need it, where it is reported.
        with contextlib.suppress(Exception):
            if not self.loaded.is_set() and (not self._closed or self._unfinished):
                with compiling():
                    _hands(0).load()
        self.loaded.set()
        while True:
            if self._tells and not self._unfinished:
                self._idle.set()
            job = self._jobs.get()
            if job is None:
                break
            if not self._serve_one(*job):
                return
            self._unfinished.popleft()
            del job  # else the last transfer's memory would live until the next one comes
        self._idle.set()
        self._crew.dismiss()
        _live.discard(self)

    def _serve_one(self, transfer: HostTransfer, after: Any, behind: Sequence[HostTransfer]) -> bool:
        """Run a transfer in its turn; False where another runner has taken over meanwhile."""
        error: BaseException | None = None
        if after is not None or behind:
            error = self._wait(transfer, after, behind)
        if self._urgent is not None:
            self._urgent._idle.wait()
        with self._turn:
            if threading.current_thread() is not self._runner:
                return False
            self._waiting = self.waiting_since = None
            if self._tells:
                self._idle.clear()
            if transfer.done():  # cancelled
                return True
            transfer._begun = True
        if error is None:
            try:
                result = _run(transfer.plan, self._crew)
                self.tally.add(result)
                transfer._finish(result)
            except BaseException as problem:  # noqa: BLE001  # the next one must still run
                error = problem
        if error is not None:
            self.tally.fail(transfer.plan, "host", error)
            transfer._finish(None, error)
        return True

    def _wait(self, transfer: HostTransfer, after: Any, behind: Sequence[HostTransfer]) -> BaseException | None:
        """Wait for what comes before a transfer; what went wrong with that."""
        with self._turn:
            if transfer.done():
                return None
            self._waiting, self.waiting_since = transfer, time.monotonic()
            self._idle.set()
        try:
            for other in behind:  # however it ends
                other._finished.wait()
            wait_for(after)
        except BaseException as error:  # noqa: BLE001  # it belongs to the transfer
            return error
        return None


def _check(plan: Plan) -> None:
    check_layouts(plan)
    why_not = refusal(plan)
    if why_not:
        raise PathError(f"path 'host' {why_not}")


def _hands(copies: int) -> ModuleType:
    """The loops that copy: compiled, or for so few copies that numba is spared, without it."""
    name = "memmove" if spares(copies) else "memcpy"
    return import_module(f"kvplan.execute.{name}")


def _run(plan: Plan, crew: Crew) -> TransferResult:
    work, copies = tasks(plan) if plan.nbytes else ([], 0)
    watch = Stopwatch()
    crew.run(work)
    return TransferResult(plan.nbytes, watch.seconds(), "host", copies, len(work))


# All whose runner may still have something to do.
_live: set[HostPath] = set()


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all that was submitted; give up what waits for something that does not come."""
    hosts = [host for host in tuple(_live) if host.generation == generation()]
    for host in hosts:
        host.stop()
    begun = time.monotonic()
    while hosts := [host for host in hosts if not host.join(0)]:
        # One that copies may be what another waits for: only when all wait does nothing more happen.
        since = [host.waiting_since for host in hosts]
        idle = [max(begun, when) for when in since if when is not None]
        if len(idle) == len(hosts) and time.monotonic() - max(idle) > EXIT_SECONDS:
            left = sum(host.unfinished() for host in hosts)
            message = f"at exit, {left} transfers were given up: what they wait for (after=) has not come"
            warnings.warn(message, RuntimeWarning, stacklevel=1)
            return
        hosts[0].join(0.01)
