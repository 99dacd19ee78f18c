"""Allocate the memory of a ring: huge pages of the host, or memory of a GPU."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress
from typing import Any

from kvplan.errors import KVPlanError, LayoutError, PathError
from kvplan.plan.row_plans import Memory

HUGE = 2 << 20  # bytes of a huge page


def ring_pages(nbytes: int, device: str) -> Memory:
    """Allocate memory for a ring. It is freed with the returned object.

    Args:
        nbytes: bytes of the ring.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``; its memory comes from ``cuMemAlloc``, which other processes
            and network cards can map.

    Raises:
        LayoutError: the host has not so much memory.
        PathError: the device is neither the CPU nor a GPU of CUDA, or the GPU has not so much memory.

    >>> ring = ring_pages(1 << 16, "cpu")
    >>> ring.shape, ring.data_ptr() % HUGE
    ((1, 65536), 0)
    """
    if device == "cpu":
        return _host_pages(nbytes)
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise PathError(f"the ring's device is {device!r}; expected 'cpu', or a GPU such as 'cuda:0'")
    from kvplan.cuda.device import Device

    try:
        gpu = Device(int(number))
        with gpu.current():
            address = gpu.allocate(nbytes)
    except KVPlanError as error:
        raise PathError(f"{device} has no {nbytes:,} bytes for a ring: {error}") from error
    owner = _GpuPages()
    weakref.finalize(owner, _free, gpu, address).atexit = False
    return Memory(address, nbytes, device, owner)


def enter(device: str) -> None:
    """Make the GPU of a ring the calling thread's current device, for a thread of kvplan's own.

    Each submit of the thread then finds it current, which saves 10 to 20 us. If the driver refuses it, each makes it
    current for itself, as always.

    Args:
        device: device of the ring; nothing is done for ``"cpu"``.

    >>> enter("cpu")
    """
    if device != "cpu":
        from kvplan.cuda.device import Device
        from kvplan.cuda.reach import ordinal_of

        with suppress(KVPlanError):
            Device(ordinal_of(device)).enter()


class _GpuPages:
    """Memory of a GPU, which is freed with this object."""


def _free(gpu: Any, address: int) -> None:
    with gpu.current():
        gpu.free(address)


def _host_pages(nbytes: int) -> Memory:
    try:
        memory = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise LayoutError(f"the host has no {nbytes:,} bytes for a ring: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # a copy by the kernel of the system looks up one page instead of 512
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = (ctypes.c_char * (nbytes + HUGE)).from_buffer(memory)
    start = -(-ctypes.addressof(whole) // HUGE) * HUGE
    return Memory(start, nbytes, "cpu", whole)
