"""Peers that die, restart, hang or leave: transfers with them end in an error in time, and others go on."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import count
from signal import SIGCONT, SIGSTOP

import pytest

from kvplan import KVPlanError, TransferError
from tests.contract.peers.pairs import BLOCKS, FAR, NEAR
from tests.contract.peers.transports import agents, every, over

pytestmark = pytest.mark.slow

BOUND = 30.0  # seconds within which a death is an error
GENEROUS = 20.0  # seconds beyond a bound, on a machine that does much else
LONG = 60.0  # seconds that a GPU is busy, beyond every bound


class Star:
    """A process that has met others, each with a cache."""

    def __init__(self, transport, start, *others):
        self.transport, self.start, self.seeds = transport, start, count()
        self.near = start()
        self.here = NEAR.build(next(self.seeds))
        transport.open(self.near, "near", self.here)
        self.others, self.caches = {}, {}
        for name in others:
            self.begin(name)

    def begin(self, name):
        """Start another process, or start it again under its name, and meet it."""
        process = self.others[name] = self.start()
        self.caches[name] = FAR.build(next(self.seeds))
        self.near.meet(self.transport.open(process, name, self.caches[name]))

    def submit(self, name, *blocks, **options):
        return self.near.submit(name, *blocks, **self.transport.options, **options)

    def pull(self, name):
        """Pull all blocks, and compare every byte."""
        self.near.end(self.submit(name, range(BLOCKS), range(BLOCKS), reading=True), BOUND)
        self.here.tensors[:] = self.caches[name].tensors.transpose(1, 0, 3, 2, 4)
        assert self.near.content() == [root.tobytes() for root in self.here.roots]

    def fails(self, name, number=None, within=BOUND + GENEROUS, **options):
        """Check that a transfer, or a new one, ends in an error in time."""
        begun = time.monotonic()
        with pytest.raises(KVPlanError):
            self.near.end(self.submit(name, [1], [1], **options) if number is None else number, within)
        assert time.monotonic() - begun < within


@agents
@pytest.mark.parametrize("reading", [False, True], ids=["push", "pull"])
def test_a_peer_is_killed_in_the_middle(transport, start, reading):
    star = Star(transport, start, "dies", "lives")
    star.near.begin("until_refused", "dies", list(range(BLOCKS)), reading=reading, **transport.options)
    time.sleep(0.2)
    star.others["dies"].kill()
    assert "'dies'" in star.near.answer()
    star.fails("dies", reading=reading)
    star.pull("lives")
    star.near.close(BOUND)


@over(
    "shm",
    "packed",
    "cuda_ipc",
    xfail={"direct": "nobody asks NIXL whether the peer of a waiting transfer lives"},
)
def test_a_peer_is_killed_while_a_transfer_waits(transport, start):
    star = Star(transport, start, "dies", "lives")
    number = star.submit("dies", [0], [0], reading=True, event=1)
    star.others["dies"].kill()
    star.fails("dies", number, BOUND + 5.0)
    star.pull("lives")
    star.near.close(BOUND)


@over("cuda_ipc")
def test_an_owner_is_killed_before_the_work_that_it_published(transport, start):
    star = Star(transport, start, "dies", "lives")
    star.pull("dies")
    star.others["dies"].fill(1, LONG)
    star.others["dies"].publish()
    number = star.submit("dies", [0], [0], reading=True)
    star.others["dies"].kill()
    star.fails("dies", number)
    star.pull("lives")
    star.near.close(BOUND)


@over("cuda_ipc")
def test_an_owner_s_stream_goes_on_when_a_visitor_is_killed(transport, start):
    star = Star(transport, start, "visited")
    star.pull("visited")
    star.submit("visited", [0], [0], reading=True, busy=LONG)
    visited = star.others["visited"]
    visited.wait_for_visitors()
    visited.fill(7)
    star.near.kill()
    assert {byte for root in visited.content() for byte in root} == {7}


@every
def test_a_peer_restarts_under_its_name(transport, start):
    star = Star(transport, start, "again", "other")
    for _ in range(2):
        star.pull("again")
        star.others["again"].kill()
        star.fails("again", reading=False, **({} if transport.name != "nixl" else {"deadline": 5.0}))
        star.begin("again")
        star.pull("again")
        star.pull("other")


@agents
def test_a_visitor_is_killed_in_the_middle(transport, start):
    """The owner's other visitors go on, the owner meets it again, and may close."""
    star = Star(transport, start, "owner")
    owner = star.others["owner"]
    second = start()
    cache = NEAR.build(77)
    transport.open(second, "second", cache)
    second.meet(owner.card())
    number = second.submit("owner", [1], [2], reading=False, event=1, note=b"still here", **transport.options)
    star.near.begin("until_refused", "owner", list(range(3, BLOCKS)), reading=True, **transport.options)
    time.sleep(0.2)
    star.near.kill()
    second.set(1)
    second.end(number, BOUND)
    assert owner.hear(1) == [("second", b"still here")]
    second.close(BOUND)
    owner.close(BOUND)


@over("direct", "packed", "nixl_agent")
def test_a_peer_hangs_and_goes_on(transport, start):
    """Its transfers end at their deadline; with the others nothing changes; it is met again when it goes on."""
    star = Star(transport, start, "hangs", "lives")
    star.pull("hangs")
    os.kill(star.others["hangs"].pid, SIGSTOP)
    star.fails("hangs", star.submit("hangs", [1], [2], reading=True, deadline=2.0), 2.0 + GENEROUS)
    star.pull("lives")
    begun = time.monotonic()
    with suppress(TransferError):  # it may say that the peer has not answered
        star.near.close(*([] if transport.of == "NixlAgent" else [5.0]))
    assert time.monotonic() - begun < 5.0 + GENEROUS
    os.kill(star.others["hangs"].pid, SIGCONT)


@over("shm", "cuda_ipc")
def test_a_peer_that_hangs_is_read_all_the_same(transport, start):
    """The visitor moves the bytes, and the owner makes no call for it."""
    star = Star(transport, start, "hangs")
    os.kill(star.others["hangs"].pid, SIGSTOP)
    star.pull("hangs")
    star.near.close(BOUND)
    os.kill(star.others["hangs"].pid, SIGCONT)
    star.others["hangs"].close(BOUND)


@agents
def test_a_peer_closes_while_it_is_visited(transport, start):
    """Its transfers end, one way or the other; it is told; and both can close."""
    star = Star(transport, start, "leaves", "stays")
    star.near.begin("until_refused", "leaves", list(range(BLOCKS)), reading=True, **transport.options)
    time.sleep(0.1)
    star.others["leaves"].close(BOUND)
    assert "'leaves'" in star.near.answer()
    star.pull("stays")
    star.near.close(BOUND)


@agents
def test_a_forked_child_is_told(transport, start):
    star = Star(transport, start, "other")
    told = star.near.fork("other")
    for call in ("card", "notes", "submit", "send"):
        assert "TransferError" in str(told[call]), call
        assert "fork" in told[call], call
    assert {call: told[call] for call in ("forget", "close", "own")} == dict.fromkeys(("forget", "close", "own"))
    star.pull("other")
    star.near.send("other", b"after the fork")
    assert star.others["other"].hear(1) == [("near", b"after the fork")]
    star.near.close(BOUND)
