"""Descriptor lists of NIXL as arrays of rows, and the memory of a process in which they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array

KINDS = {"DRAM": "DRAM", "VRAM": "VRAM", "cpu": "DRAM", "cuda": "VRAM"}  # NIXL's names, and its deprecated ones
MOST_ROWS = 1 << 22  # of a list; NIXL moves larger ones
REACH = 1 << 62  # an address that no memory has
PER_ROW = 24  # bytes of a descriptor in NIXL's serialised list


@dataclass(frozen=True, eq=False)
class Rows:
    """A descriptor list.

    Attributes:
        kind: ``"DRAM"`` or ``"VRAM"``.
        device: ``"cpu"``, or the GPU as the process that made the list numbers it.
        address: address of the first byte of each row.
        size: bytes of every row, or of each.

    >>> rows = Rows.of(np.array([[4096, 16, 0, 64, 3], [8192, 16, 0, 16, 1]]), "DRAM")
    >>> rows.address.tolist(), rows.size
    ([4096, 4160, 4224, 8192], 16)
    """

    kind: str
    device: str
    address: Int64Array
    size: int | Int64Array

    @classmethod
    def of(cls, table: np.ndarray[Any, Any], kind: str) -> Rows:
        """Read an (n, 3) table of address, bytes and device, or (n, 5) with stride and count behind them.

        Raises:
            KVPlanError: the table has another form, no rows, rows of several GPUs, or numbers that no memory of this
                machine has.
        """
        form = table.ndim == 2 and table.shape[1] in {3, 5} and len(table) and table.dtype.kind in "iu"
        if kind not in KINDS or not form:
            raise KVPlanError(f"a descriptor list of {kind!r} memory, of shape {table.shape} and type {table.dtype}")
        columns = np.array(table.T, dtype=np.int64, order="C")  # a copy; an address with bit 63 turns negative
        address, size, number = columns[:3]
        stride, count = columns[3:] if len(columns) == 5 else (size, np.ones_like(size))
        if (
            min(int(column.min()) for column in (address, number, stride)) < 0
            or min(int(size.min()), int(count.min())) < 1
            or float((address + (count - 1.0) * stride + size).max()) >= REACH
            or float(count.sum(dtype=np.float64)) > MOST_ROWS
        ):
            raise KVPlanError("a descriptor list with an address, a size or a count out of range")
        gpu = KINDS[kind] == "VRAM"
        if gpu and bool((number != number[0]).any()):
            raise KVPlanError("a descriptor list of several GPUs")
        if int(count.max()) > 1:
            step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            address, size = np.repeat(address, count) + step * np.repeat(stride, count), np.repeat(size, count)
        first = int(size[0])
        sizes = first if bool((size == first).all()) else size
        return cls(KINDS[kind], f"cuda:{number[0]}" if gpu else "cpu", address, sizes)

    def __len__(self) -> int:
        return int(self.address.size)

    @cached_property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides every address and size."""
        common = 16 | int(np.bitwise_or.reduce(self.address)) | int(np.bitwise_or.reduce(np.atleast_1d(self.size)))
        return common & -common

    def sizes(self, indices: Int64Array) -> int | Int64Array:
        """Return the bytes of some rows."""
        return self.size if isinstance(self.size, int) else self.size.take(indices)

    def table(self) -> np.ndarray[Any, Any]:
        """Return an (n, 3) table, from which NIXL makes a list."""
        number = int(self.device.partition(":")[2] or 0)
        columns = np.broadcast_arrays(self.address, self.size, number)
        return np.stack(columns, axis=1).astype(np.uint64)


def rows_of(descriptors: Any) -> Rows:
    """Read a ``nixlXferDList``, or the list that stands for one where NIXL is not installed.

    Raises:
        KVPlanError: the list has no descriptors, or it is not of CPU or CUDA memory.
    """
    kind = str(getattr(descriptors.getType(), "name", descriptors.getType())).removesuffix("_SEG")
    count = descriptors.descCount()
    if kind not in KINDS or not count:
        raise KVPlanError(f"a descriptor list of {count} descriptors of {kind} memory")
    return Rows.of(_table(descriptors, count), kind)


