"""The kernel path: one launch per run group, over units and run tables; or one launch over flat descriptors."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np

from kvplan.cost.policy import ROUTES
from kvplan.errors import PathError
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.path import Path, Refusal, Sides, Streams, refuse_kernels
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import MAX_WIDTH, Shape, shape_of
from kvplan.execute.gpu.tables import Kernel
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, together
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# If a program has fewer tiles than EVEN_TILES, tiles are smaller, so that all programs end at about the same time.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
SLOW_COPIES = 1 << 14  # flat descriptors; to merge this number takes the CPU milliseconds
HEADER = 8  # words
PACKED = Struct(f"={HEADER}q")  # writes all words of a header in one call, without a Python object per word

Ready = tuple[Kernel, int]  # a kernel, and the address of its header


class Launch(NamedTuple):
    """A launch in a CUDA graph. Its header can be written again before a replay.

    Attributes:
        group: the run group, or None for flat descriptors.
        piece: the pinned slot with header and units.
        capacity: most units, or flat descriptors, that the slot holds: the number captured.
        width: bytes of a row that the kernel moves at once.
        word: alignment in bytes that the kernel is compiled for.
    """

    group: RunGroup | None
    piece: Piece
    capacity: int
    width: int
    word: int


class KernelPath(Path):
    """The path ``"kernel"``: a Triton kernel computes the addresses of runs on the GPU, and copies them."""

    name = "kernel"
    capturable = True

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        processors = resources.device.multiprocessors
        self._sizes = {route: resources.policy.kernel(route, processors) for route in ROUTES}

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """See :meth:`Path.refuse`."""
        del plan
        return None if sides.by_kernels else refuse_kernels(self.name, sides)

    def slow(self, transfer: DeviceTransfer) -> bool:
        """See :meth:`Path.slow`."""
        plan = transfer.plan
        return len(plan.parts) > 1 and self.slow_for(plan)

    def slow_for(self, plan: Plan) -> bool:
        """Return whether it takes the CPU long to issue a plan, because it has many flat descriptors."""
        return len(plan.parts) > self._resources.limits.launch_groups and copies_of(plan) > SLOW_COPIES

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.kernel, lane.kernel

    def warm_up(self, plan: Plan) -> None:
        """Compile the kernels for plans of these programs with any number of units, and upload their run tables.

        If the plan goes as flat descriptors, their kernel depends on the descriptors: only this plan's is compiled.
        """
        tables, limits, (_, tile) = self._resources.tables, self._resources.limits, self.width(plan.direction)
        parts = together(plan.parts)
        if len(parts) > limits.launch_groups:
            tables.function(_flat_shape(np.stack(plan.descriptors(max_nbytes=limits.flat_nbytes)), tile))
        for each in {tile, min(tile, EVEN_TILE)}:
            for group, _ in parts:
                tables.warm_up(group, group.packed, group.alignment, each, key="direct")

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> tuple[list[Ready], int, int]:
        """Write the headers of all launches; see :meth:`Path.prepare`."""
        parts = plan.parts if len(plan.parts) == 1 else [p for p in together(plan.parts) if p.units.shape[1]]
        programs, tile = self.width(plan.direction)
        if len(parts) > self._resources.limits.launch_groups:
            ready = self._prepare_flat(transfer, plan, tile)
        elif len(parts) == 1:
            ready = self._prepare_part(transfer, parts[0], programs, tile, lane.kernel)
        else:
            ready = []
            for part in parts:
                ready += self._prepare_part(transfer, part, programs, tile, lane.kernel)
        return ready, programs, lane.kernel

    def issue(self, transfer: DeviceTransfer, prepared: tuple[list[Ready], int, int]) -> None:
        """Launch the kernels; see :meth:`Path.issue`."""
        del transfer
        ready, programs, stream = prepared
        launch = self._resources.device.launch
        for (function, threads, shared), header in ready:
            launch(function, programs, threads, shared, stream, header)

    def issue_recorded(
        self, transfer: DeviceTransfer, prepared: tuple[list[Ready], int, int], begin: int, end: int
    ) -> bool:  # fmt: skip
        """Issue a single launch and its events in one call; see :meth:`Path.issue_recorded`."""
        del transfer
        ready, programs, stream = prepared
        if len(ready) != 1:
            return False
        kernel, header = ready[0]
        self._resources.device.launch_recorded(begin, end, kernel, programs, stream, header)
        return True

    def width(self, direction: str) -> tuple[int, int]:
        """Return programs, and bytes in flight per program. Small tiles of a store never fill the link's queues."""
        return self._sizes[direction][:2]

    def _prepare_part(self, transfer: DeviceTransfer, part: Part, programs: int, tile: int, stream: int) -> list[Ready]:
        tables, group = self._resources.tables, part.group
        count = part.units.shape[1]
        if part.nbytes < EVEN_TILES * tile * programs:
            tile = min(tile, EVEN_TILE)
        table = tables.get(group, group.packed, group.alignment, tile, stream, key="direct")
        step = max(self._resources.limits.launch_rows // table.items, 1)
        ready: list[Ready] = []
        for first in range(0, count, step):
            units = part.units if count <= step else part.units[:, first : first + step]
            piece = transfer.slot(8 * (HEADER + units.size))
            write_units(piece, units, table.words)
            ready.append((table.kernel, piece.address))
            if transfer.captures is not None:
                transfer.captures.append(Launch(group, piece, units.shape[1], table.shape.width, table.shape.word))
        transfer.count(count * group.packed.shape[1], len(ready))
        return ready

    def _prepare_flat(self, transfer: DeviceTransfer, plan: Plan, tile: int) -> list[Ready]:
        limits = self._resources.limits
        columns = np.stack(plan.descriptors(max_nbytes=limits.flat_nbytes))
        shape = _flat_shape(columns, tile)
        kernel = self._resources.tables.function(shape)
        chunks = -(-int(columns[2].max()) // shape.width)
        ready: list[Ready] = []
        for first in range(0, columns.shape[1], limits.launch_rows):
            rows = columns[:, first : first + limits.launch_rows]
            piece = transfer.slot(8 * (HEADER + 1 + rows.size))
            write_flat(piece, rows, chunks)
            ready.append((kernel, piece.address))
            if transfer.captures is not None:
                transfer.captures.append(Launch(None, piece, rows.shape[1], shape.width, shape.word))
        transfer.count(columns.shape[1], len(ready))
        return ready

    def replan(self, launches: list[Launch], plan: Plan) -> None:
        """Write the units of another plan into captured launches.

        Raises:
            PathError: the plan is of other programs, or has more units than were captured. Nothing is written.
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
        columns = np.stack(plan.descriptors(max_nbytes=self._resources.limits.flat_nbytes))
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
    """Return the shape of the kernel that copies descriptors (3, n)."""
    return shape_of(alignment_of(columns), min(int(columns[2].max()), MAX_WIDTH), tile)


def copies_of(plan: Plan) -> int:
    """Count the contiguous copies of a plan, before merging."""
    return sum(part.units.shape[1] * part.group.packed.shape[1] for part in plan.parts)


def alignment_of(columns: Int64Array) -> int:
    """Return the largest power of two, at most 16, that divides every number.

    >>> alignment_of(np.array([[64, 96], [32, 8]]))
    8
    """
    common = int(np.bitwise_or.reduce(columns, axis=None)) | 16
    return common & -common


def write_units(piece: Piece, units: Int64Array, table: tuple[int, ...] | None = None) -> None:
    """Write a header, then units, into a slot.

    Args:
        piece: the slot.
        units: (2, n) int64: source and destination addresses.
        table: header words of the run table; if None, the words in the slot stay.
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
    """Write into a slot: a header, one unit at address 0, and descriptors (3, n) as its items."""
    words, count = piece.words, columns.shape[1]
    zero = piece.address + 8 * HEADER
    items = zero + 8
    words[:HEADER] = (1, count, chunks, zero, zero, items, items + 8 * count, items + 16 * count)
    words[HEADER] = 0
    words[HEADER + 1 : HEADER + 1 + 3 * count] = columns.ravel()
