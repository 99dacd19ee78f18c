"""A visitor of another process's cache, in the process of the test; and what the tests of agents share."""

from __future__ import annotations

import time

import pytest
import torch

import kvplan
from kvplan import Agent, KVLayout
from kvplan.cuda.device import Device
from tests.agents.processes import PATIENCE
from tests.gpu.gate import Gate
from tests.gpu.processes.agent_worker import BLOCKS, PAGED, content
from tests.gpu.processes.mappings import is_mapped

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
each_owner = pytest.mark.parametrize(
    "owner",
    [0, pytest.param(1, marks=pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices"))],
    ids=["same GPU", "other GPU"],
)
memories = pytest.mark.parametrize("memory", [{}, EXPANDABLE], ids=["handle", "pieces"])


class Visitor:
    """This process: a cache under another order, an executor, an agent, and the peer that it has met."""

    def __init__(self, them, path="kernel"):
        self.cache = content(2, "cuda:0", PAGED)
        torch.cuda.synchronize()
        self.here = KVLayout.from_tensors(PAGED, self.cache)
        self.executor = kvplan.Executor("cuda:0", kvplan.Policy(path=path))
        self.agent = Agent("visitor", {}, transports=("cuda_ipc",), executor=self.executor)
        self.peer = self.agent.meet(them.card())
        self.there = self.peer.layouts["kv"]
        self.load = kvplan.compile(self.there, self.here)
        self.store = kvplan.compile(self.here, self.there)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.agent.close()
        self.executor.close()

    def holds(self, seed):
        torch.cuda.synchronize()
        return torch.equal(self.cache, content(seed, "cuda:0", PAGED))

    def mapped(self):
        """Whether the driver knows the memory that was met, at its address here."""
        return is_mapped(Device(0), self.peer.layouts["kv"].regions[0].address)

    def warm_up(self):
        """Read all of the owner's blocks and write them back: the first transfers load kernels.

        To load a kernel, the driver may wait for the streams that are busy. So this comes before a gate is closed.
        """
        for ids in ([0], every_block()):
            self.peer.submit(self.load.plan(ids, ids)).synchronize(PATIENCE)
            self.peer.submit(self.store.plan(ids, ids)).synchronize(PATIENCE)


def closed_gate():
    """A gate before a stream of this process's own; only the test opens it."""
    return Gate(torch.cuda.Stream(), PATIENCE)


def every_block():
    return list(range(BLOCKS))


def until(condition):
    """Wait for what another process brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(1e-3)
