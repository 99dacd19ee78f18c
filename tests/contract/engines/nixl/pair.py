"""Two agents of one process with a double of NIXL behind each."""

from __future__ import annotations

import gc

import numpy as np
import torch

from kvplan.engines.nixl import Agent
from tests.nixl import double as nixl
from tests.patience import until

BLOCK = 64


class Pair:
    """Two agents of one process with a pool each, the second known to the first."""

    def __init__(self, blocks=32, *, kvplan=(True, True), **options):
        self.machine = nixl.Network(looks=1)
        self.real = [self.machine.agent(name) for name in ("decode", "prefill")]
        self.agents = [Agent(agent=one, **options) if on else one for one, on in zip(self.real, kvplan, strict=True)]
        rng = np.random.default_rng(blocks)
        self.pools = [self.pool(blocks) for _ in range(2)]
        for pool in self.pools:
            pool[:] = rng.integers(0, 256, pool.shape, np.uint8)
        for agent, pool in zip(self.agents, self.pools, strict=True):
            self.registered = agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
        self.meet()

    def pool(self, blocks):
        """Memory that a peer of this machine can open."""
        return torch.zeros(blocks, BLOCK, dtype=torch.uint8).share_memory_().numpy()

    @property
    def metadata(self):
        return self.agents[1].get_agent_metadata()

    def meet(self):
        self.name = self.agents[0].add_remote_agent(self.metadata)
        self.lists = [
            self.agents[0].prep_xfer_dlist(
                name, np.array([[pool.ctypes.data, BLOCK, 0, BLOCK, len(pool)]], dtype=np.uint64), "DRAM"
            )
            for name, pool in zip(("NIXL_INIT_AGENT", self.name), self.pools, strict=True)
        ]

    def make(self, operation, here, there, note=b""):
        return self.agents[0].make_prepped_xfer(operation, self.lists[0], here, self.lists[1], there, note)

    def finish(self, handle):
        until(lambda: self.agents[0].check_xfer_state(handle) == "DONE")

    @property
    def notes(self):
        return self.agents[1].get_new_notifs()


class PackedPair(Pair):
    """A pair whose transfers are packed, wherever that is possible."""

    def __init__(self, blocks=300, *, packed="always", slots=(8, 4096), apart=False, **options):
        self.apart = apart  # whether no peer can open the pools
        super().__init__(blocks, packed=packed, slots=slots, **options)

    def pool(self, blocks):
        return np.zeros((blocks, BLOCK), np.uint8) if self.apart else super().pool(blocks)

    def rows(self, count=200, seed=1):
        rng = np.random.default_rng(seed)
        return [rng.permutation(len(pool))[:count] for pool in self.pools]

    def close(self):
        self.machine.frozen, self.machine.hook = False, None
        self.agents.clear()
        gc.collect()


def move(pair, operation, here, there, note=b""):
    """Move blocks, and return the handle."""
    handle = pair.make(operation, here, there, note)
    pair.agents[0].transfer(handle)
    pair.finish(handle)
    return handle


def heard(agent, count=1):
    """Wait for notifications, and return them without their senders."""
    found = []
    until(lambda: [found.extend(notes) for notes in agent.get_new_notifs().values()] and len(found) >= count)
    return found
