"""Memory that processes of one machine share by name: a file that all map and that the last process unlinks.

Every user holds a shared ``flock`` on the file, which the system releases however the process ends. So a file without a
lock has no users: a process that finds such a file makes it anew, and the last user unlinks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.base.process import POOLS, at_exit
from kvplan.errors import HostMemoryError, LayoutError
from kvplan.memory.shared_header import (
    MAGIC,
    WHOLE,
    check_header,
    header_in,
    in_use,
    mark_use,
    new_header,
    token_in,
    told,
)
from kvplan.memory.shared_path import page_of, path_of

FORMAT = 1  # version of the file; it is in the header, so that another version raises an error
ATTEMPTS = 1000  # to open a file that is half made or locked and does not grow: about 20 seconds
RESERVED = 1 << 30  # bytes reserved by one call, which is repeated if a signal interrupts it

Bytes = NDArray[np.uint8]


class Shared(NamedTuple):
    """A pool that this process has mapped.

    Attributes:
        memory: bytes of the whole file; this process uses the pool while this array, or a view of it, is alive.
        tensors: bytes of each tensor; each tensor begins at the start of a page.
        page: bytes per page of the file.
        token: text that identifies the pool; "" if the file has no token.
        path: the file.
    """

    memory: Bytes
    tensors: list[Bytes]
    page: int
    token: str
    path: str


def share(shared: Any, geometry: str, sizes: Sequence[int]) -> Shared:
    """Map the pool with a name. The first user makes it, full of zeros; all users must give the same geometry.

    Args:
        shared: name or path of the pool; see :func:`path_of`.
        geometry: a text that determines the place of every byte. If two users' texts differ, a message shows both.
        sizes: bytes of each tensor.

    Raises:
        LayoutError: the name is invalid, or the pool is in use with another geometry; then the message shows both.
        HostMemoryError: there is no space, or the file cannot be used.

    >>> pool, again = share(f"kvplan-doctest-{os.getpid()}", "two of 100", [100, 100]), None
    >>> again = share(f"kvplan-doctest-{os.getpid()}", "two of 100", [100, 100])
    >>> again.tensors[1][7] = 1
    >>> pool.tensors[1][:9].tolist()
    [0, 0, 0, 0, 0, 0, 0, 1, 0]
    """
    path = path_of(shared)
    at_exit(POOLS, _leave_all)
    try:
        return _share(path, f"format {FORMAT} | {geometry}", sizes)
    except OSError as error:
        raise HostMemoryError(f"cannot share {str(path)!r}: {error.strerror or error}") from error


def attach(path: str, geometry: str, sizes: Sequence[int], token: str) -> Shared | None:
    """Map a pool that is in use, whichever process made it, or return None. It makes and replaces no file.

    A mapping that this process already has is used again, so that the pool has one address in a process.

    Args:
        path: the file.
        geometry, sizes: as given to :func:`share`.
        token: :attr:`Shared.token` of the pool; another pool with that name and geometry is not mapped.

    >>> pool = share(f"kvplan-doctest-{os.getpid()}", "one of 100", [100])
    >>> path = str(path_of(f"kvplan-doctest-{os.getpid()}"))
    >>> attach(path, "one of 100", [100], pool.token).memory is pool.memory
    True
    >>> attach(path, "one of 200", [200], pool.token), attach(path, "one of 100", [100], "another")
    (None, None)
    """
    at_exit(POOLS, _leave_all)
    try:
        return _share(Path(path), f"format {FORMAT} | {geometry}", sizes, token)
    except (OSError, ValueError):  # no file, another user's file, another pool, or a file cut while it is mapped
        return None


def _share(path: Path, geometry: str, sizes: Sequence[int], token: str | None = None) -> Shared:
    """Map a pool; with a token, only the pool of that token, and only while it is in use."""
    idle, grown = 0, (0, 0, 0)
    while idle < ATTEMPTS:
        time.sleep(min(idle, 20) / 1000)
        idle += 1
        use = _Use(path, token)
        try:
            page = page_of(use.fd)
            starts = [page]
            for size in sizes:
                starts.append(starts[-1] + -(-size // page) * page)
            if not use.enter(geometry, page, starts[-1]):
                now = use.grown()
                if now[0] == grown[0] and now[1:] > grown[1:]:  # another process still makes it, so go on waiting
                    idle = 0
                grown = now
                use.leave()
                continue
            known = None if token is None else _mapped.get((str(path), use.token))
            if known is not None:
                use.leave()  # the other mapping has a use of its own
                return _shared(known, starts, sizes, page, use)
            memory = np.frombuffer(_mapping(use, starts[-1]), np.uint8)
        except BaseException:
            use.leave()
            raise
        # The finalizer runs before the unmapping, because an array releases its buffer last.
        weakref.finalize(memory, use.leave).atexit = False
        first = _mapped.setdefault((str(path), use.token), memory)
        if token is not None:  # another thread may have attached meanwhile
            memory = first
        return _shared(memory, starts, sizes, page, use)
    raise HostMemoryError(
        f"another process keeps {str(path)!r} locked and does not finish it; remove it, or take another name"
    )


def _shared(memory: Bytes, starts: Sequence[int], sizes: Sequence[int], page: int, use: _Use) -> Shared:
    whole = memoryview(memory)  # so that each tensor is a region of its own, and no view of one array
    parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return Shared(memory, [np.frombuffer(part, np.uint8) for part in parts], page, use.token, str(use.path))


def _mapping(use: _Use, nbytes: int) -> mmap.mmap:
    """Map the file through a second file descriptor, without a lock.

    A mapping keeps its file descriptor, and a forked child keeps the mapping. So a lock on it would not be released.
    """
    fd = os.open(use.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not os.path.samestat(os.fstat(fd), os.fstat(use.fd)):
            raise HostMemoryError(f"{str(use.path)!r} was replaced by another file while it was opened")
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


class _Use:
    """One use of a file by this process: a file descriptor and the lock on it.

    Args:
        path: the file; if ``token`` is None, a missing file is made, empty.
        token: token of the wanted pool, or None for any pool.

    Attributes:
        token: token of the pool in the file; "" before :meth:`enter` succeeds.

    Raises:
        HostMemoryError: the path is not a regular file, or belongs to another user.
    """

    def __init__(self, path: Path, token: str | None = None) -> None:
        self.path, self.token = path, ""
        self._wanted = token
        self._heir = token is None  # whether this use must unlink the file if it is the last
        make = os.O_CREAT if token is None else 0
        self.fd = os.open(path, os.O_RDWR | make | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _uses.add(self)
        told = os.fstat(self.fd)
        what = "" if stat.S_ISREG(told.st_mode) else "is not a regular file"
        if told.st_uid != os.geteuid():
            what = f"belongs to user {told.st_uid}, and this process to {os.geteuid()}"
        if what:
            _uses.discard(self)
            os.close(self.fd)
            raise HostMemoryError(f"{str(path)!r} {what}; take another name")

    def enter(self, geometry: str, page: int, nbytes: int) -> bool:
        """Lock the file, make the pool if it has no users, and compare geometries; return False to open the file again.

        An exclusive lock cannot be turned into a shared lock in one step. So all that was checked before the shared
        lock is checked again under it.
        """
        if self._wanted is not None:
            if not in_use(self.fd):
                raise HostMemoryError(f"{str(self.path)!r} is not in use")
        elif self._alone():
            if not self._named():
                return False
            if os.fstat(self.fd).st_size:
                # Users that were killed, or did not finish it, left this file. It may still be mapped, for example by a
                # forked child, so it is replaced and not cut.
                if not self._ours(page):
                    raise HostMemoryError(f"{str(self.path)!r} is a file that kvplan did not make; remove it, "
                                          "or take another name")  # fmt: skip
                self.path.unlink()
                return False
            self._make(geometry, page, nbytes)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # another process makes it or holds the lock: the caller tries again for some time
            return False
        self._heir = True  # from now on
        if not self._named():
            return False
        state, found = self._header(page)
        if state != WHOLE:
            if self._ours(page):
                return False
            raise HostMemoryError(f"{str(self.path)!r} is in use and is not a pool of kvplan; take another name")
        if found != geometry:
            raise LayoutError(f"{str(self.path)!r} is in use as another pool: there it is {told(found)}; here it is "
                              f"{told(geometry)}")  # fmt: skip
        self.token = token_in(os.pread(self.fd, page, 0))
        if self._wanted not in (None, self.token):
            raise LayoutError(f"{str(self.path)!r} is in use as another pool of that name")
        size = os.fstat(self.fd).st_size
        if size != nbytes:
            raise HostMemoryError(
                f"{str(self.path)!r} is in use and has {size} bytes instead of {nbytes}: it was cut; end its users"
            )
        mark_use(self.fd)
        return True

    def grown(self) -> tuple[int, int, int]:
        """Return the file's inode, its size in bytes, and its reserved blocks of 512 bytes."""
        told = os.fstat(self.fd)
        return told.st_ino, told.st_size, told.st_blocks

    def leave(self) -> None:
        """Release the lock, and unlink the file if no other process has a lock."""
        try:
            _uses.remove(self)
        except KeyError:  # left before, or this is a forked child, which has no uses
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # first: if two processes leave at once, one finds no other lock
            if self._heir and self._alone() and self._named() and os.pread(self.fd, len(MAGIC), 0) == MAGIC:
                self.path.unlink()
        os.close(self.fd)

    def _alone(self) -> bool:
        """Lock the file exclusively if no other process has a lock; return whether it is locked."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _named(self) -> bool:
        """Return whether the path still names this file. Only a process with the exclusive lock unlinks it."""
        try:
            return os.path.samestat(self.path.stat(follow_symlinks=False), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _header(self, page: int) -> tuple[bytes, str]:
        """Return the state and geometry in the first page, or the bytes at their positions."""
        return header_in(os.pread(self.fd, page, 0))

    def _ours(self, page: int) -> bool:
        """Return whether the content is a pool or an unfinished pool, so that the file may be replaced."""
        head, size = os.pread(self.fd, page, 0), os.fstat(self.fd).st_size
        return head.startswith(MAGIC) or (size in (0, page) and not head.strip(b"\0"))

    def _make(self, geometry: str, page: int, nbytes: int) -> None:
        """Make the pool, and reserve memory for all of it: a touched page without memory would kill the process."""
        header = new_header(geometry)
        try:
            os.fchmod(self.fd, 0o600)
            check_header(header, page)
            self._check_room(nbytes)
            os.posix_fallocate(self.fd, 0, page)
            with _mapping(self, page) as head:  # hugetlbfs can be written only through a mapping
                head[: len(header)] = header
                for at in range(page, nbytes, RESERVED):
                    os.posix_fallocate(self.fd, at, min(RESERVED, nbytes - at))
                head[len(MAGIC) : len(MAGIC) + len(WHOLE)] = WHOLE
        except BaseException as error:
            if self._named():
                self.path.unlink()
            if isinstance(error, OSError):
                raise HostMemoryError(
                    f"cannot reserve {nbytes:,} bytes for {str(self.path)!r}: {error.strerror or error}"
                ) from error
            raise

    def _check_room(self, nbytes: int) -> None:
        """Check that the file system has space, before it is filled; raise HostMemoryError if it has not."""
        told = os.fstatvfs(self.fd)
        every, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
        if every > 0 and free < nbytes:  # file systems without a limit report 0
            raise HostMemoryError(
                f"{str(self.path)!r} needs {nbytes:,} bytes; {free:,} of {every:,} are free in "
                f"{str(self.path.parent)!r}: take fewer blocks, make more room (docker run --shm-size), or remove "
                "unused pools"
            )


_uses: set[_Use] = set()
# Mappings of this process by path and token: the first mapping of each pool that is still alive.
_mapped: weakref.WeakValueDictionary[tuple[str, str], Bytes] = weakref.WeakValueDictionary()


def _leave_all() -> None:
    for use in tuple(_uses):
        use.leave()


def _forked() -> None:
    """Drop all uses in a forked child, where a copy of a lock could outlive the parent; the memory stays mapped."""
    while _uses:
        os.close(_uses.pop().fd)
    _mapped.clear()


os.register_at_fork(after_in_child=_forked)
