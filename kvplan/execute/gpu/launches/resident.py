"""Launches over units whose addresses stay in GPU memory: a submit names some units and a slot, and writes one header.

The chunks of a packed transfer are such launches. The addresses of all units are uploaded once. In a slot, units lie
one behind the other: the kernel reads these offsets from a second column, and the slot's address is in its run table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.cost.policy import KernelSize
from kvplan.errors import TransferError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.launches.ahead import Ahead
from kvplan.execute.gpu.launches.headers import HEADER, PACKED
from kvplan.execute.gpu.launches.recipes import Ready, programs_of
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.packing.chunk_half import Span
from kvplan.program.program import RunGroup


class Resident:
    """Unit addresses, and the units' offsets in a slot, in the GPU memory of a room.

    Args:
        ahead: the room: at least one word for each address and each offset. The caller sends it.
        group: copies of a unit.
        addresses: (n,) int64: address of each unit.
        offsets: (m,) int64: where units begin in a slot.
        gathers: whether units are copied to slots; otherwise, slots to units.
        size: size of the launches.
        tile: bytes in flight for each program.

    Attributes:
        ahead: as given.
    """

    def __init__(
        self, ahead: Ahead, group: RunGroup, addresses: Int64Array, offsets: Int64Array, *, gathers: bool,
        size: KernelSize, tile: int,
    ) -> None:  # fmt: skip
        words, units = ahead.units.reshape(-1), addresses.size
        words[:units], words[units : units + offsets.size] = addresses, offsets
        self.ahead = ahead
        self._group, self._gathers, self._size, self._tile = group, gathers, size, tile
        self._units = ahead.header + 8 * HEADER  # where the addresses are on the GPU
        self._offsets = self._units + 8 * units
        self._most = offsets.size
        self._tables: dict[int, Table] = {}  # by the address of a slot

    def place(self, spans: Sequence[Span]) -> Placed:
        """Return the launch of a plan that copies some units."""
        return Placed(self, spans)

    def ready(self, transfer: DeviceTransfer, spans: Sequence[Span], stream: int) -> Ready | None:
        """Write the headers of one launch for some spans; None if it cannot be one. The device is current."""
        resources = transfer.resources
        if any(span.units > self._most for span in spans):
            return None
        try:
            tables = [self._table(resources, span.at, stream) for span in spans]
        except TransferError:  # there is no memory for another table
            return None
        rows = sum([span.units * table.items for span, table in zip(spans, tables, strict=True)])
        if rows > resources.limits.launch_rows:
            return None
        piece = transfer.slot(8 * HEADER * len(spans))
        for number, ((first, count, _), table) in enumerate(zip(spans, tables, strict=True)):
            _, items, chunks, _, _, *columns, _ = table.words
            units = self._units + 8 * first, self._offsets
            src, dst = units if self._gathers else units[::-1]
            PACKED.pack_into(piece.words, 8 * HEADER * number, count, items, chunks, src, dst, *columns, len(spans))
        self.ahead.precede(stream)
        transfer.count(sum([span.units for span in spans]) * self._group.packed.shape[1], 1)
        kernel, shape = tables[0].kernel, tables[0].shape
        return Ready(kernel, programs_of(self._size, rows, shape), piece.address, (0, 0))

    def _table(self, resources: Resources, at: int, stream: int) -> Table:
        """Return the run table of a slot: its address is added to the offsets of the slot's side."""
        known = self._tables.get(at)
        if known is None or known.fresh:
            group = self._group
            items = group.packed.copy()
            items[1 if self._gathers else 0] += at
            known = self._tables[at] = resources.tables.get(
                group, items, group.alignment, self._tile, stream, key=("slot", at), max_warps=self._size.warps
            )  # fmt: skip
        return known


class Placed(NamedTuple):
    """The launch of one plan: spans of units that are in GPU memory. It stands in the place of :class:`Ahead`.

    Attributes:
        resident: the units.
        spans: some of them, with their places in slots.
    """

    resident: Resident
    spans: Sequence[Span]

    @property
    def choice(self) -> Any:
        """The executor's choice of the kernel path."""
        return self.resident.ahead.choice

    def of(self, resources: Resources) -> bool:
        """Return whether an executor has uploaded the units."""
        return self.resident.ahead.of(resources)

    def ready(self, transfer: DeviceTransfer, stream: int) -> Ready | None:
        """Return the launch for a transfer; None if it has to be prepared from the plan."""
        return self.resident.ready(transfer, self.spans, stream)
