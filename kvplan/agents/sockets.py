"""Processes: which machine and process this is, where its agents listen, and whether another process still lives.

All processes of one network namespace reach an abstract socket: those of a machine without containers, or of one pod.
Each container of Docker has a network of its own, so ``KVPLAN_SOCKETS`` names a folder that all of them mount.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import secrets
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvplan.base.process import generation
from kvplan.base.values import quoted
from kvplan.errors import KVPlanError, TransferError

_EXITING = 0x4  # PF_EXITING of the flags in /proc/PID/stat: set before the kernel frees any memory of the process
_FLAGS = 6  # place in /proc/PID/stat behind the name; proc(5) counts it as 9
_SO_PEERPIDFD = 77  # of Linux 6.5; the module socket has no name for it
VARIABLE = "KVPLAN_SOCKETS"
LONGEST_PATH = 107  # bytes of a socket's path (sun_path, without the null byte at its end)
BACKLOG = 128
OLD_SECONDS = 60.0  # an older socket that refuses connections is of a process that died


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
        raise KVPlanError(f"the identity of a process needs Linux's /proc: {error}") from error
    return Self(Host(boot, net, pids), pid, os.geteuid())


def allowed_users(users: Iterable[str | int]) -> frozenset[int]:
    """Return the numbers of users that were given by name or by number.

    Raises:
        KVPlanError: a user is unknown.

    >>> allowed_users(["root", 1000])
    frozenset({0, 1000})
    """
    try:
        return frozenset(user if isinstance(user, int) else pwd.getpwnam(user).pw_uid for user in users)
    except (KeyError, TypeError, ValueError):
        raise KVPlanError(
            f"users is {quoted(users)}; give a sequence of names or numbers: this machine has no user of that name"
        ) from None


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

    Attributes:
        fd: a file descriptor that becomes readable when the process ends; -1 if this system has none.

    >>> one, other = socket.socketpair()
    >>> with one, other, contextlib.closing(Life(one)) as life:
    ...     life.over()
    False
    """

    def __init__(self, sock: socket.socket) -> None:
        pid, _ = peer_of(sock)
        self._stat = self.fd = -1
        try:
            self.fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:  # before Linux 6.5, or it has ended
            with contextlib.suppress(OSError):
                self.fd = os.pidfd_open(pid)
        # Memory of a GPU may go before the process has ended: where the process has a number here, this file tells that
        # it begins to end. That of the main thread is read faster than the process's own, which adds up all threads.
        with contextlib.suppress(OSError):
            self._stat = os.open(f"/proc/{pid}/task/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def over(self) -> bool:
        """Return whether the process is known to have ended, or to have begun to end."""
        if self._stat < 0:
            poll = select.poll()
            if self.fd >= 0:
                poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))
        try:
            stat = os.pread(self._stat, 4096, 0)
            fields = stat[stat.rindex(b")") + 1 :].split()  # behind the name, which may hold any character
            return fields[0] in (b"Z", b"X", b"x") or bool(int(fields[_FLAGS]) & _EXITING)
        except OSError:  # there is no such process any more
            return True

    def close(self) -> None:
        """Close its files; may be called twice."""
        for fd in (self._stat, self.fd):
            if fd >= 0:
                os.close(fd)
        self._stat = self.fd = -1


def shared_folder() -> Path | None:
    """Return the folder of sockets that this process shares with other containers, if it has one."""
    folder = os.environ.get(VARIABLE)
    return Path(folder).absolute() if folder else None


class Listener:
    """The listening socket of an agent.

    Args:
        agent: name of the agent, for messages.
        others: whether processes of other users may connect.

    Attributes:
        sock: the socket.
        name: its name: of a file in the folder, or of an abstract socket, without the leading null byte.
        folder: device and inode of the folder; None for an abstract socket.

    Raises:
        TransferError: the system gives no socket, or none in this folder.
    """

    def __init__(self, agent: str, *, others: bool) -> None:
        folder = shared_folder()
        self.name = _prefix() + secrets.token_hex(4) + ".sock" * bool(folder)
        self.folder = folder_number(folder) if folder else None
        self._path = folder / self.name if folder else None
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.sock.settimeout(0)
            self.sock.bind(str(self._path) if self._path else b"\0" + self.name.encode())
            if self._path:
                self._path.chmod(0o666 if others else 0o600)  # nobody connects before it listens
                _remove_left_overs(self._path.parent)
            self.sock.listen(BACKLOG)
        except OSError as error:
            self.close()
            why = error.strerror or str(error)
            if folder and not folder.is_dir():
                why = "it is no folder; create it, or mount it as a volume"
            elif folder and (nbytes := len(bytes(folder / self.name))) > LONGEST_PATH:
                why = f"a socket there has a path of {nbytes} bytes, and Linux takes {LONGEST_PATH}"
            where = f"{VARIABLE} is {str(folder)!r}: " if folder else ""
            raise TransferError(f"{agent!r} cannot listen for peers: {where}{why}") from error

    def close(self) -> None:
        """Close the socket, and remove its file; may be called twice."""
        with contextlib.suppress(OSError):  # a forked child's copy would let peers wait for an answer
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.remove()

    def remove(self) -> None:
        """Remove the socket's file; may be called twice."""
        path, self._path = self._path, None
        if path:
            with contextlib.suppress(OSError):
                path.unlink()


def folder_number(folder: Path) -> tuple[int, int] | None:
    """Return a number of a folder that is the same in all containers that mount it."""
    try:
        status = folder.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _prefix() -> str:
    return f"kvplan-{this_process().host.boot[:4]}"  # machines that share a folder leave each other's sockets alone


def _remove_left_overs(folder: Path) -> None:
    """Remove the sockets of this machine's processes that died."""
    for path in folder.glob(f"{_prefix()}*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            status = path.lstat()
            if stat.S_ISSOCK(status.st_mode) and time.time() - status.st_mtime > OLD_SECONDS:
                probe.settimeout(0)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
