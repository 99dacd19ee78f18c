"""A line to a peer, and the transfers that move over it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvplan.agents.packed.messages import UNNUMBERED, Message
from kvplan.agents.packed.packed_transfer import PackedTransfer
from kvplan.agents.packed.programs import NOTHING, Known, Offer
from kvplan.agents.packed.ring import Place
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Chunks, Outline
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.plan import ById, PlanSource

ANSWER_SECONDS = 1.0  # that a line waits, and a close, for the answer of a peer of which nothing is in flight
MOST_PROGRAMS = 64  # that a line knows in one direction, and that a transfer may have


def too_many(programs: Iterable[ById]) -> bool:
    """Return whether these are more programs than a line knows."""
    return len(set(map(id, programs))) > MOST_PROGRAMS


class Wire(Protocol):
    """The wire from this process to one peer: large writes, each with a note, and notes. None of its methods blocks.

    The notes of :meth:`send` arrive in order. That of a write comes behind its bytes.
    """

    def ring(self, address: int, nbytes: int, device: str) -> None:
        """Take the place of the peer's ring; raise KVPlanError if this wire cannot write there."""

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Any:
        """Post one write, and return its handle; raise KVPlanError if nothing of it moves."""

    def state(self, handle: Any) -> str:
        """Return ``"moving"``, ``"done"``, or ``"failed: why"``."""

    def release(self, handle: Any) -> bool:
        """Forget a write, and end it; return False if it still moves, and ask again."""

    def send(self, note: bytes) -> None:
        """Send a note; raise KVPlanError if it was not sent."""

    def close(self) -> None:
        """Forget the peer; nothing moves any more."""


class Line:
    """What an end knows of a peer, from one greeting to the next.

    Args:
        name: name of the peer.
        mine: number of this end of the line.
        now: the time.

    Attributes:
        name, mine: as given.
        wire: the wire to it.
        theirs: number of the peer's end; 0 while it has not answered.
        place: the peer's ring.
        chunk_nbytes: bytes of the smaller slot of both ends.
        moving: transfers, by whether this end has begun them and their numbers.
        noted: by direction and priority, the peer's transfers whose notes have not been told, in order.
        told: programs that the peer knows, and their numbers.
        programs: programs that the peer has sent, or why they cannot be.
        named: number of this end's slots that the peer may write.
        sending: number of this end's slots that are gathered or written to the peer.
        why: why it has ended; None while it has not.
        dead: whether nothing of the peer writes to this end any more.
        parted: whether the peer was told of the end.
        doubted: whether the wire has lost the peer, and was connected anew to ask it.
        heard_at: when something came.
    """

    wire: Wire

    def __init__(self, name: str, mine: int, now: float) -> None:
        self.name, self.mine = name, mine
        self.theirs = self.chunk_nbytes = self.named = self.sending = 0
        self.place = Place(0, 0, 0, "cpu")
        self.moving: dict[tuple[bool, int], Moving] = {}
        self.noted: dict[tuple[bool, bool], deque[Moving]] = {}
        self.told: dict[Hashable, int] = {}
        self.programs: dict[int, Known | str] = {}
        self.why: str | None = None
        self.dead = self.parted = self.doubted = False
        self.heard_at = now
        self._sent = self._heard = self._programs = 0

    def say(self, kind: int, body: bytes = b"", *, mine: bool = False, transfer: int = 0, chunk: int = 0) -> None:
        """Send a message; raise KVPlanError if the wire does not."""
        numbered = kind not in UNNUMBERED
        self._sent += numbered
        self.wire.send(Message(kind, self.mine, self._sent * numbered, mine, transfer, chunk, body).note())

    def hear(self, message: Message, now: float) -> bool:
        """Take the number of a message; return whether it is the next one."""
        self.heard_at = now
        if message.kind in UNNUMBERED:
            return True
        self._heard += 1
        return message.sequence == self._heard

    def number(self, program: ById, side: int) -> tuple[int, bool]:
        """Return the number of a program of which this end has a side, and whether it is new to the peer."""
        group = program.program.groups[0] if program.program.groups else None
        key: Hashable = id(program), program, side
        if group is not None and not isinstance(program, CopyProgram):  # rows: any program of such rows is the same
            key = group.nbytes, group.src.step(), program.src.device, program.dst.device, side
        if key in self.told:
            return self.told[key], False
        number, self._programs = self._programs % MOST_PROGRAMS, self._programs + 1
        self.told = {known: its for known, its in self.told.items() if its != number}
        self.told[key] = number
        return number, True


