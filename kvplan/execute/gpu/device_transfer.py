"""Transfers of a GPU: their state, what they hold, and how they end. No other file writes a transfer's state."""

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
    """Calls that a transfer makes of its executor.

    Attributes:
        reap: take back what ended transfers hold; the device is current.
        expected: seconds that the cost model expects of a plan on a path; None where it has no model.
    """

    reap: Callable[[], int]
    expected: Callable[[Plan, str], float | None]


class Flights:
    """Transfers in flight on one lane.

    Attributes:
        flying: the transfers, in the order in which they end.
        last: the last of them.
        calls: of the driver, that issued them.
    """

    def __init__(self) -> None:
        self.flying: deque[DeviceTransfer] = deque()
        self.last: DeviceTransfer | None = None
        self.calls = 0

    def reap(self) -> int:
        """Take out what has ended, and return how many are left; the executor's lock is held, the device current."""
        while True:
            if not self.flying:  # asked after the jump back, where a signal's handler may have taken the last one out
                break
            first = self.flying[0]
            if not first._retire() or not first._settled:
                break
            if self.flying and self.flying[0] is first:  # else a signal's handler has taken it out
                self.calls -= first.launches  # from here to the end of popleft no signal is looked at
                self.flying.popleft()
        last = self.last
        if last is not None and last._over:
            self.last = None
        return len(self.flying)


