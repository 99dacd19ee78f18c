"""Meetings: strangers at the door, several threads, a name that another peer has, and a timeout that holds."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, LayoutError, TransferError
from tests.contract.peers.transports import over
from tests.patience import until

LIKE = KVLayout.from_tensors("block dim", np.zeros((4, 64), np.int8))


def an_agent(name, **options):
    return Agent(name, {"kv": kvplan.allocate("block dim", like=LIKE, shared=True)}, transports=("shm",), **options)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


class Strangers:
    """Connections to an owner that say nothing."""

    def __init__(self, card):
        self.address, self.socks = b"\0" + json.loads(card)["socket"].encode(), []

    def come(self):
        """Connect; return whether there was room."""
        self.socks.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
        try:
            self.socks[-1].connect(self.address)
        except BlockingIOError:
            return False
        return True

    def go(self):
        for sock in self.socks:
            sock.close()


@over("shm")
def test_strangers_fill_the_door_of_an_owner_that_is_stopped(transport, start):
    owner, visitor = start(), start()
    card = owner.open("owner", transport.name, None)
    visitor.open("visitor", transport.name, None)
    os.kill(owner.pid, SIGSTOP)
    strangers = Strangers(card)
    while strangers.come():
        pass
    visitor.begin("meet", card)
    time.sleep(0.5)
    os.kill(owner.pid, SIGCONT)
    assert visitor.answer() == "owner"
    strangers.go()


def test_strangers_that_stay_give_way():
    with an_agent("owner") as owner, Agent("visitor", {}, transports=("shm",)) as visitor:
        before, strangers = descriptors(), Strangers(owner.card())
        for _ in range(1000):
            until(strangers.come)
        begun = time.monotonic()
        visitor.forget(visitor.meet(owner.card()))
        assert time.monotonic() - begun < 4.0
        strangers.go()
        until(lambda: descriptors() <= before)


def test_an_owner_at_whose_door_too_many_wait_does_not_answer_in_time(start):
    owner = start()
    card = owner.open("owner", "shm", None)
    os.kill(owner.pid, SIGSTOP)
    strangers = Strangers(card)
    while strangers.come():
        pass
    with Agent("visitor", {}, transports=("shm",)) as visitor:
        begun = time.monotonic()
        with pytest.raises(TransferError, match="'owner' did not answer in time"):
            visitor.meet(card, timeout=0.5)
        assert 0.4 < time.monotonic() - begun < 4.0
    strangers.go()
    os.kill(owner.pid, SIGCONT)


def test_threads_that_meet_one_peer_leave_one_connection():
    with an_agent("owner") as owner, Agent("visitor", {}, transports=("shm",)) as visitor:
        card = owner.card()
        visitor.meet(card)
        before, together = descriptors(), threading.Barrier(4)

        def meet():
            for _ in range(25):
                together.wait(20)
                visitor.meet(card)

        threads = [threading.Thread(target=meet) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: descriptors() <= before)


def test_a_second_peer_of_the_same_name_is_refused_while_the_first_lives():
    with an_agent("prefill") as first, an_agent("prefill") as second, Agent("decode", {}, transports=("shm",)) as me:
        peer, before = me.meet(first.card()), descriptors()
        with pytest.raises(KVPlanError, match="another agent has the name 'prefill', and it lives"):
            me.meet(second.card())
        until(lambda: descriptors() <= before)
        plan = kvplan.compile(LIKE, peer.layouts["kv"]).plan([0], [1])
        peer.submit(plan, note=b"here").synchronize()
        assert first.notes() == [("decode", b"here")]
        me.meet(first.card()).send(b"again")  # a new card of the same agent
        until(lambda: ("decode", b"again") in first.notes())
        me.forget(me.peers["prefill"])
        assert me.meet(second.card()).name == "prefill"


def test_a_peer_takes_the_name_of_one_that_has_ended(start):
    with an_agent("me") as me:
        old, new = start(), start()
        cards = [process.open("peer", "shm", None) for process in (old, new)]
        me.meet(cards[0])
        old.kill()
        assert me.meet(cards[1]).name == "peer"
        me.peers["peer"].send(b"here")
        assert new.hear(1) == [("me", b"here")]


def test_a_meeting_does_not_wait_for_transfers_of_the_peer_that_it_replaces():
    with an_agent("owner") as owner, Agent("visitor", {}, transports=("shm",)) as visitor:
        peer, gate = visitor.meet(owner.card()), threading.Event()
        moved = np.ones((4, 64), np.int8)
        mine = KVLayout.from_tensors("block dim", moved)
        waits = peer.submit(kvplan.compile(mine, peer.layouts["kv"]).plan([0], [1]), after=gate)
        begun = time.monotonic()
        again = visitor.meet(owner.card(), timeout=1.0)
        assert time.monotonic() - begun < 4.0
        with pytest.raises(TransferError, match="forgotten"):
            peer.submit(kvplan.compile(mine, peer.layouts["kv"]).plan([0], [1]))
        gate.set()
        assert waits.result().nbytes == 64
        again.submit(kvplan.compile(mine, again.layouts["kv"]).plan([2], [3])).synchronize()


# ---- the folder of sockets -------------------------------------------------------------------------------------------


@pytest.fixture
def sockets(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPLAN_SOCKETS", str(tmp_path))
    return lambda: {path.name for path in tmp_path.iterdir()}


def test_a_socket_in_a_folder_goes_with_its_agent(sockets):
    with an_agent("owner") as owner, Agent("visitor", {}, transports=("shm",)) as visitor:
        card = owner.card()
        assert json.loads(card)["socket"] in sockets()
        assert visitor.meet(card).transport == "shm"
    assert not sockets()
    with Agent("late", {}, transports=("shm",)) as late, pytest.raises(TransferError, match="nobody answers the card"):
        late.meet(card)


@pytest.mark.parametrize("users", [(), ("nobody",)])
def test_a_socket_in_a_folder_is_for_those_who_may_visit(sockets, tmp_path, users):
    with an_agent("owner", users=users):
        (name,) = sockets()
        assert (tmp_path / name).stat().st_mode & 0o777 == (0o666 if users else 0o600)


def test_sockets_of_dead_processes_go_and_those_of_living_ones_stay(sockets, tmp_path, start):
    old, lives, exits = start(), start(), start()
    for process in (old, lives, exits):
        process.open("peer", "shm", None)
    assert len(sockets()) == 3
    assert exits.exit(20.0) == 0  # without a close()
    left = sockets()
    assert len(left) == 2
    old.kill()
    for name in left:
        os.utime(tmp_path / name, (0, 0))  # they are old
    (tmp_path / "kvplan-mine.sock").write_text("not a socket")
    with an_agent("new"):
        assert len(sockets()) == 3
        assert len(sockets() & left) == 1
    with an_agent("me") as me:
        assert me.meet(lives.card()).name == "peer"


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("nothing", "KVPLAN_SOCKETS is '.*nothing': it is no folder; create it"),
        ("x" * 100, "path of [0-9]+ bytes, and Linux takes 107"),
    ],
)
def test_a_folder_that_cannot_be_used(tmp_path, monkeypatch, folder, why):
    monkeypatch.setenv("KVPLAN_SOCKETS", str(tmp_path / folder))
    with suppress(OSError):
        Path(tmp_path / ("x" * 100)).mkdir()
    with pytest.raises(TransferError, match=why):
        an_agent("owner")


def test_layouts_of_a_forgotten_peer_are_refused():
    with an_agent("owner") as owner, an_agent("visitor") as visitor:
        visitor.forget(peer := visitor.meet(owner.card()))
        with pytest.raises(LayoutError, match="has other memory now"):
            kvplan.compile(LIKE, peer.layouts["kv"])
