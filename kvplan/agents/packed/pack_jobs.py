"""The transfers that this process sends, and their chunks on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.agents.packed.pack_credits import Lent
from kvplan.agents.packed.pack_messages import Credit
from kvplan.agents.packed.pack_rows import Row
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.readiness import Ready
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer


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
        posted: number of chunks of which a write was posted, or tried.
        sent: number of chunks whose writes have ended well.
        over: whether it has ended, so that no further chunk is sent.
    """

    def __init__(
        self, whose: int, number: int, rows: Sequence[Row], *, urgent: bool, attempts: int,
        ready: Sequence[Ready] = (), order: bytes = b"", own: PackedTransfer | None = None, until: float | None = None,
    ) -> None:  # fmt: skip
        self.whose, self.number, self.rows, self.urgent, self.attempts = whose, number, rows, urgent, attempts
        self.ready, self.order, self.own, self.until = ready, order, own, until
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
        since: when its latest write was posted; see :class:`kvplan.agents.packed.wire.Pace`.
    """

    __slots__ = (
        "credits", "ended", "ends", "gathered", "handle", "job", "lent", "moved", "number", "posting", "since", "slot",
        "tries", "why",
    )  # fmt: skip

    def __init__(self, job: Job, number: int, slot: RingSlot, lent: Lent | None, ends: tuple[int, int]) -> None:
        self.job, self.number, self.slot, self.lent, self.ends = job, number, slot, lent, ends
        self.moved: Transfer | None = None
        self.handle: Any = None
        self.tries, self.since = 0, 0.0
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
