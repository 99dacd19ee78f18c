"""The sender of chunks: gather units into a slot, write the slot into the peer's ring, and take the slot again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from math import inf

from kvplan.agents.packed.pack_jobs import AHEAD_WRITES, Chunk, Gathers, Job, Write
from kvplan.agents.packed.pack_messages import (
    DATA,
    MOST_TOGETHER,
    PULL,
    VOID,
    Data,
    credit_body,
    data_body,
)
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_rows import TOGETHER, Mover, ended, failure
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.agents.packed.wire import DONE, MOVING, Pace, Wire

OTHERS = 3  # looks that find nothing, until a write behind the oldest one is asked
GRANTED = 4  # a write has at most this part of the peer's slots, so that it has others to scatter, and for the next one
GATHERED = 8  # a look comes behind this part of a write of several chunks, since others are gathered meanwhile
MOST_NEED = 16  # slots of the peer that one process has use for

log = logging.getLogger("kvplan.agents")


class Sender(Gathers):
    """Sends the chunks of all transfers to one peer.

    Args:
        outbox: messages to the peer.
        wire: the wire to the peer.
        mover: gathers.
        slots: free slots to gather into; all senders of an end share them.
        most: most of them that this one may have, so that a slow peer leaves some to the others.
        pace: how fast writes move.
        together: whether several chunks may be gathered by one submit, as GPUs do.

    Attributes:
        chunks, moved: number of all chunks whose writes have ended well, and their bytes.
    """

    def __init__(
        self, outbox: Outbox, wire: Wire, mover: Mover, slots: list[RingSlot], most: int, pace: Pace, *,
        together: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(outbox, mover, slots, most, together=together)
        self._wire, self._turn, self._pace = wire, 0, pace
        self.chunks = self.moved = 0
        self._stuck: list[Write] = []  # an interrupt came while they were posted: whether they move is not known

    @property
    def quiet(self) -> bool:
        """Whether no chunk is on its way."""
        return not self._gathering and not self._writing and not self._stuck

    @property
    def busy(self) -> bool:
        """Whether it has work, or waits for the peer."""
        return bool(self.jobs) or not self.quiet

    @property
    def ahead(self) -> float:
        """Bytes that may move before the next look, which delays none of them."""
        writing = self._writing
        if not writing:
            return 0 if self.jobs or self._gathering else inf
        normal, urgent = self._lines
        count = len(writing) - 1  # the peer waits for the last one
        if normal or urgent or self._gathering:
            if not count:  # a gather ends soon, and the write of another one is to follow this one
                return writing[0].nbytes / GATHERED if writing[0].count > 1 else 0
            count = max(count + 1 - AHEAD_WRITES, 1)
        return sum([write.nbytes for write in writing[:count]])

    @property
    def need(self) -> int:
        """Number of slots of the peer that this process has use for: one for each chunk, up to a limit."""
        count = len(self._gathering) + self._on_wire + (sum([write.count for write in self._stuck]) if self.jobs else 0)
        for line in self._lines:
            for job in line:
                count += len(job.rows) - job.next
                if count >= MOST_NEED:
                    return MOST_NEED
        return count

    @property
    def served(self) -> list[Job]:
        """The peer's transfers that gather from this process's memory, or will."""
        jobs = [*self.jobs.values(), *(chunk.job for chunk in list(self._gathering))]
        return [job for job in jobs if job.own is None]

    def touches(self, transfer: PackedTransfer) -> bool:
        """Return whether a chunk of a transfer of this process is being gathered."""
        return any(chunk.job.own is transfer for chunk in list(self._gathering))

    def writes_to(self, number: int) -> bool:
        """Return whether a chunk that began for an end of the peer, of this number or a lower one, is on its way."""
        return any(chunk.ends[1] <= number for chunk in self._chunks)

    @property
    def _chunks(self) -> list[Chunk]:
        """The chunks on their way."""
        return [*self._gathering, *[chunk for write in (*self._writing, *self._stuck) for chunk in write.chunks]]

    def look(self) -> bool:
        """Look at what moves; return whether a gather or a write has ended, so that a step may change something.

        Writes mostly end in the order in which they were posted: behind one that moves, one of the others is asked at
        times, in turn.
        """
        found, running = False, set[tuple[bool, str]]()
        for chunk in self._gathering:
            known = chunk.gathered
            chunk.gathered = known or ended(chunk.moved, chunk.job.urgent, running)
            # One that has ended waits for a slot of the peer; the first step behind its end sees whether it failed.
            found |= chunk.gathered and (not known or chunk.lent is not None or chunk.job.over)
        writing = self._writing
        for write in writing:
            if not self._known(write):
                break
            found = True
            if write.why:
                break  # the peer hears of a failure before further chunks reach it
        if len(writing) > 1 and not found:
            self._turn += 1
            if not self._turn % OTHERS:
                self._known(writing[1 + self._turn // OTHERS % (len(writing) - 1)])
            for write in writing:  # it, or one that was not released at once
                found |= write.why is not None
        return found

    def step(self) -> bool:
        """Write what is gathered, and end what is written; return whether anything changed. It follows a look."""
        changed = False
        if self._gathering:
            changed = self._gathered()
        if self._writing:
            for write in [write for write in self._writing if write.why is not None]:
                changed |= self._ended(write)
        return changed

    def _gathered(self) -> bool:
        changed, waiting = False, [chunk for chunk in self._gathering if chunk.gathered]
        while waiting:
            chunk = waiting.pop(0)
            job = chunk.job
            error = failure(chunk.moved)
            if error is not None and not job.over:
                self.fail(job, f"its bytes could not be gathered: {error}")
            if job.over or self._outbox.dead or (chunk.lent is not None and not self._claim(job)):
                if chunk.lent is not None:
                    self.credits.back(chunk.lent)
                self._slots.append(chunk.slot)
                self._gathering.remove(chunk)  # last: an interrupt may come between
            elif chunk.lent is None:
                continue  # the peer has no slot yet
            else:
                some = [chunk]
                if waiting and self.together and self._writing:
                    some += waiting[: self._behind(chunk, waiting)]
                    del waiting[: len(some) - 1]
                self._write(Write(some))
            changed = True
        return changed

    def _behind(self, first: Chunk, waiting: Sequence[Chunk]) -> int:
        """Return how many of the chunks that wait go with a chunk, in one write, while the wire has others.

        Each write and each note has its price. A write takes at most half of what is left of a piece, so that its last
        chunks are scattered while others move. The first chunk of a transfer, and those of high priority, go alone.
        """
        job, number = first.job, first.number
        if job.urgent or not number:  # the first one may carry the order
            return 0
        rows, piece = job.rows, job.rows[number].piece
        most = min(MOST_TOGETHER, self._most // TOGETHER, self.credits.granted // GRANTED)
        for count, chunk in enumerate(waiting[: max(0, most - 1)], 1):
            last = number + 2 * count + 1  # as many chunks again
            more = rows[last].piece == piece if last < len(rows) else not job.whole
            next_one = chunk.job is job and chunk.number == number + count and chunk.ends == first.ends
            if not (more and next_one and chunk.lent is not None and failure(chunk.moved) is None):
                return count - 1
        return min(len(waiting), max(0, most - 1))

    def _claim(self, job: Job) -> bool:
        if not job.posted and job.own is not None and not job.own.claim():
            self.withdraw(job)
            return False
        return True

    def _write(self, write: Write) -> None:
        """Write chunks that are gathered."""
        write.job.posted += write.count
        self._writing.append(write)  # first, and the chunks leave last: an interrupt may come between
        self._on_wire += write.count
        if not self._post(write):
            self._leave(write)
        for chunk in write.chunks:
            self._gathering.remove(chunk)

    def _post(self, write: Write) -> bool:
        """Post a write, as often as its transfer may; return whether it was posted."""
        job, number = write.job, write.chunks[0].number
        first = Data(job.whose, job.number, number, *write.slots[0], b"" if number else job.order)
        body, why = data_body(first, write.slots[1:]), ""
        while write.tries < job.attempts and not job.over and not self._outbox.dead:
            note, write.credits = self._outbox.note(DATA, body)
            write.tries += 1
            if job.own is not None:
                job.own.posted += 1
            write.posting, write.since = True, self._pace.begin()
            try:
                write.handle = self._wire.write(write.parts, note)
            except Exception as error:  # noqa: BLE001  # nothing of it arrives
                write.posting = False
                write.why = why = str(error)
                self._owe(write)
            else:
                write.posting = write.ended = False
                write.why = None
                return True
        self._missed(write, why or write.why or "")
        return False

    def _known(self, write: Write) -> bool:
        """Ask whether a write moves; return False if it does."""
        if write.why is None:
            state = self._state(write)
            if state == MOVING and not self._outbox.dead:
                return False
            write.why = "" if state == DONE else state
        return True

    def _ended(self, write: Write) -> bool:
        """End a write that moves no more, or post it again; return False if it is not released yet."""
        if not write.ended:
            self._release(write)
            if not write.ended:
                return False
        if not write.why:
            self._sent(write)
        else:
            self._owe(write)  # they have travelled at most with a note that came
            if self._post(write):
                return True
        self._leave(write)  # last: an interrupt may come between
        return True

    def _leave(self, write: Write) -> None:
        self._on_wire -= write.count
        self._writing.remove(write)

    def _owe(self, write: Write) -> None:
        """Give the slots that travelled with a write back again, unless one of the two ends has begun anew."""
        if self._current(write):
            self._outbox.owe(write.credits)
        write.credits = ()

    def _current(self, write: Write) -> bool:
        return write.chunks[0].ends == (self._outbox.mine, self._outbox.theirs)

    def _state(self, write: Write) -> str:
        try:
            return self._wire.state(write.handle)
        except Exception as error:  # noqa: BLE001
            return f"failed: {error}"

    def _release(self, write: Write) -> None:
        try:
            write.ended = self._wire.release(write.handle)
        except Exception as error:  # noqa: BLE001  # it may still move
            log.debug("a write was not released: %s", error)

    def _free(self, write: Write) -> None:
        """Take the slots of a write that moves no more."""
        for chunk, theirs in zip(write.chunks, write.slots, strict=True):
            self.credits.written(theirs.slot)
            self._slots.append(chunk.slot)

    def _sent(self, write: Write) -> None:
        self._free(write)
        job, count = write.job, write.count
        self._pace.end(write.since, write.nbytes)
        self.chunks += count
        self.moved += write.nbytes
        job.sent += count
        if job.whose == PULL and job.whole and job.sent == len(job.rows):
            self._end(job)

    def _missed(self, write: Write, why: str) -> None:
        """Give up a write that failed, and its transfer."""
        self._free(write)
        if self._current(write):
            for theirs in write.slots:
                self._outbox.say(VOID, credit_body(theirs))
        tries = f" in {write.tries} attempts" if write.tries > 1 else ""
        self.fail(write.job, f"the wire failed{tries}: {why.removeprefix('failed: ')}")

    def recover(self) -> None:
        """Sort the chunks again after an interrupt at any point of a step; all transfers have been given up.

        A gather whose submit was interrupted may run. It is submitted again: once that has ended, both have.
        """
        writes = list(dict.fromkeys([*self._writing, *self._stuck]))
        self._stuck = [write for write in writes if write.posting]
        self._writing = [write for write in writes if write.tries and not write.posting]
        self._on_wire = sum([write.count for write in self._writing])
        written = {chunk for write in [*self._writing, *self._stuck] for chunk in write.chunks}
        self._gathering = [chunk for chunk in dict.fromkeys(self._gathering) if chunk not in written]
        for write in self._writing:
            if write.handle is None:  # nothing was posted
                write.ended, write.why = True, write.why or "it was interrupted"
        for chunk in self._gathering:
            if chunk.moved is None:
                row, urgent, chunk.gathered = chunk.job.rows[chunk.number], chunk.job.urgent, False
                with suppress(Exception):
                    chunk.moved = self._copier.submit([(row, chunk.slot.place)], None, urgent=urgent)
        self.credits.settle({chunk.lent.number for chunk in self._chunks if chunk.lent is not None})

    def unstick(self) -> None:
        """Take the slots of unknown writes back: the peer is gone."""
        stuck, self._stuck = self._stuck, []
        self._slots += [chunk.slot for write in stuck for chunk in write.chunks]

    def slots(self) -> set[int]:
        """Return the numbers of this process's slots that hold a chunk."""
        return {chunk.slot.number for chunk in self._chunks}

    def reset(self, why: str) -> None:
        """Give all transfers up, and use no slot of the peer until the next grant."""
        for job in list(self.jobs.values()):
            self.fail(job, why, tell=False)
        self.credits.withdraw()
