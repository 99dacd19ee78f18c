"""Naps while the steps of transfers are far apart, with two ends and a clock of the test."""

from __future__ import annotations

import pytest

from kvplan.agents.by_nixl.nixl_progress import AHEAD_NAP, BUSY_NAP, MOST_BUSY_NAP, SPIN_SECONDS, Naps
from kvplan.agents.by_nixl.packed_way import GPU_SLOTS
from tests.agents.by_nixl.virtual_wire import Two

PACED = GPU_SLOTS.nbytes / 50e9  # seconds of a chunk on a network card of 400 Gb/s


def moved(seconds, *, patient, slots=GPU_SLOTS.number):
    """Pull 200 chunks; return the seconds, and the looks of both sides."""
    two = Two(seconds, slots, patient=patient)
    two.move(20)
    taken = two.move(200)
    return taken, (two.near.looks, two.far.looks)


@pytest.mark.parametrize("slots", [GPU_SLOTS.number, 12, 8])
@pytest.mark.parametrize("seconds", [PACED, 2 * PACED, 3 * PACED])
def test_long_naps_keep_the_speed_of_the_wire(seconds, slots):
    """A chunk takes as long as on the wire alone, within 1 %, and each side looks about three times for it."""
    short, many = moved(seconds, patient=False, slots=slots)
    long, few = moved(seconds, patient=True, slots=slots)
    assert 200 * seconds < long < 1.01 * short
    assert all(some < 0.75 * other for some, other in zip(few, many, strict=True)), (few, many)
    assert max(few) <= 200 * max(3.6, 3.9 * seconds / (2 * PACED))


def test_a_thread_that_works_half_of_the_time_takes_no_long_naps():
    """On a wire twice as fast, looks that move something take as long as the gaps between them."""
    (long, few), (short, many) = (moved(PACED / 2, patient=patient) for patient in (True, False))
    assert long <= short
    assert min(few) > 0.75 * min(many)


@pytest.mark.parametrize("slots", [2, 4, 6])
def test_a_ring_of_few_slots_is_looked_at_more_often(slots):
    """Where one chunk is on the way at a time, every look that is late delays it: naps are shorter."""
    for seconds in (PACED / 2, PACED, 2 * PACED):
        (long, few), (short, many) = (moved(seconds, patient=patient, slots=slots) for patient in (True, False))
        assert long < 1.2 * short
        assert max(few) <= max(many)


def test_a_fast_wire_is_looked_at_without_naps():
    """Where a chunk takes less than a look and its work, the looks are the same."""
    (long, few), (short, many) = (moved(50e-6, patient=patient) for patient in (True, False))
    assert long == pytest.approx(short, rel=0.02)
    assert few == pytest.approx(many, rel=0.1)


def test_a_short_transfer_is_not_delayed():
    """One chunk alone has few gaps before it: naps are a small share of the time that its steps take."""
    for seconds in (10e-6, 100e-6, PACED, 3 * PACED):
        short, long = (Two(seconds, patient=patient).move(1) for patient in (False, True))
        assert long <= max(1.06 * short, short + 1e-6)


def steps(naps, times, at=0.0):
    """Let looks move something after each of some times; return the naps after these looks."""
    found = []
    for gap in times:
        at += gap
        found.append(naps.after(at, moved=True, busy=True))
    return found


def test_naps_follow_the_longest_of_the_latest_gaps():
    naps = Naps(0.0, driven=True)
    naps.ahead = lambda: True
    assert steps(naps, [8e-4, 8e-4, 1e-5, 1e-5]) == [0.0] * 4  # the first look began the transfer
    assert steps(naps, [1e-5, 1e-5, 1e-5], 2e-3) == [4e-4] * 3
    assert steps(naps, [1e-5] * 9, 3e-3)[-1] == 0.0  # a faster transfer


def test_a_nap_is_as_long_as_it_has_been_quiet_at_most():
    """Where one chunk is on the way at a time, a gather ends soon after its submit, and a write much later."""
    naps = Naps(0.0, driven=True)
    assert steps(naps, [1e-3] * 6)[-1] == 0.0
    for quiet, nap in ((1e-5, 0.0), (6e-5, 6e-5), (9e-5, 9e-5), (5e-4, 1e-4)):
        assert naps.after(6e-3 + quiet, moved=False, busy=True) == pytest.approx(nap)


def test_the_time_of_a_look_is_no_gap():
    """A thread that is busy all the time does not nap, however long its looks take."""
    naps = Naps(0.0, driven=True)
    naps.ahead = lambda: True
    assert [naps.after(at, moved=True, busy=True, begun=at - 1e-3) for at in (1.0, 1.001, 1.002, 1.003, 1.004)][-1] == 0
    assert [naps.after(at, moved=True, busy=True, begun=at - 4e-4) for at in (2.001, 2.002)][-1] > 0


def test_looks_that_take_longer_than_the_gaps_allow_no_long_naps():
    """Otherwise a nap makes the gaps longer, and they the nap: such a nap stays as long as a chunk on a fast wire."""
    naps = Naps(0.0, driven=True)
    naps.ahead = lambda: True
    for took, nap in ((5e-5, 1e-4), (3e-4, 0.0)):
        at = 1.0
        for _ in range(9):
            at += 2e-4 + took
            found = naps.after(at, moved=True, busy=True, begun=at - took)
        assert found == pytest.approx(nap)
        naps.after(at, moved=False, busy=False)


def test_naps_are_bounded_and_begin_anew():
    naps = Naps(0.0, driven=True)
    assert steps(naps, [1.0] * 6)[-1] == 0.0
    assert naps.after(6.5, moved=False, busy=True) == MOST_BUSY_NAP
    naps.ahead = lambda: True
    assert naps.after(6.5, moved=False, busy=True) == AHEAD_NAP
    naps.ahead = lambda: False
    naps.after(7.0, moved=False, busy=False)
    assert naps.after(60.0, moved=False, busy=True) == 0.0  # a submit has begun something: its steps come soon
    assert naps.after(60.0 + SPIN_SECONDS, moved=False, busy=True) == BUSY_NAP
    assert naps.after(90.0, moved=False, busy=True) == MOST_BUSY_NAP


def test_bytes_that_move_by_looks_are_not_left_alone():
    """Without a thread of NIXL, a socket is filled by looks: naps are short until the wire is seen to be faster."""
    naps = Naps(0.0)
    naps.ahead = lambda: True
    assert steps(naps, [1.0] * 6)[-1] == 0.0
    assert naps.after(9.0, moved=False, busy=True) == BUSY_NAP
    naps.fast = lambda: True
    assert naps.after(9.0, moved=False, busy=True) == AHEAD_NAP


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize(("rate", "fast"), [(390e9, True), (50e9, True), (25e9, True), (9e9, False), (2.4e9, False)])
def test_a_wire_of_hardware_is_seen_by_its_pace(rate, fast, reading):
    """Both ends see it by sixty chunks of either direction. The wire moves several at once, or one after another."""
    two = Two(4096 / rate * 1e3, 12, patient=False)  # a thousandth of the rate, since a slot is small here
    for process in (two.near, two.far):
        for lane in process.end._peers.every:
            for pace in lane.paces:
                pace.end = lambda begun, nbytes, end=pace.end: end(begun, 1000 * nbytes)
    two.move(60, reading=reading)
    assert not two.near.end.fast  # nothing is in flight
    lanes = [lane for process in (two.near, two.far) for lane in process.end._peers.every]
    assert {any(pace.fast for pace in lane.paces) for lane in lanes} == {fast}
