"""GPU memory between processes: the owner names whole allocations, and another process opens them for its own GPU.

``cuMemAlloc`` makes memory with a handle of 64 bytes. Memory of ``cuMemCreate`` and ``cuMemMap`` (torch's expandable
segments, vLLM's sleep mode) consists of pieces, each of which another process opens by a file descriptor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from ctypes import byref, c_int
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.base.process import generation
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.driver import FABRIC, HANDLE_TYPES, LEGACY_IPC, MEMORY_POOL, POSIX_FD, IpcHandle
from kvplan.cuda.machine import ordinal_here, uuid_of
from kvplan.cuda.peers import check_reach
from kvplan.errors import LayoutError, PathError, TransferError

TORCH = "with torch, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
VLLM = "with vLLM, leave out --enable-sleep-mode and --enable-cumem-allocator, or take a newer vLLM"
READ_WRITE = 3  # CUmemAccess_flags
ON_DEVICE = 1  # CUmemLocationType
LAZY_PEER_ACCESS = 1  # CUipcMem_flags

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Export:
    """One allocation, or one span of mapped pieces, of a GPU's memory.

    Attributes:
        gpu: UUID of the GPU that has the memory.
        address: address of the first byte in the owner's process.
        nbytes: number of bytes.
        handle: the handle of 64 bytes; empty if the memory is opened by file descriptors.
        pieces: bytes of each piece, in the order of their addresses; empty if the memory has a handle.
    """

    gpu: str
    address: int
    nbytes: int
    handle: bytes
    pieces: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Return the address behind the last byte."""
        return self.address + self.nbytes


def exported(device: Device, address: int, nbytes: int) -> Export:
    """Return the handle or the pieces of the allocation that holds some bytes of a GPU. Nothing is allocated.

    Args:
        device: the GPU that has the memory.
        address: address of the first byte.
        nbytes: number of bytes.

    Raises:
        PathError: another process cannot open this memory; the message names the setting that helps.
        TransferError: the driver does not know the memory.
    """
    gpu, end = uuid_of(device.driver, device.ordinal), address + nbytes
    with device.current(), Uncaptured(device):
        if not device.pointer(address, LEGACY_IPC):
            return _pieces(device, gpu, address, end)
        start, held = _range(device, address)
        if end > start + held:
            more = f"{nbytes} bytes at {address:#x} of cuda:{device.ordinal}"
            raise PathError(f"{more} are of several allocations; describe each allocation as a layout of its own")
        handle = IpcHandle()
        device.driver.call("cuIpcGetMemHandle", byref(handle), start)
        return Export(gpu, start, held, bytes(handle))


def descriptors(device: Device, export: Export) -> list[int]:
    """Open a file descriptor of each piece of an export. The caller closes them once they are sent.

    Raises:
        TransferError: the driver gives no descriptor; then none stays open.
    """
    cu, opened, at = device.driver, list[int](), export.address
    try:
        with device.current(), Uncaptured(device):
            for nbytes in export.pieces:
                what = f"{nbytes} bytes at {at:#x}"
                handle = cu.get("cuMemRetainAllocationHandle", at)
                try:
                    opened.append(cu.get("cuMemExportToShareableHandle", handle, POSIX_FD, 0, what=what))
                finally:
                    cu.cuMemRelease(handle)
                at += nbytes
    except BaseException:
        for each in opened:
            os.close(each)
        raise
    return opened


def _pieces(device: Device, gpu: str, address: int, end: int) -> Export:
    """Walk the mapped pieces that hold some bytes, and check that each has a file descriptor."""
    pieces = list[int]()
    start = at = _range(device, address)[0]
    while at < end:
        why = _refusal(device, at)
        if why:
            raise PathError(f"memory of cuda:{device.ordinal} at {at:#x} cannot be opened by another process: {why}")
        pieces.append(_range(device, at)[1])
        at += pieces[-1]
    return Export(gpu, start, at - start, b"", tuple(pieces))


def _refusal(device: Device, address: int) -> str:
    """Return why no file descriptor opens the memory at an address, with the setting that helps; or ""."""
    if device.pointer(address, MEMORY_POOL):
        return (
            "it is of a stream-ordered pool (cudaMallocAsync), which opens in no other process; "
            "with torch, set PYTORCH_CUDA_ALLOC_CONF=backend:native"
        )
    kinds = device.pointer(address, HANDLE_TYPES) or 0
    if kinds & POSIX_FD:
        return ""
    if kinds & FABRIC:
        return f"its allocator made it for fabric handles only; {TORCH}"
    return f"its allocator (cuMemCreate) asked for no file descriptors; {TORCH}; {VLLM}"


def _range(device: Device, address: int) -> tuple[int, int]:
    """Return address and bytes of the allocation, or of the mapped piece, that holds an address."""
    what = f"{address:#x} is no memory of cuda:{device.ordinal}"
    start, nbytes = device.driver.get("cuMemGetAddressRange_v2", address, what=what)
    return start, nbytes


class _Access(ctypes.Structure):
    """CUmemAccessDesc: a GPU, and what it may do."""

    _fields_ = (("kind", c_int), ("ordinal", c_int), ("flags", c_int))


