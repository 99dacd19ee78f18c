"""Memory of mapped pieces, as torch's expandable segments have it: each piece is a file of memory.

Another process maps the files at other addresses; so does a visitor within one process.
"""

# ruff: noqa: N802  # the driver's names

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from kvplan.cuda.device import SUCCESS

INVALID = 1
NONE, READ_WRITE, SHARED, PRIVATE, FIXED, ANONYMOUS = 0, 3, 1, 2, 16, 32  # of mmap(2)
FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def reserved(nbytes: int, at: int | None = None) -> int:
    """Addresses without memory; at given ones, the memory there is unmapped."""
    found = _libc.mmap(at, nbytes, NONE, PRIVATE | ANONYMOUS | (FIXED if at else 0), -1, 0)
    assert found not in (None, FAILED)
    return found


def mapped(file: int, nbytes: int, at: int) -> None:
    assert _libc.mmap(at, nbytes, READ_WRITE, SHARED | FIXED, file, 0) == at


class Pieces:
    """Memory of some pieces, one after another.

    Attributes:
        array: all bytes.
        files: of each piece, its address, its bytes and its file.
    """

    def __init__(self, *sizes: int) -> None:
        self._start = at = reserved(sum(sizes))
        self.files: list[tuple[int, int, int]] = []
        for nbytes in sizes:
            file = os.memfd_create("piece")
            os.ftruncate(file, nbytes)
            mapped(file, nbytes, at)
            self.files.append((at, nbytes, file))
            at += nbytes
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * sum(sizes)).from_address(self._start))

    def close(self) -> None:
        for _, _, file in self.files:
            os.close(file)
        _libc.munmap(self._start, self.array.nbytes)


class PieceEntries:
    """The driver's entry points of mapped pieces.

    Attributes:
        pieces: address, bytes and file of each piece of this process.
        handles: by number, the file of an allocation, and whether it was imported.
        spans: bytes of each range of reserved addresses, by its first address.
        held: bytes of each piece of another process, by its address here.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.handles: dict[int, tuple[int, bool]] = {}
        self.spans: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self._numbers = iter(range(1000, 10**6))

    def piece_at(self, address: int) -> tuple[int, int, int] | None:
        return next((one for one in self.pieces if one[0] <= address < one[0] + one[1]), None)

    def cuMemRetainAllocationHandle(self, out: Any, address: int) -> int:
        found = self.piece_at(address)
        if found is None:
            return INVALID
        out._obj.value = next(self._numbers)
        self.handles[out._obj.value] = found[2], False
        return SUCCESS

    def cuMemExportToShareableHandle(self, out: Any, handle: int, kind: int, flags: int) -> int:
        assert (kind, flags) == (1, 0)
        out._obj.value = os.dup(self.handles[handle][0])
        return SUCCESS

    def cuMemImportFromShareableHandle(self, out: Any, descriptor: int, kind: int) -> int:
        assert kind == 1
        out._obj.value = next(self._numbers)
        self.handles[out._obj.value] = os.dup(descriptor), True
        return SUCCESS

    def cuMemRelease(self, handle: int) -> int:
        file, imported = self.handles.pop(handle)
        if imported:
            os.close(file)
        return SUCCESS

    def cuMemAddressReserve(self, out: Any, nbytes: int, align: int, at: int, flags: int) -> int:
        assert (align, at, flags) == (0, 0, 0)
        out._obj.value = reserved(nbytes)
        self.spans[out._obj.value] = nbytes
        return SUCCESS

    def cuMemMap(self, at: int, nbytes: int, offset: int, handle: int, flags: int) -> int:
        assert (offset, flags) == (0, 0)
        file = self.handles[handle][0]
        if os.fstat(file).st_size < nbytes:
            return INVALID
        mapped(file, nbytes, at)
        self.held[at] = nbytes
        return SUCCESS

    def cuMemSetAccess(self, at: int, nbytes: int, access: Any, count: int) -> int:
        assert self.spans[at] == nbytes == sum(self.held[each] for each in self.held if at <= each < at + nbytes)
        assert (access._obj.flags, count) == (3, 1)
        return SUCCESS

    def cuMemUnmap(self, at: int, nbytes: int) -> int:
        assert self.held.pop(at) == nbytes
        reserved(nbytes, at)
        return SUCCESS

    def cuMemAddressFree(self, at: int, nbytes: int) -> int:
        assert self.spans.pop(at) == nbytes
        assert not any(at <= each < at + nbytes for each in self.held)
        _libc.munmap(at, nbytes)
        return SUCCESS
