"""The order of a packed transfer, as the end that begins it tells the other end; its legs, and their parts.

A long order has several legs, each with recipes of chunks that follow one another. The other end begins with the first
leg while the later ones are written, sent and read.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kvplan.agents.packed.pack_messages import PART, OrderPart, overhead, part_body, wrong
from kvplan.plan.packing.pack_recipe import Buffer

_ORDER = struct.Struct("<BHQdIH")


class Ordered(NamedTuple):
    """A leg of the order of a transfer, for the other end.

    Attributes:
        urgent: whether it has high priority.
        attempts: how often a write is posted, at most.
        chunk_nbytes: most bytes of a chunk.
        seconds: seconds until it is given up, or 0.
        recipes: recipes of the leg's chunks, as bytes or views of them.
        note: the user's note for a push; the first leg's counts.
        begins: whether its first recipe begins a piece of the transfer; otherwise it goes on with the one before.
    """

    urgent: bool
    attempts: int
    chunk_nbytes: int
    seconds: float
    recipes: tuple[Buffer, ...]
    note: bytes = b""
    begins: bool = False


def order_pieces(order: Ordered, recipes: Sequence[Sequence[Buffer]]) -> list[Buffer]:
    """Return the bytes of a leg of an order in pieces, one behind the other.

    Args:
        order: the leg, without its recipes.
        recipes: the pieces of each recipe.

    >>> told = Ordered(True, 2, 1 << 20, 0.5, (), b"note", begins=True)
    >>> found = read_order(b"".join(order_pieces(told, [[b"rec", b"ipe"], [b"of two"]])))
    >>> found == told._replace(recipes=(b"recipe", b"of two"))
    True
    """
    lengths = struct.pack(f"<{len(recipes)}I", *[sum([len(piece) for piece in recipe]) for recipe in recipes])
    flags, note = order.urgent | order.begins << 1, order.note
    head = _ORDER.pack(flags, order.attempts, order.chunk_nbytes, order.seconds, len(note), len(recipes))
    return [head, lengths, *[piece for recipe in recipes for piece in recipe], note]


def read_order(content: Buffer) -> Ordered:
    """Read the bytes of a leg of an order; its recipes are views of them."""
    try:
        flags, attempts, chunk_nbytes, seconds, noted, count = _ORDER.unpack_from(content)
        lengths = struct.unpack_from(f"<{count}I", content, _ORDER.size)
    except struct.error:
        raise wrong(bytes(content)) from None
    start = _ORDER.size + 4 * count
    if start + sum(lengths) + noted != len(content) or not seconds >= 0 or not attempts:
        raise wrong(bytes(content))
    recipes, view = list[memoryview](), memoryview(content)
    for length in lengths:
        recipes.append(view[start : start + length])
        start += length
    note, begins = bytes(view[start:]), bool(flags & 2)
    return Ordered(bool(flags & 1), attempts, chunk_nbytes, seconds, tuple(recipes), note, begins)


def parts_of(transfer: int, leg: int, legs: int, order: Sequence[Buffer], most_note: int) -> list[bytes]:
    """Cut a leg of an order, in pieces, into the bodies of messages that fit into notes.

    >>> [len(body) for body in parts_of(5, 0, 1, [bytes(600), bytes(400)], 512)]
    [481, 481, 110]
    >>> [len(body) for body in parts_of(5, 0, 1, [bytes(100), bytes(50)], 512)]
    [174]
    """
    most = most_note - overhead(0) - PART.size
    if sum([len(piece) for piece in order]) <= most:
        return [b"".join([PART.pack(transfer, leg, legs, 0, 1), *order])]
    whole = memoryview(b"".join(order))
    pieces = [whole[start : start + most] for start in range(0, len(whole), most)]
    return [part_body(OrderPart(transfer, leg, legs, k, len(pieces), piece)) for k, piece in enumerate(pieces)]


class Leg(NamedTuple):
    """A leg that has come whole, after all legs before it.

    Attributes:
        number: its number.
        last: whether it is the order's last one.
        content: its bytes.
    """

    number: int
    last: bool
    content: Buffer


class _Open:
    """An order of which parts are missing.

    Attributes:
        legs: number of its legs.
        next: number of the next leg.
        held: by leg, the parts that have come, by their numbers.
    """

    def __init__(self, legs: int) -> None:
        self.legs, self.next = legs, 0
        self.held: dict[int, dict[int, OrderPart]] = {}


class Parts:
    """Orders whose parts arrive, in any order.

    >>> parts = Parts()
    >>> parts.add(OrderPart(1, 0, 2, 1, 2, b"der")), parts.add(OrderPart(1, 1, 2, 0, 1, b"the second"))
    ([], [])
    >>> parts.add(OrderPart(1, 0, 2, 1, 2, b"der")), 1 in parts
    ([], True)
    >>> [leg.content for leg in parts.add(OrderPart(1, 0, 2, 0, 2, b"or"))], 1 in parts
    ([b'order', b'the second'], False)
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def __contains__(self, transfer: int) -> bool:
        return transfer in self._open

    def add(self, part: OrderPart) -> list[Leg]:
        """Take a part; return the legs that are whole now, in order."""
        if part.parts == part.legs == 1:
            return [Leg(0, last=True, content=part.content)]
        order = self._open.get(part.transfer)
        if order is None:
            order = self._open[part.transfer] = _Open(part.legs)
        if part.leg < order.next:
            return []  # it came twice
        order.held.setdefault(part.leg, {})[part.part] = part
        return self._whole(part.transfer, order)

    def _whole(self, transfer: int, order: _Open) -> list[Leg]:
        """Take the next legs out that are whole."""
        found: list[Leg] = []
        while (held := order.held.get(order.next)) and len(held) == next(iter(held.values())).parts:
            content = b"".join([one.content for _, one in sorted(held.items())])
            found.append(Leg(order.next, order.next + 1 == order.legs, content))
            del order.held[order.next]
            order.next += 1
        if order.next == order.legs:
            self.drop(transfer)
        return found

    def drop(self, transfer: int) -> None:
        """Forget the parts of an order."""
        self._open.pop(transfer, None)