class Opening:
    """Memory of another process, mapped here until :meth:`close`. The driver counts openings of one handle.

    Args:
        device: the GPU whose kernels will read and write the memory.
        export: the other process's description, whose types and sizes have been checked.
        descriptors: a file descriptor of each piece, which the caller closes.

    Attributes:
        address: address of the first byte in this process.
        nbytes: bytes that may be read and written.
        owner: this process's number of the GPU that has the memory.
        ordinal: number of the GPU in whose context it is mapped; only kernels of this GPU reach it.

    Raises:
        PathError: the GPU is not visible here, or cannot reach the memory.
        TransferError: the driver refuses the handle or a descriptor; nothing stays mapped.
    """

    __slots__ = ("_device", "_made_in", "_mapped", "address", "nbytes", "ordinal", "owner")

    def __init__(self, device: Device, export: Export, descriptors: Sequence[int] = ()) -> None:
        self.owner = ordinal_here(device.driver, export.gpu)
        check_reach(device.driver, device.ordinal, self.owner)
        self.ordinal, self.nbytes = device.ordinal, export.nbytes
        self._device, self._made_in = device, generation()
        with device.current(), Uncaptured(device), ExitStack() as undo:
            if export.handle:
                self.address = _open_handle(device, export)
                undo.callback(device.driver.cuIpcCloseMemHandle, self.address)
            else:
                self.address = _map_pieces(device, export, descriptors, undo)
            self._mapped: ExitStack | None = undo.pop_all()

    def bytes_at(self, address: int, nbytes: int) -> MappedBytes:
        """Return some of its bytes, to be read and written by the CPU.

        Raises:
            LayoutError: it is closed.
        """
        if self._mapped is None:
            raise LayoutError(f"memory of another process at {address:#x} is no longer mapped")
        return MappedBytes(self._device, address, nbytes)

    def present(self) -> int:
        """Return the address; 0 once it is closed, so that an executor refuses plans over this memory."""
        return 0 if self._mapped is None else self.address

    def close(self) -> None:
        """Unmap the memory; no transfer may be in flight. A second call does nothing.

        In a child of a fork it does nothing: the mapping is the parent's.
        """
        mapped, self._mapped = self._mapped, None
        if mapped is not None and self._made_in == generation():
            with self._device.current(), Uncaptured(self._device):
                mapped.close()


def _open_handle(device: Device, export: Export) -> int:
    handle = IpcHandle.from_buffer_copy(export.handle)
    try:
        return int(device.driver.get("cuIpcOpenMemHandle_v2", handle, LAZY_PEER_ACCESS))
    except TransferError as error:
        raise TransferError(
            f"the handle of {export.nbytes} bytes of another process does not open on cuda:{device.ordinal}: {error}; "
            "the process must live, and be another one, and must not have freed the memory"
        ) from error


def _map_pieces(device: Device, export: Export, descriptors: Sequence[int], undo: ExitStack) -> int:
    cu = device.driver
    at = start = int(cu.get("cuMemAddressReserve", export.nbytes, 0, 0, 0))
    undo.callback(cu.cuMemAddressFree, start, export.nbytes)
    for nbytes, descriptor in zip(export.pieces, descriptors, strict=True):
        what = f"a piece of {nbytes} bytes"
        handle = cu.get("cuMemImportFromShareableHandle", descriptor, POSIX_FD, what=what)
        try:
            cu.call("cuMemMap", at, nbytes, 0, handle, 0, what=what)  # refuses a piece that has fewer bytes
        finally:
            cu.cuMemRelease(handle)  # a mapping keeps the memory
        undo.callback(cu.cuMemUnmap, at, nbytes)
        at += nbytes
    cu.call("cuMemSetAccess", start, export.nbytes, byref(_Access(ON_DEVICE, device.ordinal, READ_WRITE)), 1)
    return start


class MappedBytes:
    """Bytes of another process's memory, which the CPU reads and writes through the driver: slow, for checks.

    It is indexed by arrays of offsets, like a numpy array of bytes.

    Args:
        device: the GPU in whose context the memory is mapped.
        address: address of the first byte.
        nbytes: number of bytes.
    """

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self._device, self._address, self._nbytes = device, address, nbytes

    def __getitem__(self, offsets: NDArray[np.int64]) -> Bytes:
        """Return a copy of the bytes."""
        order, runs = _runs(offsets)
        ascending, out = np.empty(order.size, np.uint8), np.empty(order.size, np.uint8)
        self._copy([(ascending.ctypes.data + at, self._address + offset, count) for at, offset, count in runs])
        out[order] = ascending
        return out.reshape(offsets.shape)

    def __setitem__(self, offsets: NDArray[np.int64], values: Any) -> None:
        """Write the bytes."""
        order, runs = _runs(offsets)
        ascending = np.asarray(values, np.uint8).ravel()[order]
        self._copy([(self._address + offset, ascending.ctypes.data + at, count) for at, offset, count in runs])

    def _copy(self, moves: list[tuple[int, int, int]]) -> None:
        """Make copies, as (to, from, bytes), and wait for their end."""
        device = self._device
        with device.current(), Uncaptured(device):
            stream, event = device.stream(), device.event()
            try:
                for dst, src, nbytes in moves:
                    device.copy(dst, src, nbytes, stream)
                device.record(event, stream)
                device.synchronize(event)
            finally:
                device.driver.cuEventDestroy_v2(event)
                device.driver.cuStreamDestroy_v2(stream)


def _runs(offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
    """Return the order of offsets, and runs of consecutive ones, as (place in that order, offset, count).

    >>> order, runs = _runs(np.array([7, 3, 4]))
    >>> order.tolist(), runs
    ([1, 2, 0], [(0, 3, 2), (2, 7, 1)])
    """
    flat = offsets.ravel()
    order = np.argsort(flat, kind="stable")
    ascending = flat[order]
    starts = np.flatnonzero(np.diff(ascending, prepend=-2) != 1)
    counts = np.diff(starts, append=flat.size)
    return order, list(zip(starts.tolist(), ascending[starts].tolist(), counts.tolist(), strict=True))
