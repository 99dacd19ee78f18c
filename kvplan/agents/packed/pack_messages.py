"""Messages between two ends of packed transfers: notes that begin with :data:`MAGIC`, in little-endian integers.

Every message has the numbers of both ends, so that a message for an end that was restarted is known to be late, and the
slots that its sender gives back. No order is assumed, and a message may come twice.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError
from kvplan.plan.packing.pack_recipe import Buffer

MAGIC = b"kvplan.pack/5"

HELLO = 1  # where the sender's ring is, and its slots that the receiver may write
ASK = 2  # a part of the order of a pull
PUSH = 3  # a part of the order of a push
DATA = 4  # a chunk, in a slot; it may carry the whole order of its push
CREDIT = 5  # slots, and nothing else
DONE = 6  # all chunks of a push are scattered
FAILED = 7  # a transfer that the receiver of this message has begun failed at the other end
CANCEL = 8  # a transfer that the sender of this message has begun is given up
VOID = 9  # the write into a slot failed, and no DATA may come for it
BYE = 10  # the sender leaves, or answers that
WANT = 11  # slots that the sender has use for
GRANT = 12  # further slots that the receiver may write
RECALL = 13  # slots that the receiver is to return once they are free
RETURN = 14  # recalled slots that the sender writes no more
SHARING = WANT, GRANT, RECALL, RETURN

MOST_CREDITS = 255  # of a message
MOST_GRANT = 48  # slots of one peer, so that a greeting fits into the shortest note
MOST_BASE = 1 << 31  # turn of a grant: further turns are written in 32 bits
MOST_WHY = 1000  # bytes of a reason

_HEADER = struct.Struct("<13sBQQB")  # the magic first
_CREDIT = struct.Struct("<II")
_HELLO = struct.Struct("<QQIIH")
PART = struct.Struct("<QIIII")
_DATA = struct.Struct("<BQIII")
_WHICH = struct.Struct("<BQ")
_WANT = struct.Struct("<QI")

FIXED = _HEADER.size  # bytes before the slots that are given back
LEAST_NOTE = 512  # bytes of a note that every wire must take
QUIET, ANSWER = 1, 2  # flags of a goodbye: none of the sender's writes moves any more; it wants an answer
PULL, PUSHED = 0, 1  # transfers: the end that receives the chunks began it, or the end that sends them


class Credit(NamedTuple):
    """A slot that is given back, and the turn of its use."""

    slot: int
    turn: int


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: :data:`HELLO` or another of the kinds.
        sender, receiver: numbers of the two ends; the receiver's is 0 if the sender does not know it yet.
        credits: slots that the sender gives back.
        body: the rest.
    """

    kind: int
    sender: int
    receiver: int
    credits: tuple[Credit, ...]
    body: bytes


class Hello(NamedTuple):
    """Where a ring is.

    Attributes:
        address: address of its first slot.
        slot_nbytes: bytes of a slot.
        total: number of its slots.
        device: its device.
        slots: the slots that the receiver may write: each with whether it is still read, and with the turn before its
            first use.
    """

    address: int
    slot_nbytes: int
    total: int
    device: str
    slots: tuple[tuple[int, bool, int], ...]


class OrderPart(NamedTuple):
    """A part of a leg of an order; most orders have one leg of one part.

    Attributes:
        transfer: number of the transfer.
        leg, legs: which leg of how many.
        part, parts: which part of the leg, of how many.
        content: its bytes.
    """

    transfer: int
    leg: int
    legs: int
    part: int
    parts: int
    content: Buffer


class Data(NamedTuple):
    """A chunk that lies in a slot.

    Attributes:
        whose: :data:`PULL` or :data:`PUSHED`.
        transfer: number of the transfer.
        chunk: number of the chunk.
        slot: number of the slot.
        turn: number of this use of the slot.
        order: the whole order of the push, or ``b""``.
    """

    whose: int
    transfer: int
    chunk: int
    slot: int
    turn: int
    order: bytes = b""


def message(kind: int, sender: int, receiver: int, given: Sequence[Credit], body: bytes = b"") -> bytes:
    """Return the note of a message.

    >>> note = message(CREDIT, 7, 9, [Credit(3, 1)])
    >>> read(note)
    Message(kind=5, sender=7, receiver=9, credits=(Credit(slot=3, turn=1),), body=b'')
    """
    head = _HEADER.pack(MAGIC, kind, sender, receiver, len(given))
    if given:
        head += b"".join([_CREDIT.pack(*credit) for credit in given])
    return head + body


def read(note: bytes) -> Message:
    """Return the message of a note that begins with :data:`MAGIC`; raise LayoutError if it cannot be read."""
    try:
        _, kind, sender, receiver, count = _HEADER.unpack_from(note)
        start = FIXED + count * _CREDIT.size
        given = tuple(map(Credit._make, _CREDIT.iter_unpack(note[FIXED:start]))) if count else ()
    except struct.error:
        raise wrong(note) from None
    if len(given) != count or not HELLO <= kind <= RETURN or not sender:
        raise wrong(note)
    body = note[start:]
    return Message(kind, sender, receiver, given, body)


def overhead(given: int) -> int:
    """Return the bytes of a message that gives so many slots back, without its body."""
    return FIXED + given * _CREDIT.size


