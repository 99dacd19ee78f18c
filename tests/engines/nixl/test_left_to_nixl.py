"""What NIXL would do, it still does: whatever fails in kvplan, and whatever an engine does between two calls."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import kvplan
from kvplan.engines.nixl import Agent
from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.engines.nixl.standalone import StandaloneAgent
from tests.engines.nixl import nixl_double as nixl
from tests.engines.nixl.pair import BLOCK, Lost, Pair


@pytest.fixture
def pair():
    return Pair()


def moved(pair, handle, here, there):
    """Post a transfer that reads, and see that it moved these blocks."""
    pair.pools[0][:] = 0
    pair.agents[0].transfer(handle)
    pair.finish(handle)
    wanted = np.zeros_like(pair.pools[0])
    wanted[here] = pair.pools[1][there]
    np.testing.assert_array_equal(pair.pools[0], wanted)


def refuse(*given, **more):
    raise RuntimeError("a bug")


def lose(pair):
    state = pair.agents[0]._kvplan
    state.lost(state.neighbours[pair.name.decode()], "its agent closes")


def test_transfers_made_before_a_peer_was_lost_go_by_nixl(pair):
    handle = pair.make("READ", [0, 4], [1, 2], b"done")
    lose(pair)
    for _ in range(3):  # posted again
        moved(pair, handle, [0, 4], [1, 2])
    assert pair.real[0].made == 1
    assert pair.notes == {"decode": [b"done"] * 3}


def test_transfers_made_before_new_metadata_still_move(pair):
    handle, more = pair.make("READ", [0, 4], [1, 2]), np.zeros((4, BLOCK), np.uint8)
    pair.agents[1].register_memory([(more.ctypes.data, more.nbytes, 0, "")], "DRAM")
    pair.agents[0].add_remote_agent(pair.agents[1].get_agent_metadata())
    moved(pair, handle, [0, 4], [1, 2])


@pytest.mark.parametrize("again", [False, True])
def test_transfers_made_before_a_peer_was_removed_are_stale_also_by_nixl(pair, again):
    agent = pair.agents[0]
    lists = [agent.get_xfer_descs([(pool.ctypes.data, BLOCK, 0)], "DRAM") for pool in pair.pools]
    handles = [pair.make("READ", [0], [1]), agent.initialize_xfer("READ", *lists, pair.name)]
    agent.remove_remote_agent(pair.name)
    if again:
        agent.add_remote_agent(pair.agents[1].get_agent_metadata())
    for handle in handles:
        with pytest.raises(nixl.nixlNotFoundError):
            agent.transfer(handle)


def test_arrays_and_lists_may_change_once_a_transfer_is_made(pair):
    agent, here, there = pair.agents[0], np.array([0, 4]), np.array([1, 2])
    one, two = [agent.get_xfer_descs([(pool.ctypes.data, BLOCK, 0)], "DRAM") for pool in pair.pools]
    handles = [pair.make("READ", here, there), agent.initialize_xfer("READ", one, two, pair.name)]
    here[:], there[:] = 7, 8
    one[0] = two[0] = (0, BLOCK, 0)
    lose(pair)
    moved(pair, handles[0], [0, 4], [1, 2])
    moved(pair, handles[1], [0], [0])


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_table_may_change_once_a_list_is_prepared(pair, order):
    tables = [np.array([[pool.ctypes.data, BLOCK, 0]], order=order) for pool in pair.pools]
    lists = [pair.agents[0].prep_xfer_dlist(n, t, "DRAM") for n, t in zip(("", pair.name), tables, strict=True)]
    for table in tables:
        table[:] = 1
    moved(pair, pair.agents[0].make_prepped_xfer("READ", lists[0], [0], lists[1], [0]), [0], [0])


def test_lists_may_be_released_once_a_transfer_is_made(pair):
    handle = pair.make("READ", [0], [1])
    lose(pair)
    kept = [weakref.ref(one.own) for one in pair.lists]
    for one in pair.lists * 2:
        pair.agents[0].release_dlist_handle(one)
    with pytest.raises(nixl.nixlInvalidParamError):
        pair.make("READ", [0], [1])
    moved(pair, handle, [0], [1])
    assert all(one() is not None for one in kept)
    pair.agents[0].release_xfer_handle(handle)
    assert all(one() is None for one in kept)  # NIXL's handles release themselves
    with pytest.raises(nixl.nixlInvalidParamError, match="was released"):
        pair.agents[0].transfer(handle)


def test_a_transfer_that_fails_while_the_peer_lives_goes_by_nixl(pair, monkeypatch):
    handle = pair.make("READ", [0], [1], b"done")
    monkeypatch.setattr(pair.agents[0]._kvplan.neighbours["prefill"], "submit", lambda plan: Lost())
    moved(pair, handle, [0], [1])
    assert pair.notes == {"decode": [b"done"]}
    assert pair.real[0].made == 1
    assert pair.name.decode() in pair.agents[0]._kvplan.neighbours


def test_a_bug_at_the_post_leaves_the_transfer_to_nixl(pair, monkeypatch):
    handle = pair.make("READ", [0], [1])
    monkeypatch.setattr(pair.agents[0]._kvplan.neighbours["prefill"], "submit", refuse)
    moved(pair, handle, [0], [1])
    assert pair.real[0].made == 1


@pytest.mark.parametrize(
    "where",
    ["neighbours.Neighbourhood.meet", "neighbours.Neighbourhood.card", "neighbours.Neighbourhood.spans",
     "spans.Spans.place", "taking.RowProgram.plan", "opened.SameProcess.prepare", "opened.SameProcess.close"],
)  # fmt: skip
def test_a_bug_of_kvplan_reaches_no_engine(where, monkeypatch, caplog):
    monkeypatch.setattr(f"kvplan.engines.nixl.{where}", refuse)
    pair = Pair()
    handle = pair.make("READ", [0, 4], [1, 2], b"done")
    moved(pair, handle, [0, 4], [1, 2])
    assert pair.notes == {"decode": [b"done"]}
    pair.agents[0].remove_remote_agent(pair.name)
    pair.agents[1].deregister_memory(pair.registered)
    assert "RuntimeError: a bug" in caplog.text or where.endswith("meet")


def test_lists_that_only_nixl_can_judge_are_judged_by_nixl(pair, monkeypatch):
    agent = pair.agents[0]
    with pytest.raises(ValueError, match="inhomogeneous"):
        np.asarray([[1], [2, 3]])
    with pytest.raises(TypeError):
        pair.make("READ", [[1], [2, 3]], [0, 1])
    with pytest.raises(TypeError):
        agent.transfer(pair.make("READ", [0], [1]), 5)
    asked = []
    monkeypatch.setattr(pair.real[0], "prep_xfer_dlist", lambda *given: asked.append(given))
    table = np.zeros((1, 5))
    agent.prep_xfer_dlist("", table)  # NIXL says that it needs a kind of memory
    assert asked == [("", table, None, [])]


def test_rows_that_wrap_around_are_refused():
    for stride, count in ((1 << 40, 1 << 24), (1 << 62, 5), (8, (1 << 62) + 1)):
        with pytest.raises(kvplan.KVPlanError, match="out of range"):
            Rows.of(np.array([[4096, 8, 0, stride, count]]), "DRAM")


def test_memory_of_this_process_that_is_deregistered_or_gone_is_moved_no_more(pair):
    handle = pair.make("READ", [0], [1])
    pair.agents[1].deregister_memory(pair.registered)
    assert "deregistered" in pair.agents[0]._kvplan.neighbours["prefill"].gone()
    pair.agents[0].transfer(handle)  # NIXL's to judge
    assert pair.real[0].made == 1
    pair.agents[0].add_remote_agent(pair.agents[1].get_agent_metadata())
    fresh = Pair()
    handle, told = fresh.make("READ", [0], [1]), weakref.ref(fresh.agents[1]._kvplan._around)
    del fresh.agents[1]
    gc.collect()
    assert told() is None
    fresh.agents[0].transfer(handle)
    assert fresh.real[0].made == 1


def shared(blocks=8):
    return torch.zeros(blocks, BLOCK, dtype=torch.uint8).share_memory_().numpy()


def test_other_memory_comes_and_goes_without_new_agents():
    agent, pool, other = Agent(agent=StandaloneAgent("a")), shared(), shared()
    agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    agent.get_agent_metadata()
    offers = agent._kvplan._around._offers
    first = offers[0][0]
    for _ in range(4):  # an engine that registers a private buffer for each request
        private = np.zeros(1 << 12, np.uint8)
        made = agent.register_memory([(private.ctypes.data, private.nbytes, 0, "")], "DRAM")
        agent.prep_xfer_dlist("", [(private.ctypes.data, 8, 0)], "DRAM")
        agent.get_agent_metadata()
        agent.deregister_memory(made)
    assert [one for one, _ in agent._kvplan._around._offers] == [first]
    made = agent.register_memory([(other.ctypes.data, other.nbytes, 0, "")], "DRAM")
    agent.get_agent_metadata()
    assert len(agent._kvplan._around._offers) == 2
    agent.deregister_memory(made)
    agent.get_agent_metadata()
    assert [one for one, _ in agent._kvplan._around._offers] == [first]


def test_programs_of_memory_that_was_deregistered_are_dropped(pair):
    for _ in range(5):
        private = np.zeros(1 << 12, np.uint8)
        made = pair.agents[0].register_memory([(private.ctypes.data, private.nbytes, 0, "")], "DRAM")
        pair.make("READ", [0], [1])
        pair.agents[0].deregister_memory(made)
    assert len(pair.agents[0]._kvplan._programs) <= 2


def test_a_peer_that_nixl_removes_with_an_error_is_let_go(pair, monkeypatch):
    monkeypatch.setattr(pair.real[0], "remove_remote_agent", refuse)
    with pytest.raises(RuntimeError):
        pair.agents[0].remove_remote_agent(pair.name)
    assert pair.agents[0]._kvplan.neighbours == {}
