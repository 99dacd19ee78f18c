"""Transfers between agents: on a double everywhere, on NIXL itself where it is installed."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError, TransferError
from tests.nixl.double import Agent
from tests.patience import PATIENCE


def test_bytes_are_read_from_a_peer(both):
    plan = both.load.plan([5, 1, 2], [0, 7, 3])
    transfer = both.peer.submit(plan)
    transfer.synchronize(PATIENCE)
    expected = np.zeros_like(both.mine)
    for src, dst in ((5, 0), (1, 7), (2, 3)):
        expected[:, dst] = both.theirs[src]
    np.testing.assert_array_equal(both.mine, expected)
    made = transfer.result()
    assert (made.nbytes, made.path, made.descriptors, made.launches) == (3 * 192, "nixl", 9, 1)
    assert transfer.done()
    assert repr(transfer).endswith("done)")
    assert (both.me.stats().transfers, both.me.stats().nbytes, both.me.stats().failed) == (1, 576, 0)


def test_a_peer_that_comes_back_is_met_by_its_new_card(both):
    both.peer.submit(both.load.plan([1], [1])).synchronize(PATIENCE)
    old = both.peer
    again = both.me.meet(both.you.card())
    with pytest.raises(TransferError, match=r"was forgotten.*meet it again"):
        old.submit(both.load.plan([1], [1]))
    again.submit(both.load.plan([2], [2])).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 2], both.theirs[2])


def test_an_agent_of_several_transports_meets_it(doubled):
    with kvplan.Agent("other", {}, transports=("shm", "nixl"), agent=Agent(doubled.network, "other")) as other:
        assert other.meet(doubled.you.card()).transport == "nixl"
        assert isinstance(doubled.you, kvplan.Agent)


def test_one_that_was_forgotten_is_not_forgotten_again(both):
    """NIXL knows peers by name: the one that came after it would be forgotten."""
    old = both.peer
    again = both.me.meet(both.you.card())
    both.me.forget(old)
    again.submit(both.load.plan([2], [2])).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 2], both.theirs[2])


def test_closing_ends_what_has_not(doubled):
    doubled.network.frozen = True
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]))
    doubled.me.close()
    doubled.me.close()
    with pytest.raises(TransferError, match="was forgotten"):
        transfer.synchronize(PATIENCE)


def test_a_slice_of_what_was_registered_is_registered(doubled):
    program = kvplan.compile(
        doubled.peer.layouts["pool"].slice(layers=range(1, 2)), doubled.me.layouts["kv"].slice(layers=range(1, 2))
    )
    doubled.peer.submit(program.plan([4], [0])).synchronize(PATIENCE)
    assert doubled.mine.any(axis=(1, 2)).tolist() == [False, True, False]


def test_a_destination_that_is_read_only(doubled):
    frozen = np.zeros((3, 8, 64), np.uint8)
    frozen.flags.writeable = False
    agent = doubled.agent("third", kv=KVLayout.from_tensors("layer block dim", frozen))
    peer = agent.meet(doubled.you.card())
    with pytest.raises(LayoutError, match="read-only"):
        peer.submit(kvplan.compile(peer.layouts["pool"], agent.layouts["kv"]).plan([0], [0]))
