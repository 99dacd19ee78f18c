"""Two agents of one process that know each other through NIXL only, on a double of it."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout
from tests.nixl import double
from tests.patience import until


class KnownAgents:
    """The network of two agents, ``me`` and ``you``, which a subclass makes."""

    me: Agent
    you: Agent

    def __init__(self) -> None:
        self.network = double.Network()

    def close(self) -> None:
        """Close both; NIXL then holds nothing."""
        self.me.close()
        self.you.close()
        self.network.check_released()


class Far(KnownAgents):
    """Two agents with a layout each; a transfer is done after so many looks."""

    def __init__(self, transports=("shm", "nixl"), looks=2, **options) -> None:
        super().__init__()
        self.options = options
        self.network.looks = looks
        self.mine = np.zeros((3, 8, 64), np.uint8)
        self.theirs = (np.arange(8 * 3 * 64) % 251).astype(np.uint8).reshape(8, 3, 64)
        self.me = self.agent("me", {"kv": KVLayout.from_tensors("layer block dim", self.mine)}, transports)
        self.you = self.agent("you", {"kv": KVLayout.from_tensors("block layer dim", self.theirs)}, transports)

    def agent(self, name, layouts, transports):
        return Agent(name, layouts, transports=transports, agent=double.Agent(self.network, name), **self.options)

    def meet(self):
        self.peer = self.me.meet(self.you.card())
        self.load = kvplan.compile(self.peer.layouts["kv"], self.me.layouts["kv"])
        self.store = kvplan.compile(self.me.layouts["kv"], self.peer.layouts["kv"])
        return self.peer


def heard(agent, count=1):
    """Wait for so many notes of an agent, and return them."""
    found = []
    until(lambda: found.extend(agent.notes()) or len(found) >= count)
    return found


def looks(*counts):
    """Run a test with two agents that have met by NIXL, the fixture ``pair``, for each number of looks."""
    return pytest.mark.parametrize("pair", counts, indirect=True)


def same(pair, src, dst):
    """Whether a block here has the bytes of a block there."""
    return (pair.mine[:, dst] == pair.theirs[src]).all()
