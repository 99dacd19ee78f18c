"""Transfers by the double of NIXL that fail, hang or are tried again, and the handles that they leave."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvplan import PathError, TransferError
from kvplan.nixl import NixlAgent, nixl_transfer
from tests.nixl.double import Agent
from tests.patience import PATIENCE, until


def test_one_that_hangs_is_given_up_at_its_deadline(doubled):
    doubled.network.frozen = True
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]), deadline=1e-9)
    with pytest.raises(TransferError, match=r"reading from 'you-.*deadline of 1e-09 seconds.*may have arrived"):
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


@pytest.mark.parametrize("call", ["make", "post", "look", "err", "half"])
def test_what_fails_once_is_tried_again(doubled, call, caplog):
    doubled.network.failures = [call]
    transfer = doubled.peer.submit(doubled.load.plan([1, 4], [1, 2]), attempts=2)
    with caplog.at_level(logging.WARNING, "kvplan"):
        transfer.synchronize(PATIENCE)
    assert transfer.attempt == 2
    np.testing.assert_array_equal(doubled.mine[:, [1, 2]], doubled.theirs[[1, 4]].transpose(1, 0, 2))
    assert (doubled.me.stats().transfers, doubled.me.stats().failed) == (1, 0)


@pytest.mark.parametrize(("attempts", "tries"), [(1, ""), (3, " in 3 attempts")])
def test_what_keeps_failing_is_an_error_that_says_why(doubled, attempts, tries):
    doubled.network.failures = ["post"] * attempts
    transfer = doubled.peer.submit(doubled.store.plan([1], [1]), attempts=attempts)
    with pytest.raises(TransferError, match=rf"writing to 'you-.*' failed{tries}: RemoteDisconnectError"):
        transfer.synchronize(PATIENCE)
    with pytest.raises(TransferError, match="meet"):
        transfer.result()
    assert doubled.me.stats().failed == 1


def test_a_peer_that_dies_in_the_middle(doubled):
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]), attempts=2)
    assert not transfer.done()
    doubled.network.agents[doubled.you.name].dead = True
    with pytest.raises(TransferError, match="in 2 attempts: RemoteDisconnectError"):
        transfer.synchronize(PATIENCE)
    reborn = Agent(doubled.network, doubled.you.name, life=1)
    other = NixlAgent(doubled.you.name, doubled.you.layouts, agent=reborn)
    doubled.made.append(other)
    doubled.you.closed = True
    doubled.peer = doubled.me.meet(other.card())
    doubled.peer.submit(doubled.load.plan([1], [1])).synchronize(PATIENCE)
    np.testing.assert_array_equal(doubled.mine[:, 1], doubled.theirs[1])


def test_transfers_that_failed_together_join_again_once(doubled):
    transfers = [doubled.peer.submit(doubled.load.plan([k], [k]), attempts=2) for k in range(4)]
    doubled.network.agents[doubled.you.name].dead = True
    for transfer in transfers:
        assert not transfer.done()
    doubled.network.agents[doubled.you.name].dead = False
    joins = doubled.network.joins
    for transfer in transfers:
        transfer.synchronize(PATIENCE)
    assert doubled.network.joins == joins + 1
    np.testing.assert_array_equal(doubled.mine[:, :4], doubled.theirs[:4].transpose(1, 0, 2))


def test_one_that_is_tried_again_does_not_break_what_moves(doubled):
    doubled.network.looks = 100
    other = doubled.peer.submit(doubled.load.plan([3], [3]))
    doubled.network.failures = ["make"]
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]), attempts=2)
    joins = doubled.network.joins
    transfer.synchronize(PATIENCE)
    other.synchronize(PATIENCE)
    assert doubled.network.joins == joins
    np.testing.assert_array_equal(doubled.mine[:, [1, 3]], doubled.theirs[[1, 3]].transpose(1, 0, 2))


def test_a_plan_of_two_kinds_of_memory_is_refused_at_once(doubled, monkeypatch):
    def refuse(made, layouts):
        raise PathError("src is on cpu and cuda:0; a NIXL list holds one kind of memory")

    monkeypatch.setattr(nixl_transfer, "nixl_lists", refuse)
    with pytest.raises(PathError, match="one kind of memory"):
        doubled.peer.submit(doubled.load.plan([1], [1]), attempts=3)
    assert doubled.me.stats().in_flight == 0


def test_what_nixl_cannot_let_go_of_stays_until_it_can(doubled):
    doubled.network.frozen = True
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]), deadline=1e-9)
    doubled.network.failures = ["release"]
    with pytest.raises(TransferError, match="deadline"):
        transfer.synchronize(PATIENCE)
    assert len(doubled.me._end.kept) == 1
    doubled.network.frozen = False
    doubled.peer.submit(doubled.load.plan([2], [2])).synchronize(PATIENCE)
    assert doubled.me._end.kept == []  # given back with the next one's


def test_a_question_in_the_pause_between_two_attempts_uses_up_none(doubled):
    doubled.network.failures = ["look"]
    transfer = doubled.peer.submit(doubled.load.plan([3], [3]), attempts=2)
    until(lambda: transfer.done() or transfer._again_at is not None)
    assert transfer.moved() is None
    transfer.synchronize(PATIENCE)
    np.testing.assert_array_equal(doubled.mine[:, 3], doubled.theirs[3])
    assert not doubled.me._end.kept


def test_one_that_is_abandoned_leaves_its_handle_to_the_next_release_once(doubled):
    doubled.network.frozen = True
    end = doubled.me._end
    transfer = doubled.peer.submit(doubled.load.plan([1], [1]))
    transfer.abandon()
    transfer.abandon()
    assert len(end.kept) == 1
    transfer._release()
    assert not end.kept
    assert not doubled.network.agents[doubled.me.name].live
