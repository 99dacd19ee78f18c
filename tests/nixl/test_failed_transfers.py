"""Transfers by the double of NIXL that fail or hang, and the handles that they leave."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import TransferError
from kvplan.nixl import NixlAgent
from tests.nixl.double import Agent
from tests.patience import PATIENCE


def test_one_that_hangs_is_given_up_at_its_deadline(doubled):
    doubled.network.frozen = True
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]), deadline=1e-9)
    with pytest.raises(TransferError, match=r"reading from 'you-.*deadline of 1e-09 seconds.*may"):
        transfer.synchronize(PATIENCE)
    assert not doubled.mine.any()
    assert doubled.me.stats().failed == 1
    assert repr(transfer).endswith("failed)")


def test_a_timeout_ends_the_wait_and_not_the_transfer(doubled):
    doubled.network.frozen = True
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]))
    with pytest.raises(TransferError, match=r"has not finished within 0\.0 seconds"):
        transfer.synchronize(0.0)
    doubled.network.frozen = False
    transfer.synchronize()
    np.testing.assert_array_equal(doubled.mine[:, 1], doubled.theirs[1])


def test_what_fails_is_an_error_that_says_why(doubled):
    doubled.network.failures = ["post"]
    transfer = doubled.peer.submit(doubled.store.plan([1], [1]))
    with pytest.raises(TransferError, match=r"writing to 'you-.*' failed: RemoteDisconnectError"):
        transfer.synchronize(PATIENCE)
    with pytest.raises(TransferError, match="meet"):
        transfer.result()
    assert doubled.me.stats().failed == 1


def test_a_peer_that_dies_in_the_middle(doubled):
    doubled.network.looks = 1000
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]))
    doubled.network.agents[doubled.you.name].dead = True
    with pytest.raises(TransferError, match="RemoteDisconnectError"):
        transfer.synchronize(PATIENCE)
    reborn = Agent(doubled.network, doubled.you.name, life=1)
    other = NixlAgent(doubled.you.name, doubled.you.layouts, agent=reborn)
    doubled.made.append(other)
    doubled.peer = doubled.me.meet(other.card())
    doubled.peer.submit(doubled.load.plan([1], [1])).synchronize(PATIENCE)
    np.testing.assert_array_equal(doubled.mine[:, 1], doubled.theirs[1])
