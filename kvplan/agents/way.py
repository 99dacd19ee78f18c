"""The Protocol that every transport of an agent keeps: ``shm``, ``cuda_ipc``.

Two processes take part. The *owner* has the memory and makes the card. The *visitor* has read the card, and moves bytes
to and from the owner's memory. The steps, in order, with the process and the thread that makes each call:

1. Owner, user's thread: :meth:`Way.refuse` for each region, then one :meth:`Way.offer` of the regions that it takes.
   :attr:`Offer.part` goes into the card, as JSON.
2. Visitor, user's thread: :meth:`Way.check` of the part. It opens nothing.
3. Owner, service thread: :meth:`Offer.serve`, after the visitor has proved that it holds the card. The descriptors of
   :class:`Served` go over the socket to the visitor.
4. Visitor, user's thread: :meth:`Way.open` with these. :attr:`Opened.mapped` says where the memory is now.
5. Each transfer, in the visitor: :meth:`Opened.before`, the executor's submit, :meth:`Opened.after`. When the last byte
   has moved, and the owner lives: the note.
6. The owner closes or dies, or the visitor forgets it: once no transfer is in flight, the visitor's thread calls
   :meth:`Opened.release`, or :meth:`Opened.close` if the visitor leaves, and says goodbye. In the owner,
   :meth:`Served.close` follows the goodbye or the visitor's death, and :meth:`Offer.close` the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvplan.errors import TransferError
from kvplan.layout.components import Region
from kvplan.plan.plan import Plan

Tell = Callable[[bytes], None]  # sends a message of at most 32 KiB to the owner's ``heard``; never blocks
# Called when a transfer has ended: with its error, or None if all bytes have moved. It may raise TransferError.
Deliver = Callable[[TransferError | None], None]


def delivered(error: TransferError | None) -> None:
    """Do nothing: the transport's stream delivers the note behind the last byte, whatever the agent does."""
    del error


Table = dict[str, Any]  # a table for JSON: texts, numbers, lists and tables; bytes as base64 or hex text


class Origin(NamedTuple):
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


class Mapped(NamedTuple):
    """A range of the owner's memory, and its place in the visitor.

    Attributes:
        theirs: address of its first byte in the owner.
        nbytes: number of bytes.
        here: address of its first byte in the visitor.
        device: device in the visitor: ``"cpu"``, or the GPU that has the memory, such as ``"cuda:1"``.
        owner: the object that the layout's regions keep; it keeps the mapping while it is alive. It has the method
            ``present() -> int``: some address of its own that never changes, and 0 after :meth:`Opened.close`.
        writable: whether the visitor may write it.
        pinned: whether the GPUs of the visitor reach it, if it is host memory.
    """

    theirs: int
    nbytes: int
    here: int
    device: str
    owner: Any
    writable: bool = True
    pinned: bool = False


class Checked(NamedTuple):
    """A part of a card, read.

    Attributes:
        descriptors: number of file descriptors that the owner must send.
        data: data for :meth:`Way.open`.
    """

    descriptors: int
    data: Any


class Served(Protocol):
    """The owner's state for one visitor of one transport.

    Attributes:
        descriptors: file descriptors for the visitor, in order. The agent sends and never closes them.
    """

    descriptors: Sequence[int]

    def heard(self, message: bytes) -> None:
        """Take a message that the visitor's :class:`Opened` told. An error of kvplan ends the connection."""

    def notes(self) -> list[bytes]:
        """Return the notes that came by this transport itself, each once and in order; never block."""

    def close(self) -> None:
        """Give back what belongs to this visitor alone: it said goodbye or died. Called once, in any thread."""


class Offer(Protocol):
    """The memory that an owner offers by one transport.

    Attributes:
        part: the part of the card: a table that every JSON writer takes.
    """

    part: Table

    def serve(self) -> Served:
        """Return the state for a visitor that holds the card; called in the service thread, so it must be quick.

        Raises:
            KVPlanError: it cannot be served; the visitor is then refused with the message.
        """

    def close(self) -> None:
        """Give back everything, after the last visitor has gone. Called once."""


class Opened(Protocol):
    """The visitor's state of one transport with one owner.

    Attributes:
        mapped: where the owner's memory is now; ascending.
        gpu: the GPU whose executor must move the bytes, such as ``"cuda:0"``; None if any executor can.
    """

    mapped: Sequence[Mapped]
    gpu: str | None

    def before(self, plan: Plan, after: Any) -> Any:
        """Return the ``after=`` to submit with; called before the executor's submit, in the user's thread.

        Args:
            plan: the plan that is submitted.
            after: the user's ``after=``, or None. A transport may make the user's stream wait for the owner's event.
        """

    def after(self, transfer: Any, note: bytes, taken: list[Deliver], *, urgent: bool) -> None:
        """Take part in the end of a transfer; called right after the executor's submit, in the user's thread.

        Args:
            transfer: the executor's transfer.
            note: the user's note, or ``b""``.
            taken: an empty list. It stays empty to have the agent send the note. Otherwise this transport delivers it,
                behind the last byte, and puts in a function. The agent calls it once, when it knows how the transfer
                ended; also if Ctrl-C ends this call.
            urgent: whether the transfer has high priority. Notes of one priority come in the order of the submits.
        """

    def owner_gone(self) -> None:
        """Let transfers in flight go on that wait for the owner, which has died; called in the service thread."""

    def release(self) -> None:
        """Let go of memory that the owner may free from now on; no transfer is in flight. May be called twice."""

    def close(self) -> None:
        """Release, and unmap all; no transfer is in flight. May be called twice.

        Layouts over the memory may still be alive. Their addresses must not go to other memory while
        :attr:`Mapped.owner` lives. After this, its method ``present()`` returns 0 instead of its address, so that
        ``compile`` and ``Executor.prepare`` refuse these layouts.
        """


class Way(Protocol):
    """One transport. An object is made for each agent: ``SomeWay()``; it raises PathError if this machine cannot.

    ``cuda_ipc`` takes the device of the agent's executor, if the user gave one.

    Attributes:
        name: name of the transport, as in ``Agent(transports=...)``.
    """

    name: str

    def refuse(self, region: Region) -> str | None:
        """Return why a region of this process cannot be offered, with the setting that helps; None if it can."""

    def offer(self, regions: Sequence[Region]) -> Offer:
        """Offer regions that :meth:`refuse` took, ascending and each once; they may touch, nest and overlap.

        Raises:
            PathError: they cannot be offered, with the setting that helps.
        """

    def check(self, part: Table, regions: Sequence[Region], origin: Origin) -> Checked:
        """Read a part of a card, and open nothing.

        Args:
            part: the part of the card.
            regions: regions of the layouts that the card offers by this transport, ascending, with the owner's
                addresses.
            origin: the owner.

        Raises:
            PathError: this process cannot open it, for example for lack of that GPU.
        """

    def open(self, checked: Checked, descriptors: Sequence[int], tell: Tell, origin: Origin) -> Opened:
        """Open what :meth:`check` returned.

        Args:
            checked: the result of :meth:`check`.
            descriptors: as many as :attr:`Checked.descriptors`. The caller closes them after this call, so a transport
                that needs one for longer duplicates it.
            tell: sends a message to the owner's :meth:`Served.heard`.
            origin: the owner.

        Raises:
            LayoutError: what the descriptors or handles map is not what the card says; nothing stays mapped.
            PathError: the system refuses; nothing stays mapped.
        """
