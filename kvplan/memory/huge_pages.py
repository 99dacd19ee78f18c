"""Pages of 2 MiB for files in memory: a place where they can be mapped, and the request for them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
from pathlib import Path
from typing import Any

from kvplan.errors import HostMemoryError

HUGE = 2 << 20  # bytes of a huge page
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1; the mmap module does not name it
_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_NORESERVE = 0x4000  # untouched pages of the placeholder take no memory


def map_file(nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    """Map a file, and return the address, which lies in a huge page as ``offset`` does in the file.

    So huge pages of the file are mapped whole. The system itself chooses such places only if an administrator allowed
    huge pages for all files in memory. A file of less than a huge page is mapped anywhere.

    Args:
        nbytes: number of bytes.
        access, flags: as ``mmap`` of the system takes them.
        fd: descriptor of the file.
        offset: first byte, on a page boundary of the file.

    Raises:
        HostMemoryError: the system does not map it.
    """
    if nbytes < HUGE:
        return map_at(None, nbytes, access, flags, fd, offset)
    whole = nbytes + HUGE + mmap.PAGESIZE  # of the placeholder
    hold = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    start = map_at(None, whole, 0, hold, -1, 0)
    address = start + (offset - start) % HUGE
    used = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        map_at(address, nbytes, access, flags | _FIXED, fd, offset)
    except HostMemoryError:
        libc().munmap(start, whole)
        raise
    for first, last in ((start, address), (used, start + whole)):
        if first < last:
            libc().munmap(first, last - first)
    return address


def take_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for huge pages under a new mapping of a file in memory; return whether the system gave them.

    The pages are allocated now, full of zeros, and not at the first touch. A copy of scattered blocks then needs one
    512th of the address translations. Without them, the pages stay as they are. Memory of more than half of what is
    free is left alone.

    >>> take_huge_pages(mmap.PAGESIZE, HUGE - 1)  # there is no whole huge page
    False
    """
    first = -(-address // HUGE) * HUGE
    last = (address + nbytes) // HUGE * HUGE
    if first >= last or last - first > _available() // 2:
        return False
    for at in range(first, last, HUGE):  # the system collapses no range without a page
        ctypes.memset(at, 0, 1)
    return bool(libc().madvise(first, last - first, _COLLAPSE) == 0)


def _available() -> int:
    """Return the bytes of memory that the system could give; 0 if it does not say."""
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def map_at(address: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    """Call the system's ``mmap``; raise HostMemoryError if it fails."""
    made = libc().mmap(address, nbytes, access, flags, fd, offset)
    if made is None or made == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise HostMemoryError(f"cannot map {nbytes:,} bytes from {offset:,} on: {reason}")
    return int(made)


def hide(address: int, nbytes: int) -> None:
    """Put zeros that take no memory in the place of a mapping; raise HostMemoryError if that fails."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
    map_at(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


@functools.cache
def libc() -> Any:
    """Return the C library."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
