"""Random transfers between two processes, with every byte of both pools compared."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvplan
from tests.deep.agents.places import GROWTH, SECONDS, Bytes, Host, Neighbour, neighbours

BATCH = 50  # transfers between two comparisons
Flying = tuple[bool, Any]  # whether it reads, and the transfer


def transfers(place: Host, seed: int, count: int) -> None:
    """Move random blocks between two processes."""
    rng = random.Random(seed)
    whole = -(-count // BATCH)
    batches = [min(place.batches, whole - first) for first in range(0, whole, place.batches)]
    seeds = [rng.randrange(251) for _ in batches]
    used: dict[str, int] = {}
    for k, other in enumerate(neighbours(place, seeds, ahead=0)):
        pair = Pair(place, rng, other, seeds[k])
        for batch in range(batches[k]):
            pair.run()
            if batch == batches[k] // 4:
                theirs = other.used()
        _bounded(other.used(), theirs, "the other process")
        pair.close()
        other.end()
        del pair
        gc.collect()
        if k == len(batches) // 10 + place.turns - 1:
            used = place.used()
        print(f"  {BATCH * sum(batches[: k + 1]):,} transfers", flush=True)
    if used:
        _bounded(place.used(), used, "this process")


def _bounded(now: dict[str, int], before: dict[str, int], whose: str) -> None:
    """Memory has grown by no more than it may, wherever it is."""
    grown = {name: nbytes - before[name] for name, nbytes in now.items()}
    assert max(grown.values()) < GROWTH, f"{whose} grew by {grown} bytes"


@dataclass
class Moves:
    """Random transfers with a peer, and what both pools must hold after them.

    Attributes:
        rng: source of all that is random.
        peer: the peer.
        programs: by whether it reads from the peer.
        expected: bytes of this process's pool (True) and of the peer's, by (block, layer, dim).
        in_order: whether transfers of both directions run in the order of their submits.
        later: function that returns an ``after=`` that completes soon, or None.
    """

    rng: random.Random
    peer: kvplan.Peer
    programs: dict[bool, kvplan.CopyProgram]
    expected: dict[bool, Bytes]
    in_order: bool
    later: Callable[[random.Random], Any]

    def batch(self) -> list[tuple[bool, bytes]]:
        """Make a batch of transfers, and wait for all; return the notes, by the direction of the transfer."""
        flying: list[Flying] = []
        noted: list[tuple[bool, bytes]] = []
        for k in range(BATCH):
            note = b"%d" % k if self.rng.random() < 0.3 else b""
            if self._submit(flying, note) and note:
                noted.append((flying[-1][0], note))
        for _, transfer in flying:
            transfer.synchronize(SECONDS)
        return noted

    def _submit(self, flying: list[Flying], note: bytes) -> bool:
        """Submit a transfer; return False if it was cancelled."""
        rng, blocks = self.rng, len(self.expected[True])
        reading = rng.random() < 0.5
        number = rng.randint(0, blocks // 2)
        src, dst = rng.sample(range(blocks), number), rng.sample(range(blocks), number)
        event = threading.Event() if rng.random() < 0.1 else None
        after: Any = event
        if flying and not self.in_order and flying[-1][0] != reading:
            after, event = flying[-1][1], None  # the directions do not wait for each other
        elif event is None and rng.random() < 0.3:
            after = flying[-1][1] if flying and rng.random() < 0.7 else self.later(rng)
        plan = self.programs[reading].plan(src, dst)
        transfer = self.peer.submit(plan, after=after, note=note, by_layer=rng.random() < 0.1)
        cancelled = event is not None and rng.random() < 0.3 and transfer.cancel()
        if event is not None:
            event.set()
        if cancelled:
            return False
        self.expected[reading][dst] = self.expected[not reading][src]
        flying.append((reading, transfer))
        return True

    def check_notes(self, noted: list[tuple[bool, bytes]], found: list[bytes]) -> None:
        """Compare the notes of a batch that have come: each once, and those of a direction in their order."""
        assert len(found) == len(noted)
        for way in [{True, False}] if self.in_order else [{True}, {False}]:
            wanted = [note for reading, note in noted if reading in way]
            assert [note for note in found if note in wanted] == wanted


class Pair:
    """This process and another one, which have met."""

    def __init__(self, place: Host, rng: random.Random, other: Neighbour, seed: int) -> None:
        self.place, self.other = place, other
        first = rng.randrange(251)
        self.mine = place.pool(first, rng.choice(place.notations))
        self.executor = place.executor(rng)
        self.agent = place.agent("me", {"kv": self.mine}, self.executor)
        peer = self.agent.meet(other.card())
        theirs = peer.layouts["kv"]
        self.moves = Moves(
            rng,
            peer,
            {True: kvplan.compile(theirs, self.mine), False: kvplan.compile(self.mine, theirs)},
            {True: place.content(first), False: place.content(seed)},
            in_order=place.in_order or other.turn % place.turns == 0,
            later=place.later,
        )

    def run(self) -> None:
        """Make a batch of transfers, wait for all, and compare every byte."""
        noted = self.moves.batch()
        np.testing.assert_array_equal(self.place.seen(self.mine), self.moves.expected[True])
        np.testing.assert_array_equal(self.other.holds(), self.moves.expected[False])
        found: list[tuple[str, bytes]] = []
        until = time.monotonic() + SECONDS
        while len(found) < len(noted):
            found += self.other.notes()
            assert time.monotonic() < until, f"{len(noted)} notes were sent; {len(found)} have come"
        found += self.other.notes()
        assert {whose for whose, _ in found} <= {"me"}
        self.moves.check_notes(noted, [note for _, note in found])

    def close(self) -> None:
        """Part; none has failed."""
        assert self.agent.stats().failed == 0
        self.agent.close(timeout=SECONDS)
        if self.executor is not None:
            self.executor.close()
