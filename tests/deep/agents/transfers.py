"""Random transfers between two processes, with every byte of both pools compared."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import numpy as np

import kvplan
from tests.deep.agents.places import GROWTH, SECONDS, Host, Neighbour, neighbours

BATCH = 50  # transfers between two comparisons
Flying = tuple[bool, Any]  # whether it reads, and the transfer


def transfers(place: Host, seed: int, count: int) -> str:
    """Move random blocks between two processes; return a summary."""
    rng = random.Random(seed)
    whole = -(-count // BATCH)
    batches = [min(place.batches, whole - first) for first in range(0, whole, place.batches)]
    seeds = [rng.randrange(251) for _ in batches]
    grown: dict[str, int] = {}
    used: dict[str, int] = {}
    for k, other in enumerate(neighbours(place, seeds, ahead=0)):
        pair = Pair(place, rng, other, seeds[k])
        for batch in range(batches[k]):
            pair.run()
            if batch == batches[k] // 4:
                theirs = other.used()
        grown = _most(grown, _growth(other.used(), theirs, "the other process"))
        pair.close()
        other.end()
        del pair
        gc.collect()
        if k == len(batches) // 10 + place.turns - 1:
            used = place.used()
        print(f"  {BATCH * sum(batches[: k + 1]):,} transfers", flush=True)
    mine = _growth(place.used(), used, "this process") if used else {}
    return "; ".join(
        f"{whose} grew by {', '.join(f'{name} {nbytes / 1e6:.1f} MB' for name, nbytes in found.items())}"
        for whose, found in (("this process", mine), ("the other", grown))
        if found
    )


def _growth(now: dict[str, int], before: dict[str, int], whose: str) -> dict[str, int]:
    """Bytes by which memory has grown, by where; each is bounded."""
    grown = {name: nbytes - before[name] for name, nbytes in now.items()}
    assert max(grown.values()) < GROWTH, f"{whose} grew by {grown} bytes"
    return grown


def _most(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {name: max(nbytes, first.get(name, nbytes)) for name, nbytes in second.items()}


class Pair:
    """This process and another one, which have met; and what both pools must hold."""

    def __init__(self, place: Host, rng: random.Random, other: Neighbour, seed: int) -> None:
        self.place, self.rng, self.other = place, rng, other
        first = rng.randrange(251)
        self.mine = place.pool(first, rng.choice(place.notations))
        self.expected = {True: place.content(first), False: place.content(seed)}  # by whether it is this process's
        self.executor = place.executor(rng)
        self.agent = place.agent("me", {"kv": self.mine}, self.executor)
        self.peer = self.agent.meet(other.card())
        theirs = self.peer.layouts["kv"]
        self.programs = {True: kvplan.compile(theirs, self.mine), False: kvplan.compile(self.mine, theirs)}
        self.in_order = place.in_order or other.turn % place.turns == 0

    def run(self) -> None:
        """Make a batch of transfers, wait for all, and compare every byte."""
        flying: list[Flying] = []
        noted: list[tuple[bool, bytes]] = []  # by the direction of the transfer
        for k in range(BATCH):
            note = b"%d" % k if self.rng.random() < 0.3 else b""
            if self._submit(flying, note) and note:
                noted.append((flying[-1][0], note))
        for _, transfer in flying:
            transfer.synchronize(SECONDS)
        np.testing.assert_array_equal(self.place.seen(self.mine), self.expected[True])
        np.testing.assert_array_equal(self.other.holds(), self.expected[False])
        self._check_notes(noted)

    def _check_notes(self, noted: list[tuple[bool, bytes]]) -> None:
        """Each note has come once, and those of a direction in the order of the submits."""
        found: list[tuple[str, bytes]] = []
        until = time.monotonic() + SECONDS
        while not found or len(found) < len(noted):
            found += self.other.notes()
            assert time.monotonic() < until, f"{len(noted)} notes were sent; {len(found)} have come"
            if not noted:
                break
        ways = [{True, False}] if self.in_order else [{True}, {False}]
        assert len(found) == len(noted)
        for way in ways:
            wanted = [note for reading, note in noted if reading in way]
            assert [(whose, note) for whose, note in found if note in wanted] == [("me", note) for note in wanted]

    def close(self) -> None:
        """Part; none has failed."""
        assert self.agent.stats().failed == 0
        self.agent.close(timeout=SECONDS)
        if self.executor is not None:
            self.executor.close()

    def _submit(self, flying: list[Flying], note: bytes) -> bool:
        """Submit a transfer; return False if it was cancelled."""
        rng, blocks = self.rng, self.place.extents[0]
        reading = rng.random() < 0.5
        number = rng.randint(0, blocks // 2)
        src, dst = rng.sample(range(blocks), number), rng.sample(range(blocks), number)
        event = threading.Event() if rng.random() < 0.1 else None
        after: Any = event
        if flying and not self.in_order and flying[-1][0] != reading:
            after, event = flying[-1][1], None  # the directions do not wait for each other
        elif event is None and rng.random() < 0.3:
            after = flying[-1][1] if flying and rng.random() < 0.7 else self.place.later(rng)
        transfer = self.peer.submit(
            self.programs[reading].plan(src, dst), after=after, note=note, by_layer=rng.random() < 0.1
        )
        cancelled = event is not None and rng.random() < 0.3 and transfer.cancel()
        if event is not None:
            event.set()
        if cancelled:
            return False
        self.expected[reading][dst] = self.expected[not reading][src]
        flying.append((reading, transfer))
        return True
