"""Transfers with peers: what all have in common, and those between two processes of a machine, in the order of submits.

The agent's thread ends them, or callers do. One is done when its bytes have moved and the peer was found alive after
that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from kvplan.agents.board import VisitorOrder
from kvplan.agents.connection import Link, Watcher
from kvplan.base.process import check_process, generation
from kvplan.base.threads import Call, Latch
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import Transfer, TransferResult, cancellation, check_after, check_layer
from kvplan.plan.plan import Plan

# The deadline of a submit that names none, compared by identity: it counts from when the transfer could have begun.
BOUND = 30.0
SLOWEST = 1e8  # bytes a second; large transfers get so much more time

# To wake the thread costs a submit some 10 us, and the thread then competes with it for the interpreter. So it looks
# for ends by itself, and callers that ask for an end need no thread. After IDLE_LOOKS looks without a transfer it
# sleeps until the next submit.
LOOK_SECONDS, IDLE_LOOKS = 2e-3, 50
SLICE_SECONDS = 0.5  # after which a caller that blocks looks whether the agent's thread has given the transfer up
_NOTHING = "it had not begun, and nothing was moved"


class Order(NamedTuple):
    """The arguments of a submit.

    Attributes:
        plan: the plan.
        peer: name of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer; ``b""`` if there is none.
        deadline: seconds until it is given up, or None.
        after: what it waits for, or None.
        by_layer: whether its layers are moved in their order.
        urgent: whether it has high priority.
    """

    plan: Plan
    peer: str
    reading: bool
    note: bytes = b""
    deadline: float | None = BOUND
    after: Any = None
    by_layer: bool = False
    urgent: bool = False

    @property
    def until(self) -> float | None:
        """When it is given up if it is submitted now, as ``time.monotonic`` counts; None if not known yet, or never."""
        return None if self.deadline is None or self.deadline is BOUND else time.monotonic() + self.deadline

    @property
    def bound(self) -> float | None:
        """Seconds until it is given up after it could have begun."""
        return BOUND + self.plan.nbytes / SLOWEST if self.deadline is BOUND else self.deadline


class LatchedTransfer(Transfer):
    """A transfer whose first end counts, whichever thread gave it; then a latch wakes those that wait.

    Args:
        order: the arguments of the submit.
        tally: sums to which it is added.

    Attributes:
        plan: the plan that it moves.
        order: as given; without its ``after=`` once it has ended, so that a chain of transfers does not stay alive.
        ended: whether its end is known.
        error: why it failed, once it has ended.
        cancelled: whether its user has cancelled it.
    """

    ended = cancelled = False
    error: TransferError | None = None

    def __init__(self, order: Order, tally: Tally) -> None:
        self.plan, self.order, self.until = order.plan, order, order.until
        self._tally, self._generation, self._over = tally, generation(), Latch()

    def result(self) -> TransferResult:
        """Wait for its end and return its result; see :meth:`kvplan.Transfer.result`."""
        self.synchronize()
        assert self._result is not None  # it has not failed
        return self._result

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`."""
        self._over.call(function)
        return True

    def _raise(self) -> None:
        """Raise the error of a transfer that has ended, if there is one."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _end_as(self, result: TransferResult | None, what: str = "", held: str = "") -> None:
        """End it: with a result, or an error that says what failed and what the destination holds."""
        order = self.order
        if result is not None:
            self._result = result
            self._tally.add(result, "read" if order.reading else "write")
        elif self.cancelled and not what:
            self.error = TransferError(cancellation(self.plan))
            self._tally.cancel()
        else:
            way = f"{'reading from' if order.reading else 'writing to'} {order.peer!r} failed"
            self.error = TransferError(f"{way}: {what}; {held}")
            self._tally.fail(self.plan, "agent", self.error)
        self.order, self.until, self.ended = order._replace(after=None), None, True


def question(after: Any) -> Callable[[], object]:
    """Return a function that says, without blocking, whether an object has completed, and raises its error, if any.

    A transfer, an event of torch, and a ``threading.Event`` are asked. A stream of torch is asked through an event that
    is recorded now.

    Raises:
        KVPlanError: it cannot be waited for, or is an event of CUDA that was never recorded: it would count as passed.

    >>> import threading
    >>> event = threading.Event()
    >>> ask = question(event)
    >>> ask(), event.set(), ask()
    (False, None, True)
    """
    check_after(after)
    if getattr(after, "cuda_event", None) == 0:
        raise KVPlanError("after= has an event that was never recorded, and CUDA takes it for passed; record it first")
    if isinstance(after, Transfer):
        return lambda: after.done() and after.synchronize() is None
    event = after.record_event() if hasattr(after, "record_event") else after
    for name in ("done", "query", "is_set"):
        if callable(ask := getattr(event, name, None)):
            return ask  # type: ignore[no-any-return]
    raise KVPlanError(f"after is a {type(after).__name__}, which cannot be asked whether it has completed")


class PeerTransfer(LatchedTransfer):
    """A transfer between two processes of one machine. :meth:`kvplan.Peer.submit` returns it.

    It has ended when its bytes have moved, the peer's process was found alive after the last byte, and the note was
    sent. An error says what the destination holds. The agent's thread ends it, or a caller who asks for its end.

    :meth:`wait` and :meth:`wait_layer` order a GPU's stream behind the bytes, at once. Only :meth:`done`,
    :meth:`synchronize` and :meth:`result` tell whether the peer lived until the end.

    Args:
        order: the arguments of the submit.
        link: the peer's connection.
        gpu_order: what counts its end on the GPU, or None.
        tally: sums over the transfers with the peer.
        line: the transfers before it.

    Attributes:
        plan: the plan that it moves.
        inner: the inner transfer; None while it has not been submitted.
    """

    inner: Any = None
    _settling = _noted = False
    _number = 0  # as its GPU counts; 0 if the CPU alone notices its end

    def __init__(self, order: Order, link: Link, gpu_order: VisitorOrder | None, tally: Tally, line: Line) -> None:
        super().__init__(order, tally)
        self._link, self._gpu_order, self._line = link, gpu_order, line

    # ---- the face of a transfer --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        if not self.ended and self._generation == generation():
            self._line.end()
        return self.ended

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            check_process(self._generation)
            left = SLICE_SECONDS if limit is None else min(limit - time.monotonic(), SLICE_SECONDS)
            if left <= 0:
                raise self._late(timeout)
            if self.inner.done():  # others before it have not ended
                self._over.wait(left)
            else:
                with suppress(TransferError):
                    self.inner.synchronize(left)
        self._raise()

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`."""
        self.inner.add_done_callback(self._line.wake)
        return super().add_done_callback(function)

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for the bytes, or block without a GPU; see :meth:`kvplan.Transfer.wait`."""
        self._moving().wait(stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make a stream wait for the bytes of a layer; see :meth:`kvplan.Transfer.wait_layer`."""
        check_layer(self.plan, layer)
        self._moving().wait_layer(layer, stream)

    def await_issue(self) -> None:
        """See :meth:`kvplan.Transfer.await_issue`."""
        self._moving().await_issue()

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`kvplan.Transfer.layer_groups`."""
        groups: tuple[tuple[int, ...], ...] = self.inner.layer_groups
        return groups

    @property
    def on_gpu(self) -> bool:
        """Whether streams can wait for it."""
        return hasattr(self.inner, "precede")  # as a transfer of a GPU has

    def _moving(self) -> Transfer:
        """Return the inner transfer, for whose bytes a stream can wait; or block until the end, and raise its error."""
        if not self.on_gpu:
            self.synchronize()
        elif self.ended:
            self._raise()
        moving: Transfer = self.inner
        return moving

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`kvplan.Transfer.cancel`. Its note is not sent."""
        check_process(self._generation)  # a thread of the parent may hold the lock
        with self._line.lock:
            if not self.ended and self.inner is not None and self.inner.cancel():
                self._cancel()
        if self.ended:
            self._over.set()
        self._line.wake()  # for those behind it
        return self.cancelled

    # ---- its submit --------------------------------------------------------------------------------------------------

    def launch(self, start: Callable[[], Transfer]) -> None:
        """Submit it, by a function that submits the inner transfer."""
        try:
            self._link.enter(self)
            self.inner = start()
            if self._gpu_order is not None:
                self._number = self._gpu_order.count(self.inner, int(self.order.urgent))
            if self.order.note:
                self._note_early()
            self._line.add(self)
        except BaseException:
            if self.inner is None:
                self._link.leave_flight(self)
            else:
                self._line.add(self)  # its bytes move all the same; to add it twice does nothing
            raise

    def _note_early(self) -> None:
        """Send the note now, if its GPU counts the end, and no note before it still waits for an end.

        The owner then reads it as soon as the last byte has arrived, whatever this process does.
        """
        if self._number and not isinstance(self.order.after, PeerTransfer) and not self._line.owing:
            with suppress(TransferError):  # its end tries again
                self._send_note(self._number)
                return
        self._line.owing.add(self)
        self.inner.add_done_callback(self._line.wake)

    def _send_note(self, number: int = 0) -> None:
        """Write the note: it is read when the lane's GPU has counted to a number."""
        order, lane = self.order, int(self.order.urgent)
        needs = (0, number) if lane else (number, 0)
        self._noted = True  # before: a note that an interrupt meets may be lost, and none comes twice
        try:
            self._link.notes.write(order.note, 2 * lane + order.reading, needs)
        except TransferError:
            self._noted = False
            raise

    # ---- for its line ------------------------------------------------------------------------------------------------

    def bound(self) -> None:
        """Begin to count the default bound: it is the first of its line. When an ``after=`` completes is not known."""
        order = self.order
        if order.deadline is BOUND and self.until is None and order.after is None and not self.ended:
            self.until = time.monotonic() + (order.bound or 0.0)

    def expire(self) -> bool:
        """Give it up, if its deadline has passed: cancel it if it has not begun, and else let it run unobserved."""
        if self.until is None or time.monotonic() <= self.until:
            return False
        late = f"it did not end within its deadline of {self.order.bound:g} seconds"
        if self.inner.cancel():
            self._link.leave_flight(self)
            self._finish(None, late, _NOTHING)
        else:
            self._finish(None, late, f"it still runs, and may still change {self._destination()}")
        return True

    def moved(self) -> bool:
        """Return whether nothing of it moves any more: its line may end it."""
        after = self.order.after
        waits = isinstance(after, PeerTransfer) and not after.ended  # the GPU waited for its bytes only
        return not self._settling and bool(self.inner.done()) and not waits  # a signal handler may ask within its end

    def settle(self) -> None:
        """End it, now that nothing of it moves any more."""
        try:
            self._settling = True
            if not self.ended:
                self._end()
            if self._number:
                self._link.ended_as(int(self.order.urgent), self._number)
            self._link.leave_flight(self)
        finally:
            self._settling = False

    # ---- its end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Ask how the bytes have moved and whether the peer lives, and send the note."""
        order, after = self.order, self.order.after
        try:
            result = self.inner.result()
        except KVPlanError as problem:  # any other error is of a signal handler, and the caller's; this is asked again
            if self.inner.cancel():
                self._cancel()
            else:
                self._finish(None, str(problem), f"{self._destination()} may hold a part of the bytes")
            return
        if (lost := self._link.death()) is not None:
            written = "the bytes were written to the memory of a peer that is gone"
            wrong = "the destination's blocks hold bytes that may be wrong: do not use them"
            self._finish(None, lost, wrong if order.reading else written)
            return
        if isinstance(after, PeerTransfer) and after.error is not None:
            self._finish(None, f"its after= failed ({after.error})", f"{self._destination()} may hold wrong bytes")
            return
        try:
            if order.note and not self._noted:
                self._send_note()
        except TransferError as error:
            self._finish(None, f"the note was not sent: {error}", "all bytes have moved")
        else:
            self._finish(result)

    def _cancel(self) -> None:
        self.cancelled = True
        self._link.leave_flight(self)
        self._finish(None, self._link.why or "", _NOTHING)

    def _finish(self, result: TransferResult | None, what: str = "", held: str = "") -> None:
        self._end_as(result, what, held)
        self._line.owing.discard(self)

    def announce(self) -> None:
        """Wake those that wait for its end. The line's lock is not held: they may ask for other ends."""
        self._over.set()

    def _destination(self) -> str:
        return "the destination" if self.order.reading else "the peer's memory"


