"""Memory that processes of one machine share by name: a file they map, which the last of them unlinks.

Every user holds a shared ``flock`` on the file, which the system takes back however the process ends. So a file that
nobody has locked is nobody's: who finds it makes it anew, and who leaves it so unlinks it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import mmap
import os
import stat
import sys
import time
import weakref
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from kvplan.memory.shared_path import path_of

FORMAT = 1  # of the file; told in the header, so that another version is refused
ATTEMPTS = 1000  # about 20 seconds, in which the file is half made or locked, and does not grow
RESERVED = 1 << 30  # bytes asked of the file system at once: what a signal interrupts is done again

Bytes = NDArray[np.uint8]


class Shared(NamedTuple):
    """A pool that is mapped here.

    Attributes:
        memory: the whole file; this process uses the pool for as long as it, or what is made of it, is there.
        tensors: bytes of each tensor, each beginning a page.
        page: bytes of a page of the file.
        token: what tells this pool from every other one; "" where the file names none.
    """

    memory: Bytes
    tensors: list[Bytes]
    page: int
    token: str


def share(shared: Any, geometry: str, sizes: Sequence[int]) -> Shared:
    """Map the pool of that name; the first user makes it, full of zeros, and all must mean the same geometry by it.

    Args:
        shared: see :func:`path_of`.
        geometry: all that tells where which bytes lie, as text; it is compared, and shown where it differs.
        sizes: bytes of each tensor.

    Raises:
        LayoutError: no name; or the pool is in use with another geometry, and both are named.
        HostMemoryError: no room, or a file that is not ours to use.

    >>> pool, again = share(f"kvplan-doctest-{os.getpid()}", "two of 100", [100, 100]), None
    >>> again = share(f"kvplan-doctest-{os.getpid()}", "two of 100", [100, 100])
    >>> again.tensors[1][7] = 1
    >>> pool.tensors[1][:9].tolist()
    [0, 0, 0, 0, 0, 0, 0, 1, 0]
    """
    path = path_of(shared)
    _hook_exit(os.getpid())
    try:
        return _share(path, f"format {FORMAT} | {geometry}", sizes)
    except OSError as error:
        raise HostMemoryError(f"cannot share {str(path)!r}: {error.strerror or error}") from error


def attach(path: str, geometry: str, sizes: Sequence[int], token: str) -> Shared | None:
    """Map a pool that is in use, whichever process made it; None where there is none. Nothing is made or replaced.

    A mapping that this process has of the pool serves again, so that the pool has one address for all who attach.

    Args:
        path: the file.
        geometry, sizes: as :func:`share` was given them.
        token: :attr:`Shared.token` of the pool that is meant: another one of that name and geometry is none.

    >>> pool = share(f"kvplan-doctest-{os.getpid()}", "one of 100", [100])
    >>> path = str(path_of(f"kvplan-doctest-{os.getpid()}"))
    >>> attach(path, "one of 100", [100], pool.token).memory is pool.memory
    True
    >>> attach(path, "one of 200", [200], pool.token), attach(path, "one of 100", [100], "another")
    (None, None)
    """
    _hook_exit(os.getpid())
    try:
        return _share(Path(path), f"format {FORMAT} | {geometry}", sizes, token)
    except (OSError, ValueError):  # no file, another user's, another pool, or one that is cut while it is mapped
        return None


def _share(path: Path, geometry: str, sizes: Sequence[int], token: str | None = None) -> Shared:
    """Map a pool; with a token, only that one, and only while somebody uses it."""
    idle, grown = 0, (0, 0, 0)
    while idle < ATTEMPTS:
        time.sleep(min(idle, 20) / 1000)
        idle += 1
        use = _Use(path, token)
        try:
            page = _page(use.fd)
            starts = [page]
            for size in sizes:
                starts.append(starts[-1] + -(-size // page) * page)
            if not use.enter(geometry, page, starts[-1]):
                now = use.grown()
                if now[0] == grown[0] and now[1:] > grown[1:]:  # somebody is at work, which is no reason to give up
                    idle = 0
                grown = now
                use.leave()
                continue
            known = None if token is None else _mapped.get((str(path), use.token))
            if known is not None:
                use.leave()  # the other mapping has a use of its own
                return _shared(known, starts, sizes, page, use.token)
            memory = np.frombuffer(_mapping(use, starts[-1]), np.uint8)
        except BaseException:
            use.leave()
            raise
        # Runs before the mapping goes: an array lets go of what it was made of last.
        weakref.finalize(memory, use.leave).atexit = False
        first = _mapped.setdefault((str(path), use.token), memory)
        if token is not None:  # another thread may have attached meanwhile
            memory = first
        return _shared(memory, starts, sizes, page, use.token)
    raise HostMemoryError(
        f"nobody finishes {str(path)!r}, which somebody keeps locked; remove it, or take another name"
    )


def _shared(memory: Bytes, starts: Sequence[int], sizes: Sequence[int], page: int, token: str) -> Shared:
    whole = memoryview(memory)  # between an array and its views, so that each tensor is a region of its own
    parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return Shared(memory, [np.frombuffer(part, np.uint8) for part in parts], page, token)


def _page(fd: int) -> int:
    """Bytes of a page of the file's system: those of hugetlbfs are large, and the file is a whole number of them."""
    block = os.fstatvfs(fd).f_bsize
    return lcm(mmap.PAGESIZE, block) if 0 < block <= 1 << 30 else mmap.PAGESIZE


