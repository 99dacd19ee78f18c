"""Transfers between two processes, in the order in which they run: the agent's thread ends them, or callers do.

A transfer is done when its bytes have moved and the peer was found alive after that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvplan.agents.latched_transfer import LatchedTransfer, failure
from kvplan.agents.link import Link
from kvplan.agents.loop import Watcher
from kvplan.base.process import check_process, generation
from kvplan.base.threads import Call, error_of
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import Transfer, TransferResult, call_when_done, cancellation, check_layer
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.agents.gpu_order import VisitorOrder

_HOLDS = {
    True: "the destination's blocks hold bytes that may be wrong: do not use them",
    False: "the bytes were written to the memory of a peer that is gone",
}  # by whether it reads from the peer

# The deadline of a submit that names none, compared by identity: it counts from when the transfer could have begun.
BOUND = 30.0
SLOWEST = 1e8  # bytes a second; large transfers get so much more time
# To wake the thread costs a submit some 10 us, and the thread then competes with it for the interpreter. So it looks
# for ends by itself, and callers that ask for an end need no thread. After IDLE_LOOKS looks without a transfer it
# sleeps until the next submit.
LOOK_SECONDS, IDLE_LOOKS = 2e-3, 50
SLICE_SECONDS = 0.5  # after which a caller that blocks looks whether the agent's thread has given the transfer up


class Peering(Protocol):
    """A peer's connection: a :class:`kvplan.agents.link.Link`, or one by NIXL."""

    why: str | None

    def enter(self, transfer: Any) -> None:
        """Count a transfer as in flight; raise TransferError if the connection is not open."""

    def leave_flight(self, transfer: Any) -> None:
        """Count a transfer as ended."""

    def lost(self) -> str | None:
        """Return why bytes that have just moved are nobody's word, or None."""


class Order(NamedTuple):
    """The arguments of a submit.

    Attributes:
        plan: the plan.
        peer: name of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer; ``b""`` if there is none.
        deadline: seconds until it is given up, or None.
        until: when that is, as ``time.monotonic`` counts; None if it is not known yet, or never.
        after: what it waits for, or None.
        urgent: whether it has high priority.
    """

    plan: Plan
    peer: str
    reading: bool
    note: bytes = b""
    deadline: float | None = None
    until: float | None = None
    after: Any = None
    urgent: bool = False


