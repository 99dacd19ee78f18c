"""Threads that end transfers between processes: after the last byte they ask whether the peer lives, and send notes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from kvplan.base.threads import Bell, Call, Worker
from kvplan.execute.transfer import Transfer

# A wait for a GPU's transfer ends after this time if a transfer of the lane has a deadline, and one for NIXL's always:
# those behind it that callers have ended hold handles.
SLICE_SECONDS = 0.05
# To wake a thread costs a submit about 10 us, and the thread then competes with it for the interpreter. So the thread
# looks for new transfers by itself, and only a call that asks for a transfer's end wakes it. After IDLE_LOOKS looks
# without a transfer it sleeps until the next submit.
LOOK_SECONDS, IDLE_LOOKS = 2e-3, 50


class Settled(Protocol):
    """A transfer that a lane ends.

    Attributes:
        until: its deadline as ``time.monotonic`` counts, or None.
        quiet: whether a caller that asks for its end can end it, too; nobody waits for its end otherwise.
        polled: whether it is quiet, and the lane's thread still has work with it behind its end.
        left: whether the lane's thread has left it to its caller for a look's time.
    """

    until: float | None
    quiet: bool
    polled: bool
    left: bool

    @property
    def inner(self) -> Transfer | None:
        """The transfer that moves the bytes; None while it has not been submitted."""

    def submitting(self) -> bool:
        """Return whether a thread is still at work on its submit."""

    def begin(self, bell: Bell, inside: set[int]) -> None:
        """Submit the inner transfer, if that was left to the lane. It may wait, also for rings of the bell."""

    def expire(self) -> None:
        """Give it up: its deadline has passed."""

    def settle(self) -> bool:
        """End it, now that the inner transfer has ended; return False if it was submitted again."""

    def tidy(self, line: Sequence[Any]) -> Sequence[Settled]:
        """Release what the transfers of a line hold whose ends callers have seen; return these."""


class Lane:
    """A thread that ends transfers in the order of their submits, which is the order in which they run.

    Args:
        inside: identifiers of the agent's own threads; the lane adds its own.

    Attributes:
        wake: wakes the lane's thread.
    """

    def __init__(self, inside: set[int]) -> None:
        self._line: deque[Settled] = deque()
        self._bell = Bell()
        self.wake: Call = self._bell.ring
        self._watched: Transfer | None = None  # its end rings the bell
        self._inside = inside
        self._stopped = False
        self._asleep = self._dozing = False  # whether the thread waits for a wake, with no limit; or at most for a look
        self._hurried = False  # whether a caller blocks until a transfer of the line has ended
        self._idle = 0  # looks without a transfer
        self.thread = Worker("kvplan-settle", self._serve, "no thread ends the transfers with a peer", inside)

    def take(self, transfer: Settled) -> None:
        """Take a transfer that will be submitted now; the lane ends it, whatever becomes of the submit."""
        self._line.append(transfer)  # one C call: from here on the lane has it

    def watch(self, transfer: Settled) -> None:
        """Let the end of a submitted transfer wake the lane. Without this call, any other wake does."""
        inner = transfer.inner
        if inner is None or transfer.until is not None or not inner.add_done_callback(self.wake):
            self.wake()  # otherwise the thread wakes once, at the end

    def leave(self) -> None:
        """Let the thread find a submitted transfer by itself, in place of :meth:`watch`: soon, or by :meth:`hurry`."""
        if self._asleep:
            self._asleep = False
            self.wake()

    def hurry(self) -> None:
        """Let the thread wait for the transfers that it leaves to their callers: a caller blocks for their end."""
        self._hurried = True
        if self._dozing:
            self._dozing = False
            self.wake()

    def drop(self, transfer: Settled) -> None:
        """Forget a transfer that has ended. Its caller and the thread may both do so."""
        try:
            self._line.remove(transfer)  # one C call
        except ValueError:  # the other one was first
            return

    def stop(self) -> None:
        """End the thread after the transfers that it has."""
        self._stopped = True
        self.wake()

    def _serve(self) -> None:
        while True:
            head = self._head()
            if head is None:
                if self._stopped:
                    break
                self._hurried = False
                self._rest()
                continue
            self._idle = 0
            if tidied := head.tidy(list(self._line)):
                for one in tidied:
                    self.drop(one)
                continue
            self._expire()
            if head.submitting():  # the transport may not have taken the note yet
                self._doze(hurried=True)  # it asks again then; the end of the submit need not wake it
                continue
            if self._leaves(head):
                continue
            if head.inner is None:
                head.begin(self._bell, self._inside)
            if self._ended(head) and head.settle():
                self.drop(head)
                self._watched = None

    def _head(self) -> Settled | None:
        """Return the first transfer. Its caller may end it, and take it out of the line, at any time."""
        try:
            return self._line[0]
        except IndexError:
            return None

    def _leaves(self, head: Settled) -> bool:
        """Leave transfers that their callers can end to the callers, for a look's time; return whether that was done.

        A caller that waits for each of its transfers ends all of them, and this thread never competes with it.
        """
        inner, line = head.inner, list(self._line)
        if self._hurried or self._stopped or inner is None or not all(one.quiet for one in line):
            return False
        if head.left and (head.polled or inner.done()):
            return False
        for one in line:
            one.left = True
        self._doze(hurried=False)
        return True

    def _doze(self, *, hurried: bool) -> None:
        """Wait for a look's time, or until a caller hurries this thread; not at all if one has, unless ``hurried``."""
        self._dozing = True  # before the question: a caller that hurries this thread asks for it
        if hurried or not self._hurried:
            self._bell.wait(LOOK_SECONDS)
        self._dozing = False

    def _rest(self) -> None:
        """Wait for the next transfer: for a look's time, or until a submit wakes this thread."""
        self._idle += 1
        self._dozing = True
        self._asleep = self._idle > IDLE_LOOKS
        if not self._line:  # otherwise a submit has come that did not see that it must wake this thread
            if self._asleep:
                self._bell.wait()
            else:
                self._bell.wait(LOOK_SECONDS)
        self._dozing = self._asleep = False

    def _ended(self, head: Settled) -> bool:
        """Wait until a transfer has ended, or something has happened; return whether it has ended."""
        inner = head.inner
        if inner is None:
            return True
        due = min((one.until for one in list(self._line) if one.until is not None), default=None)
        if self._watched is not inner:
            self._watched = inner if inner.add_done_callback(self.wake) else None
        if self._watched is None:
            limit = SLICE_SECONDS if head.polled or due is not None else None
            try:
                inner.synchronize(limit)
            except Exception:  # noqa: BLE001  # it failed, or it has not ended in time; the caller sees which
                return inner.done()
            return True
        if inner.done():
            return True
        self._bell.wait(None if due is None else due - time.monotonic())
        return inner.done()

    def _expire(self) -> None:
        now = time.monotonic()
        for one in list(self._line):
            if one.until is not None and now > one.until:
                one.expire()


Key = tuple[object, ...]


class Lanes:
    """The lanes of an agent: one for each order in which transfers run."""

    def __init__(self, inside: set[int]) -> None:
        self._inside = inside
        self._lanes: dict[Key, Lane] = {}

    def lane(self, key: Key) -> Lane:
        """Return the lane of a key, and start its thread; raise TransferError if the system cannot."""
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes.setdefault(key, Lane(self._inside))
        if not lane.thread.started:
            lane.thread.start()
        return lane

    def stop(self) -> None:
        """End all threads after the transfers that they have."""
        for lane in list(self._lanes.values()):
            lane.stop()

    def join(self, timeout: float) -> bool:
        """Wait until all threads have ended; return whether they have."""
        return all(lane.thread.join(timeout) for lane in list(self._lanes.values()))
