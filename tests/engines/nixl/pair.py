"""Two agents of one process with a double of NIXL behind each, and a transfer that fails."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan.engines.nixl import Agent
from tests.engines.nixl import nixl_double as nixl
from tests.patience import until

BLOCK = 64


class Pair:
    """Two agents of one process with a pool each, the second known to the first."""

    def __init__(self, blocks=32, *, kvplan=(True, True)):
        self.machine = nixl.Machine()
        self.real = [self.machine.agent(name) for name in ("decode", "prefill")]
        self.agents = [Agent(agent=one) if on else one for one, on in zip(self.real, kvplan, strict=True)]
        rng = np.random.default_rng(blocks)
        self.pools = [rng.integers(0, 256, (blocks, BLOCK), np.uint8) for _ in range(2)]
        for agent, pool in zip(self.agents, self.pools, strict=True):
            self.registered = agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
        self.meet()

    def meet(self):
        self.name = self.agents[0].add_remote_agent(self.agents[1].get_agent_metadata())
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


class Lost:
    """A transfer whose peer has died."""

    def done(self):
        return True

    def synchronize(self, timeout=None):
        raise kvplan.TransferError("the peer died")
