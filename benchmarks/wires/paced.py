"""A wire that is no faster than a network card: writes of packed transfers end in its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Clock = Callable[[], float]


class Card:
    """The time at which a card has sent its last byte: one write after another, each at the card's rate.

    Args:
        gbps: the card's rate.
        clock: returns seconds.

    >>> card = Card(1.0, lambda: 1.0)
    >>> card.sent(500_000_000), card.sent(500_000_000)
    (1.5, 2.0)
    """

    def __init__(self, gbps: float, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._rate, self._until = gbps * 1e9, 0.0

    def sent(self, nbytes: int) -> float:
        """Return when the last of some more bytes has left, if they are asked for now."""
        self._until = max(self._until, self.clock()) + nbytes / self._rate
        return self._until


class Held:
    """A write that was posted.

    Attributes:
        posted: the wire's handle.
        due: when its last byte has left the card.
        note: its note; ``b""`` once it is sent.
    """

    def __init__(self, posted: Any, due: float, note: bytes) -> None:
        self.posted, self.due, self.note = posted, due, note


def pace(owner: Any, gbps: float, clock: Clock = time.perf_counter) -> None:
    """Let all wires of a class share one card, for the rest of this process.

    A card moves bytes while nobody looks. So a write is posted at once, and the wire is not asked about it before the
    card would have sent its last byte. NIXL sends a write's note when it finds the end: when it is asked, or within the
    post if that has copied host memory. So the note goes by itself, at the first look behind the last byte.

    Args:
        owner: the class, with the methods ``write``, ``over``, ``release`` and ``send`` of
            :class:`kvplan.agents.by_nixl.nixl_end.NixlWire`.
        gbps: the card's rate.
        clock: returns seconds.
    """
    post, ask, free = owner.write, owner.over, owner.release
    card = Card(gbps, clock)

    def write(wire: Any, local: int, remote: int, nbytes: int, note: bytes) -> Held:
        return Held(post(wire, local, remote, nbytes, b""), card.sent(nbytes), note)

    def over(wire: Any, held: Held) -> bool:
        if clock() < held.due or not ask(wire, held.posted):
            return False
        if held.note:
            wire.send(held.note)
            held.note = b""
        return True

    def release(wire: Any, held: Held) -> bool:
        return bool(free(wire, held.posted))

    for method in (write, over, release):
        setattr(owner, method.__name__, method)
