"""The chunks of a transfer, and the pieces of a plan that arrive one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from kvplan.agents.packed.readiness import Ready
from kvplan.errors import KVPlanError
from kvplan.execute.transfer import Transfer, check_after
from kvplan.plan.packing.chunk_half import Half, Slot
from kvplan.plan.packing.packing import Packing, packing_of, packings_by_layer
from kvplan.plan.plan import Plan

GROUPS = 8  # most groups of layers of a transfer by layer

TOGETHER = 2  # one launch copies at most this part of the slots, so that the wire has others meanwhile


class Mover(Protocol):
    """The object that gathers and scatters: an executor."""

    def submit(self, plan: Plan, after: Any = None, *, priority: str = "normal") -> Transfer:
        """Queue a plan; see :meth:`kvplan.Executor.submit`."""


class Copier:
    """Submits chunks to a mover.

    Args:
        mover: gathers or scatters.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def submit(self, chunks: Sequence[tuple[Row, Slot]], after: Any, *, urgent: bool) -> Transfer:
        """Copy chunks of one piece between their units and their slots.

        Args:
            chunks: them and their slots, at least one.
            after: what the copies wait for.
            urgent: whether they have high priority.

        Raises:
            KVPlanError: the mover refuses them.
        """
        plan = chunks[0][0].half.plan_all([(row.first, row.last, slot) for row, slot in chunks])
        return self._mover.submit(plan, after, priority="high" if urgent else "normal")


def ended(moved: Transfer | None, urgent: bool, running: set[tuple[bool, str]]) -> bool:
    """Return whether a gather or a scatter is known to have ended.

    Those of one priority and direction end in the order of their submits, so none behind one that runs is asked.

    Args:
        moved: it; None if it was not submitted.
        urgent: whether it has high priority.
        running: priority and direction of those before it that run; one that runs is added.
    """
    if moved is None:
        return True
    line = urgent, moved.plan.direction
    if line in running:
        return False
    if moved.done():
        return True
    running.add(line)
    return False


def failure(moved: Transfer | None) -> Exception | None:
    """Return the error of a gather or a scatter that has ended; None if it ended well, or was not submitted."""
    if getattr(moved, "ended_well", False):  # as nearly all do
        return None
    try:
        if moved is not None:
            moved.synchronize()
    except Exception as error:  # noqa: BLE001  # it is a transfer's; an interrupt is not
        return error
    return None


class Row(NamedTuple):
    """One chunk.

    Attributes:
        half: makes the plan that gathers or scatters it, perhaps with others of its piece.
        first, last: its units.
        nbytes: its bytes.
        piece: number of its piece.
    """

    half: Half
    first: int
    last: int
    nbytes: int
    piece: int

    def planned(self, slot: Slot) -> Plan:
        """Return the plan that gathers the chunk into a slot, or scatters it from there."""
        return self.half.plan(self.first, self.last, slot)


def rows_of(halves: Sequence[Half], chunk_nbytes: int, piece: int = 0) -> list[Row]:
    """Return the chunks of all pieces, in order; both ends make the same.

    Args:
        halves: this end's half of each piece.
        chunk_nbytes: most bytes of a chunk.
        piece: number of the first piece.
    """
    rows: list[Row] = []
    for number, half in enumerate(halves, piece):
        cuts = half.cuts(chunk_nbytes) if half.nbytes else [0]
        rows += [Row(half, a, b, half.chunk_nbytes(a, b), number) for a, b in pairwise(cuts)]
    return rows


class Piece(NamedTuple):
    """A part of a transfer that arrives before the next one.

    Attributes:
        layers: global numbers of its layers.
        packing: its chunks, and the recipes of both sides; None once the transfer has ended.
        ready: asks whether it may begin.
    """

    layers: tuple[int, ...]
    packing: Packing | None
    ready: Ready


def pieces_of(
    plan: Plan, slot_nbytes: int, ready: Ready, *, by_layer: bool, after_layers: Mapping[int, Ready]
) -> list[Piece]:
    """Pack a plan.

    Args:
        plan: the plan.
        slot_nbytes: most bytes of a chunk.
        ready: asks whether the transfer may begin.
        by_layer: whether groups of layers arrive in their order.
        after_layers: for layers, whether they may begin.
    """
    if not by_layer:
        return [Piece(plan.layers, packing_of(plan, most=slot_nbytes), ready)]
    count = len(plan.layers) if after_layers else GROUPS
    return [
        Piece(
            tuple(sorted(layers)),
            packing,
            Ready.of_all([ready, *(after_layers[layer] for layer in sorted(layers) if layer in after_layers)]),
        )
        for layers, packing in packings_by_layer(plan, count, most=slot_nbytes)
    ]


def readies_of(plan: Plan, after: Any) -> tuple[Ready, dict[int, Ready]]:
    """Return what a transfer waits for, and its layers, from the ``after=`` of a submit.

    Raises:
        KVPlanError: it cannot be waited for, or names layers that the plan does not move.
    """
    if not isinstance(after, Mapping):
        if after is not None:
            check_after(after, gpu=True)
        return Ready(after), {}
    strange = sorted(set(after) - set(plan.layers), key=str)
    if strange:
        raise KVPlanError(f"after has layers {strange}, which {plan!r} does not move")
    for one in after.values():
        if one is not None:
            check_after(one, gpu=True)
    return Ready(None), {layer: Ready(one) for layer, one in after.items()}


def chunks_of_pieces(rows: Sequence[Row], pieces: int) -> list[int]:
    """Return the number of chunks of each piece."""
    counts = [0] * pieces
    for row in rows:
        counts[row.piece] += 1
    return counts
