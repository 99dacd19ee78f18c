"""Mappings of files that this process shares: found by address, to hand them out, and made from a descriptor."""

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
from pathlib import Path
from typing import Any, NamedTuple

from kvplan.errors import HostMemoryError

F_ADD_SEALS, F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 1034, 2, 4  # Linux; fcntl names them from Python 3.12 on
IN_MEMORY = {0x01021994: "tmpfs", 0x958458F6: "hugetlbfs"}  # file systems whose pages are memory, by statfs' number
_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10
_NORESERVE = 0x4000  # untouched pages of the placeholder take no memory
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
    found: list[Stretch] = []
    for row in Path("/proc/self/maps").read_bytes().splitlines():
        match = _ROW.match(row)
        if match is None:
            continue
        first, last, offset, major, minor = (int(match[k], 16) for k in (1, 2, 4, 5, 6))
        inode = int(match[7])
        file = (os.makedev(major, minor), inode) if inode else (0, 0)
        one = Stretch(first, last, offset, match[3][3:] == b"s", file, os.fsdecode(match[8]))
        before = found[-1] if found else None
        if (
            before is not None
            and inode
            and before.end == first
            and before.file == file
            and before.shared == one.shared
            and before.offset + before.end - before.start == offset
        ):
            found[-1] = before._replace(end=last)
        else:
            found.append(one)
    return found


def stretch_of(address: int, nbytes: int, stretches: Sequence[Stretch]) -> Stretch | None:
    """Return the stretch that holds a whole range, or None."""
    at = bisect_right(stretches, address, key=lambda one: one.start) - 1
    if at < 0 or stretches[at].end < address + nbytes:
        return None
    return stretches[at]


def opened_file(stretch: Stretch, *, writable: bool) -> int:
    """Open the file of a stretch anew, and return the descriptor.

    Raises:
        HostMemoryError: the file has no name any more, and no descriptor of this process leads to it.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    if not stretch.path.endswith(" (deleted)"):
        with contextlib.suppress(OSError):
            return _same(os.open(stretch.path, flags | os.O_NOFOLLOW), stretch.file)
    for name in os.listdir("/proc/self/fd"):  # these links are followed below, if at all
        with contextlib.suppress(OSError):
            told = os.fstat(int(name))  # a descriptor of another file is not opened, because that may have effects
            if (told.st_dev, told.st_ino) == stretch.file:
                return _same(os.open(f"/proc/self/fd/{name}", flags), stretch.file)
    with contextlib.suppress(OSError):  # for privileged users
        return _same(os.open(f"/proc/self/map_files/{stretch.start:x}-{stretch.end:x}", flags), stretch.file)
    raise HostMemoryError(
        f"the file {stretch.path!r} of the memory at {stretch.start:#x} cannot be opened: it has no name, and no "
        "descriptor of this process leads to it; allocate the pool with kvplan.allocate(..., shared=True)"
    )


def _same(fd: int, file: tuple[int, int]) -> int:
    told = os.fstat(fd)
    if (told.st_dev, told.st_ino) != file:
        os.close(fd)
        raise FileNotFoundError
    return fd


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
    try:
        used = len(os.listdir("/proc/self/fd"))  # only their number
        if used < resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            return sealed_memory(nbytes)
    except (OSError, AttributeError):
        pass
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
    told = os.fstat(fd)
    if not stat.S_ISREG(told.st_mode):
        return "it is not a file"
    kind = _file_system(fd)
    if kind not in IN_MEMORY:
        return f"it is not a file in memory, but of a file system of number {kind:#x}"
    if told.st_uid != uid:
        return f"it belongs to user {told.st_uid}, and not to user {uid}"
    if told.st_size < nbytes:
        return f"it has {told.st_size:,} bytes, and not {nbytes:,}"
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if mode != os.O_RDWR and (writable or mode != os.O_RDONLY):
        return "it is not open for writing" if writable else "it is not open for reading"
    if sealed and not _seals(fd) & F_SEAL_SHRINK:
        return "it is not sealed against cuts (F_SEAL_SHRINK), and its owner is another user"
    return None


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:  # a file with a name, in /dev/shm
        return 0


def _file_system(fd: int) -> int:
    told = (ctypes.c_long * 64)()  # struct statfs, whose first field is the type
    return int(told[0]) & 0xFFFFFFFF if _libc().fstatfs(fd, told) == 0 else 0


class Mapping:
    """A mapped range of a file. It is unmapped when this object is garbage-collected.

    Args:
        fd: descriptor of the file, which may be closed afterwards.
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
        self.address = _mmap(None, nbytes, access, mmap.MAP_SHARED, fd, offset)
        weakref.finalize(self, _libc().munmap, self.address, nbytes).atexit = False

    def present(self) -> int:
        """Return the address while the file is mapped there, and 0 afterwards."""
        return self.address if self._open else 0

    def close(self) -> None:
        """Unmap the file; the addresses stay reserved, full of zeros, while this object lives. May be called twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(HostMemoryError):  # then the file stays mapped until the object is collected
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
                _mmap(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)


def _mmap(address: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    made: int | None = _libc().mmap(address, nbytes, access, flags, fd, offset)
    if made is None or made == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise HostMemoryError(f"cannot map {nbytes:,} bytes from {offset:,} on: {reason}")
    return made


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library
