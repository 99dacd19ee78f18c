"""The parts of packed transfers, one by one: readiness, rings, wires that raise, and the face of a transfer."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan.agents.by_nixl.ring_pages import ring_pages
from kvplan.agents.packed.pack_credits import Credits
from kvplan.agents.packed.readiness import Ready
from kvplan.agents.packed.slot_ring import SlotRing
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.plan.row_plans import Memory
from tests.agents.packed.pairs import Pair
from tests.patience import until


class Blocking:
    """An object that can only be waited for."""

    def __init__(self, error=None) -> None:
        self.event, self.error = threading.Event(), error

    def synchronize(self) -> None:
        self.event.wait()
        if self.error is not None:
            raise self.error


class Handle:
    """A stream of CUDA of which only the handle is known."""

    cuda_stream = 7


class Stream:
    """A stream of torch."""

    def __init__(self) -> None:
        self.events: list[threading.Event] = []

    def record_event(self) -> threading.Event:
        self.events.append(threading.Event())
        return self.events[-1]


def test_objects_that_only_block_get_a_thread():
    blocking = Blocking()
    ready = Ready(blocking)
    assert not ready()
    blocking.event.set()
    until(ready)
    assert ready()
    failing = Blocking(RuntimeError("broken"))
    ready = Ready(failing)
    failing.event.set()
    with pytest.raises(RuntimeError, match="broken"):
        until(ready)


def test_a_stream_is_asked_through_an_event_of_now():
    stream = Stream()
    ready = Ready(stream)
    assert len(stream.events) == 1
    assert not ready()
    stream.events[0].set()
    assert ready()


def test_a_stream_without_events_is_left_to_the_executor():
    ready = Ready(Handle())
    assert ready()
    assert isinstance(ready.left, Handle)
    both = Ready.of_all([ready, Ready(None), Ready(threading.Event())])
    assert not both()
    assert both.left is ready.left
    with pytest.raises(KVPlanError, match="after has 2 objects that cannot be asked"):
        Ready.of_all([ready, Ready(Handle())])


@pytest.mark.parametrize("together", [True, False])
def test_to_ask_whether_it_waits_raises_no_error_and_takes_none_away(together):
    class Failing:
        over = False

        def query(self):
            if self.over:
                raise ValueError("lost")
            return False

        def synchronize(self):
            pass

    after = Failing()
    ready = Ready(after)
    ready = Ready.of_all([ready, Ready(threading.Event())]) if together else ready
    assert ready.waits()
    after.over = True
    assert ready.waits() is together
    for _ in range(2):
        with pytest.raises(TransferError, match="lost"):
            ready.completed()
    assert ready.waits() is together


def test_a_transfer_that_failed_is_an_error(executor):
    pair = Pair(executor)
    pair.network.wires[0].down = True
    first = pair.submit(reading=False)
    second = pair.submit(reading=False, after=first)
    pair.ended(first, second)
    with pytest.raises(TransferError, match=r"its after= failed .*the wire"):
        second.synchronize()


def test_rings_of_the_host_and_of_nothing_else():
    ring = ring_pages(1 << 20, "cpu")
    slots = SlotRing(ring, 1 << 18)
    assert (len(slots.slots), slots.nbytes, slots.free) == (4, 1 << 20, 4)
    taken = slots.take(9)
    assert [slot.place.address - slots.address for slot in taken] == [0, 1 << 18, 2 << 18, 3 << 18]
    assert slots.take(1) == []
    slots.give(taken[1:2])
    assert slots.take(1) == taken[1:2]
    for device in ("tpu", "cuda:x", "cuda"):
        with pytest.raises(PathError, match="expected 'cpu', or a GPU such as 'cuda:0'"):
            ring_pages(4096, device)
    with pytest.raises(LayoutError, match="the host has no"):
        ring_pages(1 << 62, "cpu")
    pool = np.zeros(1000, np.uint8)
    with pytest.raises(LayoutError, match="has 0 slots of 1,024 bytes"):
        SlotRing(Memory(pool.ctypes.data, pool.nbytes, "cpu", pool), 1024)


def test_turns_of_slots():
    """A slot that is taken, and given back unused, has the same turn again; late credits free nothing."""
    credits = Credits()  # noqa: A001
    credits.grant(0, 256, 8, [(4, False, 0)])
    lent = credits.take()
    assert lent == (4, 1, 1024)
    credits.back(lent)
    assert credits.take() == lent
    credits.credit(4, 1)
    assert credits.free == 0  # its write moves
    credits.grant(0, 256, 8, [(4, True, 0), (5, False, 0)])
    credits.back(lent)  # of the time before the grant
    assert (credits.free, credits.awaited) == (1, 1)
    for turn in (1, 2, 0, 0):
        credits.credit(4, turn)
    assert (credits.free, credits.awaited) == (2, 0)
    credits.withdraw()
    credits.credit(5, 1)
    assert (credits.free, credits.take()) == (0, None)


def test_a_wire_whose_questions_fail(executor):
    """A state or a release that raises: the write counts as failed, and its slot waits until it has ended."""
    pair = Pair(executor)
    wire = pair.network.wires[0]
    state, release = wire.state, wire.release

    def broken(handle):
        raise OSError("no answer")

    wire.state = wire.release = broken
    transfer = pair.submit(reading=False)
    for _ in range(50):
        pair.network.step()
    assert not transfer.over or pair.same()
    assert len(pair.near.end._own.sends) < pair.near.end.sending
    wire.state, wire.release = state, release
    pair.ended(transfer)
    pair.check()


def test_a_pull_whose_deadline_passes_at_its_owner(executor):
    """The owner has no slot for it in time: it says so, and gathers nothing later."""
    pair = Pair(executor, far={"sending": 1, "slots": 4})
    wire = pair.network.wires[1]
    first = pair.submit([0], [0], reading=True)
    pair.network.run(lambda: wire.writes)
    wire.frozen = True
    late = pair.submit([1], [1], reading=True, deadline=0.02)
    pair.network.run(lambda: late.over)
    with pytest.raises(TransferError, match="nothing was moved"):
        late.synchronize()
    wire.frozen = False
    pair.ended(first)
    assert wire.posted == 1
    pair.check()


def test_the_face_of_a_transfer(executor):
    """Waits move the ends themselves, and give up in time."""
    pair = Pair(executor)
    pair.near.end._progress._arrivals = lambda: (pair.network.turn(), pair.far.end.poll())
    never = threading.Event()
    waiting = pair.submit(reading=True, after=never)
    with pytest.raises(TransferError, match=r"has not finished within 0.01 seconds"):
        waiting.synchronize(0.01)
    assert "in flight" in repr(waiting)
    assert waiting.layer_groups == ((0, 1, 2),)
    never.set()
    waiting.wait_layer(1)
    waiting.wait()
    waiting.await_issue()
    assert waiting.result().path == "packed"
    assert "done" in repr(waiting)
    assert waiting.done()
    pushed = pair.submit(reading=False, by_layer=True)
    pushed.wait_layer(0)
    assert pushed.done()
    assert not pushed.cancel()
    assert pair.near.end.in_flight("far") == 0
    failed = pair.near.end.submit("far", pair.push.plan([0], [0]), reading=False, deadline=1e-9)
    with pytest.raises(TransferError, match="deadline"):
        failed.result()
    assert "failed" in repr(failed)
    pair.network.settle()
    assert pair.near.end.stats().failed == 1
    assert kvplan.Transfer in type(failed).__mro__


def test_slots_for_a_peer_that_comes_back_to_a_full_ring(executor):
    """It gets the slot that is left, and another peer returns some when they are needed."""
    pair = Pair(executor, near={"slots": 8, "sending": 2, "granted": 6})
    network = pair.network
    pair.far.end.forget("near")
    network.settle()
    other = network.place("other", executor)
    pair.near.meet("other")
    other.meet("near")
    network.run(lambda: pair.near.lane("other").outbox.ready)
    pair.far.meet("near", [pair.there])
    network.run(lambda: pair.near.end.has("far") and pair.near.lane("far").outbox.ready)
    assert [len(pair.near.lane(name).granted) for name in ("other", "far")] == [5, 1]
    pair.ended(pair.submit(reading=True))
    assert len(pair.near.lane("far").granted) > 1
    assert pair.same()
    pair.check()
