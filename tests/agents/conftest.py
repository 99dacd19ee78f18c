"""Agents and other processes that end with their test, and leave nothing behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout
from kvplan.errors import TransferError
from tests.agents.processes import Other
from tests.agents.workers import BLOCKS, DIM, LAYERS, pool
from tests.patience import until


@pytest.fixture
def others():
    """A function that starts another process."""
    made = []

    def start(name="other", seed=0, **options):
        made.append(Other(name, seed, **options))
        return made[-1]

    yield start
    for one in made:
        one.end()


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


class Left:
    """Descriptors, threads and mappings of this process, compared before and after.

    What an earlier test has left may end meanwhile, so there may be fewer.
    """

    def __init__(self) -> None:
        resource_tracker.ensure_running()  # these two run once per process, as soon as it starts another one
        forkserver.ensure_running()
        self.before = self.now()

    @staticmethod
    def now():
        gc.collect()
        maps = [row for row in Path("/proc/self/maps").read_text().splitlines() if "/memfd:kvplan" in row]
        threads = [one.name for one in threading.enumerate() if one.name.startswith("kvplan")]
        descriptors = [str(fd.readlink()).split(":")[0] for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return Counter(maps=len(maps)) + Counter(threads) + Counter(descriptors)

    def check(self):
        until(lambda: self.now() <= self.before)


@pytest.fixture
def left():
    return Left()


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
