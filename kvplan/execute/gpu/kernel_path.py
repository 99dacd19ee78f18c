"""The kernel path: launches of the copy kernel over units and run tables, or over flat descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cost.policy import HOST_ROUTES, ROUTES, KernelSize
from kvplan.cuda.rows import COPY, LAUNCH, RECORD, rows_of
from kvplan.errors import PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.path import (
    NO_STEPS,
    Path,
    Refusal,
    Sides,
    Work,
    Written,
    pieces_of,
    refuse_kernels,
    route_of,
    work_of,
    works_of,
)
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import MAX_WIDTH, Shape, alignment_of, shape_of
from kvplan.execute.gpu.tables import HEADER, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import together
from kvplan.plan.layers import Edges, LayerCuts
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# If a program has fewer tiles than EVEN_TILES, tiles are smaller, so that all programs end at about the same time.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
# A plan of more run groups goes as flat descriptors: a run group costs the CPU as much as 30 of them.
MOST_GROUPS = 16
MOST_ROWS = 1 << 30  # the kernel counts rows in 32 bits, and adds the step of all programs
# Longer descriptors are cut, so that programs share the work; the kernel loops over the bytes of one descriptor.
FLAT_NBYTES = 64 << 10
# A launch of more rows within a GPU, or between GPUs, reads its units from GPU memory. Within a GPU, to copy them there
# first takes as long as 1,000 reads across the link (H200). Loads and stores cross the link anyway.
NEAR_ROWS = 1024
ALL = np.empty((0, 2), dtype=np.int64)  # of each run group, all units


class Prepared:
    """The launches of a run group, or of its pieces by layers, without units.

    Args:
        tables: the run table of each.

    Attributes:
        headers: (pieces, 9) int64: the header of each launch.
        kernels: (pieces, 4) int64: function, threads of a program, bytes of shared memory, and rows of a tile.
        edges, marks: (pieces + 1,) and (pieces,) int64, as the loop takes them.
        rows: rows of a unit, of all pieces.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.headers: Int64Array = np.stack([table.header for table in tables])
        self.kernels: Int64Array = kernels_of(tables)
        self.edges = np.arange(len(tables) + 1, dtype=np.int64)
        self.marks = np.zeros(len(tables), dtype=np.int64)
        self.rows = int(self.headers[:, 1].sum())
        self.fresh = list(tables)