class Line:
    """Transfers that run, and end, in the order of their submits.

    Args:
        lines: all lines of the agent.

    Attributes:
        lock: held while a transfer is ended, and not while others hear of it.
        wake: wakes the agent's thread.
        owing: transfers whose notes wait for their ends.
    """

    def __init__(self, lines: Lines) -> None:
        self.lock, self.wake = threading.RLock(), lines.wake
        self.owing: set[PeerTransfer] = set()
        self._lines = lines
        self._flying: deque[PeerTransfer] = deque()

    def add(self, transfer: PeerTransfer) -> None:
        """Add a transfer that was submitted."""
        self._flying.append(transfer)
        self._lines.serve_soon(self)

    def end(self) -> None:
        """End the first transfers, as far as nothing of them moves any more; any thread may call it."""
        ended: list[PeerTransfer] = []
        with self.lock:
            while self._flying and (head := self._flying[0]).moved():
                head.settle()
                ended.append(head)
                if self._flying and self._flying[0] is head:  # otherwise a signal handler has asked for an end, too
                    self._flying.popleft()
        for transfer in ended:
            transfer.announce()

    def serve(self) -> None:
        """End what can be, and give up what is late, in the agent's thread."""
        self.end()
        with self.lock:
            if self._flying:
                self._flying[0].bound()
            late = [transfer for transfer in tuple(self._flying) if transfer.expire()]
        for transfer in late:
            transfer.announce()

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return bool(self._flying)


