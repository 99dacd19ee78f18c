"""The transfers that this process sends, their chunks on the way, and the gathers: which chunk begins when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvplan.agents.packed.pack_credits import Credits, Lent
from kvplan.agents.packed.pack_messages import CANCEL, FAILED, PULL, Credit, which_body
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_rows import TOGETHER, Copier, Mover, Row
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.readiness import Ready
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer

AHEAD = 3  # chunks that are gathered while the peer has no slot for them
AHEAD_WRITES = 2  # writes that move, so that the wire has another one when the first ends
SPARE = 3  # slots that a chunk which is gathered ahead leaves to the other peers
FED, FED_PART = 3, 5 / 8  # chunks with slots of the peer, at least, and part of a sender's slots: while as many are on
# the way, later ones wait until more can be gathered together; a fast wire has others until these are gathered


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
        whole: whether these are all of its chunks; more come by :meth:`Gathers.extend` otherwise.
        left: called when it has ended; None for nothing.

    Attributes:
        next: number of chunks that have begun.
        posted: number of chunks of which a write was posted, or tried.
        sent: number of chunks whose writes have ended well.
        over: whether it has ended, so that no further chunk is sent.
    """

    def __init__(
        self, whose: int, number: int, rows: list[Row], *, urgent: bool, attempts: int,
        ready: Sequence[Ready] = (), order: bytes = b"", own: PackedTransfer | None = None, until: float | None = None,
        whole: bool = True, left: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.whose, self.number, self.rows, self.urgent, self.attempts = whose, number, rows, urgent, attempts
        self.ready, self.order, self.own, self.until = ready, order, own, until
        self.whole, self.left = whole, left
        self.next = self.posted = self.sent = 0
        self.over = False


class Chunk:
    """A chunk on its way: gathered into a slot, then written.

    Args:
        job: its transfer.
        number: its number there.
        slot: the slot of this process.
        lent: the slot of the peer; None while it has none for this chunk.
        ends: numbers of this end and the peer's, when it began: its turn and its credits are theirs.

    Attributes:
        moved: the gather; None if it was not submitted.
        gathered: whether the gather is known to have ended.
        handle: its latest write.
        tries: number of writes that were tried.
        posting: whether a write is being posted, so that it may move.
        ended: whether the latest write has ended for sure.
        why: why the latest write failed, ``""`` if it did not, None if that is not known.
        credits: slots that travel with it.
    """

    __slots__ = (
        "credits", "ended", "ends", "gathered", "handle", "job", "lent", "moved", "number", "posting", "slot",
        "tries", "why",
    )  # fmt: skip

    def __init__(self, job: Job, number: int, slot: RingSlot, lent: Lent | None, ends: tuple[int, int]) -> None:
        self.job, self.number, self.slot, self.lent, self.ends = job, number, slot, lent, ends
        self.moved: Transfer | None = None
        self.handle: Any = None
        self.tries = 0
        self.gathered = self.posting = self.ended = False
        self.why: str | None = None
        self.credits: Sequence[Credit] = ()

    @property
    def theirs(self) -> Lent:
        """The slot of the peer; raise TransferError if it has none for this chunk."""
        if self.lent is None:
            raise TransferError(f"chunk {self.number:,} has no slot of the peer")
        return self.lent


def held(job: Job) -> str:
    """Return what the peer's memory holds after a push that failed."""
    return "the peer's memory may hold all of the bytes, or a part of them" if job.posted else "nothing was moved"


class Gathers:
    """The transfers to one peer, and the gathers of their chunks.

    Args:
        outbox: messages to the peer.
        mover: gathers.
        slots: free slots to gather into; all senders of an end share them.
        together: whether several chunks may be gathered by one submit, as GPUs do.

    Attributes:
        together: as given.
        credits: the peer's slots.
        jobs: transfers that have not ended, by whose they are and their numbers.
        most: most of the slots that this one may have, so that a slow peer leaves some to the others. The lanes of an
            end divide them; see :class:`kvplan.agents.packed.pack_peers.Peers`.
        held: whether a transfer of high priority waits for its first chunks, so that no other one begins before it.
    """

    def __init__(self, outbox: Outbox, mover: Mover, slots: list[RingSlot], *, together: bool) -> None:
        self.credits = Credits()
        self.jobs: dict[tuple[int, int], Job] = {}
        self.held, self.together = False, together
        self.most = 1
        self._outbox, self._copier, self._slots = outbox, Copier(mover), slots
        self._lines: tuple[dict[Job, None], dict[Job, None]] = ({}, {})  # transfers with chunks that have not begun
        self._gathering: list[Chunk] = []
        self._writing: list[Chunk] = []

    @property
    def waits(self) -> bool:
        """Whether a chunk has not begun, or may have got its slot of the peer."""
        normal, urgent = self._lines
        return bool(normal or urgent or (self._gathering and self.credits.some))

    @property
    def due(self) -> bool:
        """Whether a step may change something, though nothing has come or ended: a chunk waits for its ``after=``."""
        if self.credits.leaving:
            return True
        normal, urgent = self._lines
        if not ((normal or urgent) and self._room):
            return False
        return not self.together or not all(map(self._waits_for_more, [*urgent, *normal]))

    def take(self, job: Job) -> None:
        """Send a transfer."""
        self.jobs[job.whose, job.number] = job
        if job.rows:
            self._lines[job.urgent][job] = None

    def extend(self, job: Job, rows: Sequence[Row], *, whole: bool) -> None:
        """Add chunks to a transfer, which is in its line still; ``whole`` if no more will come."""
        job.rows += rows
        job.whole = whole

    def begin(self, now: float, *, urgent: bool) -> bool:
        """Gather chunks of one priority while there are slots; return whether any has begun."""
        line, began = self._lines[urgent], False
        if urgent:
            self.held = False
        if self._gathering and self.credits.some:
            self._lend(urgent=urgent)
        if not line or not self._room:
            return False
        for job in list(line):
            if job.until is not None and now > job.until:
                self.fail(job, "its deadline has passed")
                continue
            try:
                began |= self._begin(job)
            except Exception as error:  # noqa: BLE001  # it is the transfer's
                self.fail(job, str(error))
            if not self._room:
                break
        return began

    @property
    def _room(self) -> bool:
        """Whether a chunk may begin."""
        moving = len(self._gathering) + len(self._writing)
        if not self._slots:
            return False
        if self.credits.some:  # chunks that have no slot of the peer keep no other one back
            return moving < self.most or moving - len(self._unlent) < self.most
        spare = len(self._slots) > SPARE and self.credits.granted > 0
        return moving < self.most and spare and len(self._unlent) < AHEAD

    @property
    def _unlent(self) -> list[Chunk]:
        """The chunks that are gathered while the peer has no slot for them."""
        return [chunk for chunk in self._gathering if chunk.lent is None]

    def _lend(self, *, urgent: bool) -> None:
        """Give slots of the peer to chunks that had none, first to those of high priority."""
        for chunk in self._unlent:
            if chunk.job.urgent >= urgent and not chunk.job.over:
                chunk.lent = self.credits.take()

    def _begin(self, job: Job) -> bool:
        rows, began = job.rows, False
        while job.next < len(rows) and not job.over:
            ready = job.ready[rows[job.next].piece] if job.ready else None
            if ready is not None and not ready.completed():
                return began
            if not self._room:
                return began
            if self.together and self._waits_for_more(job):
                return began
            if self._first_is_gathered(job):
                self.held |= job.urgent
                return began
            some = self._next(job)
            after = None if ready is None else ready.left
            chunks = [(rows[one.number], one.slot.place) for one in some]
            moved = self._copier.submit(chunks, after, urgent=job.urgent)
            for chunk in some:
                chunk.moved = moved
            began = True
            if self.together and job.posted < AHEAD_WRITES and job.next < len(rows):
                self.held |= job.urgent
                return True  # the wire idles, and a submit takes as long as a gather: look whether one has ended
        if job.whole:  # otherwise it keeps its place in the line, where its deadline is seen
            self._lines[job.urgent].pop(job, None)
        return began

    def _first_is_gathered(self, job: Job) -> bool:
        """Return whether the wire idles until the first chunk of a transfer is gathered: it is written before others.

        A submit takes as long as a GPU gathers a chunk. On a CPU, a gather takes much longer.
        """
        if not self.together or job.posted or not job.next or self._writing:
            return False
        return bool([one for one in self._gathering if one.job is job and one.lent is not None])

    def _waits_for_more(self, job: Job) -> bool:
        """Return whether the next chunks of a transfer wait for slots, so that more of them are gathered together.

        The wire has others meanwhile. Chunks of high priority wait for nothing.
        """
        moving, unlent = len(self._gathering) + len(self._writing), len(self._unlent)
        if job.urgent or moving - unlent < max(FED, self.most * FED_PART):
            return False
        room = self.credits.free if self.credits.some else AHEAD - unlent
        return min(room, len(self._slots), self.most - moving) < min(self._at_once(job), len(job.rows) - job.next)

    def _at_once(self, job: Job) -> int:
        """Return how many chunks of a transfer are gathered together, at most.

        A GPU gathers several in one launch, whose submit takes as long as that of one chunk. But the wire waits until
        the last one is gathered. So they are at most half of the slots, and as many as have begun before. If the last
        ones of a leg or a piece are more, they go in two equal parts, so that chunks come in an even time.
        """
        most = min(job.next, self.most // TOGETHER) if self.together else 1
        rows = job.rows[job.next : job.next + 2 * most]
        if most <= 1 or not rows:
            return 1
        left = [row.half for row in rows].count(rows[0].half)
        return most if left in (most, 2 * most) else -(-left // 2) if left > most else left

    def _next(self, job: Job) -> list[Chunk]:
        """Take slots for the chunks of a transfer that are gathered together."""
        rows, made, most = job.rows, list[Chunk](), self._at_once(job)
        half = rows[job.next].half
        ends = self._outbox.mine, self._outbox.theirs
        while len(made) < most and job.next < len(rows) and rows[job.next].half is half and self._room:
            made.append(Chunk(job, job.next, self._slots.pop(), self.credits.take(), ends))
            self._gathering.append(made[-1])
            job.next += 1
        return made

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
        self._lines[job.urgent].pop(job, None)
        if job.left is not None:
            job.left()  # last: an interrupt may come in it
