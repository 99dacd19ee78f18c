"""Orders that are told in legs: what a leg holds, and transfers that begin, fail or end before all legs are told."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import TransferError
from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_messages import OrderPart
from kvplan.agents.packed.pack_orders import Parts
from kvplan.agents.packed.pack_starts import Telling, legs_of
from kvplan.errors import KVPlanError, LayoutError
from kvplan.plan.packing.packing import packing_of
from tests.agents.packed.pairs import BLOCKS, Pair


def halves(*units):
    """Halves of so many units of 64 bytes."""
    a, b = (kvplan.KVLayout.from_tensors("block dim", np.zeros((100, 64), np.uint8)) for _ in range(2))
    return [packing_of(kvplan.compile(a, b).plan(range(count), range(count))).src for count in units]


@pytest.mark.parametrize(
    ("units", "chunk_nbytes", "most", "legs"),
    [
        ([10], 256, 100, [[10]]),  # one leg: the half as it is
        ([10], 256, 8, [[4], [6]]),  # chunks of four units; the first leg has a quarter, but a chunk at least
        ([20], 256, 8, [[4], [8], [8]]),
        ([20], 256, 16, [[4], [16]]),
        ([20], 256, 32, [[8], [12]]),
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
    seen, leg = [], Telling.leg

    def noted(self, number, now):
        seen.append(number)
        return change(number, leg(self, number, now))

    monkeypatch.setattr(Telling, "leg", noted)
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
