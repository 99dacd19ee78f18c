"""The pace of a wire: one that a CPU thread feeds is never taken for hardware, whatever comes early or late."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.agents.packed.wire import CHUNKS, FAST, LEAST_CHUNKS, Pace
from tests.agents.packed.pairs import Pair


class Clock:
    time = 0.0

    def __call__(self):
        return self.time


seconds = st.floats(0, 1e-2)
chunks = st.lists(st.tuples(seconds, seconds, seconds, st.integers(1, 64 << 20)), max_size=60)


@given(chunks, st.floats(0.01, 0.999))
def test_a_slow_wire_is_never_fast(some, share):
    """Chunks wait for one another on the wire; each was posted before, and is found later."""
    clock = Clock()
    pace, free_at = Pace(clock), 0.0
    for pause, early, late, nbytes in some:
        begun = max(0.0, clock.time + pause - early)  # a receiver knows only a time before
        free_at = max(free_at, clock.time + pause) + nbytes / (share * FAST)
        clock.time = max(clock.time, free_at) + late
        pace.end(begun, nbytes)
    assert not pace.fast


@given(st.integers(1, 12), st.floats(1.0, 100.0), chunks)
def test_a_fast_wire_is_seen_however_many_chunks_share_it(window, times, before):
    """As many chunks as slots are posted at once, over and over, after slow ones of an earlier transfer."""
    clock = Clock()
    pace = Pace(clock)
    for pause, _, late, nbytes in before:
        begun = clock.time
        clock.time += pause + late + nbytes / FAST
        pace.end(begun, nbytes)
    nbytes, each = 32 << 20, (32 << 20) / (5 * times * FAST)
    posted = [clock.time] * window
    for _ in range(CHUNKS + window):
        clock.time += each
        pace.end(posted.pop(0), nbytes)
        posted.append(clock.time)
    assert pace.fast
    assert pace.begin() == 0.0


def test_few_chunks_say_nothing():
    """A chunk that was posted just before its end is found may be an accident of the clock."""
    pace = Pace(lambda: 1.0)
    for count in range(LEAST_CHUNKS):
        assert not pace.fast, count
        pace.end(1.0, 64 << 20)
    assert pace.fast


# ---- bytes that may move before the next look ----

CHUNK = 192  # bytes: of a block, in slots of 256


def moving(executor, *, reading, **submit):
    """A pair in the middle of a transfer of 14 chunks, whose wires stand still: four writes are on the way."""
    ring = {"slot_nbytes": 256, "slots": 24, "sending": 8, "granted": 16}
    pair = Pair(executor, near=ring, far=ring, blocks=14)
    pair.network.settle()
    transfer = pair.submit(reading=reading, **submit)
    sender = (pair.far if reading else pair.near).lane("near" if reading else "far").sender
    pair.network.run(lambda: len(sender._writing) >= 4)
    for wire in pair.network.wires:
        wire.frozen = True
    for _ in range(30):
        pair.network.step()
    return pair, transfer, sender


@pytest.mark.parametrize("reading", [True, False])
def test_a_sender_is_ahead_by_the_writes_behind_the_next_two(executor, reading):
    pair, _, sender = moving(executor, reading=reading)
    assert sender._gathering or any(sender._lines)  # more are to come
    assert sender.ahead == (len(sender._writing) - 2) * CHUNK
    assert 0 < (pair.far if reading else pair.near).end.ahead <= sender.ahead


@pytest.mark.parametrize("reading", [True, False])
def test_a_transfer_that_waits_for_its_after_is_asked_often(executor, reading):
    pair, _, _ = moving(executor, reading=reading)
    assert pair.far.end.ahead > 0 or pair.near.end.ahead > 0
    event = threading.Event()
    other = pair.submit([0], [0], reading=False, after=event)
    assert pair.near.end.ahead == 0
    event.set()
    for wire in pair.network.wires:
        wire.frozen = False
    pair.ended(other)


def test_an_end_that_moves_nothing_is_not_ahead(executor):
    pair = Pair(executor)
    pair.network.settle()
    assert not pair.near.end.busy
    assert pair.near.end.ahead == 0
    transfer = pair.submit([0], [0], reading=True, after=threading.Event())
    assert pair.near.end.busy
    assert pair.near.end.ahead == 0
    assert transfer.cancel()


def test_a_receiver_is_not_ahead_of_its_last_chunk(executor):
    """The fewer are to come, and the fewer slots the peer has, the sooner it looks; the last chunk is looked for."""
    pair, transfer, _ = moving(executor, reading=True)
    receiver = pair.near.lane("far").receiver
    for wire in pair.network.wires:
        wire.frozen = False
    seen = {}
    while not transfer.over:
        left = [len(one.rows) - one.come for one in receiver.inbounds.values()]
        seen[left[0] if left else 0] = receiver.ahead
        pair.network.step()
    assert seen[1] == 0
    assert all(value <= left // 2 * CHUNK for left, value in seen.items() if left >= 4)
    assert all(value == 0.5 * CHUNK for left, value in seen.items() if left in (2, 3))
