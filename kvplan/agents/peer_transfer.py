"""A transfer between two processes. It is done when its bytes have moved and the peer was found alive after that."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import starmap
from typing import Any, NamedTuple, Protocol

from kvplan.agents.settling import Lane
from kvplan.agents.way import Deliver, delivered
from kvplan.base.latch import Latch, Wake
from kvplan.base.process import check_process, generation
from kvplan.base.threads import Standby, error_of
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import StreamlessTransfer, Transfer, TransferResult, cancellation, check_layer, wait_on_cpu
from kvplan.plan.plan import Plan

_BEGUN = object()
_HOLDS = {
    True: "the destination's blocks hold bytes that may be wrong: do not use them",
    False: "the bytes were written to the memory of a peer that is gone",
}  # by whether it reads from the peer

log = logging.getLogger("kvplan.agents")


def _ended() -> Transfer:
    raise TransferError("the transfer has ended")


class Peering(Protocol):
    """The methods of a peer's connection that a transfer calls; :class:`kvplan.agents.link.Link` has them."""

    why: str | None

    def enter(self, transfer: Any) -> None:
        """Count the transfer as in flight; raise TransferError if the connection is not open."""

    def leave_flight(self, transfer: Any) -> None:
        """Count the transfer as ended."""

    def lost(self, opened: Any) -> str | None:
        """Return why bytes that have just moved are nobody's word, or None."""

    def send_note(self, note: bytes) -> None:
        """Send the note."""


class Order(NamedTuple):
    """The arguments of a submit.

    Attributes:
        plan: the plan.
        peer: name of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer; ``b""`` if the transport delivers it, or if there is none.
        attempts: number of attempts in total.
        deadline: seconds until it is given up, or None.
        until: when that is, as ``time.monotonic`` counts, or None.
        after: what the lane waits for before the first attempt, or None.
    """

    plan: Plan
    peer: str
    reading: bool
    note: bytes = b""
    attempts: int = 1
    deadline: float | None = None
    until: float | None = None
    after: Any = None


class _Frame:
    """An object that lives as long as the call that made it."""

    __slots__ = ("__weakref__",)


