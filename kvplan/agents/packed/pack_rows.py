"""The chunks of a transfer as rows, and what this end needs of a packing and of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from kvplan.agents.packed.slot_ring import Slot
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan

MOST_CHUNKS = 1 << 24  # of a transfer

Planner = Callable[[int, int, Any], Plan]  # units from and to, and a slot


class Chunked(Protocol):
    """A packing, or one half of it: :class:`Packing` and :class:`Half` of ``kvplan.plan.packing``.

    Attributes:
        nbytes: bytes of all chunks.
    """

    nbytes: int

    def cuts(self, slot_nbytes: int) -> list[int]:
        """Return where chunks of at most this number of bytes begin and end, in units."""

    def chunk_nbytes(self, first: int, last: int) -> int:
        """Return the bytes of a chunk."""


class Mover(Protocol):
    """What gathers and scatters: an executor."""

    def submit(self, plan: Plan, after: Any = None, *, priority: str = "normal") -> Transfer:
        """Queue a plan; see :meth:`kvplan.Executor.submit`."""


class Row(NamedTuple):
    """One chunk.

    Attributes:
        plan: makes the plan that gathers or scatters it.
        first, last: its units.
        nbytes: its bytes.
        piece: number of its piece.
    """

    plan: Planner
    first: int
    last: int
    nbytes: int
    piece: int

    def planned(self, slot: Slot) -> Plan:
        """Return the plan that gathers the chunk into a slot, or scatters it from there."""
        return self.plan(self.first, self.last, slot)


def rows_of(pieces: Iterable[tuple[Chunked, Planner]], chunk_nbytes: int) -> list[Row]:
    """Return the chunks of all pieces, numbered through."""
    rows: list[Row] = []
    for number, (chunked, plan) in enumerate(pieces):
        if chunked.nbytes:
            cuts = chunked.cuts(chunk_nbytes)
            rows += [Row(plan, a, b, chunked.chunk_nbytes(a, b), number) for a, b in pairwise(cuts)]
    return rows


def counts_of(rows: Sequence[Row]) -> dict[int, int]:
    """Return the number of chunks of each piece."""
    counts: dict[int, int] = {}
    for row in rows:
        counts[row.piece] = counts.get(row.piece, 0) + 1
    return counts
