"""Descriptor lists of NIXL as arrays: rows of (address, bytes, device), each repeated with a stride."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.errors import KVPlanError
from kvplan.layout.strides import Int64Array

KINDS = {"DRAM": "DRAM", "VRAM": "VRAM", "cpu": "DRAM", "cuda": "VRAM"}  # NIXL's names, and its deprecated ones
MOST_EXPANDED = 1 << 22  # descriptors whose addresses are kept one by one: 32 MiB
REACH = 1 << 62  # bytes and descriptors that are too many, although 64-bit numbers hold them
PER_ROW = 24  # bytes of a descriptor in NIXL's serialised list


@dataclass(frozen=True, eq=False)
class Rows:
    """A descriptor list. Descriptor ``k`` of NIXL is a step of a row; rows are counted one after the other.

    Attributes:
        kind: ``"DRAM"`` or ``"VRAM"``.
        address, size, device, stride, count: a number for each row: address of its first byte, bytes of a descriptor,
            number of the device, bytes from a descriptor to the next, and number of descriptors.

    >>> rows = Rows.of(np.array([[4096, 16, 0, 64, 3], [8192, 16, 0, 16, 1]]), "DRAM")
    >>> len(rows), rows.addresses(np.array([1, 3])).tolist(), rows.one_size
    (4, [4160, 8192], 16)
    """

    kind: str
    address: Int64Array
    size: Int64Array
    device: Int64Array
    stride: Int64Array
    count: Int64Array

    @classmethod
    def of(cls, table: np.ndarray[Any, Any], kind: str) -> Rows:
        """Read an (n, 3) table of address, bytes and device, or (n, 5) with stride and count behind them.

        Raises:
            KVPlanError: the table has another form, no rows, or numbers that no memory of this machine has.
        """
        if kind not in KINDS:
            raise KVPlanError(f"the kind of memory is {kind!r}; expected one of {', '.join(KINDS)}")
        if table.ndim != 2 or table.shape[1] not in {3, 5} or not len(table) or table.dtype.kind not in "iu":
            raise KVPlanError(f"a descriptor list of shape {table.shape} and type {table.dtype}; give (n, 3) or (n, 5) "
                              "integers")  # fmt: skip
        columns = np.array(table.T, dtype=np.int64, order="C")  # a copy; an address with bit 63 turns negative
        address, size, device = columns[:3]
        stride, count = columns[3:] if len(columns) == 5 else (size, np.ones_like(size))
        if (
            min(int(column.min()) for column in (address, device, stride)) < 0
            or min(int(size.min()), int(count.min())) < 1
            or float((address + (count - 1.0) * stride + size).max()) >= REACH
            or float(count.sum(dtype=np.float64)) >= REACH
        ):
            raise KVPlanError("a descriptor list with an address, a size or a count out of range")
        return cls(KINDS[kind], address, size, device, stride, count)

    def table(self) -> np.ndarray[Any, Any]:
        """Return rows of one descriptor each as an (n, 3) table, from which NIXL makes a list."""
        return np.stack((self.address, self.size, self.device), axis=1).astype(np.uint64)

    def __len__(self) -> int:
        return int(self.up_to[-1])

    @cached_property
    def up_to(self) -> Int64Array:
        """For each row, the number of descriptors up to its end."""
        return np.cumsum(self.count)

    @cached_property
    def ends(self) -> Int64Array:
        """For each row, the address behind its last byte."""
        return self.address + (self.count - 1) * self.stride + self.size

    @cached_property
    def one_size(self) -> int:
        """Bytes of every descriptor; 0 if they differ."""
        first = int(self.size[0])
        return first if bool((self.size == first).all()) else 0

    @cached_property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides every address and size."""
        steps = self.stride[self.count > 1]
        common = 16
        for column in (self.address, self.size, steps):
            common |= int(np.bitwise_or.reduce(column, initial=0))
        return common & -common

    def moved(self, by: Int64Array) -> Rows:
        """Return the rows at other addresses: row ``k`` lies ``by[k]`` bytes further."""
        return Rows(self.kind, self.address + by, self.size, self.device, self.stride, self.count)

    @cached_property
    def expanded(self) -> Int64Array | None:
        """The address of every descriptor; None if there are too many to keep."""
        if len(self) > MOST_EXPANDED:
            return None
        if len(self) == len(self.count):
            return self.address
        step = np.arange(len(self), dtype=np.int64) - np.repeat(self.up_to - self.count, self.count)
        spread: Int64Array = np.repeat(self.address, self.count) + step * np.repeat(self.stride, self.count)
        return spread

    @cached_property
    def _sizes(self) -> Int64Array | None:
        return None if len(self) > MOST_EXPANDED else np.repeat(self.size, self.count)

    def addresses(self, indices: Int64Array) -> Int64Array:
        """Return the addresses of some descriptors, whose indices are in range."""
        if self.expanded is not None:
            return self.expanded.take(indices)
        row = self.row(indices)
        before: Int64Array = self.up_to - self.count
        step: Int64Array = indices - before.take(row)
        return self.address.take(row) + step * self.stride.take(row)

    def sizes(self, indices: Int64Array) -> Int64Array:
        """Return the bytes of some descriptors, whose indices are in range."""
        return self._sizes.take(indices) if self._sizes is not None else self.size[self.row(indices)]

    def row(self, indices: Int64Array) -> Int64Array:
        """Return the row of each of some descriptors."""
        found: Int64Array = np.searchsorted(self.up_to, indices, side="right")
        return found


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
