"""Packed rows when something fails: wires, deaths, releases, deregistered memory, and peers that lie or say nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.contract.engines.nixl.pair import PackedPair, heard, move
from tests.nixl import double as nixl
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
        except Exception as error:  # NIXL's
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
    pair.agents[0].release_xfer_handle(handle)


def test_a_write_whose_post_finds_the_peer_gone_says_so(pair):
    here, there = pair.rows()
    move(pair, "WRITE", here, there)
    gone = nixl.nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
    pair.machine.hook = failing("transfer", pair.real[0], gone, skip=1)
    handle = pair.make("WRITE", here, there)
    pair.agents[0].transfer(handle)
    assert isinstance(ended(pair, handle), nixl.nixlRemoteDisconnectError)


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
    begun = pair.real[1].made
    pair.agents[0].transfer(handle)
    until(lambda: pair.real[1].made > begun)
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
