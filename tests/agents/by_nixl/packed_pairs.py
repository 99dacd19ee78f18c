"""Packed transfers between two real processes by NIXL, one of which is killed at a random moment."""

from __future__ import annotations

import os
import random
import time
from functools import partial
from typing import Any

import numpy as np

import kvplan
from kvplan import Agent, KVLayout, TransferError
from kvplan.base.threads import error_of
from tests.agents.answering import answer
from tests.agents.processes import Other
from tests.patience import PATIENCE, until

WIRES = ("", "tcp,self")  # values of UCX_TLS: shared memory, and a wire that runs in pieces
LAYERS, BLOCKS, DIM = 8, 512, 576
HOLDS = ("nothing was moved", "the destination's blocks hold", "the peer's memory may hold")  # of an error


def choose_wire(transports: str) -> None:
    """Set the wire of this process, before NIXL is loaded."""
    os.environ.pop("UCX_TLS", None)
    if transports:
        os.environ["UCX_TLS"] = transports


class FarEnd:
    """What the other process does."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.agent: Agent | None = None
        self.peer: Any = None

    def large(self, name: str, number: int) -> bytes:
        self.cache = LargePool(name, number, "block layer dim")
        self.agent = self.cache.agent
        return self.agent.card()

    def meet(self, card: bytes) -> None:
        self.peer = self.agent.meet(card)

    def move(self, number: int, reading: bool) -> int:
        """Move all blocks until the other process dies; return the number of transfers that were done."""
        done = 0
        rng = np.random.default_rng(number)
        while True:
            a, b = rng.permutation(BLOCKS), rng.permutation(BLOCKS)
            try:
                self.cache.move(self.peer, a, b, reading=reading)
            except TransferError:
                return done
            done += 1

    def content(self) -> bytes:
        return self.cache.blocks().tobytes()


def serve(name: str, number: int, options: dict, pipe: Any) -> None:
    """Be the other process."""
    del name, number
    choose_wire(options["transports"])
    answer(FarEnd, pipe)


def far_end(transports: str) -> Other:
    """Start the other process."""
    made = Other.__new__(Other)
    made.begin(serve, "far", 0, {"transports": transports})
    made.answer()
    return made


def free_slots(agent: Agent) -> tuple[int, int]:
    """Return the free slots of an agent's ring, and all of them."""
    ring = agent._core.packed.ring
    return (0, 0) if ring is None else (len(ring.into), ring.place.slots - ring.gathers)


class LargePool:
    """A pool of many short rows, and its agent."""

    def __init__(self, name: str, number: int, notation: str) -> None:
        shape = (BLOCKS, LAYERS, DIM) if notation.startswith("block") else (LAYERS, BLOCKS, DIM)
        self.memory = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
        self.agent = Agent(
            name, {"kv": KVLayout.from_tensors(notation, self.memory)}, transports=("nixl",), slots=(6, 1 << 16)
        )

    def blocks(self) -> np.ndarray:
        """Return the bytes, block by block."""
        return np.ascontiguousarray(self.memory if len(self.memory) == BLOCKS else self.memory.swapaxes(0, 1))

    def plan(self, peer: Any, mine: Any, theirs: Any, *, reading: bool) -> kvplan.Plan:
        """Plan to read or write blocks."""
        here, there = self.agent.layouts["kv"], peer.layouts["kv"]
        if reading:
            return kvplan.compile(there, here).plan(theirs, mine)
        return kvplan.compile(here, there).plan(mine, theirs)

    def move(self, peer: Any, mine: Any, theirs: Any, *, reading: bool) -> None:
        peer.submit(self.plan(peer, mine, theirs, reading=reading), way="packed").synchronize(PATIENCE)


def kills(rounds: int, number: int, transports: str) -> None:
    """Kill one end at a random moment, round after round; what was called done must be right to the last byte."""
    choose_wire(transports)
    rng = random.Random(number)
    pool = LargePool("near", number, "layer block dim")
    try:
        for turn in range(rounds):
            _killed(pool, rng, turn, transports)
        for peer in list(pool.agent.peers.values()):  # nobody may have noticed that the last one is dead
            pool.agent.forget(peer)
        until(lambda: free_slots(pool.agent)[0] == free_slots(pool.agent)[1])  # or a slot is lost
    finally:
        pool.agent.close()


def _killed(pool: LargePool, rng: random.Random, turn: int, transports: str) -> None:
    far = far_end(transports)
    try:
        peer = pool.agent.meet(far.large("far", turn))
        theirs = np.frombuffer(far.content(), np.uint8).reshape(BLOCKS, LAYERS, DIM).copy()
        moment = time.monotonic() + rng.random() * 0.3
        if rng.random() < 0.5:  # the other process begins
            far.meet(pool.agent.card())
            before = pool.blocks()
            reading = rng.random() < 0.5
            far.pipe.send(("move", (turn, reading)))
            time.sleep(max(0.0, moment - time.monotonic()))
            far.kill()
            until(lambda: pool.agent.stats().in_flight == 0)
            if reading:
                np.testing.assert_array_equal(pool.blocks(), before)
            return
        generator = np.random.default_rng(turn)
        while True:
            reading = rng.random() < 0.7
            a, b = generator.permutation(BLOCKS), generator.permutation(BLOCKS)
            try:
                transfer = peer.submit(pool.plan(peer, a, b, reading=reading), way="packed")
            except TransferError:  # its death was seen already
                assert not far.process.is_alive()
                break
            if time.monotonic() > moment and far.process.is_alive():
                far.process.kill()
            why = error_of(partial(transfer.synchronize, PATIENCE))
            if why is not None:
                assert any(holds in str(why) for holds in HOLDS), why
                break
            if reading:
                np.testing.assert_array_equal(pool.blocks()[a], theirs[b])
            else:
                theirs[b] = pool.blocks()[a]
    finally:
        far.end()
