"""Transfers of a GPU: their state, their loans, and how they end. No other file writes a transfer's state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvplan.base.latch import Latch, waking
from kvplan.base.process import check_process, generation
from kvplan.cuda.device import NOT_READY, Uncaptured
from kvplan.errors import TransferError
from kvplan.execute.gpu.resources import Loans, Resources
from kvplan.execute.gpu.waits import Awaited
from kvplan.execute.transfer import TransferResult, cancellation
from kvplan.plan.layers import Layers, split_layers
from kvplan.plan.plan import Plan

WHOLE: Layers = frozenset()  # stands for all layers of a transfer that is not cut


class Callbacks(NamedTuple):
    """Functions of the executor that a transfer calls.

    Attributes:
        reap: takes back the loans of ended transfers; the device is current.
        expected: returns the predicted seconds of a plan on a path; None if there is no model for them.
    """

    reap: Callable[[], int]
    expected: Callable[[Plan, str], float | None]


class Flights:
    """Transfers in flight on one lane.

    Attributes:
        flying: the transfers, in the order in which they end.
        last: the last transfer issued, while it is in flight.
        calls: number of driver calls that issued them.
    """

    def __init__(self) -> None:
        self.flying: deque[DeviceTransfer] = deque()
        self.last: DeviceTransfer | None = None
        self.calls = 0

    def reap(self) -> int:
        """Remove ended transfers, and return how many are left. The executor's lock is held, and the device current."""
        while True:
            if not self.flying:  # checked at each turn, since a signal handler may have removed the last transfer
                break
            first = self.flying[0]
            if not first._retire() or not first._settled:
                break
            if self.flying and self.flying[0] is first:  # otherwise a signal handler has removed it
                self.calls -= first.launches  # no signal handler runs from here to the end of popleft
                self.flying.popleft()
        last = self.last
        if last is not None and last._over:
            self.last = None
        return len(self.flying)


