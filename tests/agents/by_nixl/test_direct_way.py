"""Direct transfers by ``nixl``, on a double of NIXL: who ends them, what fails, and what peers leave."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, PathError, TransferError
from tests.agents.by_nixl.far_agents import Far, heard
from tests.patience import PATIENCE


def test_private_memory_goes_by_nixl(far):
    card = far.you.card()
    other = far.agent("other", KVLayout.from_tensors("layer block dim", far.mine), transports=("shm", "nixl"))
    peer = other.meet(card)
    assert peer.transport == "nixl"
    assert peer.layouts["kv"].addresses == "dump"
    load = kvplan.compile(peer.layouts["kv"], other.layouts["kv"])
    result = peer.submit(load.plan([5, 1], [0, 7]), note=b"read").result()
    assert (result.path, result.nbytes, result.descriptors, result.launches) == ("nixl", 2 * 192, 6, 1)
    assert far.came([5, 1], [0, 7])
    peer.send(b"alone")
    assert heard(far.you, 2) == [("other", b"read"), ("other", b"alone")]
    assert (other.stats().transfers, other.stats().in_flight) == (1, 0)
    other.close()


def test_an_agent_of_nixl_that_refuses(far):
    far.network.failures = ["register"]
    you = far.agent(
        "refused", KVLayout.from_tensors("block dim", np.zeros((4, 8), np.uint8)), transports=("shm", "nixl")
    )
    with pytest.raises(PathError, match="nixl: 'refused' does not offer it: NIXL cannot register the memory"):
        far.me.meet(you.card())
    you.close()


def test_one_that_hangs_is_given_up_at_its_deadline(far):
    far.network.frozen = True
    transfer = far.peer.submit(far.load.plan([1], [1]), way="direct", deadline=1e-9)
    with pytest.raises(TransferError, match=r"reading from 'you'.*deadline of 1e-09 seconds.*may"):
        transfer.synchronize(PATIENCE)
    assert not far.mine.any()
    assert far.me.stats().failed == 1


def test_none_begins_with_a_peer_that_is_forgotten_meanwhile(far):
    """Nobody would end it."""

    class Late(threading.Event):
        @property
        def query(self):  # the submit looks for it, when it has found the peer
            far.me.forget(far.peer)
            raise AttributeError

    with pytest.raises(TransferError, match="the peer was forgotten"):
        far.peer.submit(far.load.plan([1], [1]), way="direct", after=Late())
    assert far.me.stats().in_flight == 0


@pytest.mark.parametrize("way", ["direct", "packed"])
@pytest.mark.parametrize("noticed", [False, True])
def test_a_peer_that_was_killed_is_met_again_in_another_life(noticed, way):
    """NIXL knows the dead one until its lane has ended, and takes no other metadata of that name meanwhile."""
    far = Far()
    far.peer.submit(far.load.plan([1], [1]), way=way).synchronize(PATIENCE)
    killed, first = far.network.agents["you"], far.you
    killed.dead = True
    if noticed:
        with pytest.raises(TransferError):
            far.peer.submit(far.load.plan([1], [1]), way=way).synchronize(PATIENCE)
    far.theirs = np.random.default_rng(9).integers(1, 256, far.theirs.shape, dtype=np.uint8)
    far.you = far.agent("you", KVLayout.from_tensors("block layer dim", far.theirs), life=1)
    far.meet()
    for turn in range(2):
        far.peer.submit(far.load.plan([turn, 7], [3, 4]), way=way).synchronize(PATIENCE)
        assert far.came([turn, 7], [3, 4])
    far.me.close()
    far.you.close()
    far.network.agents["me"].dead = True  # the killed one lives in truth, and is not to wait for an answer
    first.close()
