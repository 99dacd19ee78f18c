"""The order of a packed transfer, as the end that begins it tells the other end; and the parts of long orders."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvplan.agents.packed.pack_messages import PART, OrderPart, overhead, part_body, read_part, wrong
from kvplan.errors import LayoutError

MOST_ORDER = 256 << 20  # bytes of an order: 8 bytes for each of 32 million units
MOST_OPEN = 4096  # orders of which parts are missing, of one peer

_ORDER = struct.Struct("<BHQdIH")


class Ordered(NamedTuple):
    """The order of a transfer, for the other end.

    Attributes:
        urgent: whether it has high priority.
        attempts: how often a write is posted, at most.
        chunk_nbytes: most bytes of a chunk.
        seconds: seconds until it is given up, or 0.
        recipes: the recipe of each piece.
        note: the user's note for a push.
    """

    urgent: bool
    attempts: int
    chunk_nbytes: int
    seconds: float
    recipes: tuple[bytes, ...]
    note: bytes = b""


def order_bytes(order: Ordered) -> bytes:
    """Return the bytes of an order.

    >>> told = Ordered(True, 2, 1 << 20, 0.5, (b"recipe", b"of two"), b"note")
    >>> read_order(order_bytes(told)) == told
    True
    """
    lengths = struct.pack(f"<{len(order.recipes)}I", *map(len, order.recipes))
    head = _ORDER.pack(
        order.urgent, order.attempts, order.chunk_nbytes, order.seconds, len(order.note), len(order.recipes)
    )
    return b"".join([head, lengths, *order.recipes, order.note])


def read_order(content: bytes) -> Ordered:
    """Read the bytes of an order."""
    try:
        urgent, attempts, chunk_nbytes, seconds, noted, count = _ORDER.unpack_from(content)
        lengths = struct.unpack_from(f"<{count}I", content, _ORDER.size)
    except struct.error:
        raise wrong(content) from None
    start = _ORDER.size + 4 * count
    if start + sum(lengths) + noted != len(content) or seconds != seconds or seconds < 0 or not attempts:
        raise wrong(content)
    recipes = []
    for length in lengths:
        recipes.append(content[start : start + length])
        start += length
    return Ordered(bool(urgent), attempts, chunk_nbytes, seconds, tuple(recipes), content[start:])


def parts_of(transfer: int, order: bytes, most_note: int) -> list[bytes]:
    """Cut an order into the bodies of messages that fit into notes.

    >>> bodies = parts_of(5, bytes(1000), 512)
    >>> len(bodies), b"".join(read_part(body).content for body in bodies) == bytes(1000)
    (3, True)
    """
    most = most_note - overhead(0) - PART.size
    pieces = [order[start : start + most] for start in range(0, len(order), most)]
    return [part_body(OrderPart(transfer, k, len(pieces), piece)) for k, piece in enumerate(pieces)]


class Parts:
    """Orders whose parts arrive, in any order.

    >>> parts = Parts()
    >>> parts.add(OrderPart(1, 1, 2, b"der")), parts.add(OrderPart(1, 1, 2, b"der"))
    (None, None)
    >>> parts.add(OrderPart(1, 0, 2, b"or"))
    b'order'
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[int, bytes]] = {}
        self._nbytes = 0

    def add(self, part: OrderPart) -> bytes | None:
        """Take a part; return the whole order if this was the last part that was missing.

        Raises:
            LayoutError: too many orders are open, or they are too long.
        """
        if part.parts == 1:
            return part.content
        held = self._open.get(part.transfer)
        if held is None:
            if len(self._open) >= MOST_OPEN:
                raise LayoutError(f"over {MOST_OPEN:,} orders of packed transfers have missing parts")
            held = self._open[part.transfer] = {}
        if part.part not in held:
            held[part.part] = part.content
            self._nbytes += len(part.content)
        if self._nbytes > MOST_ORDER:
            raise LayoutError(f"orders of packed transfers have over {MOST_ORDER:,} bytes")
        if len(held) < part.parts:
            return None
        self.drop(part.transfer)
        return b"".join(content for _, content in sorted(held.items()))

    def drop(self, transfer: int) -> None:
        """Forget the parts of an order."""
        self._nbytes -= sum(map(len, self._open.pop(transfer, {}).values()))


class Ends:
    """The transfers of one kind that a peer began, which have ended here; their numbers are 1, 2, 3 and so on.

    It takes the same memory after any number of transfers.

    >>> ends = Ends()
    >>> ends.end(2, b"second"), ends.ended(2), ends.ended(1)
    ([], True, False)
    >>> ends.end(1, b"first"), ends.end(1, b"again"), ends.ended(1)
    ([b'first', b'second'], [], True)
    """

    def __init__(self) -> None:
        self._next = 1
        self._held: dict[int, bytes] = {}

    def ended(self, number: int) -> bool:
        """Return whether a transfer has ended."""
        return number < self._next or number in self._held

    def end(self, number: int, note: bytes = b"") -> list[bytes]:
        """Note that a transfer has ended; return the notes that are now due, in the order of the transfers."""
        if self.ended(number):
            return []
        self._held[number] = note
        due = []
        while self._next in self._held:
            due.append(self._held.pop(self._next))
            self._next += 1
        return due
