"""The kernel path: one launch a run group, over units and run tables; or one launch over flat descriptors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.cost.policy import Policy
from kvplan.errors import PathError
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.shape import MAX_WIDTH, Shape, shape_of
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, together
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Fork, Lane
    from kvplan.execute.gpu.tables import Kernel

LOAD_TILE, STORE_TILE = 128 << 10, 32 << 10  # bytes in flight a program
# A transfer of so few tiles a program goes in smaller ones, so that all programs end together.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
# More run groups than this go as flat descriptors, in one launch: every launch costs the CPU as much as 100 of them.
MAX_GROUPS = 4
# Bytes of a flat descriptor: longer ones are cut, so that programs share the work; the kernel loops over the rest.
FLAT_NBYTES = 64 << 10
HEADER = 8  # words
PACKED = Struct(f"={HEADER}q")  # written in one go: a word at a time costs an object each
# Rows of one launch: they are counted in 32 bits, with room for the steps of all programs.
MAX_ROWS = 1 << 30


Ready = tuple["Kernel", int]  # a kernel and the header that it will read


class Launch(NamedTuple):
    """A launch whose header may be written again: one captured into a graph.

    Attributes:
        group: the run group, or None for flat descriptors.
        piece: header and units.
        capacity: units, or flat descriptors, that were captured; the slot has room for no more.
        width: bytes of a row that the kernel moves at once.
        word: alignment that the kernel was compiled for.
    """

    group: RunGroup | None
    piece: Piece
    capacity: int
    width: int
    word: int


class KernelPath:
    """Triton over the factored plan; addresses of runs are worked out on the GPU."""

    name = "kernel"
    capturable = True
    in_order = True

    def __init__(self, runtime: Runtime, policy: Policy) -> None:
        self._runtime = runtime
        self._widths = {
            direction: (policy.programs(direction), policy.tile_bytes or tile)
            for direction, tile in (("load", LOAD_TILE), ("store", STORE_TILE), ("device", LOAD_TILE))
        }

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        del direction
        return lane.kernel, lane.kernel

    def slow(self, plan: Plan, groups: int = 1) -> bool:
        """Whether issuing it takes the CPU long, cut into so many groups of layers."""
        del groups
        return len(plan.parts) > MAX_GROUPS and copies_of(plan) > 1 << 14

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Lane | Fork) -> Callable[[], None]:
        """Write the headers of all launches; what is returned launches them, on the lane's kernel stream."""
        parts = plan.parts if len(plan.parts) == 1 else [p for p in together(plan.parts) if p.units.shape[1]]
        programs, tile = self.width(plan.direction)
        if len(parts) > MAX_GROUPS:
            ready = self._prepare_flat(transfer, plan, tile)
        elif len(parts) == 1:
            ready = self._prepare_part(transfer, parts[0], programs, tile, lane.kernel)
        else:
            ready = []
            for part in parts:
                ready += self._prepare_part(transfer, part, programs, tile, lane.kernel)
        transfer.launches += len(ready)
        return partial(self._launch, ready, programs, lane.kernel)

    def make_ready(self, plan: Plan) -> None:
        """Compile the kernels that plans of these programs take, large or small, and upload their run tables.

        Of more than :data:`MAX_GROUPS` run groups, whose kernel depends on the descriptors, that of this plan; and the
        tables, for plans of fewer of them.
        """
        tables, (_, tile) = self._runtime.tables, self.width(plan.direction)
        parts = together(plan.parts)
        if len(parts) > MAX_GROUPS:
            tables.function(_flat_shape(np.stack(plan.descriptors(max_nbytes=FLAT_NBYTES)), tile))
        for each in {tile, min(tile, EVEN_TILE)}:
            for group, _ in parts:
                tables.make_ready(group, group.packed, group.alignment, each, key="direct")

    def _launch(self, ready: list[Ready], programs: int, stream: int) -> None:
        launch = self._runtime.device.launch
        for (function, threads, shared), header in ready:
            launch(function, programs, threads, shared, stream, header)

    def width(self, direction: str) -> tuple[int, int]:
        """Programs, and bytes in flight of each: small tiles of a store never fill the link's queues."""
        return self._widths[direction]

    def _prepare_part(self, transfer: DeviceTransfer, part: Part, programs: int, tile: int, stream: int) -> list[Ready]:
        runtime, group = self._runtime, part.group
        count = part.units.shape[1]
        if part.nbytes < EVEN_TILES * tile * programs:
            tile = min(tile, EVEN_TILE)
        table = runtime.tables.get(group, group.packed, group.alignment, tile, stream, key="direct")
        step = max(MAX_ROWS // table.items, 1)
        ready: list[Ready] = []
        for first in range(0, count, step):
            units = part.units if count <= step else part.units[:, first : first + step]
            piece = transfer.slot(8 * (HEADER + units.size))
            write_units(piece, units, table.words)
            ready.append((table.kernel, piece.address))
            if transfer._captured:
                transfer._launches.append(Launch(group, piece, units.shape[1], table.shape.width, table.shape.word))
        transfer.copies += count * group.packed.shape[1]
        return ready

    def _prepare_flat(self, transfer: DeviceTransfer, plan: Plan, tile: int) -> list[Ready]:
        columns = np.stack(plan.descriptors(max_nbytes=FLAT_NBYTES))
        shape = _flat_shape(columns, tile)
        kernel = self._runtime.tables.function(shape)
        chunks = -(-int(columns[2].max()) // shape.width)
        ready: list[Ready] = []
        for first in range(0, columns.shape[1], MAX_ROWS):
            rows = columns[:, first : first + MAX_ROWS]
            piece = transfer.slot(8 * (HEADER + 1 + rows.size))
            write_flat(piece, rows, chunks)
            ready.append((kernel, piece.address))
            if transfer._captured:
                transfer._launches.append(Launch(None, piece, rows.shape[1], shape.width, shape.word))
        transfer.copies += columns.shape[1]
        return ready

    def replan(self, launches: list[Launch], plan: Plan) -> None:
        """Write other units into captured launches.

        Raises:
            PathError: the plan is not of the programs that were captured, or has more units; nothing is written then.
        """
        parts = [part for part in together(plan.parts) if part.units.shape[1]]
        if any(launch.group is None for launch in launches):
            self._replan_flat(launches, plan)
            return
        held: dict[RunGroup, list[Launch]] = {}
        for launch in launches:
            if launch.group is not None:
                held.setdefault(launch.group, []).append(launch)
        for part in parts:
            if part.group not in held:
                raise PathError("the plan is of another program than the one captured; capture it by itself")
            capacity = sum(launch.capacity for launch in held[part.group])
            if part.units.shape[1] > capacity:
                raise PathError(
                    f"the plan moves {part.units.shape[1]} units; what was captured has room for {capacity}"
                )
        units = {part.group: part.units for part in parts}
        for group, captured in held.items():
            left = units.get(group, np.empty((2, 0), dtype=np.int64))
            for launch in captured:
                write_units(launch.piece, left[:, : launch.capacity])
                left = left[:, launch.capacity :]

    def _replan_flat(self, launches: list[Launch], plan: Plan) -> None:
        columns = np.stack(plan.descriptors(max_nbytes=FLAT_NBYTES))
        capacity = sum(launch.capacity for launch in launches)
        if columns.shape[1] > capacity:
            raise PathError(f"the plan has {columns.shape[1]} descriptors; what was captured has room for {capacity}")
        if columns.size and alignment_of(columns) % launches[0].word:
            raise PathError(f"the plan is aligned to {alignment_of(columns)} bytes; captured were {launches[0].word}")
        longest = int(columns[2].max(initial=0))
        for launch in launches:
            write_flat(launch.piece, columns[:, : launch.capacity], -(-longest // launch.width))
            columns = columns[:, launch.capacity :]


def _flat_shape(columns: Int64Array, tile: int) -> Shape:
    """Of the kernel that copies descriptors (3, n)."""
    return shape_of(alignment_of(columns), min(int(columns[2].max()), MAX_WIDTH), tile)


def copies_of(plan: Plan) -> int:
    """Contiguous copies, before units are merged."""
    return sum(part.units.shape[1] * part.group.packed.shape[1] for part in plan.parts)


def alignment_of(columns: Int64Array) -> int:
    """Largest power of two, at most 16, that divides every number.

    >>> alignment_of(np.array([[64, 96], [32, 8]]))
    8
    """
    common = int(np.bitwise_or.reduce(columns, axis=None)) | 16
    return common & -common


def write_units(piece: Piece, units: Int64Array, table: tuple[int, ...] | None = None) -> None:
    """Fill a slot: a header, then units.

    Args:
        piece: the slot.
        units: (2, n) int64: source and destination addresses.
        table: the header's words of the run table; None keeps those that are there.
    """
    words, count = piece.words, units.shape[1]
    first = piece.address + 8 * HEADER
    if table is None:
        words[0], words[3], words[4] = count, first, first + 8 * count
    else:
        _, items, chunks, _, _, *columns = table
        PACKED.pack_into(words, 0, count, items, chunks, first, first + 8 * count, *columns)
    words[HEADER : HEADER + 2 * count] = units.ravel()


def write_flat(piece: Piece, columns: Int64Array, chunks: int) -> None:
    """Fill a slot: a header, one unit at address 0, and descriptors (3, n) as its items."""
    words, count = piece.words, columns.shape[1]
    zero = piece.address + 8 * HEADER
    items = zero + 8
    words[:HEADER] = (1, count, chunks, zero, zero, items, items + 8 * count, items + 16 * count)
    words[HEADER] = 0
    words[HEADER + 1 : HEADER + 1 + 3 * count] = columns.ravel()
