"""Processes: which machine and process this is, and whether another process still lives."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvplan.base.process import generation
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError

_EXITING = 0x4  # PF_EXITING of the flags in /proc/PID/stat: set before the kernel frees any memory of the process
_FLAGS, _STARTED = 6, 19  # places in /proc/PID/stat behind the name; proc(5) counts them as 9 and 22


class Host(NamedTuple):
    """The part of a machine whose processes find each other: one boot, one network and one set of process numbers.

    Attributes:
        boot: the boot's identity, a text.
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
        pid: its number.
        started: when it started, in clock ticks since boot; with ``pid``, this names one process only.
        uid: number of its user.
    """

    host: Host
    pid: int
    started: int
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
        started = int(_fields(Path("/proc/self/stat").read_bytes())[_STARTED])
    except (OSError, ValueError, IndexError) as error:
        raise KVPlanError(
            f"this system does not tell the identity of a process ({error}); it needs Linux's /proc"
        ) from error
    return Self(Host(boot, net, pids), pid, started, os.geteuid())


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


def user_name(uid: int) -> str:
    """Return a user's name and number, for a message.

    >>> user_name(0), user_name(2**31 - 3)
    ("'root' (0)", '2147483645')
    """
    try:
        return f"{pwd.getpwuid(uid).pw_name!r} ({uid})"
    except (KeyError, OverflowError):
        return str(uid)


class Life:
    """The life of another process: whether it still runs, whatever later process gets its number.

    Args:
        pid: number of the process.
        started: when it started, in clock ticks since boot; None to trust the number.

    Raises:
        ProcessLookupError: there is no such process, or another process has its number now.

    >>> with contextlib.closing(Life(os.getpid(), this_process().started)) as life:
    ...     life.over()
    False
    """

    def __init__(self, pid: int, started: int | None) -> None:
        self.pid = pid
        self._stat = self._pidfd = -1
        try:
            with contextlib.suppress(OSError, AttributeError):  # not on Linux before 5.3
                self._pidfd = os.pidfd_open(pid)
            # From here on the number cannot go to another process unnoticed: this file belongs to one process only.
            # The file of the main thread tells the same as the process's own, which adds up the times of all threads.
            self._stat = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            if started is not None and int(_fields(os.pread(self._stat, 4096, 0))[_STARTED]) != started:
                raise ProcessLookupError(f"process {pid} is another one now")
        except (OSError, ValueError, IndexError) as error:
            self.close()
            raise ProcessLookupError(f"there is no process {pid}") from error

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when the process ends; -1 if this system has none."""
        return self._pidfd

    def over(self) -> bool:
        """Return whether the process has ended or has begun to end; its memory is still whole if it has not."""
        if self._stat < 0:
            return True
        try:  # the descriptor of the process would tell it later, and costs another system call
            fields = _fields(os.pread(self._stat, 4096, 0))
            return fields[0] in (b"Z", b"X", b"x") or bool(int(fields[_FLAGS]) & _EXITING)
        except (OSError, ValueError, IndexError):
            return True

    def close(self) -> None:
        """Close its files; may be called twice."""
        for fd in (self._stat, self._pidfd):
            if fd >= 0:
                os.close(fd)
        self._stat = self._pidfd = -1


def _fields(stat: bytes) -> list[bytes]:
    """Return the fields of /proc/PID/stat behind the process's name, which may hold any character."""
    return stat[stat.rindex(b")") + 1 :].split()
