"""Packed rows of GPU memory, on a simulated GPU: gathered into a ring there, and scattered from one."""

from __future__ import annotations

from threading import current_thread
from types import SimpleNamespace

import numpy as np
import pytest

from kvplan.agents.by_nixl import nixl_packed
from kvplan.engines.nixl import Agent
from kvplan.errors import TransferError
from kvplan.plan.row_plans import Memory
from tests.engines.nixl import nixl_double as nixl
from tests.engines.nixl.pair import heard
from tests.patience import until
from tests.simulated import Device
from tests.simulated.executors import executor_on

ROWS, SIZE, STRIDE = 400, 576, 640


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_rows_of_two_gpus_are_packed(operation, monkeypatch):
    device, machine = Device(1), nixl.Machine()
    rng = np.random.default_rng(1)

    def ring_pages(nbytes, name):
        assert name == "cuda:0"
        memory = np.zeros(nbytes, np.uint8)
        device.own(memory, 0)
        return Memory(memory.ctypes.data, nbytes, name, memory)

    monkeypatch.setattr(nixl_packed, "ring_pages", ring_pages)
    entered = []
    monkeypatch.setattr(nixl_packed, "enter", lambda device: entered.append((current_thread().name, device)))
    pools = [rng.integers(0, 256, (ROWS, STRIDE), np.uint8) for _ in range(2)]
    agents = [Agent(agent=machine.agent(name), packed="always", slots=(6, 1 << 14)) for name in ("decode", "prefill")]
    with executor_on(device, "auto") as executor:
        for agent, pool in zip(agents, pools, strict=True):
            device.own(pool, 0)
            agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "VRAM")
            agent._kvplan.packed.way._executor = lambda name: executor
        name = agents[0].add_remote_agent(agents[1].get_agent_metadata())
        lists = [
            agents[0].prep_xfer_dlist(who, np.array([[p.ctypes.data, SIZE, 0, STRIDE, ROWS]], np.uint64), "VRAM")
            for who, p in zip(("", name), pools, strict=True)
        ]
        compiled = set(device.modules)
        assert compiled, "the lists name rows of a size, for which kernels are compiled at once"
        here, there = rng.permutation(ROWS)[:300], rng.permutation(ROWS)[:300]
        wanted = [pool.copy() for pool in pools]
        if operation == "READ":
            wanted[0][here, :SIZE] = pools[1][there, :SIZE]
        else:
            wanted[1][there, :SIZE] = pools[0][here, :SIZE]
        handle = agents[0].make_prepped_xfer(operation, lists[0], here, lists[1], there, b"note")
        agents[0].transfer(handle)
        until(lambda: agents[0].check_xfer_state(handle) == "DONE")
        assert agents[0].query_xfer_backend(handle) == "KVPLAN"
        for pool, want in zip(pools, wanted, strict=True):
            np.testing.assert_array_equal(pool, want)
        assert heard(agents[1]) == [b"note"]
        assert set(device.modules) == compiled
        assert entered == [("kvplan-nixl", "cuda:0")] * 2, "each agent's own thread, once"
        for agent in agents:
            agent._kvplan.packed.finalize()


def test_a_gpu_that_cannot_warm_up_does_not_stop_the_engine(caplog):
    """The lists stay NIXL's and kvplan's; the first transfer waits, or NIXL moves it."""
    pool = np.zeros((ROWS, STRIDE), np.uint8)
    agent = Agent(agent=nixl.Machine().agent("decode"), packed="always", slots=(6, 1 << 14))
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "VRAM")
    asked = []

    def refused(name):
        asked.append(name)
        raise TransferError("the GPU is full")

    agent._kvplan.packed.way._executor = refused
    rows = np.array([[pool.ctypes.data, SIZE, 0, STRIDE, ROWS]], np.uint64)
    with caplog.at_level("WARNING", "kvplan.engines.nixl"):
        made = [agent.prep_xfer_dlist("", rows, "VRAM") for _ in range(2)]
    assert [one.placed is not None for one in made] == [True, True]
    assert asked == ["cuda:0"], "it is not tried again for rows of the same size"
    assert [record.getMessage() for record in caplog.records] == [
        "the first transfer with a peer may wait: the GPU is full"
    ]
    agent._kvplan.packed.finalize()


class Warmed(list):
    """The GPUs on which something was warmed up."""

    def executor(self, name):
        def prepare(plan):
            assert plan.units == 1
            self.append(name)

        return SimpleNamespace(prepare=prepare)


@pytest.fixture
def warmed():
    return Warmed()


@pytest.mark.parametrize("size", [2 << 10, 8 << 10])
@pytest.mark.parametrize("listed_first", [True, False])
def test_pages_of_an_engine_are_warmed_up_in_any_order_of_its_calls(size, listed_first, warmed):
    """vLLM prepares the list of its own blocks before it asks for the metadata, which offers the memory."""
    agent = Agent(agent=nixl.Machine().agent("decode"), packed="auto")
    base, count = 1 << 40, 1 << 16  # nothing is read or written there
    agent.register_memory([(base, count * size, 0, "")], "VRAM")
    agent._kvplan.packed.way._executor = warmed.executor
    rows = np.array([[base, size, 0, size, count]], np.uint64)
    calls = [lambda: agent.prep_xfer_dlist("", rows, "VRAM"), agent.get_agent_metadata]
    for call in calls if listed_first else calls[::-1]:
        call()
    assert warmed == ["cuda:0"] * 2, "to gather and to scatter"
    agent.prep_xfer_dlist("", rows, "VRAM")
    assert len(warmed) == 2
    agent._kvplan.packed.finalize()


@pytest.mark.parametrize(
    ("size", "count", "prepared"), [(576, 1 << 14, ["cuda:0"] * 2), (576, 1 << 10, []), (1 << 16, 1 << 14, [])]
)
def test_rows_that_are_not_packed_warm_nothing_up(size, count, prepared, warmed):
    """By the model of the wire, few rows go faster as they are, and large ones, unless there are very many."""
    base = 1 << 40  # nothing is read or written there
    agent = Agent(agent=nixl.Machine().agent("decode"), packed="auto")
    agent.register_memory([(base, count * size, 0, "")], "VRAM")
    agent._kvplan.packed.way._executor = warmed.executor
    for number in (0, 1):  # a list on another GPU than the ring's is left alone
        agent.prep_xfer_dlist("", np.array([[base, size, number, size, count]], np.uint64), "VRAM")
    assert warmed == prepared
    agent._kvplan.packed.finalize()
