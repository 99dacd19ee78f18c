"""Naps while the steps of transfers are far apart, with two ends and a clock of the test."""

from __future__ import annotations

import pytest

from kvplan.agents.by_nixl.nixl_progress import (
    AHEAD_NAP,
    BUSY_NAP,
    MOST_BUSY_NAP,
    RATED,
    SPIN_SECONDS,
    STEPS,
    Naps,
)
from kvplan.agents.by_nixl.packed_way import GPU_SLOTS
from kvplan.agents.packed.pack_starts import LEG_UNITS
from tests.agents.by_nixl.virtual_wire import SLOT, Two

PACED = GPU_SLOTS.nbytes / 50e9  # seconds of a chunk on a network card of 400 Gb/s


def moved(seconds, *, patient, slots=GPU_SLOTS.number, together=False):
    """Pull 200 chunks; return the seconds, and the looks of both sides."""
    two = Two(seconds, slots, patient=patient, together=together)
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


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("seconds", [PACED, 2 * PACED])
def test_chunks_that_wait_for_one_another_keep_the_speed_of_the_wire(seconds, reading):
    """A ring of 24 slots, as of a GPU: three chunks a submit on either side, and one or two looks a chunk."""
    two, short = Two(seconds, 24, patient=True, together=True), Two(seconds, 24, patient=False)
    for one in (two, short):
        one.move(20, reading=reading)
    long, least = two.move(200, reading=reading), short.move(200, reading=reading)
    assert 200 * seconds < long < 1.01 * least
    assert max(two.near.submits, two.far.submits) <= 200 / 2.8
    assert max(two.near.looks, two.far.looks) <= 200 * 2.2


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("more", [{"larger": 2}, {"larger": 4}, {"leg_units": 16}, {"leg_units": 64}])
def test_naps_are_long_with_slots_of_two_sizes_and_while_legs_come(more, reading):
    """The speed is known by chunks, whatever the slots; a push whose last leg has not come has chunks to come.

    Each leg takes a look or two.
    """
    legs = 200 * 16 // more.get("leg_units", LEG_UNITS)
    two, equal = (
        Two(2 * PACED, 24, patient=True, together=True, **more),
        Two(2 * PACED, 24, patient=True, together=True),
    )
    for one in (two, equal):
        one.move(20, reading=reading)
    assert two.move(200, reading=reading) < 1.06 * equal.move(200, reading=reading)
    assert max(two.near.looks, two.far.looks) <= 1.5 * max(equal.near.looks, equal.far.looks) + 2 * legs


def test_a_thread_that_works_half_of_the_time_takes_no_long_naps():
    """On a wire four times as fast, looks that move something take longer than the gaps between them."""
    (long, few), (short, many) = (moved(PACED / 4, patient=patient) for patient in (True, False))
    assert long <= 1.01 * short
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


class Far:
    """Naps of a thread to which chunks of 1 MB come, with many on the way."""

    def __init__(self, *, driven: bool = True, chunks: int = 2) -> None:
        self.naps = Naps(0.0, driven=driven)
        self.chunks, self.at = 0, 0.0
        self.naps.moved = lambda: (self.chunks, 1_000_000 * self.chunks)
        self.let(chunks)

    def let(self, chunks):
        """Let so many chunks pass before the next look."""
        self.naps.ahead = lambda: chunks * 1e6

    def come(self, gaps, look=0.0, chunks=1):
        """Let chunks come after each of some times, and a look take as long; return the last nap."""
        nap = None
        for gap in gaps:
            self.at += gap + look
            self.chunks += chunks
            nap = self.naps.after(self.at, moved=True, busy=True, begun=self.at - look)
        return nap


def test_a_nap_is_three_quarters_of_the_time_that_the_bytes_on_the_way_take():
    far = Far()
    assert far.come([1e-3] * RATED) == 0.0  # it is not known how fast they move
    assert far.come([1e-3]) == pytest.approx(1.5e-3)
    far.let(1)
    assert far.come([1e-3]) == pytest.approx(0.75e-3)
    assert far.naps.after(far.at + 5e-4, moved=False, busy=True) == pytest.approx(0.375e-3)  # half of it has passed
    far.let(0)
    assert far.come([1e-3]) == 0.0


@pytest.mark.parametrize("slow", [4, 8, 11])
def test_a_slow_begin_makes_no_later_nap_longer(slow):
    """The sender's compute gives the first chunks. What is on the way then moves as fast as the wire can."""
    far = Far(chunks=8)
    assert far.come([4e-3] * slow) == 0.0
    assert far.come([80e-6] * 30) == 0.0
    far.naps.after(far.at, moved=False, busy=False)
    assert far.naps.after(far.at + 5e-3, moved=False, busy=True) == 0.0
    assert far.naps.after(far.at + 5.2e-3, moved=False, busy=True) == BUSY_NAP