class PeerTransfer(LatchedTransfer):
    """A transfer between two processes of one machine, or of two by NIXL. :meth:`kvplan.Peer.submit` returns it.

    It has ended when its bytes have moved, the peer's process was found alive after the last byte, and the note was
    sent. An error says what the destination holds. The agent's thread ends it, or a caller who asks for its end.

    :meth:`wait` and :meth:`wait_layer` order a GPU's stream behind the bytes, at once. Only :meth:`done`,
    :meth:`synchronize` and :meth:`result` tell whether the peer lived until the end.

    Args:
        order: the arguments of the submit.
        link: the peer's connection.
        gpu_order: what counts its end on the GPU, or None.
        tally: sums over the transfers with the peer.
        start: submits the inner transfer, which moves the bytes.
        line: the transfers before it.

    Attributes:
        plan: the plan that it moves.
        inner: the inner transfer; None while it has not been submitted.
        until: its deadline as ``time.monotonic`` counts, or None.
        called: whether the end of the inner transfer calls the agent's thread.
    """

    inner: Transfer | None = None
    called = False
    _answers: tuple[BaseException | None, ...] = ()  # the error of an ``after=`` that the CPU waited for, or None
    _deferred = _asked = _cancelled = _settling = _noted = False
    _number = 0  # as its GPU counts; 0 if the CPU alone notices its end

    def __init__(
        self, order: Order, link: Peering, gpu_order: VisitorOrder | None, tally: Tally,
        start: Callable[[], Transfer], line: Line,
    ) -> None:  # fmt: skip
        super().__init__(order.plan)
        self.until = order.until
        self._order, self._link, self._gpu_order, self._tally, self._start = order, link, gpu_order, tally, start
        self._line = line

    # ---- the face of a transfer --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        if not self._over.happened and self._generation == generation():
            self._line.end()
        return self._over.happened

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        limit = None if timeout is None else time.monotonic() + timeout
        while not self.done():
            check_process(self._generation)
            if limit is not None and time.monotonic() > limit:
                raise self._late(timeout)
            self._await_bytes(limit)
        self._raise()

    def _await_bytes(self, limit: float | None) -> None:
        """Block until the bytes have moved, a limit has passed, or for a slice of time."""
        left = SLICE_SECONDS if limit is None else min(max(limit - time.monotonic(), 0.0), SLICE_SECONDS)
        inner = self.inner
        if inner is None or self.called or inner.done():  # the agent's thread submits it, or ends it
            if not self.called:
                self._line.wake()
            self._over.wait(left)
        else:
            with suppress(TransferError):
                inner.synchronize(left)

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`."""
        self.watch()
        return super().add_done_callback(function)

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait for the bytes, or block without a GPU; see :meth:`kvplan.Transfer.wait`."""
        if self.on_gpu:
            self._inner().wait(stream)
        else:
            self.synchronize()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Make a stream wait for the bytes of a layer; see :meth:`kvplan.Transfer.wait_layer`."""
        if self.on_gpu:
            self._inner().wait_layer(layer, stream)
        else:
            check_layer(self.plan, layer)
            self.synchronize()

    def await_issue(self) -> None:
        """See :meth:`kvplan.Transfer.await_issue`."""
        if self.on_gpu:
            self._inner().await_issue()
        else:
            self.synchronize()

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`kvplan.Transfer.layer_groups`."""
        return self.inner.layer_groups if self.inner is not None else (self.plan.layers,)

    @property
    def on_gpu(self) -> bool:
        """Whether streams can wait for it."""
        return hasattr(self.inner, "precede")  # as a transfer of a GPU has

    def _inner(self) -> Transfer:
        if self._over.happened:
            self._raise()
        assert self.inner is not None  # as on_gpu has seen
        return self.inner

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`kvplan.Transfer.cancel`. Its note is not sent."""
        check_process(self._generation)  # a thread of the parent may hold the lock
        with self._line.lock:  # the agent's thread may submit it now
            if not self._ends and (self.inner.cancel() if self.inner is not None else self._deferred):
                self._cancelled = True
                self._link.leave_flight(self)
                self._finish(None, self._cancellation())
        self._line.announce()
        self._line.wake()  # for those behind it
        return self._cancelled

    # ---- its submit --------------------------------------------------------------------------------------------------

    def launch(self, *, deferred: bool = False) -> None:
        """Submit it; or leave that to the agent's thread, if ``deferred``: the CPU must wait for its ``after=``."""
        try:
            self._link.enter(self)
            self._deferred = deferred
            if not deferred:
                self.inner = self._start()
                if self._gpu_order is not None:
                    self._number = self._gpu_order.count(self.inner, int(self._order.urgent))
                if self._order.note:
                    self._note_early()
            self._line.add(self, deferred=deferred)
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
        before, self._line.noting = self._line.noting, self
        early = self._number and not isinstance(self._order.after, PeerTransfer)
        if early and (before is None or before._noted):
            with suppress(TransferError):  # its end tries again
                self._send_note(self._number)

    def _send_note(self, number: int = 0) -> None:
        order = self._order
        assert isinstance(self._link, Link)  # NIXL sends its notes itself
        self._noted = True
        try:
            self._link.note(order.note, 2 * order.urgent + order.reading, int(order.urgent), number)
        except TransferError:
            self._noted = False
            raise

    # ---- for its line ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Let the end of the inner transfer wake the agent's thread, if it can."""
        if self.inner is not None and not self.called:
            self.called = self.inner.add_done_callback(self._line.wake)

    def begin(self) -> None:
        """Submit it, once its ``after=`` has completed. It is the first of its line, in the agent's thread."""
        if self.inner is not None or self._ends:
            return
        if not self._asked:
            self._asked = True

            def answer(error: BaseException | None) -> None:
                self._answers = (error,)
                self._line.wake()

            call_when_done(self._order.after, answer, set())
        if self._answers:
            error = self._answers[0] or error_of(self._submit_late)
            if error is not None:
                self._link.leave_flight(self)
                self._finish(None, self._problem(str(error), "nothing was moved"))

    def _submit_late(self) -> None:
        self.inner = self._start()

    def bound(self) -> None:
        """Begin to count the default bound: it is the first of its line. When an ``after=`` completes is not known."""
        if self._order.deadline is BOUND and self.until is None and self._order.after is None and not self._ends:
            self.until = time.monotonic() + bound_of(self.plan)

    def expire(self) -> None:
        """Give it up, if its deadline has passed: cancel it if it has not begun, and else let it run unobserved."""
        if self.until is None or time.monotonic() <= self.until:
            return
        seconds = bound_of(self.plan) if self._order.deadline is BOUND else self._order.deadline
        late = f"it did not end within its deadline of {seconds:g} seconds"
        if self.inner is None or self.inner.cancel():
            self._link.leave_flight(self)
            self._finish(None, self._problem(late, "it had not begun, and nothing was moved"))
        else:
            self._finish(None, self._problem(late, f"it still runs, and may still change {self._destination()}"))

    @property
    def awaited(self) -> bool:
        """Whether its end sends something, so that it does not wait for a caller who asks for it."""
        return bool(self._order.note and not self._noted) or isinstance(self._order.after, PeerTransfer)

    def moved(self) -> bool:
        """Return whether nothing of it moves any more: its line may end it."""
        if self._settling:
            return False  # a signal handler asks, within its end
        if self.inner is None or not self.inner.done():
            return self.inner is None and bool(self._ends)
        after = self._order.after
        if isinstance(after, PeerTransfer) and not after._ends:  # the GPU waited for its bytes only
            self.called = False  # the end of `after` calls nobody, so look again
            return False
        return True

    def settle(self) -> None:
        """End it, now that nothing of it moves any more."""
        try:
            self._settling = True
            if not self._ends:
                self._end()
            if self._number and isinstance(self._link, Link):
                self._link.ended_as(int(self._order.urgent), self._number)
            self._link.leave_flight(self)
        finally:
            self._settling = False

    # ---- its end -----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        inner = self.inner
        assert inner is not None  # a transfer without it is over
        try:
            result = inner.result()
        except Exception as problem:  # any error is the transfer's
            self._cancelled = inner.cancel()
            held = f"{self._destination()} may hold a part of the bytes"
            self._finish(None, self._cancellation() if self._cancelled else self._problem(str(problem), held))
        else:
            error = self._settle_moved()
            self._finish(result if error is None else None, error)

    def _settle_moved(self) -> TransferError | None:
        """Ask whether the peer lives, then send the note; return the error, or None."""
        order = self._order
        lost = self._link.lost()
        if lost is not None:
            return self._problem(lost, _HOLDS[order.reading])
        if isinstance(order.after, PeerTransfer) and (failed := order.after.error) is not None:
            return self._problem(f"its after= failed ({failed})", f"{self._destination()} may hold wrong bytes")
        try:
            if order.note and not self._noted:
                self._send_note()
        except TransferError as error:
            return self._problem(f"the note was not sent: {error}", "all bytes have moved")
        return None

    def _finish(self, result: TransferResult | None, error: TransferError | None) -> None:
        self._ends.append((result, error))
        self.until = None
        if result is not None:
            self._tally.add(result, "read" if self._order.reading else "write")
        elif self._cancelled:
            self._tally.cancel()
        else:
            self._tally.fail(self.plan, "agent", error)
        self._order = self._order._replace(after=None)  # otherwise a chain of transfers would stay alive
        self._start = _ended
        if self._line.noting is self:
            self._line.noting = None  # otherwise both would keep each other
        self._line.ended.append(self)

    def announce(self) -> None:
        """Wake those that wait for its end."""
        self._over.set()

    @property
    def error(self) -> TransferError | None:
        """Why it failed, once it has ended."""
        return self._ends[0][1] if self._ends else None

    def _cancellation(self) -> TransferError:
        if self._link.why is not None:
            return self._problem(self._link.why, "it had not begun, and nothing was moved")
        return TransferError(cancellation(self.plan))

    def _problem(self, what: str, held: str) -> TransferError:
        return failure(self._order.peer, what, held, reading=self._order.reading)

    def _destination(self) -> str:
        return "the destination" if self._order.reading else "the peer's memory"


def bound_of(plan: Plan) -> float:
    """Return the seconds of the default deadline of a plan."""
    return BOUND + plan.nbytes / SLOWEST


def _ended() -> Transfer:
    raise TransferError("the transfer has ended")


class Line:
    """Transfers that run, and end, in the order of their submits.

    Args:
        lines: all lines of the agent.

    Attributes:
        lock: held while a transfer is ended, and not while others hear of it.
        wake: wakes the agent's thread.
        ended: transfers that have ended, and of which nobody has heard.
        noting: the last transfer with a note, until its end.
    """

    def __init__(self, lines: Lines) -> None:
        self.lock, self.wake = threading.RLock(), lines.wake
        self.ended: deque[PeerTransfer] = deque()
        self.noting: PeerTransfer | None = None
        self._lines = lines
        self._flying: deque[PeerTransfer] = deque()

    def add(self, transfer: PeerTransfer, *, deferred: bool = False) -> None:
        """Add a transfer that was submitted; or, if ``deferred``, that the agent's thread will submit."""
        if transfer.awaited:
            transfer.watch()
        self._flying.append(transfer)
        self._lines.serve_soon(self)
        if self._lines.asleep or deferred or transfer.until is not None:
            self.wake()

    def end(self) -> None:
        """End the first transfers, as far as nothing of them moves any more; any thread may call it."""
        with self.lock:
            while self._flying and (head := self._flying[0]).moved():
                head.settle()
                if self._flying and self._flying[0] is head:  # otherwise a signal handler has asked for an end, too
                    self._flying.popleft()
        self.announce()

    def announce(self) -> None:
        """Wake those that wait for transfers that have ended. The lock is not held: they may ask for other ends."""
        while self.ended:
            try:
                self.ended.popleft().announce()
            except IndexError:  # another thread was faster
                return

    def serve(self) -> float | None:
        """End and begin what can be, and give up what is late, in the agent's thread; return when to look again."""
        self.end()
        with self.lock:
            if self._flying:
                self._flying[0].begin()
                self._flying[0].bound()
            for transfer in tuple(self._flying):
                transfer.expire()
        self.end()
        flying = tuple(self._flying)
        times = [at for one in flying if (at := one.until) is not None]
        if flying and not flying[0].called:
            times.append(time.monotonic() + LOOK_SECONDS)
        return min(times, default=None)

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return bool(self._flying)


class Lines(Watcher):
    """The lines of an agent: one for each order in which transfers run. The agent's thread serves them.

    Args:
        wake: wakes the thread.

    Attributes:
        asleep: whether a submit must wake the thread.
    """

    def __init__(self, wake: Call) -> None:
        self.wake, self.asleep = wake, True
        self._lines: dict[tuple[object, ...], Line] = {}
        self._busy: dict[int, Line] = {}
        self._due: float | None = None
        self._fresh = False  # whether a submit has come since the last look
        self._idle = 0  # looks at nothing that needs another one
        self._stopped, self._serving = False, threading.Lock()

    def line(self, key: tuple[object, ...]) -> Line:
        """Return the line of a key."""
        return self._lines.get(key) or self._lines.setdefault(key, Line(self))

    def serve_soon(self, line: Line) -> None:
        """Serve a line that has a transfer."""
        self._busy[id(line)] = line
        self._fresh = True

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return any(line.busy for line in list(self._busy.values()))

    def stop(self) -> None:
        """Let the thread ask for no end any more, from now on: the interpreter ends."""
        self._stopped = True
        with self._serving:
            pass

    # The agent's thread calls these methods.

    def due(self) -> float | None:
        """Return when to look for ends again."""
        if self._due is None:
            self.asleep = self._idle >= IDLE_LOOKS  # before the look: a submit that comes later wakes the thread
            if self._fresh or not self.asleep:
                self._due = time.monotonic() + LOOK_SECONDS
        return self._due

    def serve(self) -> None:
        """Serve each line that has transfers."""
        self._fresh, times = False, list[float]()
        for number, line in list(self._busy.items()):
            with self._serving:
                at = None if self._stopped else line.serve()
            if at is not None:
                times.append(at)
            if not line.busy:
                self._busy.pop(number, None)
                if line.busy:  # a submit came meanwhile
                    self.serve_soon(line)
        self._idle = 0 if times else self._idle + 1
        self._due = min(times, default=None)
