"""The calls that move chunks through the ring of the staged path: literal lists, and the bounds of early copies."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.cuda.calls import APART, BATCH, COPY, LAUNCH, RECORD, SYNC, WAIT, schedule

COPY_STREAM, KERNELS, OTHERS, FORK, HEADER, STEP = 80, 81, 82, 7, 5000, 72
NAMES = {RECORD: "record", WAIT: "wait", LAUNCH: "launch", COPY: "header", BATCH: "batch", SYNC: "nap", APART: "apart"}


def listed(*, load, edges, slots, late, most=64, other=KERNELS, fork=0, busy=False):
    """The calls as words; events 100 and up are of filled slots, 200 and up of freed ones."""
    rows = np.zeros((100, 4), np.int64)
    written, copies = schedule(
        load, np.array(edges), most, 0, np.full(slots, busy), np.arange(100, 100 + slots), np.arange(200, 200 + slots),
        COPY_STREAM, KERNELS, other, fork, HEADER, STEP, late, rows,
    )  # fmt: skip
    made = [(NAMES[which], one, end, stream) for which, one, end, stream in rows[:written].tolist()]
    assert copies == sum(call[0] in ("batch", "apart") for call in made)
    return made


def words(made):
    return [f"{name} {one}" if name in ("record", "wait", "nap") else name for name, one, _, _ in made]


def test_streams_wait_for_the_slots_of_a_short_load():
    made = listed(load=True, edges=[1, 3, 5], slots=2, late=False)
    assert words(made) == [
        "batch", "header", "record 100", "wait 100", "launch", "record 200",
        "batch", "record 101", "wait 101", "launch", "record 201",
    ]  # fmt: skip
    assert made[0] == ("batch", 1, 3, COPY_STREAM)
    assert made[3:5] == [("wait", 100, 0, KERNELS), ("launch", HEADER, 0, KERNELS)]
    assert made[9] == ("launch", HEADER + STEP, 0, KERNELS)


def test_the_player_waits_for_the_slots_of_a_long_load_behind_two_more_chunks():
    made = listed(load=True, edges=[1, 2, 3, 4, 5], slots=3, late=True, other=OTHERS, fork=FORK)
    assert words(made) == [
        "batch", "header", "record 100", "batch", "record 101",
        "batch", "record 102", "record 7", "wait 7", "nap 100", "launch", "record 200",
        "wait 200", "batch", "record 100", "nap 101", "launch", "record 201",
        "nap 102", "launch", "record 202",
        "nap 100", "launch", "record 200", "wait 200",
    ]  # fmt: skip
    assert [(name, stream) for name, _, _, stream in made if name == "nap"] == [
        ("nap", KERNELS), ("nap", OTHERS), ("nap", KERNELS), ("nap", OTHERS),
    ]  # fmt: skip
    assert made[12] == ("wait", 200, 0, COPY_STREAM)


def test_the_player_waits_until_slots_of_a_long_store_are_free():
    made = listed(load=False, edges=[0, 2, 4, 6], slots=2, late=True)
    assert words(made) == [
        "launch", "record 100", "wait 100", "batch", "record 200",
        "launch", "record 101", "wait 101", "batch", "record 201",
        "nap 200", "launch", "record 100", "wait 100", "batch", "record 200",
    ]  # fmt: skip


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("load", [True, False])
def test_slots_that_an_earlier_transfer_uses_are_waited_for(load, late):
    made = listed(load=load, edges=[0, 1, 2], slots=2, late=late, busy=True)
    waits = [call[:2] for call in made if call[0] in ("wait", "nap") and call[1] >= 200]
    assert waits == [("nap" if late and not load else "wait", 200), ("nap" if late and not load else "wait", 201)]


def test_chunks_have_as_many_batches_as_their_copies_need():
    made = listed(load=True, edges=[1, 6], slots=2, late=False, most=2)
    assert [call[1:3] for call in made if call[0] == "batch"] == [(1, 3), (3, 5), (5, 6)]
    made = listed(load=True, edges=[1, 6], slots=2, late=False, most=0)
    assert [call[:3] for call in made if call[0] == "apart"] == [("apart", 1, 6)]


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 9])
def test_each_event_is_recorded_before_it_is_waited_for_and_each_slot_is_free(load, slots, chunks):
    """Law of the ring: what is waited for was recorded earlier in the list, by the last user of the slot."""
    other = OTHERS if load and chunks > 1 else KERNELS
    for late in (True, False):
        made = listed(load=load, edges=list(range(chunks + 1)), slots=slots, late=late, other=other)
        recorded: dict[int, int] = {}
        for name, one, _, _ in made:
            if name == "record":
                recorded[one] = recorded.get(one, 0) + 1
            elif name in ("wait", "nap"):
                filled = recorded.get(100 + one % 100, 0)
                assert recorded[one] >= 1
                assert filled - recorded.get(200 + one % 100, 0) in ((1,) if one < 200 else (0,)), (name, one)
        assert sum(recorded.values()) == 2 * chunks