class Lines(Watcher):
    """The lines of an agent: one for each order in which transfers run. The agent's thread serves them.

    Args:
        wake: wakes the thread.
    """

    def __init__(self, wake: Call) -> None:
        self.wake = wake
        self._lines: dict[tuple[object, ...], Line] = {}
        self._busy: dict[int, Line] = {}
        self._asleep = True  # whether a submit must wake the thread
        self._idle = 0  # looks at nothing

    def line(self, key: tuple[object, ...]) -> Line:
        """Return the line of a key."""
        return self._lines.get(key) or self._lines.setdefault(key, Line(self))

    def serve_soon(self, line: Line) -> None:
        """Serve a line that has a transfer."""
        self._busy[id(line)] = line
        if self._asleep:
            self.wake()

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return any(line.busy for line in list(self._busy.values()))

    # The agent's thread calls these methods.

    def due(self) -> float | None:
        """Return when to look for ends again."""
        self._asleep = self._idle >= IDLE_LOOKS  # before the look: a submit that comes later wakes the thread
        return None if self._asleep and not self._busy else time.monotonic() + LOOK_SECONDS

    def serve(self) -> None:
        """Serve each line that has transfers."""
        self._idle = 0 if self._busy else self._idle + 1
        for number, line in list(self._busy.items()):
            line.serve()
            if not line.busy:
                self._busy.pop(number, None)
                if line.busy:  # a submit came meanwhile
                    self._busy[number] = line
