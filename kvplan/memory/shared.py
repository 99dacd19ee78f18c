"""Memory that processes of one machine share by name: a file that all map and that the last process unlinks.

Every user holds a shared ``flock`` on the file, which the system releases however the process ends. So a file without a
lock has no users: a process that finds such a file makes it anew, and the last user unlinks it. The first page of the
file is a text: a magic line, a state, the geometry, and 32 random hexadecimal digits that identify the pool.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
import time
import weakref
from collections.abc import Sequence
from itertools import count
from math import lcm
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.base.process import POOLS, at_exit
from kvplan.base.values import quoted
from kvplan.errors import HostMemoryError, LayoutError

FORMAT = 1  # version of the file; it is in the header, so that another version raises an error
MAGIC, MAKING, WHOLE = b"kvplan.pool\n", b"making\n", b"whole.\n"
PATIENCE = 20  # seconds to wait for the process that makes a file, since the file last grew
RESERVED = 1 << 30  # bytes reserved by one call, which is repeated if a signal interrupts it
FOLDER = Path("/dev/shm")  # where shm_open keeps its files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")

Bytes = NDArray[np.uint8]


class Shared(NamedTuple):
    """A pool that this process has mapped.

    Attributes:
        memory: bytes of the whole file; this process uses the pool while this array, or a view of it, is alive.
        tensors: bytes of each tensor; each tensor begins at the start of a page.
        page: bytes per page of the file.
        token: text that identifies the pool.
        path: the file.
    """

    memory: Bytes
    tensors: list[Bytes]
    page: int
    token: str
    path: str


def path_of(shared: Any) -> Path:
    """Return the file of a name: in /dev/shm, or at an absolute path if the name has a slash.

    Raises:
        LayoutError: ``shared`` is neither a name nor an absolute path.

    >>> path_of("kv"), path_of("/mnt/huge/kv")
    (PosixPath('/dev/shm/kv'), PosixPath('/mnt/huge/kv'))
    """
    name = os.fspath(shared) if isinstance(shared, os.PathLike) else shared
    if not isinstance(name, str):
        raise LayoutError(f"shared is {quoted(shared)}; give a name, such as 'kv', or the absolute path of a file")
    if "/" not in name:
        if not _NAME.fullmatch(name):
            right = "a name has up to 200 letters, digits, '_', '-' and '.', and begins with none of '-' and '.'"
            raise LayoutError(f"shared is {quoted(name)}; {right}")
        return FOLDER / name
    path = Path(name)
    if not path.is_absolute() or ".." in path.parts or "\0" in name or name.endswith("/"):
        right = "a name with a slash must be the absolute path of a file, without '..'"
        raise LayoutError(f"shared is {quoted(name)}; {right}")
    if len(path.parts) == 2:
        right = f"write {path.name!r} for {FOLDER / path.name}"
        raise LayoutError(f"shared is {quoted(name)}, a file of the root folder; {right}")
    return path


def page_of(fd: int) -> int:
    """Return bytes per page of the file's system. On hugetlbfs pages are large, and files have whole pages."""
    block = os.fstatvfs(fd).f_bsize
    return lcm(mmap.PAGESIZE, block) if 0 < block <= 1 << 30 else mmap.PAGESIZE


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
    try:
        return _share(path, geometry, sizes)
    except OSError as error:
        raise HostMemoryError(f"cannot share {str(path)!r}: {error.strerror or error}") from error


