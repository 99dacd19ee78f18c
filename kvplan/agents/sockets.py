"""Where an agent listens: at an abstract socket, or at a file of a folder that containers share.

All processes of one network namespace reach an abstract socket: those of a machine without containers, or of one pod.
Each container of Docker has a network of its own, so ``KVPLAN_SOCKETS`` names a folder that all of them mount.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.agents.identity import this_process
from kvplan.errors import TransferError

if TYPE_CHECKING:
    from kvplan.agents.agent_card import AgentCard

VARIABLE = "KVPLAN_SOCKETS"
LONGEST_PATH = 107  # bytes of a socket's path (sun_path, without the null byte at its end)
BACKLOG = 128
OLD_SECONDS = 60.0  # an older socket that refuses connections is of a process that died
_PREFIX, _SUFFIX, _RANDOM = "kvplan-", ".sock", 8  # hexadecimal digits: the path must be short
_BOOT = 4  # digits of the boot's identity: machines that share a folder leave each other's sockets alone
_SHARE = f"set {VARIABLE} to a folder that both containers share"


def socket_folder() -> Path | None:
    """Return the folder of sockets that this process shares with other containers, if it has one."""
    folder = os.environ.get(VARIABLE)
    return Path(folder).absolute() if folder else None


def folder_trouble(folder: Path) -> str | None:
    """Return why no agent can listen in a folder, with what would be right; None if it can.

    >>> folder_trouble(Path("/none"))
    'it is no folder; create it, or mount it as a volume'
    """
    nbytes = len(bytes(folder)) + len(f"/{_PREFIX}{_SUFFIX}") + _BOOT + _RANDOM
    if nbytes > LONGEST_PATH:
        return f"a socket there has a path of {nbytes} bytes, and Linux takes {LONGEST_PATH}; take a shorter path"
    if not folder.is_dir():
        return "it is no folder; create it, or mount it as a volume"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "this process may not write there; let its user do so"
    return None


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
        folder = socket_folder()
        if folder and (trouble := folder_trouble(folder)):
            raise TransferError(f"{agent!r} cannot listen for peers: {VARIABLE} is {str(folder)!r}: {trouble}")
        self.name = _prefix() + secrets.token_hex(_RANDOM // 2) + _SUFFIX * bool(folder)
        self.folder = _number(folder) if folder else None
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
            raise TransferError(f"{agent!r} cannot listen for peers: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the socket, and remove its file; may be called twice."""
        self.sock.close()
        self.remove()

    def remove(self) -> None:
        """Remove the socket's file; may be called twice."""
        path, self._path = self._path, None
        if path:
            with contextlib.suppress(OSError):
                path.unlink()


def unreachable(card: AgentCard) -> str | None:
    """Return why no socket leads from this process to the owner of a card, with what helps; None if one does."""
    here = this_process().host
    if card.host.boot != here.boot:
        return f"{card.name!r} runs on another machine"
    if card.folder is None:
        return None if card.host.net == here.net else f"{card.name!r} runs in another container; {_SHARE}, in both"
    folder = socket_folder()
    if folder is None:
        return f"{card.name!r} listens in a folder, and {VARIABLE} is not set here; {_SHARE}"
    if _number(folder) != card.folder:
        return f"{VARIABLE} is {str(folder)!r}, which is not the folder where {card.name!r} listens; {_SHARE}"
    return None


def address(card: AgentCard) -> str | bytes:
    """Return where the owner of a card listens, as this process connects to it."""
    folder = None if card.folder is None else socket_folder()
    return b"\0" + card.socket.encode() if folder is None else str(folder / card.socket)


def _number(folder: Path) -> tuple[int, int] | None:
    """Return a number of a folder that is the same in all containers that mount it."""
    try:
        told = folder.stat()
    except OSError:
        return None
    return told.st_dev, told.st_ino


def _prefix() -> str:
    return _PREFIX + this_process().host.boot[:_BOOT]


def _remove_left_overs(folder: Path) -> None:
    """Remove the sockets of this machine's processes that died."""
    for path in folder.glob(f"{_prefix()}*{_SUFFIX}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            told = path.lstat()
            if stat.S_ISSOCK(told.st_mode) and time.time() - told.st_mtime > OLD_SECONDS:
                probe.settimeout(0)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
