"""The pace of a wire: one that a CPU thread feeds is never taken for hardware, whatever comes early or late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplan.agents.packed.wire import CHUNKS, FAST, LEAST_CHUNKS, Pace


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