def _table(descriptors: Any, count: int) -> np.ndarray[Any, Any]:
    """Return the descriptors as an (n, 3) table: from NIXL's serialised form if it is as expected, or one by one.

    Source: NIXL 1.5.1, ``nixlDescList::serialize``: the descriptors as 24 bytes each, in front of a closing ``|``. In a
    list for registration, each descriptor has a text, so it is read one by one.
    """
    state = getattr(descriptors, "__getstate__", lambda: b"")()
    if isinstance(state, bytes) and len(state) > PER_ROW * count and b"nixlBDList" in state[:64] and state[-1:] == b"|":
        table = np.frombuffer(state, np.uint64, 3 * count, len(state) - 1 - PER_ROW * count).reshape(-1, 3)
        if tuple(table[0]) == tuple(descriptors[0]) and tuple(table[-1]) == tuple(descriptors[count - 1]):
            return table
    return np.array([descriptors[k][:3] for k in range(count)], dtype=np.uint64)


def indices(given: Any, count: int) -> Int64Array | None:
    """Return indices as an int64 array; None if there are none, or one is out of range, which NIXL then refuses.

    >>> indices([0, 2], 3), indices([3], 3), indices([], 3)
    (array([0, 2]), None, None)
    """
    array = np.asarray(given)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        return None
    made = np.array(array, dtype=np.int64)  # a copy: the caller may change its own
    if np.maximum.reduce(made.view(np.uint64)) >= count:  # a negative index is a large one
        return None
    return made


class Range(NamedTuple):
    """A range of registered memory; see :class:`Rows`."""

    kind: str
    device: str
    address: int
    nbytes: int


def ranges_of(rows: Rows) -> list[Range]:
    """Return the ranges of a list for registration."""
    sizes = np.broadcast_to(rows.size, rows.address.shape).tolist()
    return [Range(rows.kind, rows.device, *one) for one in zip(rows.address.tolist(), sizes, strict=True)]


def disjoint(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges that do not overlap, ascending on each device.

    >>> disjoint([Range("DRAM", "cpu", *one) for one in ((300, 8), (100, 50), (120, 100))])[0]
    Range(kind='DRAM', device='cpu', address=100, nbytes=120)
    """
    found: list[Range] = []
    for one in sorted(ranges):
        last = found[-1] if found and found[-1][:2] == one[:2] else None
        if last is not None and one.address < last.address + last.nbytes:
            found[-1] = last._replace(nbytes=max(last.nbytes, one.address + one.nbytes - last.address))
        else:
            found.append(one)
    return found


class Placed(NamedTuple):
    """Rows that kvplan can move.

    Attributes:
        rows: the rows at their addresses in this process.
        layout: the layout that holds all of them.
    """

    rows: Rows
    layout: KVLayout


class Held:
    """Memory of one device that this process has registered, or a peer has offered, to look rows up in.

    Args:
        ranges: the memory by the addresses of its own process, ascending and without overlap.
        here: the address of each range in this process.
        layout: a layout of this process over all of it.

    >>> from kvplan.plan.row_plans import Memory, layout_of
    >>> held = Held([Range("DRAM", "cpu", 1 << 20, 64)], [4096], layout_of([Memory(4096, 64, "cpu")]))
    >>> held.place(Rows.of(np.array([[(1 << 20) + 16, 8, 0, 8, 2]]), "DRAM")).rows.address.tolist()
    [4112, 4120]
    >>> held.place(Rows.of(np.array([[(1 << 20) + 60, 8, 0]]), "DRAM")) is None
    True
    """

    def __init__(self, ranges: Sequence[Range], here: Sequence[int], layout: KVLayout) -> None:
        self.kind, self.layout, self.first = ranges[0].kind, layout, here[0]
        self._starts = np.array([one.address for one in ranges], dtype=np.int64)
        self._ends = self._starts + np.array([one.nbytes for one in ranges], dtype=np.int64)
        self._by = np.array(here, dtype=np.int64) - self._starts

    def place(self, rows: Rows) -> Placed | None:
        """Return rows at their addresses in this process; None if some lie elsewhere."""
        found = np.searchsorted(self._starts, rows.address, side="right") - 1
        if rows.kind != self.kind or int(found.min()) < 0 or bool((rows.address + rows.size > self._ends[found]).any()):
            return None
        return Placed(Rows(rows.kind, rows.device, rows.address + self._by[found], rows.size), self.layout)
