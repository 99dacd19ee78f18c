"""Small direct transfers by NIXL: their callers end them, no thread is woken for them, and looks make room for them."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvplan import TransferError, join
from kvplan.agents.by_nixl.nixl_packed import MOST_LEFT_OUT, NixlPacked
from kvplan.agents.by_nixl.packed_way import PackedWay
from kvplan.agents.settling import Lane
from kvplan.cost.wires.wire_model import WayCost, WireChoice
from kvplan.cost.wires.wire_profile import default_wire
from tests.agents.by_nixl.known_agents import Far, heard, looks, same, settled
from tests.patience import PATIENCE, until

DIRECT = WireChoice("direct", WayCost("direct", 0.0, 0, 0.0, 0.0, ""), WayCost("packed", 1.0, 0, 0.0, 0.0, ""), "")


@pytest.fixture
def wakes(monkeypatch):
    """How often a lane's thread was told of a transfer, or of a caller that waits, by name."""
    found = Counter()
    for name in ("watch", "hurry"):
        call = getattr(Lane, name)

        def counted(self, *given, name=name, call=call):
            found[name] += 1
            return call(self, *given)

        monkeypatch.setattr(Lane, name, counted)
    return found


@looks(0)
def test_bytes_that_have_moved_at_once_end_the_transfer_in_its_submit(pair, wakes):
    transfer = pair.peer.submit(pair.load.plan([5], [2]), note=b"read", way="direct")
    assert transfer._over.happened
    assert same(pair, 5, 2)
    assert transfer.result().nbytes == 192
    assert heard(pair.you) == [("me", b"read")]
    assert not wakes
    assert (pair.me.stats().transfers, pair.me.stats().in_flight) == (1, 0)


@looks(5)
def test_a_caller_that_waits_looks_itself(pair, wakes, monkeypatch):
    monkeypatch.setattr("kvplan.agents.peer_transfer.LOOK_SECONDS", PATIENCE)
    for k in range(8):
        transfer = pair.peer.submit(pair.load.plan([k], [7 - k]), way="direct")
        assert not transfer._over.happened
        transfer.synchronize(PATIENCE)
        assert same(pair, k, 7 - k)
    assert not wakes


@looks(5)
def test_a_caller_that_asks_now_and_then_ends_it_by_asking(pair, wakes):
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    until(transfer.done)
    assert same(pair, 1, 1)
    assert not wakes


@looks(2)
def test_nobody_need_ask(pair):
    """The lane's thread finds it by itself."""
    pair.peer.submit(pair.load.plan([1], [1]), note=b"read", way="direct")
    assert heard(pair.you) == [("me", b"read")]
    until(lambda: pair.me.stats().transfers == 1)


@looks(1 << 30)
def test_one_that_takes_long_is_left_to_the_lane(pair, wakes):
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    with pytest.raises(TransferError, match="has not finished"):
        transfer.synchronize(0.01)
    with pytest.raises(TransferError, match="has not finished"):
        transfer.synchronize(0.01)
    assert wakes["hurry"] == 2
    pair.me.forget(pair.peer)
    with pytest.raises(TransferError, match="forgotten"):
        transfer.synchronize(PATIENCE)


@looks(5)
@pytest.mark.parametrize("failure", ["post", "err"])
def test_a_failure_is_told_whoever_ends_it(pair, failure):
    pair.network.failures = [failure]
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        transfer.synchronize(PATIENCE)
    assert pair.me.stats().failed == 1


@looks(3)
def test_several_threads_submit_and_wait(pair):
    """A lane that has gone to sleep until one submit is over goes on with the transfers of the others."""
    errors = []

    def work(number):
        try:
            for _ in range(60):
                pair.peer.submit(pair.load.plan([number], [number]), way="direct").synchronize(PATIENCE)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(same(pair, number, number) for number in range(4))
    assert (pair.me.stats().transfers, pair.me.stats().in_flight) == (240, 0)


@contextmanager
def elsewhere(lock):
    """Let another thread have a lock."""
    held, free = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            free.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    try:
        yield free
        assert free.is_set() or thread.is_alive()
    finally:
        free.set()
        thread.join()


@looks(1 << 30)
def test_a_caller_that_asks_never_waits_for_another_call_of_nixl(pair):
    transfer = pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    with elsewhere(pair.peer.nixl.own.lock):
        assert not transfer.done()
        with pytest.raises(TransferError, match="has not finished"):
            transfer.synchronize(0.01)


@looks(0)
def test_a_lane_that_sleeps_is_woken_for_a_transfer_that_nobody_asks_for(pair):
    pair.peer.submit(pair.load.plan([1], [1]), way="direct")
    settled(pair)
    (lane,) = pair.me._core.lanes._lanes.values()
    until(lambda: lane._asleep)
    pair.network.looks = 3
    pair.peer.submit(pair.load.plan([2], [2]), way="direct")
    settled(pair)
    assert same(pair, 2, 2)


