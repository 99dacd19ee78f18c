"""Two agents that know each other: of the double everywhere, of NIXL where it is installed."""

from __future__ import annotations

import os
from itertools import count

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.nixl import NixlAgent
from tests.nixl.double import Agent, Network

names = count()


class Both:
    """Two agents in this process that know each other: of the double, or of NIXL."""

    def __init__(self, kind: str, request: pytest.FixtureRequest):
        self.network = Network()
        self.number = next(names)
        self.kind = kind
        self.made: list[NixlAgent] = []
        request.addfinalizer(self.close)
        self.mine = np.zeros((3, 8, 64), np.uint8)
        self.theirs = (np.arange(8 * 3 * 64, dtype=np.int64) % 251).astype(np.uint8).reshape(8, 3, 64)
        self.me = self.agent("me", kv=KVLayout.from_tensors("layer block dim", self.mine))
        self.you = self.agent("you", pool=KVLayout.from_tensors("block layer dim", self.theirs))
        self.peer = self.me.meet(self.you.card())
        self.load = kvplan.compile(self.peer.layouts["pool"], self.me.layouts["kv"])
        self.store = kvplan.compile(self.me.layouts["kv"], self.peer.layouts["pool"])

    def agent(self, name: str, **layouts: KVLayout) -> NixlAgent:
        name = f"{name}-{os.getpid()}-{self.number}"
        made = NixlAgent(name, layouts, agent=Agent(self.network, name) if self.kind == "double" else None)
        self.made.append(made)
        return made

    def close(self):
        for agent in self.made:
            agent.close()
        if self.kind == "double":
            self.network.check_released()


@pytest.fixture(params=["double", "nixl"])
def both(request):
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")
    return Both(request.param, request)


@pytest.fixture
def doubled(request):
    return Both("double", request)
