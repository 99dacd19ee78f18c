"""A line to a peer, and the transfers that move over it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, cast

from kvplan.agents.packed.messages import NUMBERED, Message
from kvplan.agents.packed.programs import NOTHING, Offer, document_of_program
from kvplan.agents.packed.ring import Place, Ring
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Chunks, Outline
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.plan import Plan, PlannedBy

MOST_PROGRAMS = 64  # that a line knows in one direction, and that a transfer may have
GREETS, OPEN, ENDED, OVER = range(4)  # states of a line; in the last one nothing of the peer is written any more


class Wire(Protocol):
    """The wire from this process to one peer: large writes, each with a note, and notes. None of its methods blocks.

    The notes of :meth:`send` arrive in order. That of a write comes behind its bytes. Every method may raise
    KVPlanError.

    Attributes:
        gone: whether the transport has reported that the peer is gone.
    """

    gone: bool

    def metadata(self) -> bytes:
        """Return what the peer needs to write to this process's ring."""

    def join(self, metadata: bytes, place: Place) -> None:
        """Take the peer's metadata, and the place of its ring."""

    def renew(self) -> None:
        """Connect anew to a peer that the transport has lost."""

    def send(self, note: bytes) -> None:
        """Send a note."""

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Any:
        """Post one write, and return its handle."""

    def over(self, handle: Any) -> bool:
        """Return whether a write has ended; raise an error if it failed."""

    def release(self, handle: Any) -> bool:
        """Forget a write that has not ended well, and end it; return False if it still moves, and ask again."""

    def close(self) -> None:
        """Forget the peer; nothing moves any more."""


class Line:
    """What an end knows of a peer, from one greeting to the next.

    Args:
        name: name of the peer.
        wire: the wire to it.
        now: the time.

    Attributes:
        name, wire: as given.
        state: ``GREETS`` until the peer has answered, ``OPEN``, ``ENDED``, or ``OVER``.
        mine: number of this end of the line.
        theirs: number of the peer's end; 0 while that is not known.
        place: the peer's ring.
        chunk_nbytes: bytes of the smaller slot of both ends; 0 if it was never open.
        moving: transfers that both ends know of, by whether this end has begun them and their numbers.
        noted: by direction and priority, the peer's transfers whose notes have not been given to the user, in order.
        programs: programs that the peer has sent, by their numbers.
        taken: numbers of slots of this ring: those that are gathered or written to the peer, those that it may write.
        why: why it has ended.
        reported: whether the peer has been told of the end.
        renewed: whether the wire was connected anew to tell it.
        active: whether something was in flight at the last look.
        heard_at, said_at: when something came, or was sent for the sake of the line.
    """

    def __init__(self, name: str, wire: Wire, now: float) -> None:
        self.name, self.wire, self.mine = name, wire, secrets.randbits(63) | 1
        self.state, self.theirs, self.chunk_nbytes = GREETS, 0, 0
        self.moving: dict[tuple[bool, int], Moving] = {}
        self.noted: dict[tuple[bool, bool], deque[Moving]] = {}
        self.programs: dict[int, Any] = {}
        self.place, self.taken, self.why = Place(0, 0, 0, "cpu"), [0, 0], ""
        self.reported = self.renewed = self.active = False
        self.heard_at, self.said_at = now, 0.0
        self._numbers: dict[Hashable, int] = {}
        self._sent = self._heard = 0

    def say(
        self, kind: int, body: bytes = b"", *, mine: bool = False, transfer: int = 0, chunk: int = 0, slot: int = 0
    ) -> None:
        """Send a message; raise KVPlanError if the wire does not."""
        numbered = kind in NUMBERED
        self._sent += numbered
        self.wire.send(Message(kind, self.mine, self._sent * numbered, mine, transfer, chunk, slot, body).note())

    def follows(self, message: Message) -> bool:
        """Return whether a message is the next one."""
        numbered = message.kind in NUMBERED
        self._heard += numbered
        return not numbered or message.sequence == self._heard

    def number(self, program: PlannedBy, side: int, new: dict[int, Any]) -> int:
        """Return the number of a program of which this end has a side; add it to those that are new to the peer."""
        groups, key = program.program.groups, cast("Hashable", (id(program), program, side))
        if groups and not isinstance(program, CopyProgram):  # rows: any program of such rows is the same
            key = groups[0].nbytes, groups[0].src.step(), program.src.device, program.dst.device, side
        number = self._numbers.pop(key, None)
        if number is None:
            document, number = document_of_program(program, side), len(self._numbers)
            if number == MOST_PROGRAMS:  # the one that was used the longest time ago: no transfer has more programs
                number = self._numbers.pop(next(iter(self._numbers)))
            new[number] = document
        self._numbers[key] = number  # the last one now
        return number


