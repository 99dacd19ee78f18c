"""GPU memory and words of several processes, played within one process.

An owner's handle holds an address. To open it gives the same address, so both sides see the same bytes. Memory of
pieces, as torch's expandable segments have it, is files of memory: another process maps them at other addresses, and so
does a visitor within one process.
"""

# the driver's names

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import c_int, c_uint64

import numpy as np

from kvplan.cuda.driver import IpcHandle

INVALID = 1
HANDLE = "<4sQ52x"
UUID = bytes(range(15))
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


class SharedMemory:
    """The driver's entry points of memory and of words that processes share.

    Attributes:
        visible: how many GPUs this process sees.
        pieces: address, bytes and file of each mapped piece of this process.
        opened: how often each address was opened and not closed.
        registered: bytes of pinned pages, by address.
    """

    visible: int
    _ranges: list[tuple[int, int, int | None]]

    def __init__(self) -> None:
        self.pieces: list[tuple[int, int, int]] = []
        self.opened: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self._files: dict[int, tuple[int, bool]] = {}  # by handle: the file of an allocation, and whether it came in
        self._spans: dict[int, int] = {}  # bytes of reserved addresses, by the first one
        self._mapped: dict[int, int] = {}  # bytes of each piece of another process, by its address here

    def shared(self) -> dict[str, int]:
        """What is open of other processes, and pinned for them. Nothing, once agents have closed."""
        counts = {
            "handles": len(self.opened), "pages": len(self.registered), "files": len(self._files),
            "spans": len(self._spans), "pieces": len(self._mapped),
        }  # fmt: skip
        return {name: count for name, count in counts.items() if count}

    def in_piece(self, address: int) -> tuple[int, int, int] | None:
        return next((one for one in self.pieces if one[0] <= address < one[0] + one[1]), None)

    def cuDeviceGetUuid_v2(self, out: int, handle: int) -> None:
        ctypes.memmove(out, UUID + bytes([handle]), 16)

    def cuMemGetAddressRange_v2(self, start: int, nbytes: int, address: int) -> int:
        held = self.in_piece(address)
        first, last, gpu = (held[0], held[0] + held[1], 0) if held else self._range(address) or (0, 0, None)
        if gpu is None:
            return INVALID
        c_uint64.from_address(start).value, c_uint64.from_address(nbytes).value = first, last - first
        return 0

    def cuIpcGetMemHandle(self, out: int, address: int) -> None:
        ctypes.memmove(out, struct.pack(HANDLE, b"mem ", address), 64)

    def cuIpcOpenMemHandle_v2(self, out: int, handle: IpcHandle, flags: int) -> int:
        assert flags == 1
        kind, address = struct.unpack(HANDLE, bytes(handle))
        owner = (self._range(address) or (0, 0, None))[2]
        if kind != b"mem " or owner is None:
            return INVALID
        self._reached.add((self._gpu, owner))
        self.opened[address] = self.opened.get(address, 0) + 1
        c_uint64.from_address(out).value = address
        return 0

    def cuIpcCloseMemHandle(self, address: int) -> None:
        self.opened[address] -= 1
        if not self.opened[address]:
            del self.opened[address]

    # Words.

    def cuMemHostRegister_v2(self, address: int, nbytes: int, flags: int) -> None:
        self.registered[address] = nbytes
        self._ranges.append((address, address + nbytes, None))

    def cuMemHostUnregister(self, address: int) -> None:
        nbytes = self.registered.pop(address)
        self._ranges.remove((address, address + nbytes, None))

    def cuStreamWriteValue64_v2(self, stream: int, address: int, value: int, flags: int) -> None:
        assert self._pinned(address)

        def writes() -> None:
            c_uint64.from_address(address).value = value

        self.put(stream, writes)

    def cuStreamWaitValue64_v2(self, stream: int, address: int, value: int, flags: int) -> None:
        assert flags == 0
        assert self._pinned(address)
        with self._lock:
            self._streams[stream].append(lambda: c_uint64.from_address(address).value >= value)

    def _pinned(self, address: int) -> bool:
        known = self._range(address)
        return known is not None and known[2] is None

    # Pieces.

    def cuMemRetainAllocationHandle(self, out: int, address: int) -> int:
        found = self.in_piece(address)
        return INVALID if found is None else self._file(out, found[2], came_in=False)

    def cuMemExportToShareableHandle(self, out: int, handle: int, kind: int, flags: int) -> None:
        assert (kind, flags) == (1, 0)
        c_int.from_address(out).value = os.dup(self._files[handle][0])

    def cuMemImportFromShareableHandle(self, out: int, descriptor: int, kind: int) -> int:
        assert kind == 1
        return self._file(out, os.dup(descriptor), came_in=True)

    def _file(self, out: int, file: int, *, came_in: bool) -> int:
        c_uint64.from_address(out).value = made = next(self._handles)
        self._files[made] = file, came_in
        return 0

    def cuMemRelease(self, handle: int) -> None:
        file, came_in = self._files.pop(handle)
        if came_in:
            os.close(file)

    def cuMemAddressReserve(self, out: int, nbytes: int, align: int, at: int, flags: int) -> None:
        assert (align, at, flags) == (0, 0, 0)
        c_uint64.from_address(out).value = made = reserved(nbytes)
        self._spans[made] = nbytes

    def cuMemMap(self, at: int, nbytes: int, offset: int, handle: int, flags: int) -> int:
        assert (offset, flags) == (0, 0)
        file = self._files[handle][0]
        if os.fstat(file).st_size < nbytes:
            return INVALID
        mapped(file, nbytes, at)
        self._mapped[at] = nbytes
        return 0

    def cuMemSetAccess(self, at: int, nbytes: int, access: int, count: int) -> None:
        assert self._spans[at] == nbytes == sum(self._mapped[each] for each in self._mapped if at <= each < at + nbytes)
        assert count == 1
        self._ranges.append((at, at + nbytes, self._gpu))

    def cuMemUnmap(self, at: int, nbytes: int) -> None:
        assert self._mapped.pop(at) == nbytes
        reserved(nbytes, at)

    def cuMemAddressFree(self, at: int, nbytes: int) -> None:
        assert self._spans.pop(at) == nbytes
        assert not any(at <= each < at + nbytes for each in self._mapped)
        self._ranges[:] = [one for one in self._ranges if one[0] != at]
        _libc.munmap(at, nbytes)