class Submitting:
    """A transfer whose submit is at work."""

    until, quiet, polled, left, inner = None, True, False, False, None

    def __init__(self) -> None:
        self.asked, self.again = 0, threading.Event()

    def submitting(self):
        self.asked += 1
        if self.asked > 1:
            self.again.set()
        return True

    def tidy(self, line):
        return ()


def test_a_lane_that_meets_a_submit_at_work_asks_again_though_nobody_wakes_it():
    lane, one = Lane(set()), Submitting()
    lane.take(one)
    lane.thread.start()
    assert one.again.wait(PATIENCE)
    lane.drop(one)
    lane.stop()
    assert lane.thread.join(PATIENCE)


@looks(0)
def test_small_ones_behind_a_long_one_hold_no_handles(pair):
    pair.network.looks = 1 << 30
    long = pair.peer.submit(pair.load.plan([7], [7]), way="direct")
    pair.network.looks = 0
    for _ in range(100):
        pair.peer.submit(pair.load.plan([1], [1]), way="direct").synchronize(PATIENCE)
    until(lambda: len(pair.network.agents["me"].live) == 1)
    assert (pair.peer.nixl.own.stats().in_flight, long.done()) == (1, False)
    (handle,) = pair.network.agents["me"].live
    handle.left = 0
    long.synchronize(PATIENCE)
    settled(pair)


@looks(0)
@pytest.mark.parametrize("failure", ["", "post"])
def test_a_forgotten_peers_transfer_ended_as_nixl_has_told_already(pair, failure):
    """Also where nobody has asked since: by NIXL's agent alone, which has no thread that does."""
    own = pair.peer.nixl.own
    pair.network.failures = [failure] if failure else []
    transfer = own.peers["you"].submit(pair.load.plan([3], [3]))
    own.forget(own.peers["you"])
    assert transfer.done()
    if failure:
        with pytest.raises(TransferError, match="RemoteDisconnectError"):
            transfer.synchronize()
    else:
        assert same(pair, 3, 3)
    assert (own.stats().transfers, own.stats().failed, own.stats().in_flight) == ((0, 1, 0) if failure else (1, 0, 0))
    assert not pair.network.agents["me"].live


def looked(packed, count):
    """Look so often, and return whether each look polled."""
    polls = []
    original, packed.poll = packed.poll, lambda: polls.append(True) or original()
    found = []
    for _ in range(count):
        polls.clear()
        packed._look()
        found.append(bool(polls))
    return found


@looks(0)
def test_a_look_is_left_out_a_few_times_while_another_thread_calls_nixl(pair, monkeypatch):
    agent = pair.me._core.nixl.agent()
    packed = NixlPacked("me", pair.me._core.nixl, dict, None, PackedWay(threaded=False), set())
    assert looked(packed, 2) == [True, True]
    for _ in range(2):
        with elsewhere(agent.lock) as free:
            assert looked(packed, MOST_LEFT_OUT) == [False] * MOST_LEFT_OUT
            threading.Timer(0.05, free.set).start()
            assert looked(packed, 1) == [True]  # it waits
        assert looked(packed, 2) == [True, True]
    monkeypatch.setattr(packed, "_busy", lambda: True)
    with elsewhere(agent.lock) as free:
        threading.Timer(0.05, free.set).start()
        assert looked(packed, 1) == [True]  # packed transfers are in flight: it waits


def test_few_pieces_are_not_counted_and_many_are(monkeypatch):
    pair = Far(("nixl",), 0, progress="step")
    pair.meet()
    plan, packed = pair.load.plan([1], [1]), pair.me._core.packed
    wire = replace(default_wire("DRAM"), latency=1.0, start=0.0, descriptor=0.0, message=0.0, byte=0.0, overlaps=True)
    chosen = []
    monkeypatch.setattr(NixlPacked, "choose", lambda self, plan, *, reading: chosen.append(plan) or DIRECT)
    for post, pull, at_once in ((0.9, True, True), (1.1, True, False), (-0.1, False, True), (0.1, False, False)):
        # direct takes a latency and the post; packed begins after two latencies of a pull, and one of a push
        packed._profiles["DRAM"] = replace(wire, post=post)
        some = plan if pull else pair.store.plan([1], [1])
        assert pair.peer.nixl.direct_at_once(some, reading=pull) == at_once
        pair.peer.submit(some).synchronize(PATIENCE)
        assert len(chosen) == (0 if at_once else 1)
        chosen.clear()
    many = pair.load.plan(range(8), range(8))
    for pieces, at_once in ((24.5, True), (23.5, False)):  # 8 blocks have 3 pieces each
        packed._profiles["DRAM"] = replace(wire, post=0.0, descriptor=1.0 / pieces)
        assert pair.peer.nixl.direct_at_once(many, reading=True) == at_once
    assert not pair.peer.nixl.direct_at_once(join([pair.load.plan([], [])]), reading=True)
    pair.close()