class KernelPath(Path):
    """The path ``"kernel"``: a Triton kernel computes the addresses of runs on the GPU, and copies them."""

    name = "kernel"

    def __init__(self, backend: Resources) -> None:
        self._backend = backend
        policy, processors = backend.policy, backend.device.multiprocessors
        self._sizes = {route: policy.kernel(route, processors) for route in ROUTES}
        self._here = f"cuda:{backend.device.ordinal}"
        self._known: WeakKeyDictionary[RunGroup | LayerCuts, dict[int, Prepared]] = WeakKeyDictionary()

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """Refuse memory that kernels do not reach; see :meth:`Path.refuse`."""
        del plan
        return None if sides.by_kernels else refuse_kernels(self.name, sides)

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.kernel, lane.kernel

    def warm_up(self, plan: Plan, edges: Edges | None) -> None:
        """Compile the kernels for plans of these programs with any number of units, and upload their run tables.

        If the plan goes as flat descriptors, their kernel depends on the descriptors: only this plan's is compiled.
        """
        size = self._size(plan)
        for _, piece in pieces_of(plan, edges):
            parts = together(piece.parts)
            if len(parts) > MOST_GROUPS:
                self._backend.tables.function(flat_shape(np.stack(piece.descriptors(max_nbytes=FLAT_NBYTES)), size))
            for tile in {size.tile, min(size.tile, EVEN_TILE)}:
                for group, _ in parts:
                    self._table(group, tile, size.warps)

    def write(self, transfer: GpuTransfer) -> Written:
        """Write headers, units and launches; see :meth:`Path.write`."""
        plan, edges, stream = transfer.plan, transfer.edges, transfer.lane.kernel
        work = work_of(plan, edges)
        if work is not None:
            return self._write_work(transfer, work, stream)
        pieces = pieces_of(plan, edges)
        marks = transfer.marks or [0]
        made, marked = [rows_of([(RECORD, stream, transfer.begin)])], list[int]()
        for (_, piece), mark in zip(pieces, marks, strict=False):
            made.append(self._write_piece(transfer, piece, stream, mark))
            marked.append(sum(map(len, made)))
        made.append(rows_of([(RECORD, stream, transfer.end)]))
        rows = np.concatenate(made)
        return Written(rows, len(rows), marked if edges is not None else ())

    def _write_work(self, transfer: GpuTransfer, work: Work, stream: int) -> Written:
        """Write a launch for a run group, or for each of its pieces by layers."""
        direction, count, pieces = transfer.plan.direction, work.units.shape[1], len(work.groups)
        size = self._sizes[direction] if direction != "device" else self._size(transfer.plan)
        if work.copies * count > MOST_ROWS:
            raise PathError(f"path 'kernel' copies at most {MOST_ROWS:,} runs at once, and this plan has more")
        made = self._prepared(work, _tile(work.nbytes // pieces, size), size.warps, stream)
        nbytes = 8 * pieces * (HEADER + 2 * count)
        slot = transfer.slot(nbytes)
        base, copied = slot.address, 0
        if direction == "device" and count * made.rows > NEAR_ROWS:
            base, copied = transfer.scratch(nbytes).address, nbytes
        marks = np.array(transfer.marks, dtype=np.int64) if transfer.marks else made.marks
        rows = np.empty((3 + 2 * pieces, 8), dtype=np.int64)
        written = row_loops.write_launches(
            work.units, ALL, work.steps, made.headers, made.edges, made.kernels,
            size.programs, slot.address, base, copied, stream, transfer.begin, transfer.end, marks, slot.words, rows,
        )  # fmt: skip
        transfer.copies, transfer.launches = work.copies * count, pieces
        if not transfer.marks:
            return Written(rows[:written], written)
        return Written(rows[:written], written, range(4 if copied else 3, written, 2))

    def _write_piece(self, transfer: GpuTransfer, plan: Plan, stream: int, mark: int) -> Int64Array:
        """Write the launches of a plan of several run groups: one for those whose kernels have one shape."""
        size = self._size(plan)
        works = works_of(plan)
        if len({work.owner for work in works}) > MOST_GROUPS:
            return self._write_flat(transfer, plan, stream, mark)
        tile, held = _tile(plan.nbytes, size), dict[Shape, list[tuple[Work, Table]]]()
        for work in works:
            table = self._table(work.groups[0], tile, size.warps)
            self._backend.tables.ready(table, stream)
            held.setdefault(table.shape, []).append((work, table))
        made = []
        for number, alike in enumerate(held.values(), 1):
            tables, counts = [table for _, table in alike], [work.units.shape[1] for work, _ in alike]
            prepared, rows = Prepared(tables), np.empty((3, 8), dtype=np.int64)
            nbytes = 8 * (HEADER * len(alike) + 2 * sum(counts))
            total = sum(count * table.header[1] for count, table in zip(counts, tables, strict=True))
            slot = transfer.slot(nbytes)
            base, copied = self._base(transfer, slot.address, nbytes, int(total))
            last = mark if number == len(held) else 0
            written = row_loops.write_launches(
                np.concatenate([work.units for work, _ in alike], axis=1),
                np.stack((np.cumsum([0, *counts[:-1]]), counts), axis=1), np.repeat(NO_STEPS, len(alike), axis=1),
                prepared.headers, np.array([0, len(alike)]), prepared.kernels[:1], size.programs, slot.address, base,
                copied, stream, 0, 0, np.array([last], dtype=np.int64), slot.words, rows,
            )  # fmt: skip
            transfer.count(sum(work.copies * work.units.shape[1] for work, _ in alike), 1)
            made.append(rows[:written])
        return np.concatenate(made)

    def _write_flat(self, transfer: GpuTransfer, plan: Plan, stream: int, mark: int) -> Int64Array:
        """Write one launch over flat descriptors: one unit at address 0, whose items they are."""
        size = self._size(plan)
        columns = np.stack(plan.descriptors(max_nbytes=FLAT_NBYTES))
        shape, count, nbytes = flat_shape(columns, size), columns.shape[1], 8 * (HEADER + 1 + columns.size)
        kernel, slot = self._backend.tables.function(shape), transfer.slot(nbytes)
        base, copied = self._base(transfer, slot.address, nbytes, count)
        write_flat(slot.words, columns, -(-int(columns[2].max()) // shape.width), base)
        transfer.count(count, 1)
        programs = max(min(size.programs, -(-count // shape.rows)), 1)
        calls: list[tuple[int, ...]] = [(COPY, stream, base, slot.address, nbytes)] if copied else []
        calls.append((LAUNCH, stream, base, kernel.function, programs, kernel.threads, kernel.shared))
        return rows_of([*calls, (RECORD, stream, mark)] if mark else calls)

    def _prepared(self, work: Work, tile: int, warps: int, stream: int) -> Prepared:
        known = self._known.get(work.owner)
        if known is None:
            known = self._known.setdefault(work.owner, {})
        made = known.get(tile)
        if made is None:
            made = known[tile] = Prepared([self._table(group, tile, warps) for group in work.groups])
        if made.fresh:
            made.fresh = [table for table in made.fresh if not self._backend.tables.ready(table, stream)]
        return made

    def _table(self, group: RunGroup, tile: int, warps: int) -> Table:
        return self._backend.tables.get(group, group.packed, group.alignment, tile, key="direct", warps=warps)

    def _base(self, transfer: GpuTransfer, address: int, nbytes: int, rows: int) -> tuple[int, int]:
        """Return the address at which a kernel reads a slot, and the bytes to copy there first."""
        if transfer.plan.direction in HOST_ROUTES or rows <= NEAR_ROWS:
            return address, 0
        return transfer.scratch(nbytes).address, nbytes

    def _size(self, plan: Plan) -> KernelSize:
        direction = plan.direction
        return self._sizes[route_of(plan, self._here) if direction == "device" else direction]


def kernels_of(tables: Sequence[Table]) -> Int64Array:
    """Return (n, 4) int64: function, threads and shared memory of a program, and rows of a tile, of each kernel."""
    return np.array([(*table.kernel, table.shape.rows) for table in tables], dtype=np.int64)


def _tile(nbytes: int, size: KernelSize) -> int:
    """Return the bytes in flight per program, for a launch that moves ``nbytes`` bytes."""
    return min(size.tile, EVEN_TILE) if nbytes < EVEN_TILES * size.tile * size.programs else size.tile


def flat_shape(columns: Int64Array, size: KernelSize) -> Shape:
    """Return the shape of the kernel that copies descriptors (3, n)."""
    longest = min(int(columns[2].max()), MAX_WIDTH)
    return shape_of(alignment_of(columns), longest, size.tile, size.warps)


def write_flat(words: Int64Array, columns: Int64Array, chunks: int, base: int) -> None:
    """Write into a slot: a header, one unit at address 0, and descriptors as its items.

    Args:
        words: memory of the slot.
        columns: (3, n) int64: source, destination and bytes.
        chunks: chunks per item.
        base: address at which the kernel reads the slot's first byte.
    """
    count, zero = columns.shape[1], base + 8 * HEADER
    items = zero + 8
    words[:HEADER] = (1, count, chunks, zero, zero, items, items + 8 * count, items + 16 * count, 1)
    words[HEADER] = 0
    words[HEADER + 1 : HEADER + 1 + 3 * count] = columns.ravel()