def test_chunks_of_a_peer_that_has_gone_still_count():
    """A speed between two counts, of which one has them and the other has not, would be wrong."""
    two = Two(1e-3, patient=True)
    two.move(20)
    counts = two.near.end.moved, two.far.end.moved
    assert counts[0] == counts[1] == (20, 20 * SLOT)
    for process, peer in ((two.near, "far"), (two.far, "near")):
        process.end.forget(peer)
    two.run(lambda: not any(process.end.has(peer) for process, peer in ((two.near, "far"), (two.far, "near"))))
    ends = two.clock.time + 1.0
    two.run(lambda: two.clock.time > ends)
    assert not two.near.end._peers.every
    assert (two.near.end.moved, two.far.end.moved) == counts


@pytest.mark.parametrize("reading", [True, False])
def test_large_chunks_are_looked_at_rarely(reading):
    """Eight slots of 256 MiB at 50 GB/s: 16 chunks of 5.4 ms. With naps of 0.1 ms there were 15 to 54 looks a chunk."""
    seconds = (256 << 20) / 50e9
    for most, turns in ((38, 1), (25, 3)):
        two = Two(seconds, 8, patient=True, together=True)
        for _ in range(turns):
            taken = two.move(16, reading=reading)
        assert 16 * seconds < taken < 1.02 * 16 * seconds
        assert max(two.near.looks, two.far.looks) <= 16 * most


def test_the_speed_is_that_of_the_fastest_chunks():
    """A pause of the sender makes no later nap longer."""
    far = Far()
    far.come([1e-3] * 14)
    assert far.come([5e-2, 1e-3, 1e-3]) == pytest.approx(1.5e-3)


def test_a_nap_that_was_too_long_shows_by_the_chunks_that_have_come_meanwhile():
    """A transfer begins slowly. Without this, naps would make all of it as slow as its begin."""
    far = Far()
    assert far.come([1e-3] * 14) > 0
    assert far.come([2e-3] * 2, chunks=6) == 0.0


def test_the_next_transfer_begins_with_the_speed_of_the_last_one():
    far = Far(chunks=1)
    far.come([1e-3] * 14)
    far.naps.after(far.at, moved=False, busy=False)
    assert far.naps.after(far.at + 1.0, moved=False, busy=True) == 0.0  # a submit has begun something: look soon
    assert far.naps.after(far.at + 1.0 + 2e-4, moved=False, busy=True) == pytest.approx(0.225e-3)  # it may be slower
    assert far.come([1.0 + 1e-3] + [2e-3] * 14) == pytest.approx(1.5e-3)  # and then has its own


def test_a_nap_is_as_long_as_it_has_been_quiet_at_most():
    """Where one chunk is on the way at a time, a gather ends soon after its submit, and a write much later."""
    far = Far(chunks=0)
    assert far.come([1e-3] * 6) == 0.0
    for quiet, nap in ((1e-5, 0.0), (6e-5, 6e-5), (9e-5, 9e-5), (5e-4, 1e-4)):
        assert far.naps.after(far.at + quiet, moved=False, busy=True) == pytest.approx(nap)


def test_chunks_that_come_within_one_tick_of_the_clock_tell_no_speed():
    assert Far().come([0.0] * 40) == 0.0


def test_a_thread_that_is_busy_takes_no_long_naps():
    """If looks take longer than the gaps between them, a nap would make the gaps longer, and they the nap."""
    for look, nap in ((5e-4, 1.125e-3), (1.5e-3, 0.0)):
        assert Far(chunks=1).come([1e-3] * 14, look) == pytest.approx(nap)


def test_a_thread_takes_no_long_naps_if_a_chunk_moves_faster_than_its_steps_take():
    """Many are on the way then, and each needs a submit, looks and a note."""
    for seconds, nap in ((0.9 * STEPS, 0.0), (1.1 * STEPS, 1.65 * STEPS)):
        assert Far().come([seconds] * 14) == pytest.approx(nap)


def test_naps_are_bounded_and_begin_anew():
    far = Far()
    assert far.come([1.0] * 14) == AHEAD_NAP
    far.let(0)
    assert far.naps.after(14.5, moved=False, busy=True) == 5e-4
    far.naps.after(15.0, moved=False, busy=False)
    assert far.naps.after(60.0, moved=False, busy=True) == 0.0  # a submit has begun something: its steps come soon
    assert far.naps.after(60.0 + SPIN_SECONDS, moved=False, busy=True) == BUSY_NAP
    assert far.naps.after(90.0, moved=False, busy=True) == MOST_BUSY_NAP


def test_bytes_that_move_by_looks_are_not_left_alone():
    """Without a thread of NIXL, a socket is filled by looks: naps are short until the wire is seen to be faster."""
    far = Far(driven=False)
    assert far.come([1.0] * 14) == 0.0
    assert far.naps.after(14.5, moved=False, busy=True) == BUSY_NAP
    far.naps.fast = lambda: True
    assert far.naps.after(14.5, moved=False, busy=True) == AHEAD_NAP


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