class Moving:
    """A transfer at one of its ends.

    Args:
        line: the line to the other end.
        sends: whether this end gathers and writes.
        urgent: whether it has high priority.
        outlines: what both ends know of it.
        groups: most groups of layers.
        own: layouts that hold its blocks at this end; none if each chunk is checked by itself.
        device: the device of these blocks.
        note: note for the user of the end that did not begin it.
        transfer: what the user of this end has, if this end began it.
        sources: block ids of both sides, likewise.
        offer: the memory that its chunks are checked against, if there is no ``own``.

    Attributes:
        side: the side of its plan that is this end's: 0 if it sends.
        number: its number at the end that began it; 0 before it has begun.
        cut: its chunks, once it has begun.
        opened: number of groups of layers whose gates are open.
        ready_at: since when all are; None before.
        ready: number of chunks that may travel.
        next: number of chunks for which this end, as a receiver, has named a slot.
        slots: slots of the receiver, by chunk; a receiver's until the chunk has come, a sender's until it is written.
        named: chunks to send that have a slot there.
        lined: whether it stands in the line for slots of this end.
        heard: this end's ids of chunks, if the other end began it.
        lefts: what copies of each group must wait for on the GPU.
        left: number of chunks that have not been scattered, by group of layers.
        arrived: number of groups that have arrived.
        scattered: number of chunks that have been scattered.
        copying, writing: numbers of gathers and scatters, and of writes, that move here.
        error: why it failed.
        told, answered: whether this end has told that, and whether the other end has told that nothing moves there.
        over, well: whether it has ended, and well.
        moved_at: when something of it moved.
    """

    cut: Chunks

    def __init__(
        self, line: Line, outlines: Sequence[Outline], groups: int, *, sends: bool, urgent: bool,
        own: Sequence[KVLayout], device: str, note: bytes = b"", transfer: PackedTransfer | None = None,
        sources: Sequence[PlanSource] = (), offer: Offer = NOTHING,
    ) -> None:  # fmt: skip
        self.line, self.outlines, self.groups, self.sends, self.urgent = line, outlines, groups, sends, urgent
        self.own, self.device, self.note, self.transfer, self.sources = own, device, note, transfer, sources
        self.offer, self.side = offer, 0 if sends else 1
        self.number = self.opened = self.ready = self.next = self.scattered = self.arrived = 0
        self.copying = self.writing = 0
        self.slots: dict[int, int] = {}
        self.named: deque[int] = deque()
        self.heard: dict[int, Any] = {}
        self.lefts: list[Any] = []
        self.error: str | None = None
        self.lined = self.told = self.answered = self.over = self.well = False
        self.ready_at: float | None = None
        self.moved_at = 0.0

    def begin(self, number: int) -> None:
        """Cut it into chunks, and stand among the transfers of the line, which is open."""
        self.cut = Chunks(self.outlines, self.line.chunk_nbytes, self.groups)
        self.left = [0] * len(self.cut.layers)
        for chunk in self.cut.chunks:
            self.left[chunk.group] += 1
        self.number = number
        self.line.moving[self.key] = self

    @property
    def mine(self) -> bool:
        """Whether this end began it."""
        return self.transfer is not None

    @property
    def key(self) -> tuple[bool, int]:
        """Its key among the transfers of the line."""
        return self.mine, self.number

    @property
    def open_chunks(self) -> int:
        """Number of chunks whose gates are open."""
        return sum([chunk.group < self.opened for chunk in self.cut.chunks])

    def holds(self) -> str:
        """Return what the destination holds after an error."""
        if self.transfer is None or not self.transfer.begun:
            return "nothing was moved"
        if self.sends:
            return "the peer's memory may hold all of the bytes, or a part of them"
        chunks = len(self.cut.chunks)
        return f"the destination's blocks hold {self.scattered} of {chunks} chunks: do not use them"

    def waits_since(self, now: float) -> float:
        """Return since when it waits for the peer; ``now`` if it waits for its gates."""
        return now if self.ready_at is None else max(self.ready_at, self.moved_at)


class Copying(NamedTuple):
    """A gather or a scatter.

    Attributes:
        copy: the executor's transfer.
        moving: whose chunk it is.
        chunk: number of the chunk.
        slot: its slot of this ring.
    """

    copy: Transfer
    moving: Moving
    chunk: int
    slot: int


class Writing(NamedTuple):
    """A write.

    Attributes:
        handle: the wire's handle.
        moving: whose chunk it is.
        slot: its slot of this ring.
    """

    handle: Any
    moving: Moving
    slot: int


Clock = Callable[[], float]
