"""Moments at which two threads, or two processes, do something at once: each is held until the other has acted."""

from __future__ import annotations

import os
import socket
import threading

import pytest

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.agents import agent as agent_module
from kvplan.agents import channel as channel_module
from kvplan.agents.channel import GOODBYE, NOTE, Channel
from kvplan.agents.door import Visitor
from kvplan.agents.identity import Life, this_process
from kvplan.agents.loop import Loop
from tests.agents.workers import content
from tests.patience import PATIENCE, until


def test_an_agent_that_is_closed_while_it_meets(agents, monkeypatch):
    owner, visitor = agents("owner"), agents("visitor", layouts={})
    real = agent_module.greet

    def greet(*args):
        met = real(*args)
        visitor.close(timeout=PATIENCE)
        return met

    monkeypatch.setattr(agent_module, "greet", greet)
    with pytest.raises(TransferError, match="the agent 'visitor' is closed"):
        visitor.meet(owner.card())
    owner.close(timeout=PATIENCE)  # the visitor said goodbye


def test_an_agent_that_begins_to_close_while_it_meets(agents, monkeypatch):
    """The service thread has told its links to leave, and waits for a transfer of another one."""
    first, second, visitor = agents("first"), agents("second", seed=1), agents("visitor", layouts={})
    peer = visitor.meet(first.card())
    here = KVLayout.from_tensors("block layer dim", content())
    pending = peer.submit(kvplan.compile(peer.layouts["kv"], here).plan([0], [0]), after=(event := threading.Event()))
    real = agent_module.greet

    def greet(*args):
        met = real(*args)
        with pytest.raises(TransferError, match="in flight"):
            visitor.close(timeout=0.05)
        return met

    monkeypatch.setattr(agent_module, "greet", greet)
    with pytest.raises(TransferError, match="the agent 'visitor' is closed"):
        visitor.meet(second.card())
    second.close(timeout=PATIENCE)
    event.set()
    pending.synchronize(PATIENCE)
    visitor.close(timeout=PATIENCE)


@pytest.mark.parametrize("attempts", [1, 3])
def test_the_lane_ends_a_cancelled_transfer_before_its_cancel_returns(agents, monkeypatch, attempts):
    """It was cancelled: it has not failed, and it is not tried again."""
    owner, visitor = agents("owner"), agents("visitor", layouts={})
    peer = visitor.meet(owner.card())
    here = KVLayout.from_tensors("block layer dim", content(seed=1))
    plan = kvplan.compile(here, peer.layouts["kv"]).plan([0], [1])
    event = threading.Event()
    pending = peer.submit(plan, after=event, attempts=attempts)
    until(lambda: pending.inner is not None)
    real = pending.inner.cancel

    def cancel():
        gone = real()
        if threading.current_thread() is threading.main_thread():
            event.set()  # a second attempt would run at once
            until(pending.done)
        return gone

    monkeypatch.setattr(pending.inner, "cancel", cancel, raising=False)
    assert pending.cancel()
    with pytest.raises(TransferError, match="cancelled before it began; nothing was moved"):
        pending.synchronize(PATIENCE)
    assert (visitor.stats().cancelled, visitor.stats().failed) == (1, 0)
    assert (owner.layouts["kv"].tensors == content()).all()


def test_the_service_thread_sleeps_while_a_transfer_outlives_its_owner(agents, others):
    other = others("pool")
    me = agents("me", layouts={})
    peer = me.meet(other.card())
    link, started, go_on = peer.link, threading.Event(), threading.Event()
    lost, serve, served = link.lost, link.serve, []

    def held(opened):
        started.set()
        assert go_on.wait(PATIENCE)
        return lost(opened)

    link.lost = held
    here = KVLayout.from_tensors("block layer dim", content())
    transfer = peer.submit(kvplan.compile(peer.layouts["kv"], here).plan([0], [0]))
    assert started.wait(PATIENCE)
    link.serve = lambda: served.append(None) or serve()
    other.kill()
    until(lambda: link.why is not None)
    threading.Event().wait(0.05)
    assert len(served) < 10
    go_on.set()
    with pytest.raises(TransferError, match="do not use them"):
        transfer.synchronize(PATIENCE)


def test_notes_are_taken_while_their_visitor_leaves(agents, monkeypatch):
    """Each note of a visitor that goes comes once, also if it goes between two steps of ``notes``."""
    owner, visitor = agents("owner"), agents("visitor", layouts={})
    visitor.meet(owner.card()).send(b"only")
    heard: list = []
    taking = threading.Thread(target=lambda: heard.extend(owner.notes()))
    real = Visitor.notes

    def notes(self):
        found = real(self)
        if threading.current_thread() is not taking:
            taking.start()
            taking.join(0.1)  # it may wait for this thread
        return found

    owner._core.door.late.append(("gone", b"before"))
    monkeypatch.setattr(Visitor, "notes", notes)
    visitor.close(timeout=PATIENCE)
    until(lambda: not owner._core.door.visitors and taking.ident is not None)  # it starts a moment later
    taking.join(PATIENCE)
    monkeypatch.setattr(Visitor, "notes", real)
    assert heard + owner.notes() == [("gone", b"before"), ("visitor", b"only")]


def test_a_visitor_that_never_stops_sending_does_not_keep_the_service_thread(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = []
    made = Channel(ours, Life(os.getpid(), this_process().started), "flood", lambda *_: None, told.append, bool)
    monkeypatch.setattr(channel_module, "BATCH", 10)

    class Endless:
        """A socket that always has a packet."""

        def fileno(self):
            return ours.fileno()

        def recv(self, *_):
            return NOTE

        def close(self):
            ours.close()

    made.sock = Endless()
    made.read()
    assert len(made.inbox) == 10
    monkeypatch.setattr(channel_module, "HELD", 50)
    made.close("enough")
    assert len(made.notes()) == 60
    theirs.close()


def test_a_goodbye_behind_many_notes(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told = []
    made = Channel(ours, Life(os.getpid(), this_process().started), "many", lambda *_: None, told.append, bool)
    monkeypatch.setattr(channel_module, "BATCH", 10)
    for k in range(30):
        theirs.send(NOTE + b"%d" % k)
    theirs.send(GOODBYE)
    theirs.close()
    made.close("it has gone")
    assert made.notes() == [b"%d" % k for k in range(30)]
    assert told == [GOODBYE]


def test_a_wake_at_the_end_writes_to_no_file_of_others(monkeypatch):
    loop = Loop(set())
    number, real = loop._wake, os.eventfd_write
    ending = threading.Thread(target=loop._close)
    made = []

    def write(fd, value):
        ending.start()
        ending.join(0.1)  # it may wait for this thread
        made.append(os.memfd_create("another"))
        real(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write)
    loop.wake()
    ending.join(PATIENCE)
    assert made != [number]
    assert os.fstat(made[0]).st_size == 0
    os.close(made[0])
