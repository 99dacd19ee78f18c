"""Naps while the steps of transfers are far apart, with two ends and a clock of the test."""

from __future__ import annotations

import pytest

from kvplan.agents.by_nixl.nixl_progress import BUSY_NAP, MOST_BUSY_NAP, SPIN_SECONDS, Naps
from kvplan.agents.by_nixl.packed_way import GPU_SLOTS
from tests.agents.by_nixl.virtual_wire import Two

PACED = GPU_SLOTS.nbytes / 50e9  # seconds of a chunk on a network card of 400 Gb/s


def moved(seconds, *, patient):
    """Pull 200 chunks; return the seconds, and the looks of both sides."""
    two = Two(seconds, GPU_SLOTS.number, patient=patient)
    two.move(20)
    taken = two.move(200)
    return taken, (two.near.looks, two.far.looks)


@pytest.mark.parametrize("seconds", [PACED, PACED / 2, 3 * PACED])
def test_long_naps_keep_the_speed_of_the_wire(seconds):
    """A chunk takes as long as on the wire alone, within 1 %, and each side makes fewer looks."""
    short, many = moved(seconds, patient=False)
    long, few = moved(seconds, patient=True)
    assert 200 * seconds < long < 1.01 * short
    assert all(some < 0.75 * other for some, other in zip(few, many, strict=True)), (few, many)
    assert max(few) <= 200 * max(7.5, 8.5 * seconds / PACED)


def test_a_fast_wire_is_looked_at_without_naps():
    """Where a chunk takes less than a look and its work, the looks are the same."""
    (long, few), (short, many) = (moved(50e-6, patient=patient) for patient in (True, False))
    assert (long, *few) == pytest.approx((short, *many), rel=0.02)


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
    assert steps(naps, [8e-4, 8e-4, 1e-5, 1e-5]) == [0.0] * 4  # the first look began the transfer
    assert steps(naps, [1e-5, 1e-5, 1e-5], 2e-3)[0] > BUSY_NAP
    assert steps(naps, [1e-5] * 5, 3e-3)[-1] == 0.0  # a faster transfer


def test_naps_are_bounded_and_begin_anew():
    naps = Naps(0.0, driven=True)
    assert steps(naps, [1.0] * 6)[-1] == MOST_BUSY_NAP
    naps.after(7.0, moved=False, busy=False)
    assert naps.after(60.0, moved=False, busy=True) == 0.0  # a submit has begun something: its steps come soon
    assert naps.after(60.0 + SPIN_SECONDS, moved=False, busy=True) == BUSY_NAP
    assert naps.after(90.0, moved=False, busy=True) == MOST_BUSY_NAP


def test_bytes_that_move_by_looks_are_not_left_alone():
    """Without a thread of NIXL, a socket is filled by looks."""
    naps = Naps(0.0)
    assert steps(naps, [1.0] * 6)[-1] == 0.0
    assert naps.after(9.0, moved=False, busy=True) == BUSY_NAP
