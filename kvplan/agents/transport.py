"""What the transports within a machine have in common: ``shm`` for host memory, ``cuda_ipc`` for memory of GPUs.

The *owner* has the memory and makes the card. The *visitor* has read the card, opens the memory by descriptors that it
gets in the greeting, and moves bytes to and from it; the owner makes no call for that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvplan.layout.components import Region

NIXL = "nixl"
LOCAL = {
    "cuda_ipc": ("kvplan.agents.gpu_memory", "GpuMemory"),
    "shm": ("kvplan.agents.host_memory", "HostMemory"),
}  # transports within a machine, with the class of each
TRANSPORTS = (*LOCAL, NIXL)

Table = dict[str, Any]  # a table for JSON: texts, numbers, lists and tables; bytes as hex text


class Owner(NamedTuple):
    """The process that made a card.

    Attributes:
        name: name of the agent.
        pid: number of the process in its own namespace.
        pids: number of that namespace.
        uid: number of its user, as the system tells it of the connection; -1 before there is one.
        same_user: whether this process has the same user.
    """

    name: str
    pid: int
    pids: int
    uid: int = -1
    same_user: bool = False


class Offer(NamedTuple):
    """Memory that an owner offers by one transport.

    Attributes:
        part: the transport's part of the card.
        descriptors: the file descriptors that visitors need, in order.
        gpus: numbers of the GPUs that have it.
    """

    part: Table
    descriptors: list[int]
    gpus: tuple[int, ...] = ()


class Mapped(NamedTuple):
    """A range of the owner's memory, and its place in the visitor.

    Attributes:
        theirs: address of its first byte in the owner.
        nbytes: number of bytes.
        here: address of its first byte in the visitor.
        device: device in the visitor: ``"cpu"``, or the GPU that has the memory, such as ``"cuda:1"``.
        owner: the object that the layout's regions keep. ``present()`` returns an address of its own that never
            changes, and 0 after ``close()``, so that ``compile`` and ``Executor.prepare`` refuse the layouts. The
            address goes to no other memory while the object lives.
        writable: whether the visitor may write it.
    """

    theirs: int
    nbytes: int
    here: int
    device: str
    owner: Any
    writable: bool = True


class Opened(NamedTuple):
    """Memory of an owner that a visitor has opened.

    Attributes:
        mapped: where it is now, ascending by the owner's addresses.
        gpu: number of the GPU whose executor must move the bytes; None if any executor can.
        gpus: the owner's numbers of the GPUs that have it.
    """

    mapped: Sequence[Mapped]
    gpu: int | None = None
    gpus: Sequence[int] = ()


class Transport(Protocol):
    """One transport of an agent. To make it raises PathError if this machine cannot use it.

    Attributes:
        name: its name, as in ``Agent(transports=...)``.
    """

    name: str

    def refuse(self, region: Region) -> str | None:
        """Return why a region of this process cannot be offered, with the setting that helps; None if it can."""

    def offer(self, regions: Sequence[Region]) -> Offer:
        """Offer regions that :meth:`refuse` took, ascending and each once; they may touch, nest and overlap.

        Raises:
            PathError: they cannot be offered, with the setting that helps.
        """

    def check(self, part: Table, owner: Owner) -> tuple[int, Any]:
        """Read a part of a card; return the number of descriptors that it needs, and data for :meth:`open`.

        Raises:
            PathError: this process cannot open it, for example for lack of that GPU.
        """

    def open(self, data: Any, descriptors: Sequence[int], owner: Owner) -> Opened:
        """Open what :meth:`check` has read; the caller closes the descriptors afterwards.

        Raises:
            LayoutError: what they map is not what the card says; nothing stays mapped.
            PathError: the system refuses; nothing stays mapped.
        """


def close_all(descriptors: list[int]) -> None:
    """Close descriptors; a second call does nothing."""
    while descriptors:
        os.close(descriptors.pop())
