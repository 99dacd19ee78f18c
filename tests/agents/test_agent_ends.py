"""Agents that meet again, close, or are forgotten: transfers end, and nothing is left."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, LayoutError, TransferError
from tests.agents.workers import BLOCKS, content, pool
from tests.patience import PATIENCE, until


def test_a_new_meeting_replaces_the_old_one(both):
    old = both.peer
    again = both.visitor.meet(both.owner.card())
    assert both.visitor.peers == {"owner": again}
    with pytest.raises(TransferError, match="no transfer with 'owner': the peer was forgotten"):
        old.submit(both.load.plan([0], [0]))
    with pytest.raises(LayoutError, match="has other memory now"), kvplan.Executor() as executor:
        executor.submit(both.load.plan([0], [0]))
    load = kvplan.compile(again.layouts["kv"], both.here)
    again.submit(load.plan([1], [1])).synchronize(PATIENCE)
    both.visitor.forget(old)
    both.visitor.forget(again)
    both.visitor.forget(again)
    assert both.visitor.peers == {}
    with pytest.raises(KVPlanError, match="give what meet"):
        both.owner.forget(again)


def test_an_owner_that_closes_lets_transfers_end_and_takes_no_more(both):
    event = threading.Event()
    transfer = both.peer.submit(both.load.plan([1], [1]), after=event)
    with pytest.raises(TransferError, match="not closed: 'visitor' still uses its memory"):
        both.owner.close(timeout=0.1)
    with pytest.raises(TransferError, match="no transfer with 'owner': its agent closes"):
        both.peer.submit(both.load.plan([2], [2]))
    event.set()
    transfer.synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 1], content()[1])
    both.owner.close(timeout=PATIENCE)
    both.owner.close()
    for call in (both.owner.card, both.owner.notes, lambda: both.owner.meet(b"")):
        with pytest.raises(TransferError, match="is closed"):
            call()
    with pytest.raises(TransferError, match="no transfer with 'owner'"):
        both.peer.submit(both.load.plan([2], [2]))


def test_a_visitor_that_closes_waits_for_its_transfers(both):
    event = threading.Event()
    many = [both.peer.submit(both.store.plan([1], [1]), note=b"%d" % k) for k in range(50)]
    pending = both.peer.submit(both.store.plan([1], [2]), after=event, note=b"last")
    with pytest.raises(TransferError, match="transfers with 'owner' are in flight"):
        both.visitor.close(timeout=0.05)
    with pytest.raises(TransferError, match="is closed"):
        both.peer.submit(both.store.plan([1], [2]))
    event.set()
    both.visitor.close(timeout=PATIENCE)
    for transfer in (*many, pending):
        transfer.synchronize()
    assert both.owner.notes() == [("visitor", b"%d" % k) for k in range(50)] + [("visitor", b"last")]


def test_a_visitor_cancels_and_then_closes(both):
    pending = both.peer.submit(both.store.plan([1], [2]), after=threading.Event())
    assert pending.cancel()
    both.visitor.close(timeout=PATIENCE)


def test_nothing_is_left_after_close(left):
    owner, visitor = Agent("owner", {"kv": pool()}), Agent("visitor", {})
    peer = visitor.meet(owner.card())
    load = kvplan.compile(peer.layouts["kv"], KVLayout.from_tensors("block layer dim", content(1)))
    for k in range(20):
        peer.submit(load.plan([k % BLOCKS], [0]), note=b"x").synchronize(PATIENCE)
    assert len(owner.notes()) == 20
    visitor.close()
    owner.close()
    owner.layouts.clear()
    del owner
    maps = left.now()[0]
    assert maps <= left.before[0] + 1  # the program still names the visitor's layout, whose file is unmapped
    del visitor, peer, load
    left.check()


def test_agents_that_are_forgotten_without_a_close(left):
    owner, visitor = Agent("owner", {"kv": pool()}), Agent("visitor", {})
    peer = visitor.meet(owner.card())
    del peer
    del visitor
    visitors = owner._core.door.visitors
    until(lambda held=visitors: not held)
    del owner, visitors
    left.check()


def test_an_agent_that_never_met_anybody(left):
    Agent("alone", {"kv": pool()}).close()
    Agent("alone", {"kv": pool()})
    left.check()
