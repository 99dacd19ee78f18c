"""Two processes and more: bytes both ways, deaths, closes, forks, and what is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from functools import partial

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, TransferError
from tests.agents.processes import OtherError
from tests.agents.workers import BLOCKS, DIM, LAYERS, content, pool
from tests.patience import PATIENCE, until

pytestmark = pytest.mark.slow


@pytest.fixture
def mine():
    return KVLayout.from_tensors("layer block dim", np.zeros((LAYERS, BLOCKS, DIM), np.uint8))


def heard(ask):
    """The first notes that come, waited for."""
    found = []
    until(lambda: found.extend(ask()) or found)
    return found


def test_bytes_go_both_ways(others, agents, mine):
    other = others("pool", 3)
    me = agents("me", seed=5)
    peer = me.meet(other.card())
    assert peer.transport == "shm"
    peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan(range(BLOCKS), range(BLOCKS)[::-1])).synchronize(PATIENCE)
    np.testing.assert_array_equal(mine.tensors, content(3).transpose(1, 0, 2)[:, ::-1])
    store = kvplan.compile(me.layouts["kv"], peer.layouts["kv"]).plan([5], [9])
    peer.submit(store, note=b"stored 9").synchronize(PATIENCE)
    assert heard(other.notes) == [("me", b"stored 9")]
    expected = content(3)
    expected[9] = content(5)[5]
    np.testing.assert_array_equal(other.holds(), expected)
    # The other process meets this one, too, and works on this one's pool.
    assert other.meet("me", me.card()) == "shm"
    assert other.push("me", [1], [2], b"pushed") == LAYERS * DIM
    assert other.pull("me", [3], [4]) == LAYERS * DIM
    assert heard(me.notes) == [("pool", b"pushed")]
    np.testing.assert_array_equal(me.layouts["kv"].tensors[2], content(3)[1])
    np.testing.assert_array_equal(other.holds()[4], content(5)[3])


def test_three_visitors_tell_their_names(others, agents):
    me = agents("me")
    card = me.card()
    every = [others(f"v{k}", k) for k in range(3)]
    for k, one in enumerate(every):
        one.meet("me", card)
        one.push("me", [0], [k], b"from %d" % k)
    notes = []
    until(lambda: notes.extend(me.notes()) or len(notes) == 3)
    assert sorted(notes) == [(f"v{k}", b"from %d" % k) for k in range(3)]
    for k in range(3):
        np.testing.assert_array_equal(me.layouts["kv"].tensors[k], content(k)[0])


def test_an_owner_that_is_killed(others, agents, mine):
    other = others("pool")
    card = other.card()
    me = agents("me")
    peer = me.meet(card)
    load = kvplan.compile(peer.layouts["kv"], mine)
    peer.submit(load.plan([0], [0])).synchronize(PATIENCE)
    event = threading.Event()
    pending = peer.submit(load.plan([1], [1]), after=event)
    other.kill()
    with pytest.raises(TransferError, match=r"reading from 'pool' failed: .*; it had not begun, and nothing was moved"):
        pending.synchronize(PATIENCE)
    with pytest.raises(TransferError, match="no transfer with 'pool'"):
        peer.submit(load.plan([2], [2]))
    with pytest.raises(TransferError, match="no transfer with 'pool'"):
        peer.send(b"x")
    with pytest.raises(TransferError, match="nobody answers the card of 'pool'"):
        me.meet(card)
    assert not mine.tensors[:, 1:].any()
    reborn = others("pool", 7)
    peer = me.meet(reborn.card())
    peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan([1], [1])).synchronize(PATIENCE)
    np.testing.assert_array_equal(mine.tensors[:, 1], content(7)[1])
    event.set()


@pytest.mark.parametrize("reading", [True, False], ids=["read", "write"])
def test_bytes_that_moved_after_a_death_are_not_called_done(others, agents, mine, reading):
    """The owner is killed while the executor copies: the copy itself ends without an error."""
    other = others("pool")
    me = agents("me")
    peer = me.meet(other.card())
    pair = (peer.layouts["kv"], mine) if reading else (mine, peer.layouts["kv"])
    link, started, go_on = peer.link, threading.Event(), threading.Event()
    lost = link.lost

    def held(opened):
        started.set()
        assert go_on.wait(PATIENCE)
        return lost(opened)

    link.lost = held
    transfer = peer.submit(kvplan.compile(*pair).plan([1], [1]), note=b"never")
    assert started.wait(PATIENCE)
    assert not transfer.done()
    other.kill()
    go_on.set()
    says = (
        "bytes that may be wrong: do not use them" if reading else "were written to the memory of a peer that is gone"
    )
    with pytest.raises(TransferError, match=says):
        transfer.synchronize(PATIENCE)
    assert me.stats().failed == 1


def test_a_stopped_owner_is_alive(others, agents, mine):
    other = others("pool")
    card = other.card()
    me = agents("me")
    peer = me.meet(card)
    other.stop()
    peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan([1], [1])).synchronize(PATIENCE)
    with pytest.raises(TransferError, match="did not answer in time"):
        agents("other me", layouts={}).meet(card, timeout=0.2)
    os.kill(other.process.pid, signal.SIGCONT)
    assert other.card()


def test_a_visitor_that_is_killed_lets_the_owner_close(others, agents):
    me = agents("me")
    other = others("visitor")
    other.meet("me", me.card())
    other.push("me", [0], [1], b"one")
    other.hold_a_transfer("me")
    with pytest.raises(TransferError, match="'visitor' still uses its memory"):
        me.close(timeout=0.1)
    other.kill()
    me.close(timeout=PATIENCE)


def test_notes_of_a_visitor_that_was_killed_still_come(others, agents):
    me = agents("me")
    other = others("visitor")
    other.meet("me", me.card())
    other.push("me", [0], [1], b"one")
    other.kill()
    until(lambda: not me._core.door.visitors)
    assert me.notes() == [("visitor", b"one")]


def test_an_owner_whose_child_lives_on_is_dead(others, agents, mine):
    """The child closes its copies of the owner's sockets, and its life is not the owner's."""
    other = others("pool")
    me = agents("me")
    peer = me.meet(other.card())
    child = other.fork_and_hang()
    try:
        load = kvplan.compile(peer.layouts["kv"], mine)
        peer.submit(load.plan([0], [0])).synchronize(PATIENCE)
        os.kill(other.process.pid, signal.SIGKILL)  # a join would wait for the child, too
        until(lambda: peer.link.why is not None)
        with pytest.raises(TransferError, match="no transfer with 'pool'"):
            peer.submit(load.plan([0], [0]))
    finally:
        os.kill(child, signal.SIGKILL)


def _in_a_child(agent, peer, plan, pipe):
    told = []
    for call in (agent.card, agent.notes, partial(peer.submit, plan), partial(peer.send, b"x")):
        try:
            call()
        except TransferError as error:
            told.append(str(error))
    agent.close()
    agent.forget(peer)
    del agent, peer, call
    gc.collect()
    pipe.send(told)


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_leaves_the_parents_agent_as_it_is(others, agents, mine):
    other = others("pool")
    me = agents("me")
    peer = me.meet(other.card())
    other.meet("me", me.card())
    plan = kvplan.compile(peer.layouts["kv"], mine).plan([1], [1])
    fork = multiprocessing.get_context("fork")
    pipe, theirs = fork.Pipe()
    child = fork.Process(target=_in_a_child, args=(me, peer, plan, theirs))
    child.start()
    assert pipe.poll(PATIENCE)
    told = pipe.recv()
    child.join(PATIENCE)
    assert len(told) == 4
    assert all("do not survive a fork" in one for one in told)
    peer.submit(plan, note=b"after the fork").synchronize(PATIENCE)
    np.testing.assert_array_equal(mine.tensors[:, 1], content()[1])
    assert heard(other.notes) == [("me", b"after the fork")]
    other.push("me", [0], [1], b"still here")
    assert heard(me.notes) == [("pool", b"still here")]


def test_nothing_is_left_of_many_peers_that_die(others, left):
    me = Agent("me", {"kv": pool()})
    for round_ in range(3):
        other = others("other", round_)
        peer = me.meet(other.card())
        other.meet("me", me.card())
        mine = KVLayout.from_tensors("block layer dim", content())
        transfer = peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan([1], [1]))
        transfer.synchronize(PATIENCE)
        other.kill()
        other.end()
        me.forget(peer)
    visitors = me._core.door.visitors
    until(lambda held=visitors: not held)
    me.close()
    del me, peer, transfer, visitors
    left.check()


def test_a_visitor_leaves_nothing_in_its_process(others, agents):
    other = others("visitor")
    owner = agents("owner")
    card = owner.card()
    other.meet("owner", card)
    other.push("owner", [0], [1])
    other.forget("owner")
    before = other.left()
    for _ in range(5):
        other.meet("owner", card)
        other.push("owner", [0], [1])
        other.forget("owner")
    assert other.left() == before


def test_closing_at_both_ends(others, agents):
    other = others("pool")
    me = agents("me")
    me.meet(other.card())
    other.meet("me", me.card())
    me.close(timeout=PATIENCE)
    other.close(PATIENCE)
    with pytest.raises(OtherError, match="is closed"):
        other.card()


def test_cards_of_another_user(others, agents, monkeypatch):
    other = others("pool")
    card = other.card()
    me = agents("me")
    from kvplan.agents import agent, choosing

    told = agent.this_process()
    for module in (agent, choosing):
        monkeypatch.setattr(module, "this_process", lambda: told._replace(uid=told.uid + 1))
    with pytest.raises(kvplan.PathError, match=r"is of user .*; to accept it, give users=\["):
        me.meet(card)
    allowed = agents("allowed", layouts={}, users=[told.uid])
    assert allowed.meet(card).transport == "shm"


def test_a_card_of_another_machine_is_refused_with_each_reason(others, agents, monkeypatch):
    import json

    monkeypatch.setitem(sys.modules, "nixl", None)  # with NIXL, the agents can meet
    document = json.loads(others("pool").card())
    document["host"]["boot"] = "0000"
    with pytest.raises(kvplan.PathError, match="shm: 'pool' runs on another machine") as caught:
        agents("me").meet(json.dumps(document).encode())
    assert "nixl: " in str(caught.value)
    assert "cuda_ipc: " in str(caught.value)