class PeerTransfer(StreamlessTransfer):
    """A transfer between two processes of one machine, or of two by NIXL. :meth:`kvplan.Peer.submit` returns it.

    It has ended when its bytes have moved, the peer's process was found alive after the last byte, and the note was
    sent. An error says what the destination holds.

    :meth:`wait` and :meth:`wait_layer` order a GPU's stream behind the bytes, at once. Only :meth:`done`,
    :meth:`synchronize` and :meth:`result` tell whether the peer lived until the end.

    Attributes:
        plan: the plan that it moves.
        attempt: number of the current attempt, from 1.
        quiet: whether a stream delivers its note, so that any thread can end it once its bytes have moved.
        until: its deadline as ``time.monotonic`` counts, or None.
    """

    # Defaults that most transfers keep, so that a submit need not set them.
    attempt = 0
    quiet = False
    _frame: weakref.ref[_Frame] | None = None
    _deferred = _refused = _launched = _cancelled = _expired = False
    _waking: Wake | None = None
    _lane: Lane | None = None

    def __init__(self, order: Order, link: Peering, opened: Any, tally: Tally, start: Callable[[], Transfer]) -> None:
        self.plan = order.plan
        self._inners: list[Transfer] = []  # of each attempt
        self.until = order.until
        self._order, self._link, self._opened, self._tally, self._start = order, link, opened, tally, start
        self._generation = generation()
        self._over = over = Latch()
        self.sleepers = over.sleepers
        self._ends: list[tuple[TransferResult | None, TransferError | None]] = []  # the first one counts
        self._once = iter((True,))  # consumed when it is counted
        self._taken: list[Deliver] = []  # the transport's function, if the transport delivers the note
        self._fates: list[object] = []  # _BEGUN, or an object of each caller that cancels it; the first one decides

    # ---- the face of a transfer --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        if self._over.happened:
            return True
        if self.quiet:
            self._end_here()
        elif self._lane is not None:
            self._lane.hurry()
        return self._over.happened

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        if not self._over.happened:
            check_process(self._generation)
            if self._lane is not None and not (self.quiet and self._end_here()):
                self._lane.hurry()
            if not self._over.wait(timeout):
                raise self._late(timeout)
        error = self._ends[0][1]
        if error is not None:
            raise error.with_traceback(None)

    def result(self) -> TransferResult:
        """Wait for its end and return its result; see :meth:`kvplan.Transfer.result`."""
        self.synchronize()
        result = self._ends[0][0]
        if result is None:
            raise TransferError("the transfer ended without a result")
        return result

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

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`kvplan.Transfer.cancel`. Its note is not sent."""
        if not self._over.happened and not self._cancelled:
            mine = object()
            self._fates.append(mine)  # one C call, as in the transfers of the host path
            if self._fates[0] is mine:
                self._cancelled = True
            elif self.inner is not None:
                self._cancelled = self.inner.cancel()
            if self._waking is not None:
                self._waking.put(None)
        return self._cancelled

    def replan(self, plan: Plan) -> None:
        """See :meth:`kvplan.Transfer.replan`."""
        self._inner().replan(plan)

    # ---- for the peer and the lane -----------------------------------------------------------------------------------

    @property
    def inner(self) -> Transfer | None:
        """The transfer that moves the bytes; None while it has not been submitted."""
        inners = self._inners
        return inners[-1] if inners else None

    def launch(self, lane: Lane, opened: Any, *, urgent: bool = False) -> None:
        """Submit it, or leave that to the lane if it waits on the CPU for its ``after=``.

        A signal handler may raise an error at any point of this. The lane then still ends what was submitted: when this
        call is over, ``frame`` is gone, which wakes the lane.
        """
        frame = _Frame()
        self._frame = weakref.ref(frame, lane.waker)
        self._lane = lane
        lane.take(self)
        try:
            self._link.enter(self)
            if self._order.after is not None and opened is None:
                self._deferred = True
            else:
                self.submit()
                if opened is not None:
                    opened.after(self._inners[-1], self._order.note, self._taken, urgent=urgent)
        except BaseException:
            self._refused = self.inner is None
            if self._refused:
                self._link.leave_flight(self)
            lane.waker(None)
            raise
        order = self._order
        if opened is not None and opened.gpu is not None and order.attempts == 1 and self.until is None:
            # Nothing happens at its end but the end itself.
            by_stream = self._taken[0] is delivered if self._taken else not order.note
            self.quiet = by_stream and (order.after is None or not isinstance(order.after, PeerTransfer))
        self._launched = True
        if self.quiet:
            lane.leave()
        else:
            lane.watch(self)
        self._frame = None

    def submitting(self) -> bool:
        """Return whether :meth:`launch` is still at work."""
        frame = self._frame
        return frame is not None and frame() is not None and not (self._launched or self._refused)

    def submit(self) -> None:
        """Submit the inner transfer, in the caller's thread."""
        self.attempt += 1
        self._fates.append(_BEGUN)  # from here on, the inner transfer says whether it can be cancelled
        self._inners.extend(starmap(self._start, [()]))  # one C call keeps what the submit returns

    def begin(self, standby: Standby, wake: Wake) -> None:
        """Wait for the ``after=`` on the CPU, then submit; the lane calls this if the submit could not do it."""
        if not self._deferred or self._refused:
            return
        self._waking = wake
        with self._alarm(wake):
            error = wait_on_cpu(self._order.after, standby, wake, self._given_up)
        if self._late_by_now():
            self.expire()
            return
        if error is None and not self._over.happened:
            self._fates.append(_BEGUN)
            if self._fates[0] is _BEGUN:
                error = error_of(self.submit)
        if error is not None:
            self._finish(None, self._problem(str(error), "nothing was moved"))

    @contextmanager
    def _alarm(self, wake: Wake) -> Iterator[None]:
        """Wake the lane at the deadline."""
        if self.until is None:
            yield
            return
        timer = threading.Timer(max(0.0, self.until - time.monotonic()) + 1e-3, wake.put, (None,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _late_by_now(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def _given_up(self) -> bool:
        return self._cancelled or self._over.happened or self._late_by_now()

    def expire(self) -> None:
        """Give it up at its deadline: cancel it if it has not begun, and else let it run unobserved."""
        self.until = None
        if self._over.happened:
            return
        self._expired = True
        late = f"it did not end within its deadline of {self._order.deadline} seconds"
        if self.cancel():
            self._finish(None, self._problem(late, "it had not begun, and nothing was moved"))
        else:
            self._finish(None, self._problem(late, f"it still runs, and may still change {self._destination()}"))

    def settle(self) -> bool:
        """End it, now that the inner transfer has ended; return False if it was submitted again."""
        result, error = None, None
        if self.inner is None and (self._refused or not self._deferred) and not self._over.happened:
            self._link.leave_flight(self)
            self._ends.append((None, TransferError("the submit was refused or interrupted; nothing was moved")))
            self._over.set()
            return True
        if not self._over.happened:
            inner = self.inner
            problem = None if inner is None else error_of(inner.synchronize)
            if inner is None or (problem is not None and self._cancelled):
                error = self._cancellation()
            elif problem is None:
                error = self._settle_moved()
                result = inner.result() if error is None else None
            else:
                if self.attempt < self._order.attempts and self._link.why is None:
                    log.warning("%s with %s failed (%s); it is tried again", self.plan, self._order.peer, problem)
                    problem = error_of(self.submit)
                    if problem is None:
                        return False
                error = self._problem(str(problem), f"{self._destination()} may hold a part of the bytes")
        self._link.leave_flight(self)
        self._finish(result, error)
        self._tally.settle()
        return True

    def _end_here(self) -> bool:
        """End it in the caller's thread, if its bytes have moved and nothing is wrong; return whether it has ended.

        The lane's thread does the same, perhaps at the same time. A signal handler may interrupt this call at any
        point, and then the lane's thread completes the end.
        """
        inner = self._inners[-1]
        if self._cancelled or not inner.done():
            return self._over.happened
        try:
            result = inner.result()
        except TransferError:
            return self._over.happened
        if self._link.lost(self._opened) is not None:
            return self._over.happened
        self._link.leave_flight(self)
        self._finish(result, None)
        return True

    def _settle_moved(self) -> TransferError | None:
        """Ask whether the peer lives, then send the note; return the error, or None."""
        order = self._order
        lost = self._link.lost(self._opened)
        if lost is not None:
            return self._problem(lost, _HOLDS[order.reading])
        if isinstance(order.after, PeerTransfer):  # a GPU waited for its bytes only, and not for whether its peer lived
            failed = error_of(order.after.synchronize)
            if failed is not None:
                return self._problem(f"its after= failed ({failed})", f"{self._destination()} may hold wrong bytes")
        if self._taken or order.note:
            try:
                if self._taken:
                    self._tell(None)
                else:
                    self._link.send_note(order.note)
            except TransferError as error:
                return self._problem(f"the note was not sent: {error}", "all bytes have moved")
        return None

    def _finish(self, result: TransferResult | None, error: TransferError | None) -> None:
        self._ends.append((result, error))
        result, error = self._ends[0]  # the first one counts, even if its thread was interrupted here
        if error is not None and self._taken:
            with suppress(TransferError):  # the peer is gone
                self._tell(error)
        if result is not None:
            self._tally.add(result, "read" if self._order.reading else "write", self._once)
        elif any(self._once):
            if self._cancelled and not self._expired:
                self._tally.ends.append("cancelled")
            else:
                self._tally.fail(self.plan, "agent", error)
        if not self._over.happened:
            self._over.set()
        if self._order.after is not None:
            self._order = self._order._replace(after=None)  # otherwise a chain of transfers would stay alive
        self._start = _ended

    def _tell(self, error: TransferError | None) -> None:
        """Call the transport's function, once."""
        deliver, self._taken[0] = self._taken[0], delivered
        deliver(error)

    def _cancellation(self) -> TransferError:
        if self._link.why is not None:
            return self._problem(self._link.why, "it had not begun, and nothing was moved")
        return TransferError(cancellation(self.plan))

    def _problem(self, what: str, held: str) -> TransferError:
        verb = "reading from" if self._order.reading else "writing to"
        tries = f" in {self.attempt} attempts" if self.attempt > 1 else ""
        return TransferError(f"{verb} {self._order.peer!r} failed{tries}: {what}; {held}")

    def _destination(self) -> str:
        return "the destination" if self._order.reading else "the peer's memory"

    @property
    def on_gpu(self) -> bool:
        """Whether streams can wait for it."""
        inner = self.inner
        return inner is not None and inner.sleepers is None and not isinstance(inner, StreamlessTransfer)

    def _inner(self) -> Transfer:
        if self._over.happened:
            self.synchronize()
        if self.inner is None:
            raise TransferError("the transfer has not been submitted yet")
        return self.inner

    def __repr__(self) -> str:
        state = "in flight" if not self._over.happened else "failed" if self._ends[0][1] else "done"
        return f"PeerTransfer({self.plan!r}, {state})"
