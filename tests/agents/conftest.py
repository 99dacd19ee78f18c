"""Agents that end with their test."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout
from kvplan.errors import TransferError
from tests.agents.workers import BLOCKS, DIM, LAYERS, pool


@pytest.fixture
def agents():
    """A function that makes an agent of this process, with a pool of its own."""
    made = []

    def make(name="me", seed=0, layouts=None, **options):
        made.append(Agent(name, {"kv": pool(seed=seed)} if layouts is None else layouts, **options))
        return made[-1]

    yield make
    for one in made:
        try:
            one.close(timeout=0.2)
        except TransferError:
            one.close()


class Both:
    """An owner and a visitor; the visitor's pool has another order."""

    def __init__(self, agents) -> None:
        self.owner = agents("owner")
        self.mine = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
        self.here = KVLayout.from_tensors("layer block dim", self.mine)
        self.visitor = agents("visitor", layouts={})
        self.peer = self.visitor.meet(self.owner.card())
        self.theirs = self.owner.layouts["kv"].tensors
        self.load = kvplan.compile(self.peer.layouts["kv"], self.here)
        self.store = kvplan.compile(self.here, self.peer.layouts["kv"])


@pytest.fixture
def both(agents):
    return Both(agents)
