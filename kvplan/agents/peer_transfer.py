"""A transfer between two processes. It is done when its bytes have moved and the peer was found alive after that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from kvplan.agents.latched_transfer import BEGUN
from kvplan.agents.peer_ending import BOUND, Order, PeerEnding
from kvplan.agents.settling import Lane
from kvplan.agents.way import delivered
from kvplan.base.process import check_process, generation
from kvplan.base.threads import Bell, Call, error_of
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer, call_when_done, check_layer
from kvplan.nixl.nixl_transfer import NixlTransfer, end_all

__all__ = ["BOUND", "Order", "PeerTransfer"]

LOOK_SECONDS = 2e-4  # that a caller looks for the end of a transfer itself: a block's bytes arrive in less


class PeerTransfer(PeerEnding):
    """A transfer between two processes of one machine, or of two by NIXL. :meth:`kvplan.Peer.submit` returns it.

    It has ended when its bytes have moved, the peer's process was found alive after the last byte, and the note was
    sent. An error says what the destination holds.

    :meth:`wait` and :meth:`wait_layer` order a GPU's stream behind the bytes, at once. Only :meth:`done`,
    :meth:`synchronize` and :meth:`result` tell whether the peer lived until the end.

    Attributes:
        plan: the plan that it moves.
        attempt: number of the current attempt, from 1.
        quiet: whether a stream or NIXL delivers its note, so that any thread can end it once its bytes have moved.
        polled: whether it is a direct transfer of NIXL without ``after=``, which is quiet: its callers ask NIXL.
        left: whether the lane has left it to its caller for some time.
        until: its deadline as ``time.monotonic`` counts, or None.
    """

    # Defaults that most transfers keep, so that a submit need not set them.
    quiet = left = polled = False
    _launched = False
    _wake: Call | None = None  # wakes the lane while it waits for the ``after=``
    _lane: Lane | None = None

    # ---- the face of a transfer --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        if self._over.happened:
            return True
        if self.quiet:
            self._end_quietly()
        elif self._lane is not None:
            self._lane.hurry()
        return self._over.happened

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        if not self._over.happened:
            check_process(self._generation)
            if self._lane is not None and not (self.quiet and self._ends_soon(timeout)):
                self._lane.hurry()
            if not self._over.wait(timeout):
                raise self._late(timeout)
        self._raise()

    def _ends_soon(self, timeout: float | None) -> bool:
        """Look for the end without a pause for a while; return whether it has come.

        A caller that sleeps is woken by the lane's thread some time after the end, and its next submit is slower.
        """
        until = time.monotonic() + (LOOK_SECONDS if timeout is None else min(LOOK_SECONDS, timeout))
        while not self._end_quietly():
            if self._cancelled or time.monotonic() > until:
                return self._over.happened
        return True

    def _end_quietly(self) -> bool:
        """End it in the caller's thread, if it can be; return whether it has ended.

        The lane then has no work with it, since its thread would compete with the caller's next submits for the
        interpreter. NIXL's handles are released by that thread all the same: no interrupt comes there.
        """
        if self.polled and self._generation != generation():
            return False  # a forked child has no lane, and another thread may have been within NIXL
        ended = self._end_here()
        if ended and not self.polled and self._lane is not None:
            self._lane.drop(self)
        return ended

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`."""
        if self._lane is not None:
            self._lane.hurry()
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

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`kvplan.Transfer.cancel`. Its note is not sent."""
        if not self._over.happened and not self._cancelled:
            mine = object()
            self._fates.append(mine)  # one C call, as in the transfers of the host path
            if self._fates[0] is mine:
                self._cancelled = True
            elif self.inner is not None:
                self._cancelled = self.inner.cancel()
            if self._wake is not None:
                self._wake()
        return self._cancelled

    # ---- for the peer and the lane -----------------------------------------------------------------------------------

    def launch(self, lane: Lane, opened: Any, *, urgent: bool = False) -> None:
        """Submit it, or leave that to the lane if it waits on the CPU for its ``after=``.

        If Ctrl-C comes in it, the lane ends what was submitted.
        """
        self._lane = lane
        try:
            lane.take(self)
            self._link.enter(self)
            if self._order.after is not None and opened is None:
                self._deferred = True
            else:
                self.submit()
                if opened is not None:
                    self._after(opened, urgent=urgent)
            self._hand_over(lane, opened)
        except BaseException:
            self._refused = self.inner is None and not self._deferred
            if self._refused:
                self._link.leave_flight(self)
            self._launched = True
            lane.wake()
            raise

    def _hand_over(self, lane: Lane, opened: Any) -> None:
        """Tell the lane that the submit is over, and who ends the transfer."""
        order = self._order
        if opened is None:
            self.quiet = self.polled = isinstance(self.inner, NixlTransfer)
        elif opened.gpu is not None and order.attempts == 1 and self.until is None:
            # Nothing happens at its end but the end itself.
            by_stream = self._taken[0] is delivered if self._taken else not order.note
            self.quiet = by_stream and (order.after is None or not isinstance(order.after, PeerTransfer))
        self._launched = True
        if self.polled:
            self._end_quietly()  # few bytes have moved at once
        if self.quiet:
            lane.leave()
        else:
            lane.watch(self)

    def _after(self, opened: Any, *, urgent: bool) -> None:
        """Tell the transport of the submitted transfer, and of its note.

        If the peer dies meanwhile, the transfer still moves bytes. So its end says so, and what the destination holds.
        """
        try:
            opened.after(self._inners[-1], self._order.note, self._taken, urgent=urgent)
        except TransferError as error:
            if self._link.lost(opened) is None:
                moves = f"the note is not sent, but the bytes still move, and change {self._destination()}"
                raise TransferError(f"{error}; {moves}") from error

    def submitting(self) -> bool:
        """Return whether :meth:`launch` is still at work."""
        return not self._launched

    def submit(self) -> None:
        """Submit the inner transfer, in the caller's thread."""
        self.attempt += 1
        self._fates.append(BEGUN)  # from here on, the inner transfer says whether it can be cancelled
        self._inners.append(self._start())

    def tidy(self, line: Sequence[PeerTransfer]) -> Sequence[PeerTransfer]:
        """Release NIXL's handles of the transfers of a line that callers have ended."""
        ended = [one for one in line if one.polled and one._over.happened]
        if ended:
            error_of(partial(end_all, [one._inners[-1] for one in ended]))
        return ended

    def begin(self, bell: Bell, inside: set[int]) -> None:
        """Wait for the ``after=`` on the CPU, then submit; the lane calls this if the submit could not do it."""
        if not self._deferred or self._refused:
            return
        self._wake = wake = bell.ring
        ends: list[BaseException | None] = []

        def end(error: BaseException | None) -> None:
            ends.append(error)
            wake()

        call_when_done(self._order.after, end, inside)
        while not ends and not self._given_up():
            bell.wait(None if self.until is None else self.until - time.monotonic() + 1e-3)
        error = ends[0] if ends else None
        if self._late_by_now():
            self.expire()
            return
        if error is None and not self._over.happened:
            self._fates.append(BEGUN)
            if self._fates[0] is BEGUN:
                error = error_of(self.submit)
        if error is not None:
            self._finish(None, self._problem(str(error), "nothing was moved"))

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

    @property
    def on_gpu(self) -> bool:
        """Whether streams can wait for it."""
        inner = self.inner
        return hasattr(inner, "precede")  # as a transfer of a GPU has

    def _inner(self) -> Transfer:
        if self._over.happened:
            self.synchronize()
        if self.inner is None:
            raise TransferError("the transfer has not been submitted yet")
        return self.inner