class DeviceTransfer(Loans, Awaited):
    """A transfer between a GPU and pinned or pageable memory, or within the GPU.

    The executor keeps a transfer until its last event has passed, and then takes its events and memory back. After that
    the transfer only has its plan and result. Every change of its state happens under the executor's lock.

    Attributes:
        copies: number of contiguous copies that its path has counted.
        launches: number of driver calls that its path has counted.
        resources: resources of its executor.
        by_layer: most groups of layers that it is cut into; 0 if it is not cut.
        captures: launches that a CUDA graph replays; None for a transfer outside graphs.
        kept: an ``after=`` of another owner, or its event, kept until the end.
    """

    # Defaults that most transfers keep, so that a submit need not set them.
    copies = launches = 0
    kept: Any = None
    captures: list[Any] | None = None
    _begin = _end = 0
    _issued: Latch | None = None  # set when the lane's own thread has issued it; None if the submit issues it
    _job: Callable[[], None] | None = None  # the call by which that thread issues it
    _begun = False  # the lane's own thread is issuing it, or has issued it
    _cancelled = _over = False
    _unmarked = _mark = 0  # calls since pace() last recorded an event, and that event
    _result: TransferResult | None = None
    _error: BaseException | None = None

    def __init__(
        self, plan: Plan, resources: Resources, callbacks: Callbacks, path: str, predicted: float | None = None,
        layer_groups: int = 0,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.path = path
        self.predicted = predicted
        self.resources = resources
        self._callbacks = callbacks
        self.by_layer = layer_groups
        self._borrowed = []
        self._pieces = []
        self._blockers: list[object] = []  # one object per thread that blocks on the end event
        self._marks: list[tuple[Layers, int]] = []  # layers, and the event behind their bytes
        self._cut: list[tuple[Layers, Plan]] = []  # plans that it was cut into, which hold the run tables

    # For paths and lanes, while they issue it.

    def count(self, copies: int, launches: int) -> None:
        """Add copies and driver calls to the counts of the result."""
        self.copies += copies
        self.launches += launches

    def keep(self, after: Any) -> None:
        """Keep the ``after=`` object until the transfer ends."""
        self.kept = after

    def pieces(self) -> list[tuple[Layers, Plan]]:
        """Return the plans that it is issued as, each with its layers. The first call splits the plan."""
        if not self._cut:
            self._cut = split_layers(self.plan, self.by_layer) if self.by_layer else [(WHOLE, self.plan)]
        return self._cut

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`Transfer.layer_groups`."""
        if not self.by_layer:
            return super().layer_groups
        pieces = self._cut or split_layers(self.plan, self.by_layer)
        return tuple(tuple(sorted(layers)) for layers, _ in pieces)

    def mark(self, layers: Layers) -> int:
        """Borrow the event that the lane records behind the bytes of some layers."""
        event = self.event()
        self._marks.append((layers, event))
        return event

    @property
    def room(self) -> int:
        """Return the number of driver calls that may be issued before the next call of :meth:`pace`."""
        return self.resources.limits.calls_in_flight - self._unmarked

    def pace(self, calls: int, stream: int) -> None:
        """Block the lane's own thread if the calls of this transfer would fill the driver's queue.

        After every ``calls_in_flight`` calls it records an event, and waits for the event before.

        Args:
            calls: number of driver calls issued just now.
            stream: the stream on which they were issued.
        """
        self._unmarked += calls
        if self._unmarked < self.resources.limits.calls_in_flight:
            return
        self._unmarked = 0
        device, before, self._mark = self.resources.device, self._mark, self.event()
        device.record(self._mark, stream)
        if before and self._issued is not None:  # a submit must not wait for the GPU
            with Uncaptured(device):
                device.driver.cuEventSynchronize(before)

    # For lanes, graphs and the reaper: queue, issue, capture and end it.

    def defer(self, job: Callable[[], None]) -> None:
        """Let the lane's own thread issue it, by calling ``job``."""
        self._job = job
        self._issued = Latch()

    def issue_now(self) -> None:
        """Run the job given to :meth:`defer`, in the lane's own thread."""
        job, self._job = self._job, None
        if job is not None:
            job()

    def is_issued(self) -> None:
        """Wake the threads that wait until the lane's own thread has issued it, or found it cancelled."""
        if self._issued is not None:
            self._issued.set()

    def take_up(self) -> bool:
        """Mark it as begun, in the lane's own thread. Return False if it was cancelled."""
        with self.resources.lock:
            if self._over:
                return False
            self._begun = True
        return True

    def fly(self, begin: int, end: int, flights: Flights) -> None:
        """Add it to the transfers in flight. The executor's lock is held.

        Args:
            begin: the event before its work.
            end: the event behind its work.
            flights: transfers in flight on its lane.
        """
        self._begin, self._end = begin, end  # no signal handler runs from here to the end of append
        flights.last = self
        flights.calls += self.launches
        flights.flying.append(self)

    def set_events(self, begin: int, end: int) -> None:
        """Set the events before and behind its work in a graph."""
        self._begin, self._end = begin, end

    def capture(self) -> None:
        """Note its launches from now on, because a graph replays them."""
        self.captures = []

    def change_plan(self, plan: Plan) -> None:
        """Set the plan that its graph moves at the next replay."""
        self.plan = plan

    def fail(self, error: BaseException) -> None:
        """Set its error. Its issued work is still in flight."""
        with self.resources.lock:
            self._fail(error)

    def lose(self) -> None:
        """End it because the context is lost, with its memory and events."""
        self._over = True

    def abandon(self, error: BaseException) -> None:
        """End it with an error, unless some of its work is in flight; then its last event ends it."""
        with self.resources.lock:
            if not self._end and not self._over:
                self._fail(error)
                self._over = True
                self._give_back()

    def give_back(self) -> None:
        """Give its loans back, once it has ended."""
        with self.resources.lock:
            self._give_back()

    # The methods of Transfer.

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        if self._over:
            return True
        check_process(self.resources.generation)
        if self.queued:
            return False
        device = self.resources.device
        if device.is_current():  # as for most callers; then there is nothing to restore
            return self._passed()
        with device.current():
            return self._passed()

    def result(self) -> TransferResult:
        """See :meth:`Transfer.result`."""
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        if self._result.predicted is None and self.resources.generation == generation():  # the policy names the path
            self._result = TransferResult(*self._result, self._callbacks.expected(self.plan, self.path))
        return self._result

    def cancel(self) -> bool:
        """See :meth:`Transfer.cancel`. A transfer has begun when work is issued on the GPU's streams."""
        resources, issued = self.resources, self._issued
        check_process(resources.generation)
        if issued is None:
            return self._cancelled
        error = TransferError(cancellation(self.plan))
        count, wakes, stirs = resources.tally.ends.append, waking(issued.sleepers), waking(resources.wakes)
        with resources.lock:
            if self._begun or self._over:
                return self._cancelled
            self._error = error
            self._cancelled = self._over = issued.happened = (
                True  # no signal handler runs from here to the end of count()
            )
            try:
                count("cancelled")
            finally:  # each call is one C call; the nesting makes every call in spite of an exception
                try:
                    any(wakes)
                finally:
                    any(stirs)
            self._give_back()
        return True

    def block(self) -> None:
        """Block the CPU until it ends. It is issued."""
        me, blockers, device = object(), self._blockers, self.resources.device
        with device.current(), Uncaptured(device):
            try:
                with self.resources.lock:
                    if self._over:
                        return
                    blockers.append(me)  # so that its events are not given back
                device.driver.cuEventSynchronize(self._end)  # an error shows in the query below
            finally:
                if me in blockers:
                    blockers.remove(me)
            while not self._retired():  # the call returned, but the event has not passed
                time.sleep(20e-6)
            self._callbacks.reap()  # earlier transfers have ended, too

    def _passed(self) -> bool:
        with Uncaptured(self.resources.device):
            return self._retired()

    def _retired(self) -> bool:
        with self.resources.lock:
            return self._retire()

    def _retire(self) -> bool:
        """End it if its last event has passed, and return whether it ended. The lock is held, the device current."""
        if self._over:
            self._give_back()
            return True
        device = self.resources.device
        code = device.driver.cuEventQuery(self._end)
        if code == NOT_READY:
            return False
        if code:
            self._fail(
                TransferError(f"cuEventQuery returned {device.driver.name(code)}: the transfer, or work before it")
            )
        elif self._error is None:
            seconds = device.seconds(self._begin, self._end)
            result = TransferResult(self.plan.nbytes, seconds, self.path, self.copies, self.launches, self.predicted)
            ended, count = (result, self.plan.direction), self.resources.tally.ends.append
            if not self._over:  # otherwise a signal handler has ended it
                self._result, self._over = result, True  # no signal handler runs from here to the end of count()
                count(ended)
        self._over = True
        self._give_back()
        return True

    def _give_back(self) -> None:
        """Give all loans back, unless a thread blocks on its end. The lock is held. The call can be repeated."""
        if not self._blockers:
            self._return_loans()
            self._marks, self._cut, self.kept = [], [], None

    @property
    def _settled(self) -> bool:
        """Return whether it has ended and given all loans back."""
        return self._over and not self._pieces and not self._borrowed

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self.resources.tally.fail(self.plan, self.path, error)

    def __repr__(self) -> str:
        ended = "cancelled" if self._cancelled else "failed" if self._error else "done" if self._over else "in flight"
        return f"Transfer({self.plan!r}, {ended})"
