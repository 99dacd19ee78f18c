"""Packed rows when something fails: wires, deaths, releases, deregistered memory, and peers that lie or say nothing."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from kvplan.engines.nixl import Agent, packed_peers
from kvplan.errors import PathError
from tests.engines.nixl import nixl_double as nixl
from tests.engines.nixl.pair import PackedPair, heard, move
from tests.patience import PATIENCE, until


@pytest.fixture
def pair():
    made = PackedPair()
    yield made
    made.close()


def failing(call, agent, error, skip=0):
    """Return a hook with which a call of an agent fails once, after some that do not."""
    left = [skip]

    def hook(name, who, what):
        if name == call and who is agent and isinstance(what, nixl.Handle):
            left[0] -= 1
            if left[0] == -1:
                raise error

    return hook


def ended(pair, handle):
    """Wait for the end of a transfer; return its state, or its error."""
    told = []

    def over():
        try:
            told.append(pair.agents[0].check_xfer_state(handle))
        except Exception as error:  # noqa: BLE001  # NIXL's
            told.append(error)
        return told[-1] != "PROC"

    until(over)
    return told[-1]


@pytest.mark.parametrize("call", ["transfer", "look"])
@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_wire_that_fails_in_the_middle_is_an_error_and_the_next_post_works(pair, operation, call):
    here, there = pair.rows()
    handle = pair.make(operation, here, there, b"note")
    writer = pair.real[1 if operation == "READ" else 0]
    move(pair, operation, here, there)
    pair.machine.hook = failing(call, writer, nixl.nixlBackendError("NIXL_ERR_BACKEND"), skip=2)
    pair.agents[0].transfer(handle)
    error = ended(pair, handle)
    assert isinstance(error, nixl.nixlBackendError)
    assert "NIXL_ERR_BACKEND: " in str(error)
    assert ended(pair, handle) is error
    pair.pools[1 if operation == "READ" else 0][:] = 9
    pair.agents[0].transfer(handle)
    assert ended(pair, handle) == "DONE"
    np.testing.assert_array_equal(pair.pools[0][here], pair.pools[1][there])
    assert (pair.pools[0][here] == 9).all()
    assert heard(pair.agents[1]) == [b"note"]
    assert pair.real[0].made == 0 or operation == "WRITE"


def test_a_wire_that_fails_before_anything_is_changed_leaves_the_transfer_to_nixl(pair):
    here, there = pair.rows()
    pair.machine.hook = failing("look", pair.real[1], nixl.nixlBackendError("NIXL_ERR_BACKEND"))
    handle = move(pair, "READ", here, there, b"note")
    np.testing.assert_array_equal(pair.pools[0][here], pair.pools[1][there])
    assert pair.agents[0].query_xfer_backend(handle) == "UCX"
    assert pair.real[0].counts == [200]
    assert heard(pair.agents[1]) == [b"note"]


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_peer_that_dies_ends_its_transfers_as_nixl_does(pair, operation):
    here, there = pair.rows()
    move(pair, operation, here, there)
    handle = pair.make(operation, here, there, b"never")
    pair.machine.frozen = True
    pair.agents[0].transfer(handle)
    assert pair.agents[0].check_xfer_state(handle) == "PROC"

    def dead(name, who, what):
        raise nixl.nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")

    pair.machine.hook = dead
    error = ended(pair, handle)
    assert isinstance(error, nixl.nixlRemoteDisconnectError)
    with pytest.raises(nixl.nixlRemoteDisconnectError):  # NIXL tells it from now on
        pair.agents[0].transfer(pair.make(operation, here, there))
    assert pair.agents[0]._kvplan.packed.peers == {}
    pair.agents[0].release_xfer_handle(handle)


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
@pytest.mark.parametrize("chunks", [0, 2])
def test_a_release_does_not_wait_for_the_peer_and_tells_nothing(pair, operation, chunks):
    here, there = pair.rows()
    move(pair, operation, here, there)
    handle = pair.make(operation, here, there, b"never")
    left = [chunks]

    def hook(name, who, what):  # some writes end, then all stay in progress
        left[0] -= name == "look"
        pair.machine.frozen = left[0] < 0

    pair.machine.hook = hook
    pair.machine.frozen = not chunks
    pair.agents[0].transfer(handle)
    until(lambda: pair.machine.frozen)
    pair.agents[0].release_xfer_handle(handle)
    pair.agents[0].release_xfer_handle(handle)
    before = [pool.copy() for pool in pair.pools]
    pair.machine.hook, pair.machine.frozen = None, False
    move(pair, "READ", [0, 2], [1, 3], b"next")
    np.testing.assert_array_equal(np.delete(pair.pools[0], [0, 2], 0), np.delete(before[0], [0, 2], 0))
    if operation == "READ":
        np.testing.assert_array_equal(pair.pools[1], before[1])
    assert heard(pair.agents[1]) == [b"next"]
    with pytest.raises(nixl.nixlInvalidParamError):
        pair.agents[0].transfer(handle)


def test_deregistered_memory_is_touched_no_more(pair):
    here, there = pair.rows()
    move(pair, "READ", here, there)
    handle = pair.make("READ", here, there)
    pair.machine.frozen = True
    pair.agents[0].transfer(handle)
    until(pair.way(1).lanes.ring.end.served)
    over = []
    leaving = threading.Thread(target=lambda: over.append(pair.agents[1].deregister_memory(pair.registered)))
    leaving.start()
    leaving.join(0.05)
    assert not over  # it waits for the transfer that has begun
    pair.machine.frozen = False
    pair.finish(handle)
    leaving.join(PATIENCE)
    assert over
    pair.agents[0].transfer(handle)
    pair.finish(handle)
    assert pair.agents[0].query_xfer_backend(handle) == "UCX"  # the peer refuses, so it is NIXL's to refuse


def test_without_memory_for_a_ring_nixl_moves_all_and_the_log_says_it_once(pair, monkeypatch, caplog):
    """A GPU may be full, and an engine makes many transfers."""
    asked = []

    def full():
        asked.append(1)
        raise PathError("cuda:0 has no 134,217,728 bytes for a ring")

    monkeypatch.setattr(pair.way().lanes, "_ring_for", full)
    for _ in range(3):
        here, there = pair.rows()
        handle = move(pair, "READ", here, there)
        np.testing.assert_array_equal(pair.pools[0][here], pair.pools[1][there])
        assert pair.agents[0].query_xfer_backend(handle) == "UCX"
    assert len(asked) == 1
    assert caplog.text.count("no 134,217,728 bytes for a ring") == 1


def freeze_after_a_chunk(pair):
    """Let the first chunk arrive; then all writes stay in progress."""
    looks = [1]

    def hook(name, who, what):
        looks[0] -= name == "look"
        pair.machine.frozen = looks[0] < 0

    pair.machine.hook = hook


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_peer_that_stalls_touches_deregistered_memory_no_more(pair, operation, monkeypatch):
    """The memory may be freed after the call, and belong to somebody else when the peer goes on."""
    monkeypatch.setattr(packed_peers, "CLOSE_SECONDS", 0.05)
    pair.pools[0][:], pair.pools[1][:] = 1, 2
    every = np.arange(len(pair.pools[0]))
    move(pair, "READ", [0], [0])
    freeze_after_a_chunk(pair)
    handle = pair.make(operation, every, every, b"never")
    pair.agents[0].transfer(handle)
    end = pair.way(1).lanes.ring.end
    until(lambda: pair.machine.frozen and end.served())
    pair.agents[1].deregister_memory(pair.registered)
    assert not end.served()
    pair.pools[1][:] = 99
    pair.machine.hook, pair.machine.frozen = None, False
    error = ended(pair, handle)
    assert isinstance(error, nixl.nixlBackendError)
    assert "its memory was deregistered" in str(error)
    assert not (pair.pools[0] == 99).any()
    assert (pair.pools[1] == 99).all()
    assert pair.notes == {}


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_a_transfer_of_other_memory_outlives_a_deregistration(pair, operation, monkeypatch):
    monkeypatch.setattr(packed_peers, "CLOSE_SECONDS", 0.05)
    other = np.zeros(4096, np.uint8)
    registered = pair.agents[1].register_memory([(other.ctypes.data, other.nbytes, 0, "")], "DRAM")
    pair.meet()
    every = np.arange(len(pair.pools[0]))
    move(pair, "READ", [0], [0])
    freeze_after_a_chunk(pair)
    handle = pair.make(operation, every, every, b"note")
    pair.agents[0].transfer(handle)
    end = pair.way(1).lanes.ring.end
    until(lambda: pair.machine.frozen and end.served())
    pair.agents[1].deregister_memory(registered)
    assert end.served()
    pair.machine.hook, pair.machine.frozen = None, False
    pair.finish(handle)
    np.testing.assert_array_equal(*pair.pools)
    assert pair.agents[0].query_xfer_backend(handle) == "KVPLAN"


def test_a_removed_peer_that_says_no_goodbye_keeps_its_slots(pair, monkeypatch, caplog):
    monkeypatch.setattr(packed_peers, "PART_SECONDS", 0.05)
    move(pair, "READ", *pair.rows())
    lanes = pair.way().lanes
    free = lanes.ring.end.ring.free
    pair.way(1).stop(PATIENCE)
    pair.agents[0].remove_remote_agent(pair.name)
    assert "prefill does not say that its writes have ended" in caplog.text
    assert not pair.real[0].check_remote_metadata("prefill")
    assert lanes.ring.end.ring.free == free
    until(lambda: not lanes.busy)


def test_a_removed_peer_is_gone_and_may_come_back(pair):
    here, there = pair.rows()
    handle = move(pair, "READ", here, there)
    pair.agents[0].remove_remote_agent(pair.name)
    assert not pair.agents[0].check_remote_metadata("prefill")
    with pytest.raises(nixl.nixlNotFoundError):
        pair.agents[0].transfer(handle)
    pair.meet()
    pair.pools[1][:] = 3
    move(pair, "READ", here, there, b"again")
    assert (pair.pools[0][here] == 3).all()
    assert heard(pair.agents[1]) == [b"again"]
    ring = pair.way().lanes.ring.end
    (lane,) = ring._peers.every
    assert ring.ring.free + len(ring._own.senders) + len(lane.granted) == len(ring.ring.slots)


def restart(pair, k):
    """Replace an agent by one of the same name and another life, with the same pool."""
    name = pair.real[k].name
    pair.way(k).stop(PATIENCE)
    made = pair.real[k] = pair.machine.agent(name)
    made.life = 1
    pair.agents[k] = Agent(agent=made, packed="always", slots=(8, 4096))
    pair.agents[k].register_memory([(pair.pools[k].ctypes.data, pair.pools[k].nbytes, 0, "")], "DRAM")


@pytest.mark.parametrize("which", [0, 1])
def test_a_restarted_end_packs_again(pair, which, monkeypatch):
    monkeypatch.setattr(packed_peers, "PART_SECONDS", 0.05)
    here, there = pair.rows()
    move(pair, "READ", here, there)
    restart(pair, which)
    if which:
        pair.agents[0].remove_remote_agent("prefill")
    pair.meet()
    for turn in range(2):
        pair.pools[1][:] = 3 + turn
        handle = move(pair, "READ", here, there, b"again")
        assert (pair.pools[0][here] == 3 + turn).all()
        assert pair.agents[0].query_xfer_backend(handle) == "KVPLAN"
    assert heard(pair.agents[1], 2) == [b"again", b"again"]


def test_a_transfer_in_flight_with_a_removed_peer_fails(pair):
    here, there = pair.rows()
    move(pair, "READ", here, there)
    handle = pair.make("READ", here, there, b"never")
    pair.machine.frozen = True
    pair.agents[0].transfer(handle)
    removing = threading.Thread(target=pair.agents[0].remove_remote_agent, args=(pair.name,))
    removing.start()
    until(lambda: not pair.agents[0]._kvplan.packed.peers)
    pair.machine.frozen = False
    removing.join(PATIENCE)
    assert isinstance(ended(pair, handle), nixl.nixlRemoteDisconnectError)
    assert pair.notes == {}


def test_nothing_is_left_of_agents(monkeypatch):
    gc.collect()  # agents of other tests, some of whose peers never answer
    monkeypatch.setattr(packed_peers, "PART_SECONDS", PATIENCE)  # otherwise, a ring is kept from a peer that is slow
    pair = PackedPair()
    move(pair, "READ", *pair.rows())
    progress = [pair.way(k)._progress.thread for k in (0, 1)]
    gone = [weakref.ref(one) for one in pair.real]
    del pair
    gc.collect()
    for one in progress:
        assert one.join(PATIENCE)
    del one
    progress.clear()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
