"""A transfer that this process receives, and its chunks that are being scattered."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from kvplan.agents.packed.pack_messages import Credit
from kvplan.agents.packed.pack_rows import Row, chunks_of_pieces
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.execute.transfer import Transfer


class Inbound:
    """The chunks of one transfer that this process receives.

    Args:
        whose: whether this process has asked for them, or the peer pushes them.
        number: number of the transfer.
        rows: its chunks.
        urgent: whether it has high priority.
        own: the transfer, if this process has asked.
        note: the peer's note for the user.
        whole: whether these are all of its chunks; more come by :meth:`Receiver.extend` otherwise.

    Attributes:
        come: number of chunks that have come.
        scattered: number of chunks that are scattered.
        running: number of chunks that are being scattered.
        over: whether it has ended, so that no further chunk is scattered.
        left: by piece, number of chunks that have not come. A peer's push counts as one piece.
    """

    def __init__(
        self, whose: int, number: int, rows: list[Row], *, urgent: bool,
        own: PackedTransfer | None = None, note: bytes = b"", whole: bool = True,
    ) -> None:  # fmt: skip
        self.whose, self.number, self.rows, self.urgent, self.own, self.note = whose, number, rows, urgent, own, note
        self.come = self.scattered = self.running = 0
        self.over = False
        self.seen = bytearray(len(rows))
        self.whole = whole
        self.left = [len(rows)] if own is None else chunks_of_pieces(rows, rows[-1].piece + 1 if rows else 0)

    def to_come(self, piece: int) -> float:
        """Return how many chunks of a piece have not come."""
        return self.left[piece] if self.own is not None else self.left[0] if self.whole else inf

    def held(self) -> str:
        """Return what the destination holds after an error."""
        if not self.scattered and not self.running:
            return "nothing was moved"
        still = ", and may still change" if self.running else ""
        return f"the destination's blocks hold {self.scattered} of {len(self.rows)} chunks{still}: do not use them"


class Scatter(NamedTuple):
    """A chunk that is being scattered; ``moved`` is None if it could not be submitted."""

    inbound: Inbound
    row: Row
    credit: Credit
    moved: Transfer | None
    epoch: int
