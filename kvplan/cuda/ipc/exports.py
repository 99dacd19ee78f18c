"""GPU memory that other processes may open: the owner's side, which names whole allocations by handles.

``cuMemAlloc`` makes memory with a handle of 64 bytes. Memory of ``cuMemCreate`` and ``cuMemMap`` (torch's expandable
segments, vLLM's sleep mode) consists of pieces, each of which another process opens by a file descriptor.
"""

from __future__ import annotations

import os
from ctypes import byref
from dataclasses import dataclass

from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.driver import FABRIC, HANDLE_TYPES, LEGACY_IPC, MEMORY_POOL, POSIX_FD, IpcHandle
from kvplan.cuda.machine import uuid_of
from kvplan.errors import PathError

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