class Moving:
    """A transfer at one of its ends. This one is a peer's; :class:`.packed_transfer.PackedTransfer` is this end's own.

    Args:
        outlines: what both ends know of it.
        groups: most groups of layers.
        sends: whether this end gathers and writes.
        urgent: whether it has high priority.
        note: note for the user of the end that did not begin it.
        own: layouts of this process that hold all units.
        offer: the memory that a peer may name.

    Attributes:
        line, number: the line to the other end, and its number at the end that began it; 0 until both ends know of it.
        side: the side of its plan that is this end's: 0 if it sends.
        cut: its chunks.
        ready: number of chunks that may travel to this end.
        next: number of chunks for which this end, as a receiver, has named a slot.
        slots: slots of the receiver, by chunk; a receiver's until the chunk has come, a sender's until it is written.
        named: chunks to send that have a slot there.
        scattered: number of chunks that have been scattered.
        copying, writing: numbers of gathers and scatters, and of writes, that move here.
        error: why it failed.
        begun: whether the destination may have been changed.
        ended: whether nothing more of it begins.
        lost: whether the wire has reported the peer as gone.
        reported, answered: whether this end has told that it failed, and whether the other end has told its end.
        moved_at: when something of it moved.
        ids: this end's block ids of chunks that are not known before, by chunk.
        left: a stream that the executor must wait for, or None.
    """

    mine = False
    left: Any = None
    line: Line
    cut: Chunks

    def __init__(
        self, outlines: Sequence[Outline], groups: int, *, sends: bool, urgent: bool, note: bytes,
        own: tuple[KVLayout, ...], offer: Offer = NOTHING,
    ) -> None:  # fmt: skip
        self.outlines, self.groups, self.own, self.offer = outlines, groups, own, offer
        self.sends, self.urgent, self.note = sends, urgent, note
        self.side = 0 if sends else 1
        self.number = self.ready = self.next = self.scattered = self.copying = self.writing = 0
        self.slots: dict[int, int] = {}
        self.named: deque[int] = deque()
        self.error: str | None = None
        self.begun = self.ended = self.reported = self.answered = self.lost = False
        self.moved_at = 0.0
        self.ids: dict[int, Any] = {}

    def begin(self, line: Line, number: int) -> None:
        """Cut it into chunks, and stand among the transfers of the line, which is open."""
        self.cut = Chunks(self.outlines, line.chunk_nbytes, self.groups)
        self.line, self.number = line, number
        line.moving[self.key] = self

    @property
    def key(self) -> tuple[bool, int]:
        """Its key among the transfers of the line."""
        return self.mine, self.number

    def ids_there(self, chunk: int) -> bytes:
        """Return the other end's block ids of a chunk for a message: it has them."""
        del chunk
        return b""

    def chunk_plan(self, chunk: int, ring: Ring, slot: int) -> Plan:
        """Plan to gather a chunk into a slot, or to scatter it from there; raise KVPlanError if an id is wrong."""
        plan = self.cut.plan(chunk, self.side, self.ids.pop(chunk), self.own, ring.layout, ring.address(slot))
        for span, part in zip(self.cut.chunks[chunk].spans, plan.parts, strict=True):
            if not isinstance(span.piece.program, CopyProgram):
                nbytes = span.piece.program.program.groups[0].nbytes
                self.offer.check_rows(part.units[self.side], nbytes, self.own[0].device)
        return plan

    def arrive(self, chunk: int) -> None:
        """Take it that a chunk is scattered."""
        del chunk
        self.scattered += 1

    def end(self, error: str | None) -> None:
        """Tell the user of the end; nothing of it is copied at this end any more."""