class Ends:
    """Numbers of transfers, as ranges: as many ranges as there are gaps, whatever the number of transfers.

    >>> ends = Ends()
    >>> ends.add(2), ends.add(2), 2 in ends, 1 in ends
    (True, False, True, False)
    >>> ends.add(1), ends.add(3)
    (True, True)
    """

    def __init__(self) -> None:
        self._starts: list[int] = []  # ascending
        self._stops: list[int] = []  # one behind the last number of each range

    def __contains__(self, number: int) -> bool:
        k = bisect_right(self._starts, number)
        return k > 0 and number < self._stops[k - 1]

    def add(self, number: int) -> bool:
        """Add a number; return False if it was there."""
        starts, stops = self._starts, self._stops
        k = bisect_right(starts, number)
        if k and number < stops[k - 1]:
            return False
        left, right = k and stops[k - 1] == number, k < len(starts) and starts[k] == number + 1
        if left and right:
            starts.pop(k)
            stops[k - 1] = stops.pop(k)
        elif left:
            stops[k - 1] = number + 1
        elif right:
            starts[k] = number
        else:
            starts.insert(k, number)
            stops.insert(k, number + 1)
        return True


class Orders:
    """The orders of one kind that a peer sends: each leg counts once, however often its parts come.

    >>> orders = Orders()
    >>> part = OrderPart(2, 0, 1, 0, 1, b"order")
    >>> orders.add(part), orders.first(2), orders.first(2), orders.add(part), orders.known(2)
    ([Leg(number=0, last=True, content=b'order')], True, False, [], True)
    """

    def __init__(self) -> None:
        self._parts = Parts()
        self._known = Ends(), Ends()  # by priority: the last bit of a number

    def known(self, number: int) -> bool:
        """Return whether the first leg has come, or the order is not wanted any more."""
        return number >> 1 in self._known[number & 1]

    def add(self, part: OrderPart) -> list[Leg]:
        """Take a part; return the legs that are whole now, in order."""
        if self.known(part.transfer) and part.transfer not in self._parts:
            return []  # it came twice, or is not wanted
        return self._parts.add(part)

    def first(self, number: int) -> bool:
        """Note that the first leg of an order has come; return False if that was known, or it is not wanted."""
        return self._known[number & 1].add(number >> 1)

    def refuse(self, number: int) -> None:
        """Take no leg of an order from now on, also if none has come."""
        self.end(number)
        self.first(number)

    def end(self, number: int) -> None:
        """Take no further leg of an order whose first leg has come."""
        self._parts.drop(number)
