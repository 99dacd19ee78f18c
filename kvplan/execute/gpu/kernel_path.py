"""The kernel path: launches of the copy kernel over units and run tables."""

from __future__ import annotations

import numpy as np

from kvplan.cost.policy import HOST_ROUTES, ROUTES, KernelSize
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.path import Path, Sides, refuse_kernels, route_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import Shape
from kvplan.execute.gpu.tables import HEADER, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# If a program has fewer tiles than EVEN_TILES, tiles are smaller, so that all programs end at about the same time.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
MOST_ROWS = 1 << 30  # the kernel counts rows in 32 bits, and adds the step of all programs
# A launch of more rows within a GPU, or between GPUs, reads its units from GPU memory. Within a GPU, to copy them there
# first takes as long as 1,000 reads across the link (H200). Loads and stores cross the link anyway.
NEAR_ROWS = 1024


class KernelPath(Path):
    """The path ``"kernel"``: a Triton kernel computes the addresses of runs on the GPU, and copies them."""

    name = "kernel"

    def __init__(self, backend: Resources) -> None:
        self._tables = backend.tables
        sizes = {route: backend.policy.kernel(route, backend.device.multiprocessors) for route in ROUTES}
        self._sizes = {route: (size, EVEN_TILES * size.tile * size.programs) for route, size in sizes.items()}
        self._here = f"cuda:{backend.device.ordinal}"

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Refuse memory that kernels do not reach; see :meth:`Path.refuse`."""
        del plan
        return refuse_kernels(self.name, sides)

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.kernel, lane.kernel

    def warm_up(self, plan: Plan) -> None:
        """Compile the kernels for plans of these programs with any number of units, and upload their run tables."""
        size, _ = self._sizes[route_of(plan, self._here)]
        for tile in {size.tile, min(size.tile, EVEN_TILE)}:
            for group, _ in plan.parts:
                self._tables.get(group, _items, tile, size.warps)

    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Write headers, units and launches; see :meth:`Path.write`."""
        near = plan.direction in HOST_ROUTES
        size, even = self._sizes[plan.direction if near else route_of(plan, self._here)]
        tile = min(size.tile, EVEN_TILE) if plan.nbytes < even else size.tile
        if len(plan.parts) == 1:
            ((group, units),) = plan.parts
            table, launches, units = self._tables.get(group, _items, tile, size.warps), 1, np.ascontiguousarray(units)
            count, lines = units.shape[1], table.lines
            total, copies = count * table.items, count * table.copies
        else:
            units, lines, launches, total, copies = self._joined(plan, tile, size)
        if total > MOST_ROWS:
            raise PathError(f"path 'kernel' copies at most {MOST_ROWS:,} runs at once, and this plan has more")
        nbytes, copied = 8 * (HEADER * len(lines) + 2 * units.shape[1]), 0
        slot = transfer.slot(nbytes)
        base = slot.address
        if not near and total > NEAR_ROWS:
            base, copied = transfer.scratch(nbytes).address, nbytes
        rows = np.empty((3 + launches, 8), dtype=np.int64)
        written = row_loops.write_launches(
            units, lines, size.programs, slot.address, base, copied, transfer.lane.kernel, begin, end, slot.words, rows
        )
        transfer.count(copies, launches)
        return rows[:written], written

    def _joined(self, plan: Plan, tile: int, size: KernelSize) -> tuple[Int64Array, Int64Array, int, int, int]:
        """Return units, lines, launches, rows and copies of several parts: one launch for those of the same kernel."""
        alike: dict[Shape, list[tuple[Table, Int64Array]]] = {}
        for group, units in plan.moving:
            table = self._tables.get(group, _items, tile, size.warps)
            alike.setdefault(table.shape, []).append((table, units))
        some = [(number, *each) for number, same in enumerate(alike.values()) for each in same]
        lines = np.concatenate([table.lines for _, table, _ in some])
        lines[:, row_loops.LAUNCH_AT :] = [(number, units.shape[1]) for number, _, units in some]
        total, copies = (
            sum(units.shape[1] * getattr(table, name) for _, table, units in some) for name in ("items", "copies")
        )
        return np.concatenate([units for *_, units in some], axis=1), lines, len(alike), total, copies


def _items(group: RunGroup) -> tuple[Int64Array, int]:
    return group.packed, group.alignment
