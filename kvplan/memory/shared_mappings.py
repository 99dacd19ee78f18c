"""Mappings of memory: of files that this process shares, to hand them out and to take them; and reserved addresses."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import re
import resource
import stat
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvplan.errors import HostMemoryError, LayoutError
from kvplan.layout.address_ranges import stretches_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.records import relocated

F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1034, 2, 4  # Linux; fcntl names them from Python 3.12 on
IN_MEMORY = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}  # file systems whose pages are memory, by statfs' number
_FAILED = ctypes.c_void_p(-1).value
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE: untouched pages take no memory
_FIXED, _NOHUGEPAGE = 0x10, 15
_PAGE = 4096
_ROW = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)")


class Stretch(NamedTuple):
    """A range of addresses of this process that one file backs.

    Attributes:
        start, end: addresses of its first byte, and of the first byte after it.
        offset: place of the first byte in the file.
        shared: whether other mappings of the file see what is written here.
        file: device and inode of the file; (0, 0) for memory without a file.
        path: the file's name, as /proc/self/maps shows it.
    """

    start: int
    end: int
    offset: int
    shared: bool
    file: tuple[int, int]
    path: str


def stretches_here() -> list[Stretch]:
    """Return the mappings of this process, ascending; neighbours that continue one file are one stretch.

    >>> made = sealed_memory(4096)
    >>> where = ctypes.addressof(ctypes.c_char.from_buffer(made))
    >>> [one.path for one in stretches_here() if one.start == where]
    ['/memfd:kvplan (deleted)']
    """
    stretches: list[Stretch] = []
    for row in Path("/proc/self/maps").read_bytes().splitlines():
        if match := _ROW.match(row):
            first, last, offset, major, minor = (int(match[k], 16) for k in (1, 2, 4, 5, 6))
            file = (os.makedev(major, minor), int(match[7])) if int(match[7]) else (0, 0)
            new = Stretch(first, last, offset, match[3][3:] == b"s", file, os.fsdecode(match[8]))
            old = stretches[-1] if stretches else None
            if old and file != (0, 0) and new == old._replace(start=old.end, end=last, offset=_after(old)):
                stretches[-1] = old._replace(end=last)
            else:
                stretches.append(new)
    return stretches


def _after(stretch: Stretch) -> int:
    return stretch.offset + stretch.end - stretch.start


def stretch_of(address: int, nbytes: int, stretches: Sequence[Stretch]) -> Stretch | None:
    """Return the stretch that holds a whole range, or None."""
    at = bisect_right(stretches, address, key=lambda stretch: stretch.start) - 1
    return stretches[at] if at >= 0 and address + nbytes <= stretches[at].end else None


def opened_file(stretch: Stretch, *, writable: bool) -> int:
    """Open the file of a stretch anew, and return the descriptor.

    Raises:
        HostMemoryError: the file has no name any more, and no descriptor of this process leads to it.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    for path in (stretch.path, *(f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):
            about = os.stat(path)  # before it is opened, which may have effects on another file
            if (about.st_dev, about.st_ino) == stretch.file:
                fd = os.open(path, flags)
                if os.path.samestat(os.fstat(fd), about):
                    return fd
                os.close(fd)
    raise HostMemoryError(
        f"the file {stretch.path!r} of the memory at {stretch.start:#x} cannot be opened: it has no name, and no "
        "descriptor of this process leads to it; allocate the pool with kvplan.allocate(..., shared=True)"
    )


def sealed_memory(nbytes: int) -> mmap.mmap:
    """Map zeros that another process can map, too: a file without a name, of fixed size. It keeps its descriptor.

    Raises:
        OSError: the system has no such files, or too many are open.
    """
    fd = os.memfd_create("kvplan", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def shareable(nbytes: int) -> mmap.mmap:
    """Map zeros as :func:`sealed_memory` does; if the system cannot, zeros that only forked children see.

    Each file keeps a descriptor. If half of this process's descriptors are in use, it makes no file: nobody asked for
    one, and the process needs the others.
    """
    with contextlib.suppress(OSError, AttributeError):
        if len(os.listdir("/proc/self/fd")) < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            return sealed_memory(nbytes)
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)


def trouble_of(fd: int, nbytes: int, uid: int, *, writable: bool, sealed: bool) -> str | None:
    """Return why a descriptor of another process must not be mapped, or None.

    Args:
        fd: the descriptor.
        nbytes: bytes that the file must have.
        uid: number of the user whom the file must belong to.
        writable: whether it will be written.
        sealed: whether the file must be sealed against cuts: a cut file kills the process that reads past its end.
    """
    about = os.fstat(fd)
    kind = (ctypes.c_long * 64)()  # struct statfs, whose first field is the type
    if not stat.S_ISREG(about.st_mode):
        return "it is not a file"
    if _libc().fstatfs(fd, kind) or kind[0] & 0xFFFFFFFF not in IN_MEMORY:
        return f"it is not a file in memory, but of a file system of number {kind[0] & 0xFFFFFFFF:#x}"
    if about.st_uid != uid:
        return f"it belongs to user {about.st_uid}, and not to user {uid}"
    if about.st_size < nbytes:
        return f"it has {about.st_size:,} bytes, and not {nbytes:,}"
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode != os.O_RDWR and (writable or mode != os.O_RDONLY):
        return "it is not open for writing" if writable else "it is not open for reading"
    seals = 0
    with contextlib.suppress(OSError):  # a file with a name, in /dev/shm
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    if sealed and not seals & F_SEAL_SHRINK:
        return "it is not sealed against cuts (F_SEAL_SHRINK), and its owner is another user"
    return None


class Mapping:
    """A mapped range of a file, or of zeros. It is unmapped when this object is garbage-collected.

    Args:
        fd: descriptor of the file, which may be closed afterwards; -1 for zeros, of which untouched pages are free.
        offset: first byte, on a page boundary of the file.
        nbytes: number of bytes.
        writable: whether this process may write it.

    Attributes:
        address: address of the first byte.
        nbytes: as given.

    Raises:
        HostMemoryError: the system does not map it.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, *, writable: bool) -> None:
        self.nbytes = nbytes
        self._open = True
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.address = _mmap(None, nbytes, access, mmap.MAP_SHARED if fd >= 0 else _PRIVATE, fd, offset)
        weakref.finalize(self, _libc().munmap, self.address, nbytes).atexit = False

    def present(self) -> int:
        """Return the address while the file is mapped there, and 0 afterwards."""
        return self.address if self._open else 0

    def close(self) -> None:
        """Unmap the file; the addresses stay reserved, full of zeros, while this object lives. May be called twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(HostMemoryError):  # then the file stays mapped until the object is collected
                _mmap(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | _FIXED, -1, 0)


def _mmap(address: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    mapped: int | None = _libc().mmap(address, nbytes, access, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise HostMemoryError(f"cannot map {nbytes:,} bytes from {offset:,} on: {reason}")
    return mapped


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def reserve(layout: KVLayout) -> KVLayout:
    """Return a copy of a layout in CPU memory of this process, with the same strides and offsets within pages.

    Hundreds of gigabytes can be reserved, because untouched pages take no memory. All bytes are zero at first.

    Raises:
        LayoutError: the system cannot reserve the addresses.

    >>> spec = {"notation": "kv block token dim", "sizes": {"block": 1 << 20, "token": 16, "dim": 1024}}
    >>> pool = reserve(KVLayout.from_spec(spec))
    >>> pool.virtual, pool.nbytes >> 30
    (False, 64)
    """
    shifts: list[tuple[range, int]] = []  # regions that touch or nest stay together
    end = 0
    for memory in stretches_of(layout.regions):
        place = end + _PAGE + memory.start % _PAGE
        shifts.append((memory, place - memory.start))
        end = -(-(place + len(memory)) // _PAGE) * _PAGE
    try:
        owner = Mapping(-1, 0, end, writable=True)
    except HostMemoryError as error:
        raise LayoutError(f"cannot reserve {end:,} bytes of addresses ({error}); describe fewer blocks") from error
    _libc().madvise(owner.address, end, _NOHUGEPAGE)  # a touched byte should take a page of 4 KiB, not of 2 MiB
    moved = [
        replace(region, address=owner.address + region.address + shift, device="cpu", pinned=False, writable=True,
                virtual=False, recorded=False, pool=None, owner=owner, held=None)
        for region in layout.regions
        for memory, shift in shifts if region.address in memory
    ]  # fmt: skip
    return KVLayout(relocated(layout.built, moved))
