"""Transfers of a GPU: their state, their loans, and how they end. No other file writes a transfer's state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvplan.base.latch import Latch, wake_all
from kvplan.base.process import check_process, generation
from kvplan.cuda.call_errors import error_of
from kvplan.cuda.call_list import ADDED, ENDED, FAILED, CallList, Segment, new_state
from kvplan.cuda.device import NOT_READY, Uncaptured
from kvplan.errors import TransferError
from kvplan.execute.gpu.resources import Loans, Resources
from kvplan.execute.gpu.waits import Awaited, Mark
from kvplan.execute.transfer import TransferResult, cancellation
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Cutting, Layers, cut_groups, split_layers
from kvplan.plan.plan import Plan

WHOLE: Layers = frozenset()  # stands for all layers of a transfer that is not cut


class Callbacks(NamedTuple):
    """Functions of the executor that a transfer calls.

    Attributes:
        reap: takes back the loans of ended transfers; the device is current.
        expected: returns the predicted seconds of a plan on a path; None if there is no model for them. The number is
            that of the most groups of layers that the plan is cut into.
    """

    reap: Callable[[], int]
    expected: Callable[[Plan, str, Cutting | None], float | None]


class InFlight(Protocol):
    """The transfers in flight on a lane: in order, the last one, and the number of their driver calls."""

    flying: deque[DeviceTransfer]
    last: DeviceTransfer | None
    calls: int


class DeviceTransfer(Loans, Awaited):
    """A transfer between a GPU and pinned or pageable memory, or within the GPU.

    The executor keeps a transfer until its last event has passed, and then takes its events and memory back. After that
    the transfer only has its plan and result. Every change of its state happens under the executor's lock.

    Attributes:
        copies: number of contiguous copies that its path has counted.
        launches: number of driver calls that its path has counted.
        resources: resources of its executor.
        by_layer: groups of layers that it is cut into; None if it is not cut.
        kept: an ``after=`` of another owner, or its event, kept until the end.
    """

    # Defaults that most transfers keep, so that a submit need not set them.
    copies = launches = 0
    kept: Any = None
    _begin = _end = 0
    _groups: tuple[tuple[int, ...], ...] = ()  # layers that arrive together; empty if it is not cut
    _issued: Latch | None = None  # set when the lane's own thread has issued it; None if the submit issues it
    _job: Callable[[], None] | None = None  # the call by which that thread issues it
    _begun = False  # the lane's own thread is issuing it, or has issued it
    _cancelled = _over = False
    _segments: Sequence[Segment] = ()  # the calls that issue it, if they were written into a list
    _state: Int64Array | None = None  # the state of this list
    _close: Callable[[], None] | None = None  # the lane's call that ends a transfer whose list has failed
    _result: TransferResult | None = None
    _error: BaseException | None = None

    def __init__(
        self, plan: Plan, resources: Resources, callbacks: Callbacks, path: str, predicted: float | None = None,
        layer_groups: Cutting | None = None,
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
        self._holds: list[DeviceTransfer] = []  # transfers whose events its calls name
        self._marks: list[Mark] = []
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

    def set_marks(self, marks: list[Mark]) -> None:
        """Set the events behind the bytes of its groups of layers, before its calls are made."""
        self._marks = marks
        self._groups = tuple([tuple(sorted(mark.layers)) for mark in marks])

    def take_list(self, segments: Sequence[Segment], close: Callable[[], None] | None = None) -> Int64Array:
        """Keep the list of calls that issues it, and return the state of the list.

        Args:
            segments: the list.
            close: a function that records the transfer's end if a thread without the interpreter made the calls, and a
                call has failed.
        """
        self._segments, self._close = segments, close
        state = self._state = new_state()
        return state

    def play(self, calls: CallList) -> None:
        """Make the calls of a list in the calling thread.

        Raises:
            TransferError: a call failed.
        """
        calls.close()
        device, state = self.resources.device, self.take_list(calls.segments)
        device.play(calls.segments, state)
        if state[FAILED]:
            raise error_of(device, calls.segments, state)

    def shift_marks(self, front: int, inserted: Sequence[int]) -> None:
        """Count the rows added to its list: ``front`` rows before all, and two before each row of ``inserted``."""
        self._marks = [
            mark._replace(rows=mark.rows + front + 2 * sum([row < mark.rows + front for row in inserted]))
            for mark in self._marks
        ]

    def unplay(self) -> None:
        """Forget its list, none of whose calls is made any more."""
        self._state = None

    def hold(self, other: DeviceTransfer) -> None:
        """Keep the events of another transfer until this one ends. The executor's lock is held."""
        self._holds.append(other)
        other._blockers.append(self)

    # For lanes and the reaper: queue, issue and end it.

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

    def fly(self, begin: int, end: int, flights: InFlight) -> None:
        """Add it to the transfers in flight. The executor's lock is held.

        Args:
            begin: the event before its work.
            end: the event behind its work.
            flights: transfers in flight on its lane.
        """
        self._begin, self._end = begin, end
        flights.last = self
        flights.calls += self.launches
        flights.flying.append(self)

    def fail(self, error: BaseException) -> None:
        """Set its error. Its issued work is still in flight."""
        with self.resources.lock:
            self._fail(error)

    def lose(self) -> None:
        """End it because the context is lost, with its memory and events."""
        with self.resources.lock:
            self._over = True
            self._let_go()

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

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`Transfer.layer_groups`."""
        if self._groups or not self.by_layer:
            return self._groups or (self.plan.layers,)
        # It is not issued yet. It will be cut in the same way.
        return tuple([tuple(sorted(layers)) for layers, _ in cut_groups(self.plan, self.by_layer)])

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        if self._over:
            return True
        resources = self.resources
        check_process(resources.generation)
        if self._issued is not None and self.queued:
            return False
        device = resources.device
        if device.is_current():  # as for most callers; then there is nothing to restore
            with Uncaptured(device), resources.lock:
                return self._retire()
        with device.current(), Uncaptured(device), resources.lock:
            return self._retire()

    @property
    def ended_well(self) -> bool:
        """Whether it is known to have ended without an error; it asks nobody."""
        return self._over and self._error is None

    def result(self) -> TransferResult:
        """See :meth:`Transfer.result`."""
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        if self._result.predicted is None and self.resources.generation == generation():  # the policy names the path
            self._result = TransferResult(*self._result, self._callbacks.expected(self.plan, self.path, self.by_layer))
        return self._result

    def cancel(self) -> bool:
        """See :meth:`Transfer.cancel`. A transfer has begun when work is issued on the GPU's streams."""
        resources, issued = self.resources, self._issued
        check_process(resources.generation)
        if issued is None:
            return self._cancelled
        error = TransferError(cancellation(self.plan))
        with resources.lock:
            if self._begun or self._over:
                return self._cancelled
            self._error = error
            self._cancelled = self._over = True
            issued.set()
            resources.tally.ends.append("cancelled")
            wake_all(resources.wakes)
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

    def _retired(self) -> bool:
        with self.resources.lock:
            return self._retire()

    def _retire(self) -> bool:
        """End it if its last event has passed, and return whether it ended. The lock is held, the device current."""
        if self._over:
            self._give_back()
            return True
        if self._state is not None and not self._is_played():
            return False
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
            launches = self.launches + (0 if self._state is None else int(self._state[ADDED]))
            result = TransferResult(self.plan.nbytes, seconds, self.path, self.copies, launches, self.predicted)
            self._result, self._over = result, True
            self.resources.tally.add(result, self.plan.direction)
        self._over = True
        self._give_back()
        return True

    def _is_played(self) -> bool:
        """Return whether its calls have been made. If one has failed, fail it, and let the lane record its end."""
        state = self._state
        if state is None:
            return True
        if not state[ENDED]:
            if not state[FAILED]:
                return False
            if self._close is not None:
                self._close()
            state[ENDED] = 1  # now the thread plays the next list
        self._close = None
        return True

    def _give_back(self) -> None:
        """Give all loans back, unless a thread blocks on its end. The lock is held. The call can be repeated."""
        self._let_go()
        if not self._blockers:
            self._return_loans()
            self._marks, self._cut, self.kept, self._segments = [], [], None, ()

    def _let_go(self) -> None:
        """Release the transfers that it holds, even while another one holds it. The lock is held."""
        for other in tuple(self._holds):
            other.release(self)
        self._holds.clear()

    def release(self, holder: object) -> None:
        """Give the loans back that ``holder`` has kept; see :meth:`hold`. The executor's lock is held."""
        if holder in self._blockers:
            self._blockers.remove(holder)
        if self._over:
            self._give_back()

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
