"""A line to a peer and its messages: notes that begin with :data:`MAGIC`, in little-endian integers.

=======  ====================  =========================================================================================
message  from, to              meaning
=======  ====================  =========================================================================================
HELLO    either, other         where my ring is; nothing that I wrote to you earlier moves any more
ORDER    beginner, other end   begin a transfer from or to me; again: so many chunks of it may travel now
GO       receiver, sender      this free slot is for this chunk; the sender gathers it then
CHUNK    sender, receiver      this chunk is in its slot; the message comes behind the bytes
DONE     receiver, sender      all chunks are in their blocks
FAIL     either, other         why a transfer failed; nothing of it moves here any more
END      either, other         why all transfers failed; nothing of them moves here any more
WORD     either, other         I live
=======  ====================  =========================================================================================

Those of a transfer but CHUNK are numbered, so that a message that is lost, or comes twice, is an error.
"""

from __future__ import annotations

import json
import logging
import secrets
import struct
import threading
import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, cast

import numpy as np

from kvplan.agents.packed.ring import Place
from kvplan.base.process import cached_property
from kvplan.errors import TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.spec import built_from_dump, document_of
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.plan import PlannedBy
from kvplan.plan.row_plans import RowProgram

FAR = 1 << 46  # bytes of a layout that stands for any memory of a device
MAGIC = b"kvplan.pack/7"  # with the number of PACKED_VERSION
HELLO, ORDER, GO, CHUNK, DONE, FAIL, END, WORD = range(1, 9)
NUMBERED = ORDER, GO, DONE, FAIL
MOST_PROGRAMS = 64  # that a line has numbers of; then all are forgotten
GREETS, OPEN, ENDED, OVER = range(4)  # states of a line; in the last one nothing of the peer is written any more
_HEAD = struct.Struct("<13sBQQBQII")  # the magic first
_IDS = struct.Struct("<qBI")  # the lowest, bytes of each, how many
_LENGTH = struct.Struct("<I")
MOST_UNREAD = 64 << 20  # bytes of the notes of a peer that the user has not taken, as over shared memory
NOTE_NBYTES = 100  # that a note takes beside its content

log = logging.getLogger("kvplan.agents")


class Offer:
    """Memory of this process that peers may name.

    Args:
        layouts: layouts over it.

    >>> from kvplan.plan.row_plans import Memory, layout_of
    >>> pool = np.zeros(256, np.uint8)
    >>> offer = Offer([layout_of([Memory(pool.ctypes.data, 256, "cpu", pool)])])
    >>> offer.check_rows(np.array([pool.ctypes.data + 192]), 64, "cpu")
    >>> offer.check_rows(np.array([pool.ctypes.data + 193]), 64, "cpu")
    Traceback (most recent call last):
        ...
    kvplan.errors.TransferError: a peer names memory that is not all in the memory that is offered on cpu
    """

    def __init__(self, layouts: Iterable[KVLayout] = ()) -> None:
        self.layouts = tuple(layouts)

    @cached_property
    def _ranges(self) -> dict[str, Int64Array]:
        """By device, disjoint ranges (first, end), ascending."""
        regions = [region for layout in self.layouts for region in layout.regions]
        joined: dict[str, list[list[int]]] = {}
        for region in sorted(regions, key=lambda region: region.address):
            ranges = joined.setdefault(region.device, [])
            if ranges and region.address <= ranges[-1][1]:
                ranges[-1][1] = max(ranges[-1][1], region.end)
            else:
                ranges.append([region.address, region.end])
        return {device: np.array(ranges, np.int64) for device, ranges in joined.items()}

    def holding(self, layout: KVLayout, *, rows: bool) -> tuple[KVLayout, ...]:
        """Return the layouts over a peer's layout of this memory, or all of its device for rows.

        Raises:
            TransferError: some of it is not offered.
        """
        own = [each for each in self.layouts if each.device == layout.device]
        if not rows:
            regions = layout.regions
            for region in regions:
                self.check_rows(np.array([region.address]), region.nbytes, region.device)
            own = [
                each
                for each in own
                if any(r.address < s.end and s.address < r.end for r in regions for s in each.regions)
            ]
        if not own:
            raise TransferError(f"no memory is offered on {layout.device}")
        return tuple(own)

    def check_rows(self, addresses: Int64Array, nbytes: int, device: str) -> None:
        """Check that rows lie in this memory; raise TransferError if not."""
        ranges = self._ranges.get(device)
        if ranges is not None and addresses.size:
            at = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
            if bool((at >= 0).all()) and bool((addresses + nbytes <= ranges[at, 1]).all()):
                return
        raise TransferError(f"a peer names memory that is not all in the memory that is offered on {device}")


NOTHING = Offer()


def document_of_program(program: PlannedBy, side: int) -> dict[str, Any]:
    """Return a program as a message has it.

    Args:
        program: the program.
        side: the side of the process that sends it.
    """
    layouts = program.src, program.dst
    if isinstance(program, CopyProgram):
        return {"side": side, "layouts": [document_of(layout.built) for layout in layouts]}
    group = program.program.groups[0]
    return {"rows": [group.nbytes, group.src.step()], "devices": [layout.device for layout in layouts]}


def read_program(document: dict[str, Any], offer: Offer) -> tuple[PlannedBy, tuple[KVLayout, ...]]:
    """Compile a program that a peer has sent; return it with layouts of this process that hold its side.

    There are none for rows, whose memory may change.

    Raises:
        KVPlanError: it cannot be compiled, or names other memory than offered.
    """
    if "rows" in document:
        src, dst = map(far_memory, document["devices"])
        return RowProgram.of_rows(src, dst, *document["rows"]), ()
    layouts = [KVLayout(built_from_dump(layout)) for layout in document["layouts"]]
    own = offer.holding(layouts[1 - document["side"]], rows=False)
    return compile_quietly(layouts[0], layouts[1], reinterpret=True), own


