"""What the other processes of the tests do: each holds a pool, and does what a pipe asks for."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import Agent, KVLayout
from tests.agents.answering import answer

LAYERS, BLOCKS, DIM = 3, 16, 64


def content(seed: int = 0) -> np.ndarray:
    """Bytes of a pool in the order block, layer, dim, which tell their place."""
    return ((np.arange(BLOCKS * LAYERS * DIM) * 7 + seed) % 251).astype(np.uint8).reshape(BLOCKS, LAYERS, DIM)


def pool(blocks: int = BLOCKS, seed: int = 0, notation: str = "block layer dim") -> KVLayout:
    """A shared pool with content."""
    like = KVLayout.from_tensors("block layer dim", content(seed))
    made = kvplan.allocate(notation, like=like, num_blocks=blocks, shared=True)
    if blocks == BLOCKS:
        with kvplan.Executor() as executor:
            executor.submit(kvplan.compile(like, made).plan(range(BLOCKS), range(BLOCKS))).synchronize()
    return made


class Worker:
    """The state of another process, and what it does when it is asked."""

    def __init__(self, name: str, seed: int, options: dict) -> None:
        self.pool = pool(seed=seed)
        self.agent = Agent(name, {"kv": self.pool}, **options)
        self.peers: dict = {}
        self.transfers: list = []

    def card(self):
        return self.agent.card()

    def notes(self):
        return self.agent.notes()

    def holds(self):
        return np.array(self.pool.tensors)

    def meet(self, name, card):
        self.peers[name] = self.agent.meet(card)
        return self.peers[name].transport

    def push(self, name, mine, theirs, note=b""):
        plan = kvplan.compile(self.pool, self.peers[name].layouts["kv"]).plan(mine, theirs)
        return self.peers[name].submit(plan, note=note).result().nbytes


def serve(name: str, seed: int, options: dict, pipe) -> None:
    """Do what the pipe asks for, until it asks for the end."""
    answer(lambda: Worker(name, seed, options), pipe)
