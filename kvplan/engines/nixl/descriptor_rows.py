"""Descriptor lists of NIXL as arrays of rows, and the memory in which they are looked up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.agents.packed.line import Offer
from kvplan.base.process import cached_property
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.row_plans import Memory, RowProgram

KINDS = {"DRAM": "DRAM", "VRAM": "VRAM", "cpu": "DRAM", "cuda": "VRAM"}  # NIXL's names, and its deprecated ones
EVERY = object()  # in place of indices
PER_ROW = 24  # bytes of a descriptor in NIXL's serialised list


@dataclass(frozen=True, eq=False)
class Rows:
    """A descriptor list.

    Attributes:
        device: ``"cpu"``, or the GPU as the process that made the list numbers it.
        address: address of the first byte of each row.
        size: bytes of every row, or of each.

    >>> rows = Rows.of_table(np.array([[4096, 16, 0, 64, 3], [8192, 16, 0, 16, 1]]), "DRAM")
    >>> rows.address.tolist(), rows.size
    ([4096, 4160, 4224, 8192], 16)
    """

    device: str
    address: Int64Array
    size: int | Int64Array

    @classmethod
    def of(cls, descriptors: Any, kind: Any = None) -> Rows:
        """Read a table, or a ``nixlXferDList``, or the list that stands for one where NIXL is not installed.

        Source: NIXL 1.5.1, ``nixlDescList::serialize``: the descriptors as 24 bytes each, in front of a closing ``|``.
        A list of another form is read one by one, as one for registration is, whose descriptors have texts.

        Raises:
            Exception: kvplan cannot move such rows.
        """
        if isinstance(descriptors, np.ndarray):
            return cls.of_table(descriptors, kind)
        kind = str(getattr(descriptors.getType(), "name", descriptors.getType())).removesuffix("_SEG")
        count, state = descriptors.descCount(), descriptors.__getstate__()
        if isinstance(state, bytes) and b"nixlBDList" in state[:64] and state[-1:] == b"|":
            table = np.frombuffer(state, np.uint64, 3 * count, len(state) - 1 - PER_ROW * count).reshape(-1, 3)
            if tuple(table[0]) == tuple(descriptors[0]) and tuple(table[-1]) == tuple(descriptors[count - 1]):
                return cls.of_table(table, kind)
        return cls.of_table(np.array([descriptors[k][:3] for k in range(count)], dtype=np.uint64), kind)

    @classmethod
    def of_table(cls, table: np.ndarray[Any, Any], kind: str) -> Rows:
        """Read an (n, 3) table of address, bytes and device, or (n, 5) with stride and count behind them.

        Raises:
            Exception: kvplan cannot move such rows. A table that is wrong is NIXL's to refuse.
        """
        address, size, number, *strided = np.array(table.T, dtype=np.int64, order="C")  # a copy
        gpu = KINDS[kind] == "VRAM"
        if strided:
            stride, count = strided
            step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            address, size = np.repeat(address, count) + step * np.repeat(stride, count), np.repeat(size, count)
        if int(size.min()) < 1 or (gpu and bool((number != number[0]).any())):
            raise ValueError("a row without bytes, or rows of several GPUs")
        first = int(size[0])
        return cls(f"cuda:{number[0]}" if gpu else "cpu", address, first if bool((size == first).all()) else size)

    @cached_property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides every address and size."""
        common = 16 | int(np.bitwise_or.reduce(self.address)) | int(np.bitwise_or.reduce(np.atleast_1d(self.size)))
        return common & -common

    def sizes(self, indices: Int64Array) -> int | Int64Array:
        """Return the bytes of some rows."""
        return self.size if isinstance(self.size, int) else self.size.take(indices)


@dataclass(frozen=True, eq=False)
class Placed(Rows):
    """Rows that kvplan can move.

    Attributes:
        layout: the layout of this process that holds all of them.
    """

    layout: KVLayout

    @cached_property
    def programs(self) -> dict[tuple[KVLayout, bool], RowProgram]:
        """Programs with layouts of the other side, by whether they read these rows: executors know them again."""
        return {}


