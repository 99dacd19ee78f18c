"""The chunks of a transfer, and the pieces of a plan that arrive one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from kvplan.agents.packed.readiness import Ready
from kvplan.errors import KVPlanError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer, check_after
from kvplan.plan.packing.chunk_half import Half, Resident, Slot
from kvplan.plan.packing.packing import Packing, packing_of, packings_by_layer
from kvplan.plan.plan import Plan

GROUPS = 8  # most groups of layers of a transfer by layer

TOGETHER = 2  # one launch copies at most this part of the slots, so that the wire has others meanwhile
KEPT_CHUNKS = 3  # a half of fewer bytes than so many slots does not keep the addresses of its units on the GPU
KEPT_FROM = 2  # submits of a half before they are uploaded: the first chunks do not wait for that
KEPT_SOON = 1 << 17  # units that are uploaded without waiting for so many submits, as those of a leg of an order


class Mover(Protocol):
    """The object that gathers and scatters: an executor."""

    def submit(self, plan: Plan, after: Any = None, *, priority: str = "normal") -> Transfer:
        """Queue a plan; see :meth:`kvplan.Executor.submit`."""


class Copier:
    """Submits chunks to a mover.

    An executor's checks of the arguments are left out: plans of chunks are right, and a submit of a packed transfer has
    checked its ``after=``. Its backend checks all else. A GPU keeps the addresses of units that fill several chunks, or
    that are expected, until the last of these chunks is submitted.

    Args:
        mover: gathers or scatters.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover, self._queue, self._keep = mover, None, None
        if isinstance(mover, Executor):
            self._queue, self._keep = mover._submit, getattr(mover._backend, "keep", None)
        # By half: the submits so far, until its units are on the GPU; None if they cannot be.
        self._kept: WeakKeyDictionary[Half, int | Resident | None] = WeakKeyDictionary()

    def submit(
        self, chunks: Sequence[tuple[Row, Slot]], after: Any, *, urgent: bool, spare: bool = True
    ) -> Transfer:  # fmt: skip
        """Copy chunks of one piece between their units and their slots.

        Args:
            chunks: them and their slots, at least one.
            after: what the copies wait for.
            urgent: whether they have high priority.
            spare: whether there is time to upload the addresses of units.

        Raises:
            KVPlanError: the mover refuses them.
        """
        half = chunks[0][0].half
        resident = None if self._keep is None else self._resident(self._keep, half, chunks, spare=spare)
        plan = half.plan_all([(row.first, row.last, slot) for row, slot in chunks], resident)
        if resident is not None and half.units in [row.last for row, _ in chunks]:
            self._kept[half] = None  # the plan holds its units until it has ended
        if self._queue is None:
            return self._mover.submit(plan, after, priority="high" if urgent else "normal")
        return self._queue(plan, after, by_layer=False, urgent=urgent)

    def expect(self, row: Row, slot: Slot) -> None:
        """Upload the addresses of the units of a chunk, so that its submit is quick, unless they are very many.

        Call it while the chunk waits for compute to end, and nothing else is to be done. It is tried once.

        Args:
            row: the chunk.
            slot: a slot of the ring that it will go to, or come from.
        """
        half = row.half
        if self._keep is None or half.units > KEPT_SOON or not isinstance(self._kept.get(half, 0), int):
            return
        self._kept[half] = None
        with suppress(Exception):  # it is a help only
            self._kept[half] = self._upload(self._keep, row, slot)

    def _resident(
        self, keep: Callable[..., Resident | None], half: Half, chunks: Sequence[tuple[Row, Slot]], *, spare: bool
    ) -> Resident | None:  # fmt: skip
        """Return the units on the GPU; None if they are not there. A later submit of many chunks uploads them."""
        known = self._kept.get(half, 0)
        if not isinstance(known, int):
            return known
        if not spare or (known < KEPT_FROM and half.units > KEPT_SOON):
            self._kept[half] = known + 1
            return None
        row, slot = chunks[0]
        made = self._upload(keep, row, slot) if half.nbytes >= KEPT_CHUNKS * slot.nbytes else None
        self._kept[half] = made
        return made

    def _upload(self, keep: Callable[..., Resident | None], row: Row, slot: Slot) -> Resident | None:
        half = row.half
        if len(half.sections) != 1:
            return None
        _, nbytes, addresses, _ = half.sections[0]
        offsets = half.offsets_of(nbytes, min(slot.nbytes // nbytes, addresses.size))
        with suppress(KVPlanError):  # it copies as before
            sample = half.plan_all([(row.first, row.last, slot)], sample=True)
            return keep(sample, addresses, offsets, gathers=half.side == "src")
        return None


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
