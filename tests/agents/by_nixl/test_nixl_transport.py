"""The transport ``nixl`` of agents, on a double of NIXL: cards, both directions, notes, ``after=`` and ends."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVLayout, PathError, TransferError
from tests.agents.by_nixl.known_agents import Far, heard
from tests.patience import PATIENCE


@pytest.fixture
def far():
    made = Far()
    yield made
    made.close()


def test_private_memory_goes_by_nixl(far):
    peer = far.meet()
    assert peer.transport == "nixl"
    assert peer.layouts["kv"].addresses == "dump"
    result = peer.submit(far.load.plan([5, 1], [0, 7]), note=b"read").result()
    assert (result.path, result.nbytes) == ("nixl", 2 * 192)
    np.testing.assert_array_equal(far.mine[:, 0], far.theirs[5])
    far.mine[:] = 7
    peer.submit(far.store.plan([2], [3]), note=b"wrote").synchronize(PATIENCE)
    assert (far.theirs[3] == 7).all()
    assert heard(far.you) == [("me", b"read"), ("me", b"wrote")]
    peer.send(b"alone")
    assert heard(far.you) == [("me", b"alone")]
    assert (far.me.stats().transfers, far.me.stats().in_flight) == (2, 0)


def test_failures_are_told(far):
    peer = far.meet()
    far.network.failures = ["post"]
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        peer.submit(far.load.plan([5], [0])).synchronize(PATIENCE)
    far.network.agents["you"].dead = True
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        peer.submit(far.load.plan([5], [0])).synchronize(PATIENCE)


def test_an_agent_of_nixl_that_refuses(far):
    far.network.failures = ["register"]
    you = far.agent("refused", {"kv": KVLayout.from_tensors("block dim", np.zeros((4, 8), np.uint8))}, ("nixl",))
    with pytest.raises(PathError, match="nixl: 'refused' does not offer it: NIXL cannot register the memory"):
        far.me.meet(you.card())
    you.close()
