"""The kernel path: one launch over the units and run tables of several run groups; or one over flat descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.cost.policy import HOST_ROUTES, ROUTES, KernelSize
from kvplan.cuda.call_list import CallList
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.by_layer.kernel_layers import KernelLayers
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.launches.ahead import Ahead
from kvplan.execute.gpu.launches.headers import HEADER, write_flat, write_units
from kvplan.execute.gpu.launches.recipes import Ready, Recipe, Recipes, programs_of
from kvplan.execute.gpu.launches.resident import Resident
from kvplan.execute.gpu.path import Path, Refusal, Sides, Streams, refuse_kernels, route_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import MAX_WIDTH, Shape, alignment_of, shape_of
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.descriptors import Part, together
from kvplan.plan.layers import LayerCuts
from kvplan.plan.plan import Plan

# If a program has fewer tiles than EVEN_TILES, tiles are smaller, so that all programs end at about the same time.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
# Most copies of a unit whose addresses are kept for many launches: the run table is kept for each slot, and a peer may
# have chosen it.
KEPT_COPIES = 256


class KernelPath(Path):
    """The path ``"kernel"``: a Triton kernel computes the addresses of runs on the GPU, and copies them."""

    name = "kernel"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        device, policy = resources.device, resources.policy
        self._here = f"cuda:{device.ordinal}"
        self._layers = KernelLayers(resources)
        self._sizes = {route: policy.kernel(route, device.multiprocessors) for route in ROUTES}
        self._recipes = Recipes(resources.limits.decisions)

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """See :meth:`Path.refuse`."""
        del plan
        return None if sides.by_kernels else refuse_kernels(self.name, sides)

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.kernel, lane.kernel

    def warm_up(self, plan: Plan) -> None:
        """Compile the kernels for plans of these programs with any number of units, and upload their run tables.

        If the plan goes as flat descriptors, their kernel depends on the descriptors: only this plan's is compiled.
        """
        tables, limits, size = self._resources.tables, self._resources.limits, self._size(plan)
        self._loops.load()
        parts = together(plan.parts)
        if len(parts) > limits.launch_groups:
            tables.function(_flat_shape(np.stack(plan.descriptors(max_nbytes=limits.flat_nbytes)), size))
        for tile in {size.tile, min(size.tile, EVEN_TILE)}:
            for group, _ in parts:
                tables.warm_up(group, group.packed, group.alignment, tile, key="direct", max_warps=size.warps)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> tuple[list[Ready], int]:
        """Write the headers of all launches; see :meth:`Path.prepare`."""
        ahead = plan.ahead
        if ahead is not None and ahead.of(self._resources):
            ready = ahead.ready(transfer, lane.kernel)
            if ready is not None:
                return [ready], lane.kernel
        resources, size = self._resources, self._size(plan)
        parts = plan.parts if len(plan.parts) == 1 else [p for p in together(plan.parts) if p.units.shape[1]]
        if len(parts) > resources.limits.launch_groups:
            return self._prepare_flat(transfer, plan, size), lane.kernel
        tile = _tile(plan.nbytes, size)
        held: dict[Shape, list[tuple[Part, Table]]] = {}
        for part in parts:
            group = part.group
            table = resources.tables.get(
                group, group.packed, group.alignment, tile, lane.kernel, key="direct", max_warps=size.warps,
            )  # fmt: skip
            if len(parts) == 1:
                ready = self._prepare_one(transfer, plan, part, table, size)
                return [ready or self._prepare_launch(transfer, plan, [(part, table)], size)], lane.kernel
            held.setdefault(table.shape, []).append((part, table))
        return [self._prepare_launch(transfer, plan, alike, size) for alike in held.values()], lane.kernel

    def write(self, transfer: DeviceTransfer, prepared: tuple[list[Ready], int], calls: CallList) -> None:
        """Launch the kernels; see :meth:`Path.write`."""
        del transfer
        ready, stream = prepared
        for kernel, programs, header, (source, nbytes) in ready:
            if nbytes:
                calls.copy(header, source, nbytes, stream)
            calls.launch(kernel, programs, header, stream)

    def write_layers(
        self, transfer: DeviceTransfer, cuts: LayerCuts, lane: Streams, marks: Sequence[int], calls: CallList
    ) -> list[int] | None:  # fmt: skip
        """Launch a kernel for each piece; see :meth:`Path.write_layers`."""
        plan, before = transfer.plan, calls.count
        size = self._size(plan)
        tile = _tile(plan.nbytes // len(cuts.groups), size)
        written = self._layers.write(transfer, plan, cuts, lane.kernel, size, tile, marks)
        if written is None:
            return None
        calls.extend(written.calls)
        return [before + rows for rows in written.marked]

    def known(self, plan: Plan) -> Recipe | None:
        """Return the recipe of a launch; see :meth:`Path.known`."""
        return self._recipes.get(plan) if plan.ahead is None else None

    def issue_known(self, transfer: DeviceTransfer, known: Recipe, lane: Streams, begin: int, end: int) -> None:
        """Write the header and issue the launch, in one call; see :meth:`Path.issue_known`."""
        _, table, programs, copied, room, copies = known
        source = header = transfer.slot(room).address
        if copied:
            header = transfer.scratch(room).address
        transfer.count(copies, 1)
        units, stream = transfer.plan.parts[0].units, lane.kernel
        self._resources.device.launch_units(
            begin, end, table.kernel, programs, stream, header, source, copied, units, table.header
        )  # fmt: skip

    def issue_recorded(
        self, transfer: DeviceTransfer, prepared: tuple[list[Ready], int], begin: int, end: int
    ) -> bool:  # fmt: skip
        """Issue a single launch and its events in one call; see :meth:`Path.issue_recorded`."""
        del transfer
        ready, stream = prepared
        if len(ready) != 1:
            return False
        kernel, programs, header, (source, nbytes) = ready[0]
        self._resources.device.launch_recorded(begin, end, kernel, programs, stream, header, source, nbytes)
        return True

    def _size(self, plan: Plan) -> KernelSize:
        return self._sizes[route_of(plan, self._here)]

    def upload(self, ahead: Ahead, plan: Plan) -> None:
        """Upload the units of a plan, and the header of its launch; see :meth:`Path.upload`. The device is current."""
        part, size = plan.parts[0], self._size(plan)
        table = self._resources.tables.get(
            part.group, part.group.packed, part.group.alignment, _tile(plan.nbytes, size), ahead.stream, key="direct",
            max_warps=size.warps,
        )  # fmt: skip
        rows = part.units.shape[1] * table.items
        if rows <= self._resources.limits.launch_rows:
            ahead.upload(table, programs_of(size, rows, table.shape), part.group.packed.shape[1])

    def keeps(self, plan: Plan) -> bool:
        """Return whether :meth:`keep` can; see :meth:`Path.keeps`. Each slot has a run table of its own then."""
        return int(plan.group.packed.shape[1]) <= KEPT_COPIES

    def keep(
        self, ahead: Ahead, plan: Plan, addresses: Int64Array, offsets: Int64Array, *, gathers: bool
    ) -> Resident:  # fmt: skip
        """Upload unit addresses for many launches; see :meth:`Path.keep`. The device is current."""
        size, group = self._size(plan), plan.group
        tile = _tile(plan.nbytes, size)
        made = Resident(ahead, group, addresses, offsets, gathers=gathers, size=size, tile=tile)
        ahead.send()
        return made

    def _prepare_one(
        self, transfer: DeviceTransfer, plan: Plan, part: Part, table: Table, size: KernelSize
    ) -> Ready | None:  # fmt: skip
        """Do as :meth:`_prepare_launch`, in a compiled loop, for one header; otherwise return None."""
        count = part.units.shape[1]
        rows = count * table.items
        if rows > self._resources.limits.launch_rows or loops.loaded is None:
            return None
        nbytes = 8 * (HEADER + 2 * count)
        piece = transfer.slot(nbytes)
        base, copied = self._base(transfer, plan, piece, nbytes, rows)
        self._loops.write_units(piece.words, base, 0, HEADER, part.units, table.header)
        copies = part.copies
        transfer.count(copies, 1)
        ready = _ready(table, size, rows, base, (piece.address, copied))
        self._recipes.keep(plan, table, ready, piece.nbytes, copies)
        return ready

    @cached_property
    def _loops(self) -> ModuleType:
        from kvplan.cuda import short_calls  # imports numba

        return short_calls

    def _prepare_launch(
        self, transfer: DeviceTransfer, plan: Plan, alike: Sequence[tuple[Part, Table]], size: KernelSize
    ) -> Ready:
        """Write headers and units of run groups whose kernels have one shape."""
        most = self._resources.limits.launch_rows
        segments: list[tuple[Part, Int64Array, Table]] = []
        copies = rows = words = 0
        for part, table in alike:
            units, count = part.units, part.units.shape[1]
            copies += part.copies
            rows += count * table.items
            words += 2 * count
            step = max(most // table.items, 1)  # the kernel counts the rows of a header in 32 bits
            if count <= step:
                segments.append((part, units, table))
            else:
                segments += [(part, units[:, first : first + step], table) for first in range(0, count, step)]
        at = HEADER * len(segments)
        nbytes = 8 * (at + words)
        piece = transfer.slot(nbytes)
        base, copied = self._base(transfer, plan, piece, nbytes, rows)
        for k, (_, units, held) in enumerate(segments):
            write_units(piece, base, k, at, units, held.words, len(segments))
            at += units.size
        transfer.count(copies, 1)
        return _ready(alike[0][1], size, rows, base, (piece.address, copied))

    def _base(self, transfer: DeviceTransfer, plan: Plan, piece: Piece, nbytes: int, rows: int) -> tuple[int, int]:
        """Return the address at which a kernel reads a slot, and the bytes to copy there first.

        Each row reads its unit's addresses. A load or store crosses the link anyway, and reads them in place. Between
        GPUs, and within one, thousands of reads across the link would take longer than the copies. So one copy brings
        the slot to the GPU. The copy engine makes it, because a kernel would wait for a free SM beside compute.
        """
        if plan.direction in HOST_ROUTES or rows <= self._resources.limits.near_rows:
            return piece.address, 0
        return transfer.scratch(nbytes).address, nbytes

    def _prepare_flat(self, transfer: DeviceTransfer, plan: Plan, size: KernelSize) -> list[Ready]:
        limits = self._resources.limits
        columns = np.stack(plan.descriptors(max_nbytes=limits.flat_nbytes))
        shape = _flat_shape(columns, size)
        kernel = self._resources.tables.function(shape)
        chunks = -(-int(columns[2].max()) // shape.width)
        ready: list[Ready] = []
        for first in range(0, columns.shape[1], limits.launch_rows):
            rows = columns[:, first : first + limits.launch_rows]
            count, nbytes = rows.shape[1], 8 * (HEADER + 1 + rows.size)
            piece = transfer.slot(nbytes)
            base, copied = self._base(transfer, plan, piece, nbytes, count)
            write_flat(piece, rows, chunks, base)
            ready.append(Ready(kernel, programs_of(size, count, shape), base, (piece.address, copied)))
        transfer.count(columns.shape[1], len(ready))
        return ready


def _ready(table: Table, size: KernelSize, rows: int, base: int, copied: tuple[int, int]) -> Ready:
    return Ready(table.kernel, programs_of(size, rows, table.shape), base, copied)


def _tile(nbytes: int, size: KernelSize) -> int:
    """Return the bytes in flight per program, for a launch that moves ``nbytes`` bytes."""
    return min(size.tile, EVEN_TILE) if nbytes < EVEN_TILES * size.tile * size.programs else size.tile


def _flat_shape(columns: Int64Array, size: KernelSize) -> Shape:
    """Return the shape of the kernel that copies descriptors (3, n)."""
    longest = min(int(columns[2].max()), MAX_WIDTH)
    return shape_of(alignment_of(columns), longest, size.tile, size.warps)
