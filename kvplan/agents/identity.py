"""Processes: which machine and process this is, and whether another process still lives."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import select
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvplan.base.process import generation
from kvplan.base.values import quoted
from kvplan.errors import KVPlanError

_EXITING = 0x4  # PF_EXITING of the flags in /proc/PID/stat: set before the kernel frees any memory of the process
_FLAGS = 6  # place in /proc/PID/stat behind the name; proc(5) counts it as 9
_SO_PEERPIDFD = 77  # of Linux 6.5; the module socket has no name for it


class Host(NamedTuple):
    """Where a process runs.

    Attributes:
        boot: the identity of the machine's boot, a text.
        net: number of the network namespace, in which abstract sockets have their names.
        pids: number of the process namespace, in which processes have their numbers.
    """

    boot: str
    net: int
    pids: int


class Self(NamedTuple):
    """This process.

    Attributes:
        host: where it runs.
        pid: its number in its own namespace.
        uid: number of its user.
    """

    host: Host
    pid: int
    uid: int


def this_process() -> Self:
    """Return the identity of this process.

    >>> this_process() == this_process()
    True
    """
    return _this_process(generation(), os.getpid())


@functools.lru_cache(1)
def _this_process(forks: int, pid: int) -> Self:
    del forks  # a forked child has another identity
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        net, pids = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid"))
    except OSError as error:
        raise KVPlanError(
            f"this system does not tell the identity of a process ({error}); it needs Linux's /proc"
        ) from error
    return Self(Host(boot, net, pids), pid, os.geteuid())


def allowed_users(users: Iterable[str | int]) -> frozenset[int]:
    """Return the numbers of users that were given by name or by number.

    Raises:
        KVPlanError: a user is unknown.

    >>> allowed_users(["root", 1000])
    frozenset({0, 1000})
    """
    if isinstance(users, str) or not isinstance(users, Iterable):
        raise KVPlanError(f"users is {quoted(users)}; give a sequence of user names or numbers")
    return frozenset(_uid(user) for user in users)


def _uid(user: object) -> int:
    if isinstance(user, int) and not isinstance(user, bool) and user >= 0:
        return user
    if not isinstance(user, str):
        raise KVPlanError(f"users name {quoted(user)}; give the name or the number of a user")
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise KVPlanError(f"users name {quoted(user)}, and this machine has no user of that name") from None


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return number and user of the process that connected, or that listens, at the other end of a socket.

    Both are as this process counts them: a process that its namespace does not see has the number 0.
    """
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class Life:
    """The life of the process at the other end of a connection, in whatever container it runs.

    The end of the connection tells a death, too; but a child of that process may hold the connection open.

    Args:
        sock: the connected socket.

    >>> one, other = socket.socketpair()
    >>> with one, other, contextlib.closing(Life(one)) as life:
    ...     life.over()
    False
    """

    def __init__(self, sock: socket.socket) -> None:
        pid, _ = peer_of(sock)
        self._stat = self._pidfd = -1
        try:
            self._pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:  # before Linux 6.5, or it has ended
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)
        # Memory of a GPU may go before the process has ended: where the process has a number here, this file tells that
        # it begins to end. That of the main thread is read faster than the process's own, which adds up all threads.
        with contextlib.suppress(OSError):
            self._stat = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when the process ends; -1 if this system has none."""
        return self._pidfd

    def over(self) -> bool:
        """Return whether the process is known to have ended, or to have begun to end."""
        if self._stat < 0:
            poll = select.poll()
            if self._pidfd >= 0:
                poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            stat = os.pread(self._stat, 4096, 0)
            fields = stat[stat.rindex(b")") + 1 :].split()  # behind the name, which may hold any character
            return fields[0] in (b"Z", b"X", b"x") or bool(int(fields[_FLAGS]) & _EXITING)
        except OSError:  # there is no such process any more
            return True

    def close(self) -> None:
        """Close its files; may be called twice."""
        for fd in (self._stat, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._stat = self._pidfd = -1
