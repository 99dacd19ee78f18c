"""The sender of chunks: gather units into a slot, write the slot into the peer's ring, and take the slot again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvplan.agents.packed.pack_credits import Credits, Lent
from kvplan.agents.packed.pack_messages import (
    CANCEL,
    DATA,
    FAILED,
    PULL,
    VOID,
    Credit,
    Data,
    credit_body,
    data_body,
    which_body,
)
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_rows import Mover, Row
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.readiness import Ready
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.agents.packed.wire import DONE, MOVING, Wire
from kvplan.base.threads import error_of
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer

PRIORITY = ("normal", "high")

log = logging.getLogger("kvplan.agents")


class Job:
    """The chunks of one transfer that this process sends.

    Args:
        whose: whether the peer has asked for them, or this process pushes them.
        number: number of the transfer.
        rows: its chunks.
        urgent: whether it has high priority.
        attempts: how often a chunk is written, at most.
        ready: for each piece, whether it may begin.
        order: order of a push that travels with the first chunk, or ``b""``.
        own: the transfer, if this process pushes.
        until: when to give it up, by the clock; None for never.

    Attributes:
        next: number of chunks that have begun.
        sent: number of chunks whose writes have ended well.
        posted: whether a write of it was ever posted.
        over: whether it has ended, so that no further chunk is sent.
    """

    def __init__(
        self, whose: int, number: int, rows: Sequence[Row], *, urgent: bool, attempts: int,
        ready: Sequence[Ready] = (), order: bytes = b"", own: PackedTransfer | None = None, until: float | None = None,
    ) -> None:  # fmt: skip
        self.whose, self.number, self.rows, self.urgent, self.attempts = whose, number, rows, urgent, attempts
        self.ready, self.order, self.own, self.until = ready, order, own, until
        self.next = self.sent = 0
        self.posted = self.over = False


class Chunk:
    """A chunk on its way: gathered into a slot, then written."""

    __slots__ = ("credits", "handle", "job", "lent", "moved", "number", "slot", "tries", "why")

    def __init__(self, job: Job, number: int, slot: RingSlot, lent: Lent) -> None:
        self.job, self.number, self.slot, self.lent = job, number, slot, lent
        self.moved: Transfer | None = None  # the gather; None if it was not submitted
        self.handle: Any = None
        self.tries = 0
        self.why: str | None = None  # why its write failed
        self.credits: Sequence[Credit] = ()


class Sender:
    """Sends the chunks of all transfers to one peer.

    Args:
        outbox: messages to the peer.
        wire: the wire to the peer.
        mover: gathers.
        slots: free slots to gather into; all senders of an end share them.

    Attributes:
        credits: the peer's slots.
        jobs: transfers that have not ended, by whose they are and their numbers.
    """

    def __init__(self, outbox: Outbox, wire: Wire, mover: Mover, slots: list[RingSlot]) -> None:
        self.credits = Credits()
        self.jobs: dict[tuple[int, int], Job] = {}
        self._outbox, self._wire, self._mover, self._slots = outbox, wire, mover, slots
        self._lines: tuple[list[Job], list[Job]] = ([], [])  # transfers with chunks that have not begun
        self._gathering: list[Chunk] = []
        self._writing: list[Chunk] = []
        self._stuck: list[Chunk] = []  # an interrupt came while they were posted: whether they move is not known

    @property
    def quiet(self) -> bool:
        """Whether no chunk is on its way."""
        return not self._gathering and not self._writing and not self._stuck

    @property
    def busy(self) -> bool:
        """Whether it has work, or waits for the peer."""
        return bool(self.jobs) or not self.quiet

    def take(self, job: Job) -> None:
        """Send a transfer."""
        self.jobs[job.whose, job.number] = job
        if job.rows:
            self._lines[job.urgent].append(job)

    def begin(self, now: float, *, urgent: bool) -> bool:
        """Gather chunks of one priority while there are slots; return whether any has begun."""
        line, began = self._lines[urgent], False
        for job in line[:]:
            if not self._slots or not self.credits.free:
                break
            if job.until is not None and now > job.until:
                self.fail(job, "its deadline has passed")
                continue
            try:
                began |= self._begin(job)
            except Exception as error:  # noqa: BLE001  # it is the transfer's
                self.fail(job, str(error))
        return began

    def _begin(self, job: Job) -> bool:
        rows, began = job.rows, False
        while job.next < len(rows) and not job.over:
            row = rows[job.next]
            ready = job.ready[row.piece] if job.ready else None
            if ready is not None and not _completed(ready):
                return began
            lent = self.credits.take() if self._slots else None
            if lent is None:
                return began
            chunk = Chunk(job, job.next, self._slots.pop(), lent)
            self._gathering.append(chunk)
            job.next += 1
            after = None if ready is None else ready.left
            chunk.moved = self._mover.submit(row.planned(chunk.slot.place), after, priority=PRIORITY[job.urgent])
            began = True
        if job in self._lines[job.urgent]:
            self._lines[job.urgent].remove(job)
        return began

    def step(self) -> bool:
        """Write what is gathered, and end what is written; return whether anything changed."""
        changed = False
        if self._gathering:
            changed = self._gathered()
        if self._writing:
            changed |= self._written()
        return changed

    def _gathered(self) -> bool:
        ended = [chunk for chunk in self._gathering if chunk.moved is None or chunk.moved.done()]
        for chunk in ended:
            job = chunk.job
            error = None if chunk.moved is None else error_of(chunk.moved.synchronize)
            if error is not None and not job.over:
                self.fail(job, f"its bytes could not be gathered: {error}")
            if job.over or self._outbox.dead or not self._claim(job):
                self.credits.back(chunk.lent)
                self._slots.append(chunk.slot)
            elif self._post(chunk):
                self._writing.append(chunk)
            self._gathering.remove(chunk)  # last: an interrupt may come between
        return bool(ended)

    def _claim(self, job: Job) -> bool:
        if not job.posted and job.own is not None and not job.own.claim():
            self.withdraw(job)
            return False
        job.posted = True
        return True

    def _post(self, chunk: Chunk) -> bool:
        """Post the write of a chunk, as often as the transfer may; return whether it was posted."""
        job, lent = chunk.job, chunk.lent
        order = job.order if not chunk.number else b""
        body = data_body(Data(job.whose, job.number, chunk.number, lent.number, lent.turn, order))
        nbytes = job.rows[chunk.number].nbytes
        why = ""
        while chunk.tries < job.attempts and not job.over and not self._outbox.dead:
            note, chunk.credits = self._outbox.note(DATA, body)
            chunk.why, chunk.handle = None, None
            chunk.tries += 1
            if job.own is not None:
                job.own.posted += 1
            try:
                chunk.handle = self._wire.write(chunk.slot.place.address, lent.address, nbytes, note)
            except Exception as error:  # noqa: BLE001  # nothing of it arrives
                chunk.why = why = str(error)
                self._outbox.owe(chunk.credits)
            else:
                return True
        self._missed(chunk, why or chunk.why or "")
        return False

    def _written(self) -> bool:
        changed = False
        for chunk in self._writing[:]:
            if chunk.why is None:
                state = self._state(chunk)
                if state == MOVING and not self._outbox.dead:
                    continue
                chunk.why = "" if state == DONE else state
            if not self._released(chunk):
                continue
            changed = True
            if not chunk.why:
                self._sent(chunk)
            else:
                self._outbox.owe(chunk.credits)  # they have travelled at most with a note that came
                if self._post(chunk):
                    continue
            self._writing.remove(chunk)
        return changed

    def _state(self, chunk: Chunk) -> str:
        try:
            return self._wire.state(chunk.handle)
        except Exception as error:  # noqa: BLE001
            return f"failed: {error}"

    def _released(self, chunk: Chunk) -> bool:
        try:
            return self._wire.release(chunk.handle)
        except Exception as error:  # noqa: BLE001  # it may still move
            log.debug("a write was not released: %s", error)
            return False

    def _sent(self, chunk: Chunk) -> None:
        self.credits.written(chunk.lent.number)
        self._slots.append(chunk.slot)
        job = chunk.job
        job.sent += 1
        if job.whose == PULL and job.sent == len(job.rows) and not job.over:
            self._end(job)

    def _missed(self, chunk: Chunk, why: str) -> None:
        """Give up a chunk whose write failed, and its transfer."""
        self.credits.written(chunk.lent.number)
        self._slots.append(chunk.slot)
        self._outbox.say(VOID, credit_body(Credit(chunk.lent.number, chunk.lent.turn)))
        tries = f" in {chunk.tries} attempts" if chunk.tries > 1 else ""
        self.fail(chunk.job, f"the wire failed{tries}: {why.removeprefix('failed: ')}")

    def fail(self, job: Job, why: str, *, tell: bool = True) -> None:
        """Give a transfer up, and tell the other end."""
        if job.over:
            return
        if job.own is not None:
            job.own.fail(why, held(job))
        self._end(job)
        if tell:
            self._outbox.say(FAILED if job.whose == PULL else CANCEL, which_body(job.whose, job.number, why))

    def withdraw(self, job: Job) -> None:
        """Send no more of a transfer that this process has cancelled or given up, and tell the other end."""
        if not job.over:
            self._end(job)
            self._outbox.say(CANCEL, which_body(job.whose, job.number))

    def stop(self, job: Job) -> None:
        """Send no more of a transfer: it was given up at the other end, or is done there."""
        self._end(job)

    def _end(self, job: Job) -> None:
        job.over = True
        self.jobs.pop((job.whose, job.number), None)
        if job in self._lines[job.urgent]:
            self._lines[job.urgent].remove(job)

    def recover(self) -> None:
        """Sort the chunks again after an interrupt at any point of a step; all transfers have been given up."""
        chunks = list(dict.fromkeys([*self._gathering, *self._writing, *self._stuck]))
        self._gathering = [chunk for chunk in chunks if not chunk.tries]
        self._writing = [chunk for chunk in chunks if chunk.handle is not None]
        self._stuck = [chunk for chunk in chunks if chunk.tries and chunk.handle is None and chunk.why is None]
        self.credits.settle({chunk.lent.number for chunk in [*self._gathering, *self._writing, *self._stuck]})

    def slots(self) -> set[int]:
        """Return the numbers of this process's slots that hold a chunk."""
        return {chunk.slot.number for chunk in [*self._gathering, *self._writing, *self._stuck]}

    def reset(self, why: str) -> None:
        """Give all transfers up, and use no slot of the peer until the next grant."""
        for job in list(self.jobs.values()):
            self.fail(job, why, tell=False)
        self.credits.withdraw()


def _completed(ready: Ready) -> bool:
    try:
        return ready()
    except Exception as error:
        raise TransferError(f"its after= failed ({error})") from error


def held(job: Job) -> str:
    """Return what the peer's memory holds after a push that failed."""
    if not job.posted:
        return "nothing was moved"
    if job.sent == len(job.rows):
        return "the peer's memory may hold all of the bytes, or a part of them"
    return "the peer's memory may hold a part of the bytes"
