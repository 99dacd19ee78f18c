"""GPU memory that other processes may open: the owner's side, which names whole allocations by handles.

``cuMemAlloc`` makes memory with a handle of 64 bytes. Memory of ``cuMemCreate`` and ``cuMemMap`` (torch's expandable
segments, vLLM's sleep mode) consists of pieces, each of which another process opens by a file descriptor.
"""

from __future__ import annotations

import os
from ctypes import byref, c_int, c_size_t, c_uint64
from dataclasses import dataclass

from kvplan.cuda.device import Device
from kvplan.cuda.driver import FABRIC, HANDLE_TYPES, LEGACY_IPC, MEMORY_POOL, POSIX_FD, IpcHandle
from kvplan.cuda.ipc.gpu_uuids import uuid_of
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import PathError, TransferError

HANDLE_NBYTES = 64
MOST_PIECES = 1 << 17  # of 2 MiB: 256 GiB

TORCH = "with torch, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
VLLM = "with vLLM, leave out --enable-sleep-mode and --enable-cumem-allocator, or take a newer vLLM"


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
    gpu = uuid_of(device.driver, device.ordinal)
    with device.current(), Uncaptured(device):
        if device.pointer(address, LEGACY_IPC):
            start, held = _range(device, address)
            if address + nbytes > start + held:
                more = f"{nbytes} bytes at {address:#x} of cuda:{device.ordinal}"
                raise PathError(f"{more} are of several allocations; describe each allocation as a layout of its own")
            handle = IpcHandle()
            device.driver.check("cuIpcGetMemHandle", device.driver.cuIpcGetMemHandle(byref(handle), start))
            return Export(gpu, start, held, bytes(handle))
        return _pieces(device, gpu, address, nbytes)


def descriptors(device: Device, export: Export, first: int, last: int) -> list[int]:
    """Open file descriptors of some pieces of an export. The caller closes them once they are sent.

    A process may open few descriptors (``ulimit -n``), and an export may have thousands of pieces: ask in portions.

    Args:
        device: the GPU that has the memory.
        export: the export, with pieces.
        first, last: index of the first piece, and the index behind the last piece.

    Raises:
        TransferError: the driver gives no descriptor; then none stays open.
    """
    cu, opened = device.driver, list[int]()
    at = export.address + sum(export.pieces[:first])
    try:
        with device.current(), Uncaptured(device):
            for nbytes in export.pieces[first:last]:
                handle, descriptor = c_uint64(), c_int(-1)
                cu.check("cuMemRetainAllocationHandle", cu.cuMemRetainAllocationHandle(byref(handle), at))
                try:
                    code = cu.cuMemExportToShareableHandle(byref(descriptor), handle.value, POSIX_FD, 0)
                    cu.check("cuMemExportToShareableHandle", code, f"{nbytes} bytes at {at:#x}")
                finally:
                    cu.cuMemRelease(handle.value)
                opened.append(descriptor.value)
                at += nbytes
    except BaseException:
        for each in opened:
            os.close(each)
        raise
    return opened


def _pieces(device: Device, gpu: str, address: int, nbytes: int) -> Export:
    """Walk the mapped pieces that hold some bytes, and check that each has a file descriptor."""
    pieces = list[int]()
    start = at = _range(device, address)[0]
    while at < address + nbytes:
        why = _refusal(device, at)
        if why:
            raise PathError(f"memory of cuda:{device.ordinal} at {at:#x} cannot be opened by another process: {why}")
        found, held = _range(device, at)
        if found != at or held <= 0 or len(pieces) >= MOST_PIECES:
            raise TransferError(f"the driver maps {held} bytes at {found:#x}, where memory at {at:#x} was expected")
        pieces.append(held)
        at += held
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
    start, nbytes, cu = c_uint64(), c_size_t(), device.driver
    code = cu.cuMemGetAddressRange_v2(byref(start), byref(nbytes), address)
    cu.check("cuMemGetAddressRange", code, f"{address:#x} is no memory of cuda:{device.ordinal}")
    return start.value, nbytes.value
