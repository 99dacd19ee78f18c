"""What NIXL would do, it still does: whatever fails in kvplan, and whatever an engine does between two calls."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.engines.nixl.pair import BLOCK, Pair
from tests.nixl import double as nixl


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


def lose(pair):
    """Withdraw the peer's memory from kvplan; NIXL has it still."""
    pair.agents[1].deregister_memory(pair.registered)
    pair.real[1].register_memory(pair.registered)


def test_transfers_made_before_a_peer_was_lost_go_by_nixl(pair):
    handle = pair.make("READ", [0, 4], [1, 2], b"done")
    lose(pair)
    for _ in range(3):  # posted again
        moved(pair, handle, [0, 4], [1, 2])
    assert pair.real[0].made == 1
    assert pair.notes == {"decode": [b"done"] * 3}


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


def test_lists_may_be_released_once_a_transfer_is_made(pair):
    handle = pair.make("READ", [0], [1])
    lose(pair)
    for one in pair.lists * 2:
        pair.agents[0].release_dlist_handle(one)
    with pytest.raises(nixl.nixlInvalidParamError):
        pair.make("READ", [0], [1])
    moved(pair, handle, [0], [1])
    pair.agents[0].release_xfer_handle(handle)
    with pytest.raises(nixl.nixlInvalidParamError, match="was released"):
        pair.agents[0].transfer(handle)
