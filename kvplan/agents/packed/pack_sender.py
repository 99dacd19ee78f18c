"""The sender of chunks: gather units into a slot, write the slot into the peer's ring, and take the slot again."""

from __future__ import annotations

import logging
from contextlib import suppress

from kvplan.agents.packed.pack_jobs import Chunk, Gathers, Job
from kvplan.agents.packed.pack_messages import DATA, PULL, VOID, Credit, Data, credit_body, data_body
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_rows import Mover, ended, failure
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.agents.packed.wire import DONE, MOVING, Wire

OTHERS = 3  # looks that find nothing, until a write behind the oldest one is asked
MOST_NEED = 16  # slots of the peer that one process has use for

log = logging.getLogger("kvplan.agents")


class Sender(Gathers):
    """Sends the chunks of all transfers to one peer.

    Args:
        outbox: messages to the peer.
        wire: the wire to the peer.
        mover: gathers.
        slots: free slots to gather into; all senders of an end share them.
        together: whether several chunks may be gathered by one submit, as GPUs do.
    """

    def __init__(
        self, outbox: Outbox, wire: Wire, mover: Mover, slots: list[RingSlot], *, together: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(outbox, mover, slots, together=together)
        self._wire, self._turn = wire, 0
        self._stuck: list[Chunk] = []  # an interrupt came while they were posted: whether they move is not known

    @property
    def quiet(self) -> bool:
        """Whether no chunk is on its way."""
        return not self._gathering and not self._writing and not self._stuck

    @property
    def busy(self) -> bool:
        """Whether it has work, or waits for the peer."""
        return bool(self.jobs) or not self.quiet

    @property
    def need(self) -> int:
        """Number of slots of the peer that this process has use for: one for each chunk, up to a limit."""
        count = len(self._gathering) + len(self._writing) + (len(self._stuck) if self.jobs else 0)
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
        return any(chunk.ends[1] <= number for chunk in [*self._gathering, *self._writing, *self._stuck])

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
        for chunk in writing:
            if not self._known(chunk):
                break
            found = True
            if chunk.why:
                break  # the peer hears of a failure before further chunks reach it
        if len(writing) > 1 and not found:
            self._turn += 1
            if not self._turn % OTHERS:
                self._known(writing[1 + self._turn // OTHERS % (len(writing) - 1)])
            for chunk in writing:  # it, or one that was not released at once
                found |= chunk.why is not None
        return found

    def step(self) -> bool:
        """Write what is gathered, and end what is written; return whether anything changed. It follows a look."""
        changed = False
        if self._gathering:
            changed = self._gathered()
        if self._writing:
            for chunk in [chunk for chunk in self._writing if chunk.why is not None]:
                changed |= self._ended(chunk)
        return changed

    def _gathered(self) -> bool:
        changed = False
        for chunk in [chunk for chunk in self._gathering if chunk.gathered]:
            job = chunk.job
            error = failure(chunk.moved)
            if error is not None and not job.over:
                self.fail(job, f"its bytes could not be gathered: {error}")
            if job.over or self._outbox.dead or (chunk.lent is not None and not self._claim(job)):
                if chunk.lent is not None:
                    self.credits.back(chunk.lent)
                self._slots.append(chunk.slot)
            elif chunk.lent is None:
                continue  # the peer has no slot yet
            else:
                job.posted += 1
                if self._post(chunk):
                    self._writing.append(chunk)
            self._gathering.remove(chunk)  # last: an interrupt may come between
            changed = True
        return changed

    def _claim(self, job: Job) -> bool:
        if not job.posted and job.own is not None and not job.own.claim():
            self.withdraw(job)
            return False
        return True

    def _post(self, chunk: Chunk) -> bool:
        """Post the write of a chunk, as often as the transfer may; return whether it was posted."""
        job, lent = chunk.job, chunk.theirs
        order = job.order if not chunk.number else b""
        body = data_body(Data(job.whose, job.number, chunk.number, lent.number, lent.turn, order))
        nbytes = job.rows[chunk.number].nbytes
        why = ""
        while chunk.tries < job.attempts and not job.over and not self._outbox.dead:
            note, chunk.credits = self._outbox.note(DATA, body)
            chunk.tries += 1
            if job.own is not None:
                job.own.posted += 1
            local = chunk.slot.place.address
            chunk.posting = True
            try:
                chunk.handle = self._wire.write(local, lent.address, nbytes, note)
            except Exception as error:  # noqa: BLE001  # nothing of it arrives
                chunk.posting = False
                chunk.why = why = str(error)
                self._owe(chunk)
            else:
                chunk.posting = chunk.ended = False
                chunk.why = None
                return True
        self._missed(chunk, why or chunk.why or "")
        return False

    def _known(self, chunk: Chunk) -> bool:
        """Ask whether a write moves; return False if it does."""
        if chunk.why is None:
            state = self._state(chunk)
            if state == MOVING and not self._outbox.dead:
                return False
            chunk.why = "" if state == DONE else state
        return True

    def _ended(self, chunk: Chunk) -> bool:
        """End the write of a chunk that moves no more, or post it again; return False if it is not released yet."""
        if not chunk.ended:
            self._release(chunk)
            if not chunk.ended:
                return False
        if not chunk.why:
            self._sent(chunk)
        else:
            self._owe(chunk)  # they have travelled at most with a note that came
            if self._post(chunk):
                return True
        self._writing.remove(chunk)  # last: an interrupt may come between
        return True

    def _owe(self, chunk: Chunk) -> None:
        """Give the slots that travelled with a chunk back again, unless one of the two ends has begun anew."""
        if self._current(chunk):
            self._outbox.owe(chunk.credits)
        chunk.credits = ()

    def _current(self, chunk: Chunk) -> bool:
        return chunk.ends == (self._outbox.mine, self._outbox.theirs)

    def _state(self, chunk: Chunk) -> str:
        try:
            return self._wire.state(chunk.handle)
        except Exception as error:  # noqa: BLE001
            return f"failed: {error}"

    def _release(self, chunk: Chunk) -> None:
        try:
            chunk.ended = self._wire.release(chunk.handle)
        except Exception as error:  # noqa: BLE001  # it may still move
            log.debug("a write was not released: %s", error)

    def _sent(self, chunk: Chunk) -> None:
        self.credits.written(chunk.theirs.number)
        self._slots.append(chunk.slot)
        job = chunk.job
        job.sent += 1
        if job.whose == PULL and job.whole and job.sent == len(job.rows):
            self._end(job)

    def _missed(self, chunk: Chunk, why: str) -> None:
        """Give up a chunk whose write failed, and its transfer."""
        lent = chunk.theirs
        self.credits.written(lent.number)
        self._slots.append(chunk.slot)
        if self._current(chunk):
            self._outbox.say(VOID, credit_body(Credit(lent.number, lent.turn)))
        tries = f" in {chunk.tries} attempts" if chunk.tries > 1 else ""
        self.fail(chunk.job, f"the wire failed{tries}: {why.removeprefix('failed: ')}")

    def recover(self) -> None:
        """Sort the chunks again after an interrupt at any point of a step; all transfers have been given up.

        A gather whose submit was interrupted may run. It is submitted again: once that has ended, both have.
        """
        chunks = list(dict.fromkeys([*self._gathering, *self._writing, *self._stuck]))
        self._stuck = [chunk for chunk in chunks if chunk.posting]
        self._gathering = [chunk for chunk in chunks if not chunk.tries and not chunk.posting]
        self._writing = [chunk for chunk in chunks if chunk.tries and not chunk.posting]
        for chunk in self._writing:
            if chunk.handle is None:  # no write was posted
                chunk.ended, chunk.why = True, chunk.why or "it was interrupted"
        for chunk in self._gathering:
            if chunk.moved is None:
                row, urgent, chunk.gathered = chunk.job.rows[chunk.number], chunk.job.urgent, False
                with suppress(Exception):
                    chunk.moved = self._copier.submit([(row, chunk.slot.place)], None, urgent=urgent)
        ours = [*self._gathering, *self._writing, *self._stuck]
        self.credits.settle({chunk.lent.number for chunk in ours if chunk.lent is not None})

    def unstick(self) -> None:
        """Take the slots of unknown writes back: the peer is gone."""
        stuck, self._stuck = self._stuck, []
        self._slots += [chunk.slot for chunk in stuck]

    def slots(self) -> set[int]:
        """Return the numbers of this process's slots that hold a chunk."""
        return {chunk.slot.number for chunk in [*self._gathering, *self._writing, *self._stuck]}

    def reset(self, why: str) -> None:
        """Give all transfers up, and use no slot of the peer until the next grant."""
        for job in list(self.jobs.values()):
            self.fail(job, why, tell=False)
        self.credits.withdraw()