def indices(array: Any, count: int) -> Int64Array | None:
    """Return indices, or :data:`EVERY`, as an int64 array; None if there are none, or NIXL must refuse them.

    >>> indices([0, 2], 3), indices([3], 3), indices([], 3)
    (array([0, 2]), None, None)
    """
    array = np.arange(count) if array is EVERY else np.asarray(array)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        return None
    made = np.array(array, dtype=np.int64)  # a copy: the caller may change its own
    if np.maximum.reduce(made.view(np.uint64)) >= count:  # a negative index is a large one
        return None
    return made


class Area:
    """Memory of one device in which rows are looked up.

    Args:
        ranges: each range by the addresses of its own process, ascending, with a layout of this process over it.

    >>> from kvplan.plan.row_plans import layout_of
    >>> theirs, here = (layout_of([Memory(address, 64, "cpu")]) for address in (1 << 20, 4096))
    >>> area = Area([(theirs.regions[0], here)])
    >>> area.place(Rows.of_table(np.array([[(1 << 20) + 16, 8, 0, 8, 2]]), "DRAM")).address.tolist()
    [4112, 4120]
    >>> area.place(Rows.of_table(np.array([[(1 << 20) + 60, 8, 0]]), "DRAM")) is None
    True
    """

    def __init__(self, ranges: Sequence[tuple[Region, KVLayout]]) -> None:
        self.device = ranges[0][0].device
        self.layout = KVLayout.merge([layout for _, layout in ranges])
        self._starts = np.array([region.address for region, _ in ranges])
        self._ends = np.array([region.end for region, _ in ranges])
        self._shifts = np.array([layout.regions[0].address for _, layout in ranges]) - self._starts

    def place(self, rows: Rows) -> Placed | None:
        """Return rows at their addresses in this process; None if some lie elsewhere."""
        at = np.searchsorted(self._starts, rows.address, side="right") - 1
        outside = rows.size > self._ends[at] - rows.address  # so no sum exceeds 64 bits
        if rows.device != self.device or int(at.min()) < 0 or bool(outside.any()):
            return None
        return Placed(rows.device, rows.address + self._shifts[at], rows.size, self.layout)


def areas_of(theirs: Mapping[str, KVLayout], here: Mapping[str, KVLayout]) -> list[Area]:
    """Return the areas of layouts of one region each, by the addresses of their process and by those of this one."""
    devices: dict[str, list[tuple[Region, KVLayout]]] = {}
    for name, layout in sorted(theirs.items(), key=lambda item: item[1].regions[0].address):
        devices.setdefault(layout.device, []).append((layout.regions[0], here[name]))
    return [Area(ranges) for ranges in devices.values()]


def placed_in(areas: Sequence[Area], rows: Rows) -> Placed | None:
    """Return rows at their addresses in this process; None if no area holds all of them."""
    return next((placed for area in areas if (placed := area.place(rows)) is not None), None)


class RegisteredMemory:
    """The memory that this process has registered with NIXL.

    Attributes:
        layouts: a layout for each range, by a name; another object after each change.
        areas: the same, to look rows up in.
        offer: the same, for packed transfers of peers.
    """

    def __init__(self) -> None:
        self._ranges = Counter[tuple[str, int, int]]()  # device, address, end of each, as often as registered
        self.layouts: dict[str, KVLayout] = {}
        self.areas: list[Area] = []
        self.offer = Offer()

    def change(self, descriptors: Any, times: int) -> None:
        """Add the memory of a list for registration, once, or minus once."""
        rows = Rows.of(descriptors)
        for address, end in zip(rows.address.tolist(), (rows.address + rows.size).tolist(), strict=True):
            self._ranges[rows.device, address, end] += times
        layouts, areas = dict[str, KVLayout](), list[Area]()
        try:
            every = {
                str(k): KVLayout.from_tensors("block dim", Memory(start, end - start, device), layer_start=k)
                for k, (device, start, end) in enumerate(+self._ranges)
            }
            areas = areas_of(every, every)
            layouts = every
        finally:  # at once, since peers' orders come meanwhile; if ranges overlap, there are none, and NIXL moves all
            self.layouts, self.areas, self.offer = layouts, areas, Offer(area.layout for area in areas)

    def place(self, rows: Rows) -> Placed | None:
        """Return rows of this process; None if some lie in other memory."""
        return placed_in(self.areas, rows)