def _mapping(use: _Use, nbytes: int) -> mmap.mmap:
    """The file's memory, through a descriptor of its own.

    A mapping keeps its descriptor, and the child of a fork its mapping: a lock on that one would stay with the child.
    """
    fd = os.open(use.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not os.path.samestat(os.fstat(fd), os.fstat(use.fd)):
            raise HostMemoryError(f"{str(use.path)!r} was replaced by another file while it was opened")
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


class _Use:
    """One use of a file by this process: a descriptor and the lock on it.

    Args:
        path: made, empty, where there is none; unless a token is given.
        token: of the one pool that is meant, or None.

    Attributes:
        token: of the pool in the file, once it was entered.

    Raises:
        HostMemoryError: it is no file, or another user's.
    """

    def __init__(self, path: Path, token: str | None = None) -> None:
        self.path, self.token = path, ""
        self._wanted = token
        self._heir = token is None  # whether nobody else may be there to unlink the file
        make = os.O_CREAT if token is None else 0
        self.fd = os.open(path, os.O_RDWR | make | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _uses.add(self)
        told = os.fstat(self.fd)
        what = "" if stat.S_ISREG(told.st_mode) else "is no file"
        if told.st_uid != os.geteuid():
            what = f"belongs to user {told.st_uid}, and this process to {os.geteuid()}"
        if what:
            _uses.discard(self)
            os.close(self.fd)
            raise HostMemoryError(f"{str(path)!r} {what}; take another name")

    def enter(self, geometry: str, page: int, nbytes: int) -> bool:
        """Lock the file, make it if nobody uses it, and compare; False where it is to be opened again.

        Whatever was learnt before the shared lock was had is looked at again under it: no lock is exchanged for
        another in one step.
        """
        if self._wanted is not None:
            if not in_use(self.fd):
                raise HostMemoryError(f"nobody uses {str(self.path)!r}")
        elif self._alone():
            if not self._named():
                return False
            if os.fstat(self.fd).st_size:
                # Of users that were killed, or of one that did not finish it. Theirs may still be mapped, by a child
                # of a fork for example, so that it is not cut but replaced.
                if not self._ours(page):
                    raise HostMemoryError(f"{str(self.path)!r} is a file that kvplan did not make; remove it, "
                                          "or take another name")  # fmt: skip
                self.path.unlink()
                return False
            self._make(geometry, page, nbytes)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # a process makes it, or holds the lock for no reason of ours: asked again, with an end
            return False
        self._heir = True  # of those who leave from now on
        if not self._named():
            return False
        state, found = self._header(page)
        if state != WHOLE:
            if self._ours(page):
                return False
            raise HostMemoryError(f"{str(self.path)!r} is in use, and no pool of kvplan's; take another name")
        if found != geometry:
            raise LayoutError(f"{str(self.path)!r} is in use as another pool: there it is {told(found)}; here it is "
                              f"{told(geometry)}")  # fmt: skip
        self.token = token_in(os.pread(self.fd, page, 0))
        if self._wanted not in (None, self.token):
            raise LayoutError(f"{str(self.path)!r} is in use as a pool that was made anew")
        size = os.fstat(self.fd).st_size
        if size != nbytes:
            raise HostMemoryError(
                f"{str(self.path)!r} is in use, and has {size} bytes in place of {nbytes}: it was cut; end its users"
            )
        mark_use(self.fd)
        return True

    def grown(self) -> tuple[int, int, int]:
        """Which file it is, and what is reserved of it: bytes, and blocks of 512."""
        told = os.fstat(self.fd)
        return told.st_ino, told.st_size, told.st_blocks

    def leave(self) -> None:
        """Give up the lock, and unlink the file where nobody else has one."""
        try:
            _uses.remove(self)
        except KeyError:  # left before, or the child of a fork, which has no use of its own
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # first, so that of two that leave at once one finds itself alone
            if self._heir and self._alone() and self._named() and os.pread(self.fd, len(MAGIC), 0) == MAGIC:
                self.path.unlink()
        os.close(self.fd)

    def _alone(self) -> bool:
        """Lock the file against all others, if there are none."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _named(self) -> bool:
        """Whether the path still leads to this file; only who has it locked alone unlinks it."""
        try:
            return os.path.samestat(self.path.stat(follow_symlinks=False), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _header(self, page: int) -> tuple[bytes, str]:
        """State and geometry, or what stands in their place."""
        return header_in(os.pread(self.fd, page, 0))

    def _ours(self, page: int) -> bool:
        """Whether losing the content loses nothing but a pool, or the beginning of one."""
        head, size = os.pread(self.fd, page, 0), os.fstat(self.fd).st_size
        return head.startswith(MAGIC) or (size in (0, page) and not head.strip(b"\0"))

    def _make(self, geometry: str, page: int, nbytes: int) -> None:
        """Reserve all of the file, so that no page of it is missing when it is touched: that would end the process."""
        header = new_header(geometry)
        try:
            os.fchmod(self.fd, 0o600)
            check_header(header, page)
            self._check_room(nbytes)
            os.posix_fallocate(self.fd, 0, page)
            with _mapping(self, page) as head:  # hugetlbfs cannot be written otherwise
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
        """Rather than fill up what is free, and then fail."""
        told = os.fstatvfs(self.fd)
        every, free = told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
        if every > 0 and free < nbytes:  # of file systems without a limit all is 0
            raise HostMemoryError(
                f"{str(self.path)!r} needs {nbytes:,} bytes; {free:,} of {every:,} are free in "
                f"{str(self.path.parent)!r}: take fewer blocks, make more room (docker run --shm-size), or remove "
                "pools that nobody uses"
            )


_uses: set[_Use] = set()
# Mappings of this process by path and token: the first of each pool that is still there.
_mapped: weakref.WeakValueDictionary[tuple[str, str], Bytes] = weakref.WeakValueDictionary()


@functools.cache
def _hook_exit(process: int) -> None:  # noqa: ARG001  # once in each
    atexit.register(_leave_all)
    # Children that multiprocessing forks end without atexit.
    multiprocessing = sys.modules.get("multiprocessing.util")
    if multiprocessing is not None:
        multiprocessing.Finalize(None, _leave_all, exitpriority=0)


def _leave_all() -> None:
    for use in tuple(_uses):
        use.leave()


def _forked() -> None:
    """The child of a fork has the parent's memory, but no use of its own: a copy of a lock could outlive the parent."""
    while _uses:
        os.close(_uses.pop().fd)
    _mapped.clear()


os.register_at_fork(after_in_child=_forked)