def far_memory(device: str) -> KVLayout:
    """Return a layout that stands for any memory of a device of another process."""
    sizes = {"block": 1, "dim": FAR}
    spec = {"notation": "block dim", "dtype": "uint8", "device": device, "address": 4096, "sizes": sizes}
    return KVLayout.from_spec(spec)


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: :data:`HELLO` or another of the kinds.
        life: number of the sender's end of the line.
        sequence: number of the message; 0 for those without one.
        mine: whether its sender has begun the transfer.
        transfer: number of the transfer. Of HELLO and END: the receiver's end of the line, or 0 if it is not known.
        chunk: number of a chunk, or of chunks. Of END: whether no answer is wanted.
        slot: number of a slot.
        body: the rest.
    """

    kind: int
    life: int
    sequence: int = 0
    mine: bool = False
    transfer: int = 0
    chunk: int = 0
    slot: int = 0
    body: bytes = b""

    def note(self) -> bytes:
        """Return it as it travels.

        >>> Message.of(Message(GO, 7, 3, True, 5, 2, 9, b"body").note())
        Message(kind=3, life=7, sequence=3, mine=True, transfer=5, chunk=2, slot=9, body=b'body')
        """
        return _HEAD.pack(MAGIC, *self[:-1]) + self.body

    @classmethod
    def of(cls, note: bytes) -> Message:
        """Read a message."""
        _, kind, life, sequence, mine, transfer, chunk, slot = _HEAD.unpack_from(note)
        return cls(kind, life, sequence, bool(mine), transfer, chunk, slot, note[_HEAD.size :])


def body_of(fields: Any, rest: bytes) -> bytes:
    """Return values that JSON can write, and more bytes, as the body of a message.

    >>> fields_of(body_of([4096, "cpu"], b"more"))
    ([4096, 'cpu'], b'more')
    """
    text = zlib.compress(json.dumps(fields).encode(), 1)
    return _LENGTH.pack(len(text)) + text + rest


def fields_of(body: bytes) -> tuple[Any, bytes]:
    """Return what :func:`body_of` wrote."""
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    return json.loads(zlib.decompress(body[_LENGTH.size : end])), body[end:]


def id_bytes(ids: Int64Array) -> bytes:
    """Return block ids with as few bytes for each as they need.

    >>> len(id_bytes(np.arange(1000, 1100))), ids_of(id_bytes(np.array([7, 1 << 40]))).tolist()
    (113, [7, 1099511627776])
    """
    low = int(ids.min()) if ids.size else 0
    span = int(ids.max()) - low if ids.size else 0
    width = next(width for width in (1, 2, 4, 8) if span < 1 << 8 * width)
    return _IDS.pack(low, width, ids.size) + (ids - low).astype(f"<u{width}").tobytes()


def ids_of(body: bytes) -> Int64Array:
    """Return block ids from a message."""
    low, width, count = _IDS.unpack_from(body)
    ids: Int64Array = np.frombuffer(body, f"<u{width}", count, _IDS.size).astype(np.int64)
    ids += low
    return ids


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
        numbers: numbers of the programs that the peer has been sent.
        taken: numbers of slots of this ring: those that are gathered or written to the peer, those that it may write.
        why: why it has ended.
        reported: whether the peer has been told of the end.
        renewed: whether the wire was connected anew to tell it.
        heard_at, said_at: when something came, or was sent for the sake of the line.
    """

    def __init__(self, name: str, wire: Any, now: float) -> None:
        self.name, self.wire, self.mine = name, wire, secrets.randbits(63) | 1
        self.state, self.theirs, self.chunk_nbytes = GREETS, 0, 0
        self.moving: dict[tuple[bool, int], Any] = {}
        self.noted: dict[tuple[bool, bool], deque[Any]] = {}
        self.programs: dict[int, Any] = {}
        self.place, self.taken, self.why = Place(0, 0, 0, "cpu"), [0, 0], ""
        self.reported = self.renewed = False
        self.heard_at, self.said_at = now, 0.0
        self.numbers: dict[Hashable, int] = {}
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
        if key not in self.numbers:
            new[len(self.numbers)] = document_of_program(program, side)
            self.numbers[key] = len(self.numbers)
        return self.numbers[key]


class Inbox:
    """Notes of peers for the user, each with the peer. Of a peer whose notes nobody takes, later ones are dropped.

    >>> inbox = Inbox()
    >>> inbox.append(("decode", b"17")), inbox.take(), inbox.take()
    (None, [('decode', b'17')], [])
    """

    def __init__(self) -> None:
        self._notes: list[tuple[str, bytes]] = []
        self._unread = Counter[str]()  # bytes by peer
        self._lock = threading.Lock()

    def append(self, note: tuple[str, bytes]) -> None:
        """Take a note; drop it with an error in the log if those of its peer have reached :data:`MOST_UNREAD`."""
        peer, content = note
        with self._lock:
            before = self._unread[peer]
            self._unread[peer] += len(content) + NOTE_NBYTES
            if self._unread[peer] <= MOST_UNREAD:
                self._notes.append(note)
            elif before <= MOST_UNREAD:
                log.error("notes of %s are lost: %d MiB of them were not taken by notes()", peer, MOST_UNREAD >> 20)

    def take(self) -> list[tuple[str, bytes]]:
        """Return the notes that have come since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
            self._unread.clear()
        return notes