def wrong(note: bytes) -> LayoutError:
    """Return the error for a message that cannot be read."""
    return LayoutError(f"a message of packed transfers cannot be read: {quoted(note)}")


# ---- bodies ----------------------------------------------------------------------------------------------------------


def hello_body(hello: Hello) -> bytes:
    """Return the body of a :data:`HELLO`.

    >>> told = Hello(4096, 1 << 20, 8, "cuda:0", ((0, False, 0), (3, True, 0)))
    >>> read_hello(hello_body(told)) == told
    True
    """
    device = hello.device.encode()
    slots = b"".join([_CREDIT.pack(number << 1 | busy, turn) for number, busy, turn in hello.slots])
    return _HELLO.pack(hello.address, hello.slot_nbytes, hello.total, len(hello.slots), len(device)) + device + slots


def read_hello(body: bytes) -> Hello:
    """Read the body of a :data:`HELLO`."""
    try:
        address, slot_nbytes, total, count, length = _HELLO.unpack_from(body)
        device = body[_HELLO.size : _HELLO.size + length].decode()
        slots = tuple(_CREDIT.iter_unpack(body[_HELLO.size + length :]))
    except (struct.error, UnicodeDecodeError):
        raise wrong(body) from None
    if len(slots) != count:
        raise wrong(body)
    found = tuple((number >> 1, bool(number & 1), turn) for number, turn in slots)
    return Hello(address, slot_nbytes, total, device, found)


def part_body(part: OrderPart) -> bytes:
    """Return the body of an :data:`ASK` or a :data:`PUSH`."""
    return b"".join([PART.pack(*part[:5]), part.content])


def read_part(body: bytes) -> OrderPart:
    """Read the body of an :data:`ASK` or a :data:`PUSH`."""
    try:
        transfer, leg, legs, part, parts = PART.unpack_from(body)
    except struct.error:
        raise wrong(body) from None
    if not (leg < legs and part < parts):
        raise wrong(body)
    return OrderPart(transfer, leg, legs, part, parts, memoryview(body)[PART.size :])


def data_body(data: Data) -> bytes:
    """Return the body of a :data:`DATA`."""
    return _DATA.pack(*data[:5]) + data.order


def read_data(body: bytes) -> Data:
    """Read the body of a :data:`DATA`.

    >>> read_data(data_body(Data(PULL, 1, 2, 3, 4)))
    Data(whose=0, transfer=1, chunk=2, slot=3, turn=4, order=b'')
    """
    try:
        whose, transfer, chunk, slot, turn = _DATA.unpack_from(body)
    except struct.error:
        raise wrong(body) from None
    if whose not in (PULL, PUSHED):
        raise wrong(body)
    return Data(whose, transfer, chunk, slot, turn, body[_DATA.size :])


def data_nbytes() -> int:
    """Return the bytes of the body of a :data:`DATA` without an order."""
    return _DATA.size


def which_body(whose: int, transfer: int, why: str = "") -> bytes:
    """Return the body of a :data:`DONE`, :data:`FAILED` or :data:`CANCEL`.

    >>> read_which(which_body(PULL, 5, "no memory"))
    (0, 5, 'no memory')
    """
    return _WHICH.pack(whose, transfer) + why.encode()[:MOST_WHY]


def read_which(body: bytes) -> tuple[int, int, str]:
    """Read the body of a :data:`DONE`, :data:`FAILED` or :data:`CANCEL`: which transfer, and why."""
    try:
        whose, transfer = _WHICH.unpack_from(body)
    except struct.error:
        raise wrong(body) from None
    if whose not in (PULL, PUSHED):
        raise wrong(body)
    return whose, transfer, body[_WHICH.size : _WHICH.size + MOST_WHY].decode(errors="replace")


def credit_body(credit: Credit) -> bytes:
    """Return the body of a :data:`VOID`."""
    return _CREDIT.pack(*credit)


def read_credit(body: bytes) -> Credit:
    """Read the body of a :data:`VOID`."""
    try:
        return Credit(*_CREDIT.unpack(body))
    except struct.error:
        raise wrong(body) from None


def credits_body(given: Sequence[Credit]) -> bytes:
    """Return the body of a :data:`GRANT`, :data:`RECALL` or :data:`RETURN`.

    >>> read_credits(credits_body([Credit(3, 1), Credit(7, 0)]))
    (Credit(slot=3, turn=1), Credit(slot=7, turn=0))
    """
    return b"".join([_CREDIT.pack(*credit) for credit in given])


def read_credits(body: bytes) -> tuple[Credit, ...]:
    """Read the body of a :data:`GRANT`, :data:`RECALL` or :data:`RETURN`."""
    try:
        found = tuple(map(Credit._make, _CREDIT.iter_unpack(body)))
    except struct.error:
        raise wrong(body) from None
    if not 0 < len(found) <= MOST_GRANT:
        raise wrong(body)
    return found


def want_body(serial: int, slots: int) -> bytes:
    """Return the body of a :data:`WANT`: the latest one, by its serial number, counts.

    >>> read_want(want_body(2, 16))
    (2, 16)
    """
    return _WANT.pack(serial, slots)


def read_want(body: bytes) -> tuple[int, int]:
    """Read the body of a :data:`WANT`."""
    try:
        serial, slots = _WANT.unpack(body)
    except struct.error:
        raise wrong(body) from None
    return serial, slots
