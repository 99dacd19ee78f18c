"""Cards and visitors that lie: each is refused with one clear error, and nothing is mapped or left open."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, LayoutError, PathError, TransferError
from kvplan.agents import door as door_module
from kvplan.agents import greeting
from kvplan.agents.agent_card import read_card
from kvplan.agents.channel import CLOSING, GOODBYE, NOTE, PACKET
from kvplan.agents.identity import this_process
from kvplan.agents.shm_way import ShmOffer
from tests.agents.hostile_cards import at, lie
from tests.agents.workers import pool
from tests.open_files import leaves_no_file, open_files
from tests.patience import PATIENCE, until


@pytest.fixture
def owner(agents):
    return agents("owner")


@pytest.fixture
def card(owner):
    return json.loads(owner.card())


def maps():
    return sum("/memfd:kvplan" in row for row in Path("/proc/self/maps").read_text().splitlines())


def changed(card, place, value):
    at(card, place[:-1])[place[-1]] = value
    return json.dumps(card).encode()


RANGE = ("offered", "shm", "part", "ranges", 0)


@pytest.mark.parametrize(
    ("place", "value", "error", "says"),
    [
        (("schema",), "kvplan.agent/2", LayoutError, "this kvplan reads 'kvplan.agent/1'"),
        (("name",), "", LayoutError, "the name of an agent"),
        (("name",), "x\n", LayoutError, "the name of an agent"),
        (("host",), [], LayoutError, "the card's host is"),
        (("host", "boot"), "../..", LayoutError, "the card's host is"),
        (("host", "net"), -1, LayoutError, "the card's host.net is -1"),
        (("pid",), 0, LayoutError, "the card's pid is 0"),
        (("pid",), 1, TransferError, "which says process 1"),
        (("started",), 7, TransferError, "is not the one that made the card"),
        (("uid",), -1, LayoutError, "the card's uid is -1"),
        (("uid",), 54321, PathError, r"is of user 54321; to accept it, give users=\[54321\]"),
        (("agent",), "00", LayoutError, "the card's agent is '00'; it is 16 bytes"),
        (("agent",), "00" * 16, TransferError, "does not hold the card's key"),
        (("key",), "00" * 32, TransferError, "does not hold the card's key"),
        (("key",), "g" * 64, LayoutError, "it is 32 bytes in hexadecimal digits"),
        (("socket",), "/tmp/x", LayoutError, "the card's socket is '/tmp/x'"),
        (("socket",), "kvplan-" + "0" * 32, TransferError, "nobody answers the card of 'owner'"),
        (("layouts",), [], LayoutError, "the card's layouts is"),
        (("layouts", "kv"), 3, LayoutError, "layout 'kv' of the card is 3"),
        (("layouts", "kv", "virtual"), True, LayoutError, "is a spec: its addresses hold no memory"),
        (("layouts", "kv", "num_blocks"), 10**9, LayoutError, "layout 'kv' of the card: sizes say block=16"),
        (("layouts", "kv", "regions", 0, "nbytes"), 2**40, LayoutError, "its shm does not offer them whole"),
        (("layouts", "kv", "regions", 0, "nbytes"), 64, LayoutError, "layout 'kv' of the card: "),
        (("offered",), 3, LayoutError, "the card's offered is 3"),
        (("offered", "shm", "layouts"), ["no"], LayoutError, "offers layout 'no'"),
        (("offered", "shm", "layouts"), [], LayoutError, "give names, each once"),
        (("offered", "shm", "part"), None, LayoutError, "the card's shm is None"),
        (("offered", "shm", "part", "files"), [], LayoutError, "give the bytes of 1 to"),
        (("offered", "shm", "part", "files"), [4096] * 2000, LayoutError, "give the bytes of 1 to"),
        (("offered", "shm", "part", "files"), [4096, 4096], LayoutError, "hold one that no range is in"),
        (("offered", "shm", "part", "files", 0), 2**40, LayoutError, "file 0 of the card of 'owner': it has"),
        ((*RANGE, "address"), 4096, LayoutError, "its shm does not offer them whole"),
        ((*RANGE, "address"), 4097, LayoutError, "begins within a page"),
        ((*RANGE, "nbytes"), 2**46, LayoutError, "bytes into its file"),
        ((*RANGE, "nbytes"), 0, LayoutError, r"ranges\[0\].nbytes is 0"),
        ((*RANGE, "file"), 1, LayoutError, r"ranges\[0\].file is 1"),
        ((*RANGE, "offset"), 4096, LayoutError, "bytes into its file"),
        ((*RANGE, "offset"), 1, LayoutError, "begins within a page"),
        ((*RANGE, "writable"), 1, LayoutError, r"ranges\[0\].writable is 1"),
        (("refused",), {"shm": "x" * 2000}, LayoutError, "at most 1000 characters"),
    ],
)  # fmt: skip
def test_cards_that_lie(card, agents, place, value, error, says):
    visitor = agents("visitor", layouts={}, transports=["shm"])
    before = maps()
    with pytest.raises(error, match=says) as caught:
        visitor.meet(changed(card, place, value))
    assert len(str(caught.value)) < 700
    assert maps() == before
    until(lambda: not visitor._core.links or all(link.ended.is_set() for link in visitor._core.links.values()))


@pytest.mark.parametrize("card", [b"", b"[]", b"\xff", b"[" * 100_000, 3, None], ids=range(6))
def test_cards_that_are_none(agents, card):
    with pytest.raises(LayoutError, match="card"):
        agents("visitor", layouts={}).meet(card)


def test_random_cards(owner, agents):
    """More of them, with seeds, run in ``tests.deep.agents``."""
    rng = random.Random(20)
    true = owner.card()
    visitor = agents("visitor", layouts={}, transports=["shm"])
    before = maps()
    for k in range(150):
        card = lie(true, rng)
        try:
            peer = visitor.meet(card, timeout=PATIENCE)
        except KVPlanError:
            assert maps() == before, k
        else:
            visitor.forget(peer)  # the change was of no account


class Descriptors:
    """What an owner hands over in place of its files."""

    def __init__(self, files):
        self.table, self.descriptors = {}, files

    def close(self):
        pass

    def notes(self):
        return []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: os.open("/dev/zero", os.O_RDWR), "it is not a file"),
        (lambda: os.pipe()[0], "it is not a file"),
        (lambda: os.open("/proc/self/maps", os.O_RDONLY), "it is not a file in memory|it is not a file"),
        (lambda: os.memfd_create("short"), "it has 0 bytes, and not"),
        (lambda: os.open(os.devnull, os.O_RDWR), "it is not a file"),
    ],
)
def test_descriptors_that_lie(owner, agents, monkeypatch, make, says):
    fd = make()
    monkeypatch.setattr(ShmOffer, "serve", lambda *_: Descriptors([fd]))
    visitor = agents("visitor", layouts={})
    before = maps()
    with pytest.raises(LayoutError, match=says):
        visitor.meet(owner.card())
    assert maps() == before


def test_descriptors_that_are_too_many_or_too_few(owner, agents, monkeypatch):
    visitor = agents("visitor", layouts={})
    fd = os.memfd_create("some")
    for number in (0, 2, 100):
        monkeypatch.setattr(ShmOffer, "serve", lambda *_, number=number: Descriptors([fd] * number))
        before = open_files()
        with pytest.raises(LayoutError, match="its card says 1"):
            visitor.meet(owner.card())
        leaves_no_file(before)


# ---- visitors -----------------------------------------------------------------------------------------------------


class Stranger:
    """A process that connects, and says what it likes."""

    def __init__(self, owner: Agent) -> None:
        self.card = read_card(owner.card())
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(b"\0" + self.card.socket.encode())
        self.hello = greeting.Hello(b"n" * 16, "stranger", b"a" * 16, this_process().started)

    def say(self, packet):
        self.sock.send(packet)

    def hears(self):
        try:
            return self.sock.recv(PACKET)
        except ConnectionResetError:
            return b""

    def greets(self, **more):
        said = self.hello._asdict() | {"nonce": self.hello.nonce.hex(), "agent": self.hello.agent.hex()} | more
        self.say(greeting.packet_of(said))

    def enters(self, hello=None):
        self.greets()
        nonce = bytes.fromhex(json.loads(self.hears())["nonce"])
        shown = greeting.proof(self.card.key, "visitor", self.card.agent, self.hello, nonce)
        self.say(greeting.packet_of({"proof": shown.hex(), "hello": {"shm": {}} if hello is None else hello}))


@pytest.fixture
def stranger(owner):
    made = Stranger(owner)
    yield made
    made.sock.close()


def still_works(owner, agents):
    visitor = agents(f"visitor {time.monotonic()}", layouts={})
    peer = visitor.meet(owner.card())
    mine = KVLayout.from_tensors("block layer dim", np.zeros((16, 3, 64), np.uint8))
    peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan([1], [1])).synchronize(PATIENCE)


@pytest.mark.parametrize(
    "packet",
    [
        b"x",
        b"{}",
        b"[]",
        b"\xff" * 100,
        b"[" * 50_000,
        b'{"nonce": 1, "name": 2, "agent": 3, "started": 4}',
        b"x" * PACKET,
    ],
    ids=range(7),
)
def test_strangers_who_say_nonsense(owner, stranger, agents, packet):
    stranger.say(packet)
    assert stranger.hears()[:1] == greeting.REFUSED
    assert stranger.hears() == b""
    still_works(owner, agents)


def test_strangers_without_the_key(owner, stranger, agents):
    stranger.greets()
    assert json.loads(stranger.hears())["proof"]
    stranger.say(greeting.packet_of({"proof": "00" * 32, "hello": {"shm": {}}}))
    assert b"does not hold the key" in stranger.hears()
    assert not owner._core.door.visitors
    still_works(owner, agents)


@pytest.mark.parametrize("hello", [{"tcp": {}}, {"shm": 3}, [], {"x" * 300: {}}], ids=range(4))
def test_visitors_who_ask_for_what_is_not_offered(owner, stranger, agents, hello):
    stranger.enters(hello)
    assert stranger.hears()[:1] == greeting.REFUSED
    assert not owner._core.door.visitors
    still_works(owner, agents)


@pytest.mark.parametrize(
    "packet", [b"x", CLOSING, b"M", b"Mshm\0text", b"Mtcp\0text", b"M\xff\0", b"F", NOTE + b"x" * PACKET], ids=range(8)
)
def test_visitors_who_break_the_rules_are_dropped(owner, stranger, agents, packet):
    stranger.enters()
    until(lambda: owner._core.door.visitors)
    stranger.say(NOTE + b"first")
    stranger.say(packet)
    until(lambda: not owner._core.door.visitors)
    assert owner.notes() == [("stranger", b"first")]
    still_works(owner, agents)


def test_a_visitor_of_another_start_is_refused(owner, stranger):
    stranger.hello = stranger.hello._replace(started=1)
    stranger.enters()
    assert b"the visitor's process is gone" in stranger.hears()


def test_visitors_of_other_users_are_refused(owner, agents, monkeypatch):
    card = owner.card()
    monkeypatch.setattr(door_module, "peer_of", lambda _: (os.getpid(), 54321))
    for _ in range(20):
        with pytest.raises(
            TransferError, match=r"refused: 'owner' does not allow user 54321; it would by users=\[5432"
        ):
            agents("visitor", layouts={}).meet(card)


def test_other_users_do_not_push_out_those_who_may_visit(owner, stranger, monkeypatch):
    stranger.greets()
    assert stranger.hears()
    monkeypatch.setattr(door_module, "peer_of", lambda _: (os.getpid(), 54321))
    others = [Stranger(owner) for _ in range(door_module.UNANSWERED + 8)]
    until(lambda: all(b"does not allow user 54321" in one.hears() for one in others))
    assert len(owner._core.door._greetings) == 1
    for one in others:
        one.sock.close()


def test_strangers_who_say_nothing_do_not_stand_in_the_way(owner, agents, monkeypatch):
    silent = [Stranger(owner) for _ in range(door_module.UNANSWERED + 8)]
    still_works(owner, agents)
    assert len(owner._core.door._greetings) <= door_module.UNANSWERED
    monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + door_module.ANSWER_SECONDS)
    owner._core.loop.wake()
    until(lambda: not owner._core.door._greetings)
    for one in silent:
        one.sock.close()


def test_descriptors_of_a_visitor_are_not_taken(owner, stranger, agents):
    stranger.enters()
    until(lambda: owner._core.door.visitors)
    before = open_files()
    for _ in range(20):
        socket.send_fds(stranger.sock, [NOTE + b"take these"], [0, 1, 2])
    notes = []
    until(lambda: notes.extend(owner.notes()) or len(notes) == 20)
    assert open_files() <= before


def test_a_flood_of_notes_waits_and_is_bounded(owner, stranger, agents, monkeypatch):
    from kvplan.agents import channel

    monkeypatch.setattr(channel, "HELD", 100)
    stranger.enters()
    until(lambda: owner._core.door.visitors)
    stranger.sock.settimeout(0)
    sent = 0
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            stranger.say(NOTE + b"%d" % sent)
            sent += 1
        except BlockingIOError:
            if sent > 300:
                break
        if sent > 20_000:
            break
    visitor = next(iter(owner._core.door.visitors.values()))
    assert len(visitor.channel.inbox) <= 20_000
    still_works(owner, agents)
    heard = []
    until(lambda: heard.extend(owner.notes()) or len(heard) == sent)
    assert [note for _, note in heard] == [b"%d" % k for k in range(sent)]


def test_a_goodbye_is_the_end(owner, stranger):
    stranger.enters()
    until(lambda: owner._core.door.visitors)
    stranger.say(GOODBYE)
    until(lambda: not owner._core.door.visitors)
    while stranger.hears():
        pass


def test_another_users_files_must_be_sealed():
    from kvplan.memory.shared_mappings import sealed_memory, trouble_of

    open_fd = os.memfd_create("open")
    os.ftruncate(open_fd, 4096)
    assert "not sealed" in trouble_of(open_fd, 4096, os.getuid(), writable=True, sealed=True)
    assert trouble_of(open_fd, 4096, os.getuid(), writable=True, sealed=False) is None
    assert "belongs to user" in trouble_of(open_fd, 4096, os.getuid() + 1, writable=True, sealed=False)
    read_only = os.open(f"/proc/self/fd/{open_fd}", os.O_RDONLY)
    assert trouble_of(read_only, 4096, os.getuid(), writable=True, sealed=False) == "it is not open for writing"
    assert trouble_of(read_only, 4096, os.getuid(), writable=False, sealed=False) is None
    for fd in (open_fd, read_only):
        os.close(fd)
    sealed = sealed_memory(4096)
    assert len(sealed) == 4096
    assert pool().nbytes