def attach(path: str, geometry: str, sizes: Sequence[int], token: str) -> Shared | None:
    """Map a pool that is in use, whichever process made it, or return None. A pool without users is removed.

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
    try:
        return _share(Path(path), geometry, sizes, token)
    except (OSError, ValueError):  # no file, another user's file, another pool, or a file cut while it is mapped
        return None


def _share(path: Path, geometry: str, sizes: Sequence[int], token: str | None = None) -> Shared:
    """Map a pool; with a token, only the pool of that token, and only while it is in use."""
    at_exit(POOLS, _leave_all)
    blocks, deadline = -1, 0.0
    for tries in count():
        use = _Use(path, make=token is None)
        try:
            page = page_of(use.fd)
            starts = [page]
            for size in sizes:
                starts.append(starts[-1] + -(-size // page) * page)
            if use.enter(f"format {FORMAT} | {geometry}", page, starts[-1], token):
                known = _mapped.get((str(path), use.token)) if token is not None else None
                memory = np.frombuffer(_mapping(use, starts[-1]), np.uint8) if known is None else known
                break
            before, blocks, now = blocks, os.fstat(use.fd).st_blocks, time.monotonic()
            if blocks > before:  # another process still makes it
                deadline = now + PATIENCE
            elif now > deadline:
                stuck = "locked and does not finish it; remove it, or take another name"
                raise HostMemoryError(f"another process keeps {str(path)!r} {stuck}")
        except BaseException:
            use.leave()
            raise
        use.leave()
        time.sleep(min(tries, 20) / 1000)
    if known is not None:
        use.leave()  # the other mapping has a use of its own
    else:
        # The finalizer runs before the unmapping, because an array releases its buffer last.
        weakref.finalize(memory, use.leave).atexit = False
        first = _mapped.setdefault((str(path), use.token), memory)
        memory = memory if token is None else first  # another thread may have attached meanwhile
    whole = memoryview(memory)  # so that each tensor is a region of its own, and no view of one array
    parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return Shared(memory, [np.frombuffer(part, np.uint8) for part in parts], page, use.token, str(path))


def _mapping(use: _Use, nbytes: int) -> mmap.mmap:
    """Map the file through a second file descriptor, without a lock.

    A mapping keeps the open file, and a forked child keeps the mapping. So a lock on that file would not be released.
    """
    fd = os.open(f"/proc/self/fd/{use.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


class _Use:
    """One use of a file by this process: a file descriptor and the lock on it.

    Args:
        path: the file.
        make: whether to make a missing file, and a pool that has no users.

    Attributes:
        token: token of the pool in the file; "" before :meth:`enter` succeeds.

    Raises:
        HostMemoryError: the path is not a regular file, or belongs to another user.
    """

    def __init__(self, path: Path, *, make: bool) -> None:
        self.path, self.token, self._make_pool = path, "", make
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        self.fd = os.open(path, flags, 0o600)
        _uses.add(self)
        about = os.fstat(self.fd)
        what = "" if stat.S_ISREG(about.st_mode) else "is not a regular file"
        if about.st_uid != os.geteuid():
            what = f"belongs to user {about.st_uid}, and this process to {os.geteuid()}"
        if what:
            _uses.discard(self)
            os.close(self.fd)
            raise HostMemoryError(f"{str(path)!r} {what}; take another name")

    def enter(self, geometry: str, page: int, nbytes: int, token: str | None) -> bool:
        """Lock the file, make the pool if it has no users, and compare geometries; return False to open the file again.

        An exclusive lock cannot be turned into a shared lock in one step. So all that was checked before the shared
        lock is checked again under it.
        """
        if self._locked(fcntl.LOCK_EX):
            if not self._make_pool:
                raise HostMemoryError(f"{str(self.path)!r} is not in use")
            if not self._named():
                return False
            if os.fstat(self.fd).st_size:
                # Users that were killed, or did not finish it, left this file. It may still be mapped, for example by a
                # forked child, so it is replaced and not cut.
                self._check_ours(page, "is a file that kvplan did not make; remove it, or take another name")
                self.path.unlink()
                return False
            self._make(geometry, page, nbytes)
        if not self._locked(fcntl.LOCK_SH) or not self._named():  # another process makes it, or has replaced it
            return False
        state, there, self.token = self._header(page)
        if state != WHOLE:
            self._check_ours(page, "is in use and is not a pool of kvplan; take another name")
            return False
        if there != geometry:
            both = f"there it is {there!r}; here it is {geometry!r}"
            raise LayoutError(f"{str(self.path)!r} is in use as another pool: {both}")
        if token not in (None, self.token):
            raise LayoutError(f"{str(self.path)!r} is in use as another pool of that name")
        size = os.fstat(self.fd).st_size
        if size != nbytes:
            sizes = f"{size} bytes instead of {nbytes}"
            raise HostMemoryError(f"{str(self.path)!r} is in use and has {sizes}: it was cut; end its users")
        return True

    def leave(self) -> None:
        """Release the lock, and unlink the file if no other process has a lock."""
        try:
            _uses.remove(self)
        except KeyError:  # left before, or this is a forked child, which has no uses
            return
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_UN)  # first: if two processes leave at once, one finds no other lock
            if self._locked(fcntl.LOCK_EX) and self._named() and os.pread(self.fd, len(MAGIC), 0) == MAGIC:
                self.path.unlink()
        os.close(self.fd)

    def _locked(self, how: int) -> bool:
        """Lock the file unless another process has a lock that forbids it; return whether it is locked."""
        try:
            fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _named(self) -> bool:
        """Return whether the path still names this file. Only a process with the exclusive lock unlinks it."""
        try:
            return os.path.samestat(self.path.stat(follow_symlinks=False), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _header(self, page: int) -> tuple[bytes, str, str]:
        """Return the state, geometry and token in the first page, or the bytes at their positions."""
        head = os.pread(self.fd, page, 0)
        state = head[len(MAGIC) : len(MAGIC) + len(WHOLE)] if head.startswith(MAGIC) else b""
        geometry, token, *_ = (head[len(MAGIC) + len(WHOLE) :].decode(errors="replace") + "\n\n").split("\n")
        return state, geometry, token

    def _check_ours(self, page: int, problem: str) -> None:
        """Check that the content is a pool or an unfinished pool, so that the file may be replaced."""
        head, size = os.pread(self.fd, page, 0), os.fstat(self.fd).st_size
        if not head.startswith(MAGIC) and (size not in (0, page) or head.strip(b"\0")):
            raise HostMemoryError(f"{str(self.path)!r} {problem}")

    def _make(self, geometry: str, page: int, nbytes: int) -> None:
        """Make the pool, and reserve memory for all of it: a touched page without memory would kill the process."""
        header = MAGIC + MAKING + f"{geometry}\n{os.urandom(16).hex()}\n".encode()
        try:
            os.fchmod(self.fd, 0o600)
            if len(header) > page:
                raise LayoutError(f"the pool's header takes {len(header)} bytes and must fit in {page}: {geometry}")
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
                why = error.strerror or error
                raise HostMemoryError(f"cannot reserve {nbytes:,} bytes for {str(self.path)!r}: {why}") from error
            raise

    def _check_room(self, nbytes: int) -> None:
        """Check that the file system has space, before it is filled; raise HostMemoryError if it has not."""
        about = os.fstatvfs(self.fd)
        every, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
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
