"""The agent with NIXL's interface, with a double of NIXL behind it: what it takes over, and what it leaves to NIXL."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

import kvplan
from kvplan.engines.nixl import Agent
from kvplan.engines.nixl.metadata import joined, split
from tests.engines.nixl import nixl_double as nixl
from tests.engines.nixl.pair import BLOCK, Lost, Pair
from tests.patience import until


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
    assert pair.agents[0].estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
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


def test_a_peer_s_memory_that_is_not_offered_is_refused_by_nixl(pair):
    with pytest.raises(nixl.nixlNotFoundError):
        pair.agents[0].prep_xfer_dlist(pair.name, [(4096, 8, 0)], "DRAM")
    with pytest.raises(nixl.nixlNotFoundError):
        pair.agents[0].prep_xfer_dlist("nobody", [(4096, 8, 0)], "DRAM")


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


def test_a_released_transfer_tells_the_peer_nothing(pair):
    handle = pair.make("WRITE", [0], [1], b"never")
    pair.agents[0].transfer(handle)
    if pair.notes == {}:  # the post has not yet seen the end
        pair.agents[0].release_xfer_handle(handle)
        assert pair.notes == {}


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


def test_a_transfer_whose_peer_died_is_told_as_nixl_tells_it(pair, monkeypatch):
    agent = pair.agents[0]
    handle = pair.make("READ", [0], [1])
    neighbour = agent._kvplan.neighbours["prefill"]
    monkeypatch.setattr(neighbour, "submit", lambda plan: Lost())
    monkeypatch.setattr(neighbour, "gone", lambda: "its process died")
    for call in (agent.transfer, agent.check_xfer_state, agent.check_xfer_state):
        with pytest.raises(nixl.nixlRemoteDisconnectError, match=r": the peer died$"):
            call(handle)
    assert agent.check_remote_metadata("prefill")
    assert agent._kvplan.neighbours == {}
    agent.transfer(handle)  # NIXL tells how it is from now on
    pair.finish(handle)
    agent.release_xfer_handle(handle)
    assert pair.real[0].made == 1


def test_what_kvplan_refuses_at_the_post_nixl_moves(pair, monkeypatch):
    def refuse(plan):
        raise kvplan.TransferError("its agent closes")

    monkeypatch.setattr(pair.agents[0]._kvplan.neighbours["prefill"], "submit", refuse)
    handle = pair.make("READ", [0, 5], [1, 2], b"done")
    pair.agents[0].transfer(handle)
    pair.finish(handle)
    np.testing.assert_array_equal(pair.pools[0][[0, 5]], pair.pools[1][[1, 2]])
    assert pair.notes == {"decode": [b"done"]}
    assert pair.real[0].made == 1
    assert pair.agents[0].query_xfer_backend(handle) == "UCX"
    assert pair.agents[0].get_xfer_telemetry(handle).descCount == 2
    pair.agents[0].release_xfer_handle(handle)


def test_memory_registered_later_is_taken_over_after_new_metadata(pair):
    more = [np.full((4, BLOCK), k, np.uint8) for k in (1, 2)]
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


def test_attributes_are_nixl_s(pair):
    agent = pair.agents[0]
    assert agent.name == "decode"
    assert agent.get_plugin_list() == ["UCX"]
    agent.backends = {"UCX": 2}
    assert pair.real[0].backends == {"UCX": 2}
    with pytest.raises(AttributeError):
        agent.nothing  # noqa: B018


def test_metadata_with_a_wrong_card_is_nixl_s_alone(pair, caplog):
    own, card = split(pair.agents[1].get_agent_metadata())
    assert own == pair.real[1].get_agent_metadata()
    for wrong in (b"", b"{", b"[]", b'{"schema": "other"}', card[:-1], b"\xff" * 100):
        pair.agents[0].remove_remote_agent(pair.name)
        assert pair.agents[0].add_remote_agent(joined(own, wrong)) == pair.name
        assert pair.agents[0]._kvplan.neighbours == {}
    for cut in (own + b"\0" * 8 + joined(b"", b"")[-16:], own + b"\xff" * 8 + joined(b"", b"")[-16:]):
        assert split(cut)[1] in {None, b""}


def test_cards_that_lie_are_left_to_nixl():
    """Every change of a card is refused or harmless: no other error, and transfers still move the right bytes."""
    machine, rng = nixl.Machine(), random.Random(7)
    real = [machine.agent(name) for name in ("decode", "prefill")]
    agents = [Agent(agent=one) for one in real]
    pools = [torch.full((8, BLOCK), k, dtype=torch.uint8).share_memory_().numpy() for k in (1, 2)]
    for agent, pool in zip(agents, pools, strict=True):
        agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], "DRAM")
    own, card = split(agents[1].get_agent_metadata())
    document = json.loads(card) | {"identity": "of another process"}
    met = 0
    for turn in range(150):
        told = json.dumps(document).encode()
        if turn:
            at, upto = sorted(rng.randrange(len(told)) for _ in range(2))
            change = rng.choice([b"", b"0", b'"', b"{", b"9" * 20, b"-1", told[at : at + 40]])
            told = told[:at] + change + told[at + rng.choice([0, 1, upto - at]) :]
        name = agents[0].add_remote_agent(joined(own, told))
        met += bool(agents[0]._kvplan.neighbours)
        lists = [
            agents[0].prep_xfer_dlist(who, [(pool.ctypes.data, pool.nbytes, 0)], "DRAM")
            for who, pool in zip(("", name), pools, strict=True)
        ]
        pools[0][:] = 1
        agents[0].transfer(handle := agents[0].make_prepped_xfer("READ", lists[0], [0], lists[1], [0]))
        until(lambda handle=handle: agents[0].check_xfer_state(handle) == "DONE")
        assert (pools[0] == 2).all()
        agents[0].remove_remote_agent(name)
    assert 1 <= met < 150
    assert real[0].made == 150 - met