class DeviceTransfer(Loans, Awaited):
    """A transfer between a GPU and pinned or pageable memory, or within the GPU.

    The executor holds it until its last event has passed, and then gives its events and memory back. From then on it
    is only what its user holds: plan and result. All that changes does so under the executor's lock.

    Attributes:
        copies: contiguous copies that its path has counted.
        launches: calls of the driver that its path has counted.
        resources: of its executor.
        by_layer: groups of layers that it is cut into, at most; 0 where it is not.
        captures: launches that a CUDA graph replays; None of a transfer outside graphs.
        kept: an ``after=`` of another owner, or its event, kept until the end.
    """

    # Defaults that most transfers keep, so that a submit need not set them.
    copies = launches = 0
    kept: Any = None
    captures: list[Any] | None = None
    _begin = _end = 0
    _issued: Latch | None = None  # of a transfer that the lane's own thread issues
    _job: Callable[[], None] | None = None  # what that thread is to do
    _begun = False  # the lane's own thread issues it, or has
    _cancelled = _over = False
    _unmarked = _mark = 0  # calls since the last event behind some of its calls, and that event
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
        self._blockers: list[object] = []  # of those who block on the end event
        self._marks: list[tuple[Layers, int]] = []  # layers, and the event behind their bytes
        self._cut: list[tuple[Layers, Plan]] = []  # plans that it was cut into, which hold the run tables

    # What paths and lanes use while they issue it.

    def count(self, copies: int, launches: int) -> None:
        """Add copies and calls, which the result will tell."""
        self.copies += copies
        self.launches += launches

    def keep(self, after: Any) -> None:
        """Keep what it waits for until its end."""
        self.kept = after

    def pieces(self) -> list[tuple[Layers, Plan]]:
        """List the plans that it is issued as, each with its layers; they are split once, when first asked for."""
        if not self._cut:
            self._cut = split_layers(self.plan, self.by_layer) if self.by_layer else [(WHOLE, self.plan)]
        return self._cut

    def mark(self, layers: Layers) -> int:
        """Borrow the event that is recorded behind the bytes of some layers."""
        event = self.event()
        self._marks.append((layers, event))
        return event

    @property
    def room(self) -> int:
        """Calls that may be issued before :meth:`pace` must be told of them."""
        return self.resources.limits.calls_in_flight - self._unmarked

    def pace(self, calls: int, stream: int) -> None:
        """Hold the lane's own thread back where the calls of this transfer would fill the driver's queue.

        Every ``calls_in_flight`` calls are followed by an event, and the event before that is waited for.

        Args:
            calls: how many were issued just now.
            stream: the stream that they went to.
        """
        self._unmarked += calls
        if self._unmarked < self.resources.limits.calls_in_flight:
            return
        self._unmarked = 0
        device, before, self._mark = self.resources.device, self._mark, self.event()
        device.record(self._mark, stream)
        if before and self._issued is not None:  # else a submit would wait for the GPU
            with Uncaptured(device):
                device.driver.cuEventSynchronize(before)

    # How it is queued, issued, captured and ended.

    def defer(self, job: Callable[[], None]) -> None:
        """Leave the issuing to the lane's own thread."""
        self._job = job
        self._issued = Latch()

    def issue_now(self) -> None:
        """Run what :meth:`defer` was given, in the lane's own thread."""
        job, self._job = self._job, None
        if job is not None:
            job()

    def is_issued(self) -> None:
        """Tell that the lane's own thread has issued it, or found it cancelled."""
        if self._issued is not None:
            self._issued.set()

    def take_up(self) -> bool:
        """Begin to issue it, in the lane's own thread; False where it was cancelled."""
        with self.resources.lock:
            if self._over:
                return False
            self._begun = True
        return True

    def fly(self, begin: int, end: int, flights: Flights) -> None:
        """Put it among the transfers in flight; the executor's lock is held.

        Args:
            begin: the event before its work.
            end: the event behind its work.
            flights: of its lane.
        """
        self._begin, self._end = begin, end  # from here to the end of append no signal is looked at
        flights.last = self
        flights.calls += self.launches
        flights.flying.append(self)

    def set_events(self, begin: int, end: int) -> None:
        """Tell the events before and behind its work in a graph."""
        self._begin, self._end = begin, end

    def capture(self) -> None:
        """Note its launches from now on, because a graph replays them."""
        self.captures = []

    def change_plan(self, plan: Plan) -> None:
        """Set the plan that its graph moves at the next replay."""
        self.plan = plan

    def fail(self, error: BaseException) -> None:
        """Set its error; what was issued of it is still in flight."""
        with self.resources.lock:
            self._fail(error)

    def lose(self) -> None:
        """End it with the context: its memory and events are lost."""
        self._over = True

    def abandon(self, error: BaseException) -> None:
        """End it with an error, unless some of it is in flight: then its last event ends it."""
        with self.resources.lock:
            if not self._end and not self._over:
                self._fail(error)
                self._over = True
                self._give_back()

    def give_back(self) -> None:
        """Give back what it holds, once it has ended."""
        with self.resources.lock:
            self._give_back()

    # The contract.

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        if self._over:
            return True
        check_process(self.resources.generation)
        if self.queued:
            return False
        device = self.resources.device
        with device.current(), Uncaptured(device):
            return self._retired()

    def result(self) -> TransferResult:
        """See :meth:`Transfer.result`."""
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        if self._result.predicted is None and self.resources.generation == generation():  # a path that was named
            self._result = TransferResult(*self._result, self._callbacks.expected(self.plan, self.path))
        return self._result

    def cancel(self) -> bool:
        """See :meth:`Transfer.cancel`; what has been given to the GPU's streams has begun."""
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
                True  # from here to the end of count() no signal is looked at
            )
            try:
                count("cancelled")
            finally:  # each is one call of C, so that all are made in spite of an exception
                try:
                    any(wakes)
                finally:
                    any(stirs)
            self._give_back()
        return True

    def block(self) -> None:
        """Wait for its end on the CPU; it is issued."""
        me, blockers, device = object(), self._blockers, self.resources.device
        with device.current(), Uncaptured(device):
            try:
                with self.resources.lock:
                    if self._over:
                        return
                    blockers.append(me)  # its events stay its own
                device.driver.cuEventSynchronize(self._end)  # what is wrong, the query below says
            finally:
                if me in blockers:
                    blockers.remove(me)
            while not self._retired():  # the call returned, but the event has not passed
                time.sleep(20e-6)
            self._callbacks.reap()  # those before it have ended too

    def _retired(self) -> bool:
        with self.resources.lock:
            return self._retire()

    def _retire(self) -> bool:
        """End it if its last event has passed; the executor's lock is held and its device current."""
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
            if not self._over:  # else a signal's handler has ended it
                self._result, self._over = result, True  # from here to the end of count() no signal is looked at
                count(ended)
        self._over = True
        self._give_back()
        return True

    def _give_back(self) -> None:
        """Give everything back, except while a thread blocks on its end; the executor's lock is held.

        Broken off anywhere, it has given back what it no longer has, and can be called again.
        """
        if not self._blockers:
            self._return_loans()
            self._marks, self._cut, self.kept = [], [], None

    @property
    def _settled(self) -> bool:
        """Whether it has ended and given everything back."""
        return self._over and not self._pieces and not self._borrowed

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self.resources.tally.fail(self.plan, self.path, error)

    def __repr__(self) -> str:
        ended = "cancelled" if self._cancelled else "failed" if self._error else "done" if self._over else "in flight"
        return f"Transfer({self.plan!r}, {ended})"
