"""Two agents of one process that know each other through a double of NIXL, and their pools."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvplan
from kvplan import Agent, KVLayout
from tests.nixl import double
from tests.patience import until

LAYERS, BLOCKS, DIM = 3, 64, 64
SLOTS = (8, 4096)


class Far:
    """``me`` has met ``you`` by ``nixl``, and moves blocks between ``theirs`` and ``mine``."""

    def __init__(self, progress: str = "thread") -> None:
        self.network = double.Network()
        self.mine = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
        self.theirs = np.random.default_rng(0).integers(1, 256, (BLOCKS, LAYERS, DIM), dtype=np.uint8)
        self.me = self.agent("me", KVLayout.from_tensors("layer block dim", self.mine), progress=progress)
        self.you = self.agent("you", KVLayout.from_tensors("block layer dim", self.theirs), progress=progress)
        self.meet()

    def agent(self, name: str, layout: KVLayout, life: int = 0, **options: Any) -> Agent:
        options = {"transports": ("nixl",), "progress": "thread", "slots": SLOTS} | options
        return Agent(name, {"kv": layout}, agent=double.Agent(self.network, name, life), **options)

    def meet(self) -> None:
        self.peer = self.me.meet(self.you.card())
        self.load = kvplan.compile(self.peer.layouts["kv"], self.me.layouts["kv"])
        self.store = kvplan.compile(self.me.layouts["kv"], self.peer.layouts["kv"])

    def came(self, src: Any, dst: Any) -> bool:
        """Whether blocks here have the bytes of blocks there."""
        return bool((self.mine[:, dst] == self.theirs[src].swapaxes(0, 1)).all())

    def close(self) -> None:
        """Close both; NIXL then holds nothing."""
        self.me.close()
        self.you.close()
        self.network.check_released()


def blocks(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.permutation(BLOCKS), rng.permutation(BLOCKS)


def heard(agent: Agent, count: int = 1) -> list[tuple[str, bytes]]:
    """Wait for so many notes of an agent, and return them."""
    found: list[tuple[str, bytes]] = []
    until(lambda: found.extend(agent.notes()) or len(found) >= count)
    return found
