"""A wire that is no faster than a network card: writes of packed transfers, and large messages, end in its time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvplan.plan.nixl_lists import NixlList

PIECE = 4 << 20  # bytes of a large message that a card has sent before NIXL moves them
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


class PacedMessage:
    """One large message over a card: NIXL moves each piece when the card would have sent the piece's last byte.

    The pieces are small, so that the message ends soon after its last byte would have left the card.

    Args:
        nixl: the ``nixl_agent``.
        peer: name of the peer.
        mine, theirs: address and device of either side.
        nbytes: bytes of the message.
        memory: NIXL's name of the memory.
        operation: ``"READ"`` or ``"WRITE"``.
        gbps: the card's rate.
        clock: returns seconds.
    """

    def __init__(self, nixl: Any, peer: str, mine: tuple[int, int], theirs: tuple[int, int], nbytes: int, memory: str,
                 operation: str, gbps: float, clock: Clock = time.perf_counter) -> None:  # fmt: skip
        self._nixl, self._gbps, self._clock = nixl, gbps, clock
        starts = range(0, nbytes, PIECE)
        self._sizes = [min(PIECE, nbytes - start) for start in starts]
        lists = []
        for whose, (address, device) in (("NIXL_INIT_AGENT", mine), (peer, theirs)):
            rows = [(address + start, size, device) for start, size in zip(starts, self._sizes, strict=True)]
            lists.append(nixl.prep_xfer_dlist(whose, *NixlList(np.array(rows, np.int64), memory)))
        each = [np.array([k], np.int32) for k in range(len(self._sizes))]
        self._pieces = [nixl.make_prepped_xfer(operation, lists[0], k, lists[1], k, b"") for k in each]
        self._held = [*self._pieces, *lists]

    def __call__(self) -> float:
        """Return the seconds from the call to the end of the last piece."""
        nixl, moving = self._nixl, deque[Any]()
        begun = self._clock()
        card = Card(self._gbps, self._clock)
        dues = [card.sent(size) for size in self._sizes]  # all are asked for now, so the card never idles
        for piece, due in zip(self._pieces, dues, strict=True):
            while self._clock() < due:
                self._settle(moving)
            if self._moves(nixl.transfer(piece)):
                moving.append(piece)
        while moving:
            self._settle(moving)
        return self._clock() - begun

    def _settle(self, moving: deque[Any]) -> None:
        while moving and not self._moves(self._nixl.check_xfer_state(moving[0])):
            moving.popleft()

    def _moves(self, state: str) -> bool:
        if state not in ("PROC", "DONE"):
            raise RuntimeError(f"NIXL reports the state {state}")
        return state == "PROC"

    def release(self) -> None:
        """Release NIXL's handles."""
        for handle in self._held:
            handle.release()
