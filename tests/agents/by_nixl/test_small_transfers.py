"""Small direct transfers by NIXL: their callers end them, no thread is woken for them, and looks make room for them."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from kvplan import TransferError
from kvplan.agents.by_nixl.nixl_packed import MOST_LEFT_OUT, NixlPacked
from kvplan.agents.by_nixl.packed_way import PackedWay
from kvplan.agents.settling import Lane
from tests.agents.by_nixl.known_agents import Far, heard
from tests.patience import PATIENCE, until


def same(pair, src, dst):
    return (pair.mine[:, dst] == pair.theirs[src]).all()


@pytest.fixture
def pair(request):
    made = Far(("nixl",), request.param)
    made.meet()
    yield made
    made.close()


def looks(count):
    return pytest.mark.parametrize("pair", [count], indirect=True)


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


class Sleeping:
    """A transfer whose submit is at work until it is told otherwise."""

    until, quiet, left, inner = None, True, False, None

    def __init__(self) -> None:
        self.asked, self.at_work = threading.Event(), True

    def submitting(self):
        self.asked.set()
        return self.at_work


def test_a_lane_that_sleeps_until_a_submit_is_over_wakes_if_its_transfer_is_dropped():
    lane = Lane(set())
    first, second = Sleeping(), Sleeping()
    lane.take(first)
    lane.thread.start()
    lane.waker(None)
    until(lambda: lane._asleep)
    lane.take(second)
    lane.leave()  # the thread looks at the first one again, and sleeps again
    until(lambda: lane._asleep)
    lane.drop(first)
    assert second.asked.wait(PATIENCE)
    lane.drop(second)
    lane.stop()
    assert lane.thread.join(PATIENCE)


def looked(pair, packed, count):
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
def test_a_look_is_left_out_a_few_times_while_another_thread_calls_nixl(pair):
    agent = pair.me._core.nixl.agent()
    packed = NixlPacked("me", pair.me._core.nixl, dict, None, PackedWay(threaded=False), set())
    assert looked(pair, packed, 2) == [True, True]
    held, free = threading.Event(), threading.Event()

    def hold():
        with agent.lock:
            held.set()
            free.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE)
    assert looked(pair, packed, MOST_LEFT_OUT) == [False] * MOST_LEFT_OUT
    timer = threading.Timer(0.05, free.set)
    timer.start()
    assert looked(pair, packed, 1) == [True]  # it waits
    thread.join()
    assert looked(pair, packed, 2) == [True, True]
