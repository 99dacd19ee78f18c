"""Two agents that know each other through a double of NIXL only, and their pools."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import Agent, KVLayout
from tests.agents.by_nixl.known_agents import KnownAgents
from tests.nixl import double

LAYERS, BLOCKS, DIM = 3, 64, 64
SLOTS = (8, 4096)


class Far(KnownAgents):
    """Two agents that know each other through NIXL only."""

    def __init__(self, progress="thread", other="thread", seed=0, slots=SLOTS) -> None:
        super().__init__()
        self.slots = slots
        self.mine = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
        self.theirs = np.random.default_rng(seed).integers(1, 256, (BLOCKS, LAYERS, DIM), dtype=np.uint8)
        self.me = self.agent("me", KVLayout.from_tensors("layer block dim", self.mine), progress)
        self.you = self.agent("you", KVLayout.from_tensors("block layer dim", self.theirs), other)
        self.peer = self.me.meet(self.you.card())
        self.load = kvplan.compile(self.peer.layouts["kv"], self.me.layouts["kv"])
        self.store = kvplan.compile(self.me.layouts["kv"], self.peer.layouts["kv"])

    def agent(self, name, layout, progress):
        return Agent(
            name, {"kv": layout}, transports=("nixl",), agent=double.Agent(self.network, name), progress=progress,
            slots=self.slots,
        )  # fmt: skip


def blocks(seed=1):
    rng = np.random.default_rng(seed)
    return rng.permutation(BLOCKS), rng.permutation(BLOCKS)
