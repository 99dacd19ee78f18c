"""Orders that are told in legs: what a leg holds, and transfers that begin, fail or end before all legs are told."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

import kvplan
from kvplan import TransferError
from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed import pack_orders
from kvplan.agents.packed.pack_messages import OrderPart
from kvplan.agents.packed.pack_orders import Ordered, Parts
from kvplan.agents.packed.pack_starts import Telling, legs_of
from kvplan.errors import KVPlanError, LayoutError
from kvplan.plan.packing.pack_recipe import recipe_of
from kvplan.plan.packing.packing import packing_of
from tests.agents.packed.pairs import BLOCKS, Pair, order_bytes
from tests.agents.packed.simulated_wire import meet


def halves(*units):
    """Halves of so many units of 64 bytes."""
    a, b = (kvplan.KVLayout.from_tensors("block dim", np.zeros((100, 64), np.uint8)) for _ in range(2))
    return [packing_of(kvplan.compile(a, b).plan(range(count), range(count))).src for count in units]


@pytest.mark.parametrize(
    ("units", "chunk_nbytes", "most", "legs"),
    [
        ([10], 256, 100, [[10]]),  # one leg: the half as it is
        ([10], 256, 8, [[4], [6]]),  # chunks of four units; the first leg has an eighth, but a chunk at least
        ([20], 256, 8, [[4], [8], [8]]),
        ([20], 256, 16, [[4], [16]]),
        ([20], 256, 32, [[4], [16]]),
        ([20], 256, 64, [[8], [12]]),
        ([10], 256, 7, [[4], [6]]),
        ([10], 256, 1, [[4], [4], [2]]),  # a chunk has more
        ([10], 640, 1, [[10]]),
        ([3, 3, 3], 256, 6, [[3], [3, 3]]),
        ([3, 9, 1], 256, 8, [[3], [8], [1, 1]]),
        ([6, 3], 256, 5, [[4], [2, 3]]),
        ([9, 3], 256, 4, [[4], [4], [1, 3]]),
        ([5, 4], 256, 4, [[4], [1], [4]]),
        ([], 256, 4, [[]]),
    ],
)
def test_legs_end_where_chunks_end(units, chunk_nbytes, most, legs):
    made = legs_of(halves(*units), chunk_nbytes, most)
    assert [[half.units for half in leg] for leg in made] == legs


def test_a_leg_has_the_next_units():
    [half] = halves(10)
    made = [part for leg in legs_of([half], 256, 4) for part in leg]
    assert len(made) == 3
    addresses = np.concatenate([part.sections[0].addresses for part in made])
    np.testing.assert_array_equal(addresses, half.sections[0].addresses)
    assert legs_of([half], 256, 100)[0][0] is half


def legged(executor, units=1, **more):
    """A pair whose orders have a leg for each chunk, of which each has one unit."""
    ring = {"slot_nbytes": 256, "leg_units": units} | more
    pair = Pair(executor, near=ring, far=ring)
    pair.network.settle()
    return pair


def told(monkeypatch, change=lambda number, leg: leg):
    """Note the legs that are told; return them."""
    seen, leg = [], Telling.pieces

    def noted(self, number, now):
        seen.append(number)
        return change(number, leg(self, number, now))

    monkeypatch.setattr(Telling, "pieces", noted)
    return seen


@pytest.mark.parametrize("reading", [True, False])
def test_chunks_move_before_the_last_leg_is_told(executor, monkeypatch, reading):
    seen, pair = told(monkeypatch), legged(executor)
    transfer = pair.submit(reading=reading)
    sender = (pair.far if reading else pair.near).lane("near" if reading else "far").sender
    pair.network.run(lambda: sender.moved > 0 or transfer.over)
    assert len(seen) < BLOCKS
    pair.ended(transfer)
    transfer.synchronize()
    assert seen == list(range(BLOCKS))
    assert pair.same()
    pair.check()


@pytest.mark.parametrize("reading", [True, False])
def test_a_leg_that_is_refused_ends_the_transfer(executor, monkeypatch, reading):
    """The third leg is no recipe; the error says so, and no slot is lost on either side."""

    def change(number, leg):
        return leg if number != 2 else [b"".join(leg).replace(b"kvpr", b"kvpx")]

    seen, pair = told(monkeypatch, change), legged(executor)
    transfer = pair.submit(reading=reading)
    pair.ended(transfer)
    with pytest.raises(TransferError, match="this is b'kvpr' of version"):
        transfer.synchronize()
    pair.network.settle()
    assert 3 <= len(seen) <= BLOCKS
    assert not pair.far.lane("near")._requests._asks._parts._open
    assert not pair.far.lane("near").receiver.orders._parts._open
    again = pair.submit([1], [2], reading=reading)
    pair.ended(again)
    again.synchronize()
    assert pair.same([1], [2])
    pair.check()


@pytest.mark.parametrize("reading", [True, False])
def test_a_leg_that_cannot_be_written_ends_the_transfer(executor, monkeypatch, reading):
    def change(number, leg):
        if number == 3:
            raise KVPlanError("no more")
        return leg

    seen, pair = told(monkeypatch, change), legged(executor)
    transfer = pair.submit(reading=reading)
    pair.ended(transfer)
    with pytest.raises(TransferError, match=r"no more; .*(hold|moved)"):
        transfer.synchronize()
    pair.network.settle()
    assert seen == [0, 1, 2, 3]
    pair.check()


@pytest.mark.parametrize("reading", [True, False])
def test_a_transfer_that_is_given_up_tells_no_further_leg(executor, monkeypatch, reading):
    """Its deadline passes after the first leg; the other end forgets the order."""
    seen, pair = told(monkeypatch), legged(executor)
    transfer = pair.submit(reading=reading, deadline=1.0)
    assert seen == [0]
    pair.network.clock += 2.0
    pair.network.settle()
    assert transfer.over
    with pytest.raises(TransferError, match="deadline"):
        transfer.synchronize()
    assert len(seen) <= 2
    far = pair.far.lane("near")
    assert not far._requests._asks._parts._open
    assert not far.receiver.orders._parts._open
    assert not far.receiver._early
    pair.check()


def test_the_note_of_a_push_comes_with_its_first_leg_and_once(executor):
    pair = legged(executor, units=2)
    transfer = pair.submit(reading=False, note=b"all there")
    pair.ended(transfer)
    pair.network.settle()
    assert pair.far.end.notes() == [("near", b"all there")]
    assert pair.same()
    pair.check()


@pytest.mark.parametrize(
    "parts",
    [
        [OrderPart(2, 0, 2, 0, 2, b"x"), OrderPart(2, 0, 3, 1, 2, b"x")],  # two or three legs
        [OrderPart(2, 0, 2, 0, 2, b"x"), OrderPart(2, 0, 2, 1, 3, b"x")],  # two or three parts
    ],
)
def test_parts_that_contradict_each_other(parts):
    orders = Parts()
    orders.add(parts[0])
    with pytest.raises(LayoutError, match="contradict"):
        orders.add(parts[1])


def test_too_many_legs():
    with pytest.raises(LayoutError, match="legs"):
        Parts().add(OrderPart(2, 0, 1 << 31, 0, 1, b"x"))


def test_a_leg_beyond_the_legs():
    with pytest.raises(LayoutError, match="cannot be read"):
        messages.read_part(messages.part_body(OrderPart(2, 3, 3, 0, 1, b"x")))


def test_legs_of_high_priority_are_told_first(executor, monkeypatch):
    """A normal transfer has told its first leg; the other one of high priority tells all of its own then."""
    seen, pieces = [], Telling.pieces

    def noted(self, number, now):
        seen.append((self.transfer.wish.urgent, number))
        return pieces(self, number, now)

    monkeypatch.setattr(Telling, "pieces", noted)
    pair = legged(executor)
    normal = pair.submit(range(6), range(6), reading=False)
    high = pair.submit(range(6, 10), range(6, 10), reading=False, priority="high")
    pair.ended(normal, high)
    first = seen.index((True, 0))
    assert first <= 2
    assert seen[first : first + 4] == [(True, k) for k in range(4)]
    assert [one for one in seen if not one[0]] == [(False, k) for k in range(6)]
    assert pair.same()
    pair.check()


# ---- a peer that lies ----


def liar(executor, *, reading):
    """A pair, the lane of far, a function that says what near does not, and the recipe of four chunks."""
    pair = Pair(executor)
    pair.network.settle()
    lane = pair.far.lane("near")

    def say(kind, body):
        assert pair.far.end.take("near", messages.message(kind, lane.outbox.theirs, lane.outbox.mine, (), body))

    packing = packing_of((pair.pull if reading else pair.push).plan([0, 1, 2, 3], [0, 1, 2, 3]), most=256)
    return pair, lane, say, recipe_of(packing.src if reading else packing.dst)


def leg(number, legs, recipes, seconds=0.0):
    order = order_bytes(Ordered(False, 1, 256, seconds, recipes, b""))  # noqa: FBT003
    return messages.part_body(OrderPart(2, number, legs, 0, 1, order))


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("empty", [0, 1])
def test_a_leg_without_chunks_is_refused(executor, reading, empty):
    pair, lane, say, recipe = liar(executor, reading=reading)
    for number in (0, 1):
        say(messages.ASK if reading else messages.PUSH, leg(number, 2, () if number == empty else (recipe,)))
    pair.network.settle(200)
    assert not lane.sender.jobs
    assert not lane.receiver.inbounds
    assert not (lane._requests._asks if reading else lane.receiver.orders)._parts._open
    assert not pair.far.end.notes()


def test_a_pull_whose_next_leg_never_comes_ends_by_its_deadline(executor):
    pair, lane, say, recipe = liar(executor, reading=True)
    say(messages.ASK, leg(0, 2, (recipe,), seconds=0.1))
    for _ in range(20):
        pair.network.step()
    assert lane.sender.jobs
    pair.network.clock += 1.0
    for _ in range(20):
        pair.network.step()
    assert not lane.sender.jobs
    say(messages.ASK, leg(1, 2, (recipe,)))
    pair.network.settle(20)
    assert not lane.sender.jobs
    assert not lane._requests._asks._parts._open


@pytest.mark.parametrize("reading", [True, False])
def test_a_peer_whose_numbers_have_too_many_gaps_fails_nobody_else(executor, monkeypatch, reading):
    """Its order is open; then a wrong message ends its lane, and no other one."""
    monkeypatch.setattr(pack_orders, "MOST_GAPS", 50)
    pair, lane, say, recipe = liar(executor, reading=reading)
    pair.network.place("good", executor)
    meet(pair.network, "good", "far", ([pair.here], [pair.there]))
    pair.network.settle()
    say(messages.ASK if reading else messages.PUSH, leg(0, 2, (recipe,)))
    for k in range(49):
        say(messages.CANCEL, messages.which_body(messages.PULL if reading else messages.PUSHED, (2 * k + 10) << 1))
    pair.far.end.poll()
    assert lane.why is None
    good = pair.network.places["good"].end.submit("far", pair.push.plan([5], [5]), reading=False)
    say(messages.DATA, b"x")
    pair.network.run(lambda: good.over)
    good.synchronize()
    assert lane.why is not None


def test_parts_of_a_leg_take_as_many_steps_each_however_many_there_are():
    """A peer may cut a leg into many parts: nothing is sorted or compared for each of them."""
    parts, counts = Parts(), Counter()

    def look(_, event, called):
        if event == "c_call":
            counts[called.__name__] += 1

    sys.setprofile(look)
    try:
        for k in range(2000):
            made = parts.add(OrderPart(2, 0, 1, k, 2000, b"x"))
    finally:
        sys.setprofile(None)
    assert made[0].content == b"x" * 2000
    assert counts["sorted"] == 1
    assert sum(counts.values()) < 2000 * 13


def test_parts_without_bytes_are_refused_and_each_counts():
    with pytest.raises(LayoutError, match="empty"):
        Parts().add(OrderPart(2, 1, 2, 0, 1, b""))
    parts = Parts()
    for k in range(1000):  # of legs behind the first one, which does not come
        parts.add(OrderPart(2, 1 + k, 1001, 0, 1, b"x"))
    assert parts._nbytes == 1000 * (1 + pack_orders.PART_COST)
    parts.drop(2)
    assert parts._nbytes == 0


def test_an_order_of_many_legs_is_bounded(monkeypatch):
    monkeypatch.setattr(pack_orders, "MOST_ORDER", 1000)
    parts = Parts()
    parts.add(OrderPart(2, 0, 9, 0, 1, bytes(600)))
    with pytest.raises(LayoutError, match="has over 1,000 bytes"):
        parts.add(OrderPart(2, 1, 9, 0, 1, bytes(600)))
