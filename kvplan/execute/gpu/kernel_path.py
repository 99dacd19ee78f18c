"""The kernel path: launches of the copy kernel over units and run tables."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cost.policy import HOST_ROUTES, ROUTES, KernelSize
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.path import (
    Path,
    Sides,
    Work,
    Written,
    marked_in,
    pieces_of,
    refuse_kernels,
    route_of,
    work_of,
)
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import Shape
from kvplan.execute.gpu.tables import HEADER, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import together
from kvplan.plan.layers import Edges, LayerCuts
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# If a program has fewer tiles than EVEN_TILES, tiles are smaller, so that all programs end at about the same time.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
MOST_ROWS = 1 << 30  # the kernel counts rows in 32 bits, and adds the step of all programs
# A launch of more rows within a GPU, or between GPUs, reads its units from GPU memory. Within a GPU, to copy them there
# first takes as long as 1,000 reads across the link (H200). Loads and stores cross the link anyway.
NEAR_ROWS = 1024
ALL = -1  # a line's number of units: all


class Launches:
    """The launches of a plan, without its units.

    Attributes:
        lines: (headers, 18) int64, as the loop takes them.
        marks: (launches,) int64: zeros.
        rows, copies: rows and contiguous copies of a unit, over all headers; of headers with units of their own, of all
            these.
    """

    def __init__(self, lines: list[tuple[Table, int, int, int, int, int]]) -> None:
        self.lines: Int64Array = np.array([(*table.line, *others) for table, *others in lines], dtype=np.int64)
        self.marks = np.zeros(self.lines[-1, row_loops.LAUNCH_AT] + 1, dtype=np.int64)
        counts = [1 if count == ALL else count for _, _, _, count, _, _ in lines]
        self.rows = int(np.dot(self.lines[:, 1], counts))
        self.copies = sum(count * line[0].copies for count, line in zip(counts, lines, strict=True))


class KernelPath(Path):
    """The path ``"kernel"``: a Triton kernel computes the addresses of runs on the GPU, and copies them."""

    name = "kernel"

    def __init__(self, backend: Resources) -> None:
        self._backend = backend
        policy, processors = backend.policy, backend.device.multiprocessors
        self._sizes = {route: policy.kernel(route, processors) for route in ROUTES}
        self._here = f"cuda:{backend.device.ordinal}"
        self._known: WeakKeyDictionary[RunGroup | LayerCuts, dict[int, Launches]] = WeakKeyDictionary()

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Refuse memory that kernels do not reach; see :meth:`Path.refuse`."""
        del plan
        return refuse_kernels(self.name, sides)

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.kernel, lane.kernel

    def warm_up(self, plan: Plan, edges: Edges | None) -> None:
        """Compile the kernels for plans of these programs with any number of units, and upload their run tables."""
        size = self._size(plan)
        for _, piece in pieces_of(plan, edges):
            for tile in {size.tile, min(size.tile, EVEN_TILE)}:
                for group, _ in piece.parts:
                    self._table(group, tile, size.warps)

    def write(self, transfer: GpuTransfer) -> Written:
        """Write headers, units and launches; see :meth:`Path.write`."""
        plan, edges = transfer.plan, transfer.edges
        direction, stream = plan.direction, transfer.lane.kernel
        size = self._sizes[direction] if direction in HOST_ROUTES else self._size(plan)
        work = work_of(plan, edges)
        if work is not None:
            units, many, made = work.units, work.units.shape[1], self._whole(work, size)
            words, marks = many * len(made.lines), transfer.marks
        else:
            units, made, marks = self._several(plan, edges, size, transfer.marks)
            words, many = units.shape[1], 1
        if many * made.rows > MOST_ROWS:
            raise PathError(f"path 'kernel' copies at most {MOST_ROWS:,} runs at once, and this plan has more")
        nbytes = 8 * (HEADER * len(made.lines) + 2 * words)
        slot, launches = transfer.slot(nbytes), made.marks.size
        base, copied = slot.address, 0
        if direction not in HOST_ROUTES and many * made.rows > NEAR_ROWS:
            base, copied = transfer.scratch(nbytes).address, nbytes
        rows = np.empty((3 + 2 * launches, 8), dtype=np.int64)
        written = row_loops.write_launches(
            units, made.lines, size.programs, slot.address, base, copied, stream, transfer.begin, transfer.end,
            np.array(marks, dtype=np.int64) if marks else made.marks, slot.words, rows,
        )  # fmt: skip
        transfer.copies, transfer.launches = many * made.copies, launches
        rows = rows[:written]
        return Written(rows, written, marked_in(rows, marks))

    def _whole(self, work: Work, size: KernelSize) -> Launches:
        """Return a launch for all units of a run group, or for those of each of its pieces by layers."""
        tile = _tile(work.nbytes // len(work.groups), size)
        known = self._known.get(work.owner)
        if known is None:
            known = self._known.setdefault(work.owner, {})
        if tile not in known:
            steps = zip(work.groups, work.steps.T.tolist(), strict=True)
            known[tile] = Launches([(self._table(group, tile, size.warps), number, 0, ALL, *step)
                                    for number, (group, step) in enumerate(steps)])  # fmt: skip
        return known[tile]

    def _several(
        self, plan: Plan, edges: Edges | None, size: KernelSize, marks: Sequence[int]
    ) -> tuple[Int64Array, Launches, list[int]]:
        """Return units, launches, and the event behind each launch: one launch for run groups whose kernels are alike.

        Each group of layers has launches of its own, and its event is behind the last one.
        """
        pieces = [piece for _, piece in pieces_of(plan, edges)]
        tile, first, units, lines, behind = _tile(plan.nbytes // len(pieces), size), 0, [], [], list[int]()
        for number, piece in enumerate(pieces):
            alike: dict[Shape, list[tuple[Table, Int64Array]]] = {}
            for group, some in together(piece.moving):
                table = self._table(group, tile, size.warps)
                alike.setdefault(table.shape, []).append((table, some))
            for tables in alike.values():
                for table, some in tables:
                    lines.append((table, len(behind), first, some.shape[1], 0, 0))
                    units.append(some)
                    first += some.shape[1]
                behind.append(0)
            behind[-1] = marks[number] if marks else 0
        return np.concatenate(units, axis=1), Launches(lines), behind if marks else []

    def _table(self, group: RunGroup, tile: int, warps: int) -> Table:
        return self._backend.tables.get(group, group.packed, group.alignment, tile, key="direct", warps=warps)

    def _size(self, plan: Plan) -> KernelSize:
        return self._sizes[route_of(plan, self._here)]


def _tile(nbytes: int, size: KernelSize) -> int:
    """Return the bytes in flight per program, for a launch that moves ``nbytes`` bytes."""
    return min(size.tile, EVEN_TILE) if nbytes < EVEN_TILES * size.tile * size.programs else size.tile
