"""The agent with NIXL's interface, with a double of NIXL behind it: what it takes over, and what it leaves to NIXL."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.contract.engines.nixl.pair import BLOCK, Pair
from tests.nixl import double as nixl
from tests.open_files import open_files


@pytest.fixture
def pair():
    return Pair()


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_prepared_transfers_are_taken_over(pair, operation):
    here, there = np.array([3, 1, 7, 8]), np.array([0, 5, 9, 10])
    before = [pool.copy() for pool in pair.pools]
    handle = pair.make(operation, here, there, b"request 1")
    assert pair.notes == {}
    assert pair.agents[0].transfer(handle) in {"PROC", "DONE"}
    pair.finish(handle)
    to, rows = (0, (here, there)) if operation == "READ" else (1, (there, here))
    np.testing.assert_array_equal(pair.pools[to][rows[0]], before[1 - to][rows[1]])
    np.testing.assert_array_equal(np.delete(pair.pools[to], rows[0], 0), np.delete(before[to], rows[0], 0))
    np.testing.assert_array_equal(pair.pools[1 - to], before[1 - to])
    assert pair.notes == {"decode": [b"request 1"]}
    figures = pair.agents[0].get_xfer_telemetry(handle)
    assert (figures.totalBytes, figures.descCount) == (4 * BLOCK, 4)
    assert 0 <= figures.postDuration <= figures.xferDuration
    assert pair.agents[0].query_xfer_backend(handle) == "KVPLAN"
    pair.agents[0].release_xfer_handle(handle)
    pair.agents[0].release_xfer_handle(handle)
    assert pair.real[0].made == 0


def test_whole_lists_are_taken_over(pair):
    agent, (mine, theirs) = pair.agents[0], pair.pools
    lists = [agent.get_xfer_descs([(p.ctypes.data + 8 * k, 8 + k, 0) for k in (0, 9, 20)], "DRAM") for p in pair.pools]
    handle = agent.initialize_xfer("READ", lists[0], lists[1], pair.name, b"note")
    agent.transfer(handle)
    pair.finish(handle)
    for k in (0, 9, 20):
        np.testing.assert_array_equal(mine.ravel()[8 * k :][: 8 + k], theirs.ravel()[8 * k :][: 8 + k])
    assert pair.real[0].made == 0
    assert pair.notes == {"decode": [b"note"]}


def test_a_list_of_a_peer_s_own_form_is_read(pair):
    agent = pair.agents[0]
    told = agent.get_serialized_descs(agent.get_xfer_descs([(pair.pools[1].ctypes.data, BLOCK, 0)], "DRAM"))
    remote = agent.prep_xfer_dlist(pair.name, agent.deserialize_descs(told))
    handle = agent.make_prepped_xfer("READ", pair.lists[0], [2], remote, [0])
    agent.transfer(handle)
    pair.finish(handle)
    np.testing.assert_array_equal(pair.pools[0][2], pair.pools[1][0])
    assert pair.real[0].made == 0


@pytest.mark.parametrize("kvplan", [(True, False), (False, True), (False, False)])
def test_a_peer_without_kvplan_is_moved_to_by_nixl(kvplan):
    pair = Pair(kvplan=kvplan)
    handle = pair.make("READ", [3, 1], [4, 5], b"done")
    pair.agents[0].transfer(handle)
    pair.finish(handle)
    np.testing.assert_array_equal(pair.pools[0][[3, 1]], pair.pools[1][[4, 5]])
    assert pair.real[0].made == 1
    assert pair.notes == {"decode": [b"done"]}
    assert pair.agents[0].get_xfer_telemetry(handle).descCount == 2
    assert pair.agents[0].query_xfer_backend(handle) == "UCX"


@pytest.mark.parametrize(
    ("here", "there"), [([], []), ([1, 2], [3]), ([32], [0]), ([0], [32]), ([-1], [0]), ([0], [-1])]
)
def test_nixl_refuses_what_it_would_refuse(pair, here, there):
    with pytest.raises(nixl.nixlInvalidParamError, match=r"^NIXL_ERR_INVALID_PARAM$"):
        pair.make("READ", here, there)


def test_descriptors_of_unlike_sizes_are_refused_by_nixl(pair):
    remote = pair.agents[0].prep_xfer_dlist(pair.name, [(pair.pools[1].ctypes.data, 8, 0)], "DRAM")
    with pytest.raises(nixl.nixlInvalidParamError):
        pair.agents[0].make_prepped_xfer("READ", pair.lists[0], [0], remote, [0])


def test_states_before_and_after_the_end(pair):
    agent = pair.agents[0]
    handle = pair.make("WRITE", [0], [1], b"first")
    with pytest.raises(nixl.nixlNotPostedError, match=r"^NIXL_ERR_NOT_POSTED: "):
        agent.check_xfer_state(handle)
    with pytest.raises(nixl.nixlNotPostedError):
        agent.get_xfer_telemetry(handle)
    agent.transfer(handle)
    pair.finish(handle)
    assert agent.check_xfer_state(handle) == "DONE"
    pair.pools[0][0] += 1
    agent.transfer(handle, b"second")  # posted again
    pair.finish(handle)
    agent.transfer(handle)
    pair.finish(handle)
    np.testing.assert_array_equal(pair.pools[0][0], pair.pools[1][1])
    assert pair.notes == {"decode": [b"first", b"second", b"second"]}


def test_a_removed_peer_s_lists_and_transfers_are_stale(pair):
    agent, handle = pair.agents[0], pair.make("READ", [0], [1])
    agent.remove_remote_agent(pair.name)
    assert not agent.check_remote_metadata(pair.name)
    with pytest.raises(nixl.nixlNotFoundError):
        agent.transfer(handle)
    with pytest.raises(nixl.nixlNotFoundError):
        pair.make("READ", [0], [1])
    pair.meet()
    agent.transfer(again := pair.make("READ", [0], [1]))
    pair.finish(again)
    np.testing.assert_array_equal(pair.pools[0][0], pair.pools[1][1])
    assert pair.real[0].made == 0


def test_memory_registered_later_is_taken_over_after_new_metadata(pair):
    more = [torch.full((4, BLOCK), k, dtype=torch.uint8).share_memory_().numpy() for k in (1, 2)]
    for agent, pool in zip(pair.agents, more, strict=True):
        agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    agent = pair.agents[0]
    assert agent.add_remote_agent(pair.agents[1].get_agent_metadata()) == pair.name
    lists = [
        agent.prep_xfer_dlist(name, [(pool.ctypes.data, BLOCK, 0)], "DRAM")
        for name, pool in zip(("", pair.name), more, strict=True)
    ]
    agent.transfer(handle := agent.make_prepped_xfer("READ", lists[0], [0], lists[1], [0]))
    pair.finish(handle)
    assert (more[0][0] == 2).all()
    assert (more[0][1:] == 1).all()
    assert pair.real[0].made == 0


def test_registrations_add_a_file_each_and_no_thread(pair):
    agent, held = pair.agents[1], []
    before, threads = len(open_files()), threading.active_count()
    for _ in range(10):
        pool = pair.pool(4)
        held.append((pool, agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")))
        pair.agents[0].add_remote_agent(agent.get_agent_metadata())
    assert threading.active_count() <= threads  # those of earlier tests may end
    assert len(open_files()) <= before + 2 * 10  # the pool's own, and the one that is offered
    for _, registered in held:
        agent.deregister_memory(registered)
    pair.meet()
    pair.agents[0].transfer(handle := pair.make("READ", [0], [1]))
    pair.finish(handle)
    assert len(open_files()) <= before + 10
    assert pair.real[0].made == 0


def test_a_card_does_not_travel_in_metadata_of_an_unknown_form(pair, caplog, monkeypatch):
    monkeypatch.setattr(pair.real[1], "get_agent_metadata", lambda: b"NIXL, otherwise")
    assert pair.metadata == b"NIXL, otherwise"
    assert "the metadata of this NIXL has an unknown form" in caplog.text
