"""Compiled loops that call the driver: each makes the driver's own calls, until one fails."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kvplan.cuda import call_list, calls, short_calls
from kvplan.cuda.call_errors import error_of
from kvplan.cuda.call_list import Segment, launch_words, new_state
from kvplan.cuda.device import DriverError
from kvplan.execute.gpu.copy_engine import parameters

ENTRIES = {"cuEventRecord": 2, "cuStreamWaitEvent": 3, "cuLaunchKernelEx": 4, "cuMemcpyAsync": 4,
           "cuMemcpyBatchAsync": 9, "cuMemcpy2DAsync_v2": 2, "cuEventQuery": 1,
           "cuStreamWriteValue64_v2": 4}  # fmt: skip


def words_at(address, count):
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64).tolist()


@pytest.fixture
def seen(device):
    """What the driver is called with, past the interpreter; the call that fails, what it returns, its descriptor."""
    seen = SimpleNamespace(calls=[], failing=-1, at=99, code=719)

    def entry(name, *given):
        if name == "cuLaunchKernelEx":
            config, function, arguments, extra = given
            (header,) = words_at(words_at(arguments, 1)[0], 1)
            given = function, header, words_at(config, 7), extra
        if name == "cuMemcpyBatchAsync":
            ctypes.c_int64.from_address(given[7]).value = seen.at
            given = [words_at(column, given[3]) for column in given[:3]], given[8]
        seen.calls.append((name, *given))
        return seen.code if len(seen.calls) == seen.failing + 1 else 0

    seen.entries = []
    for name, count in ENTRIES.items():
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)
        seen.entries.append(kind(lambda *given, name=name: entry(name, *given)))
        setattr(device.driver, name, seen.entries[-1])
    return seen


ROWS = np.array([[calls.COPY, 1, 0, 80], [calls.BATCH, 2, 4, 81], [calls.RECORD, 5, 0, 77], [calls.WAIT, 6, 0, 78],
                 [calls.LAUNCH, 0x5000, 1, 79], [calls.COPY_2D, 0, 0, 82], [calls.SYNC, 5, 0, 0]])  # fmt: skip
COLUMNS = np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])  # source, destination, bytes
LAUNCHES = np.stack([launch_words((1, 32, 0), 1), launch_words((0x78, 512, 64), 132)])
BOX = parameters(np.array([[0x1000, 0x2000, 8, 3, 16, 32]]))
LIST = Segment(ROWS, COLUMNS, LAUNCHES, BOX)
CONFIG = np.array([132, 1, 1, 512, 1, 1, 64, 0], np.uint32).view(np.int64).tolist()
EXPECTED = [
    ("cuMemcpyAsync", 21, 11, 31, 80),
    ("cuMemcpyBatchAsync", [[22, 23], [12, 13], [32, 33]], 81),
    ("cuEventRecord", 5, 77),
    ("cuStreamWaitEvent", 78, 6, 0),
    ("cuLaunchKernelEx", 0x78, 0x5000, [*CONFIG, 79, 0, 0], 0),
    ("cuMemcpy2DAsync_v2", BOX.ctypes.data, 82),
    ("cuEventQuery", 5),
]


@pytest.fixture
def played(device, seen):
    """Play the list; return its state and the error's text."""

    def play(*, failing=-1, code=719):
        seen.failing, seen.code, state = failing, code, new_state()
        device.play([LIST], state)
        return state, str(error_of(device, [LIST], state)) if state[calls.FAILED] else ""

    return play


def test_a_list_is_played_by_the_driver_s_own_calls(played, seen):
    state, error = played()
    assert seen.calls == EXPECTED
    assert not error
    assert state[[calls.PLAYED, calls.FAILED, calls.ENDED, calls.ADDED]].tolist() == [len(ROWS), 0, 1, 0]


@pytest.mark.parametrize(("failing", "what"), [
    (0, r"cuMemcpyAsync returned CUDA_ERROR_PLAYED.*descriptor 1 of 4, 31 bytes from 0xb to 0x15"),
    (1, r"cuMemcpyBatchAsync returned CUDA_ERROR_PLAYED.*of 2 copies"), (2, "cuEventRecord returned"),
    (3, "cuStreamWaitEvent returned"), (4, "cuLaunchKernelEx returned"),
    (5, r"cuMemcpy2DAsync returned.*2-D copy 0 of 1, 3 rows of 8 bytes from 0x1000 to 0x2000"),
    (6, "cuEventQuery returned"),
])  # fmt: skip
def test_the_call_of_a_list_that_fails_is_the_last_and_its_error_names_it(played, seen, failing, what):
    state, error = played(failing=failing)
    assert seen.calls == EXPECTED[: failing + 1]
    assert state[[calls.PLAYED, calls.FAILED, calls.FAILED_ROW]].tolist() == [failing, 719, failing]
    assert re.search(what, error)


def test_a_batch_that_fails_names_its_descriptor(played, seen):
    seen.at = 1
    assert "descriptor 3 of 4, 33 bytes from 0xd to 0x17" in played(failing=1)[1]


def test_rows_of_several_allocations_are_copied_one_by_one(played, seen):
    state, _ = played(failing=5, code=1)
    lines = [("cuMemcpyAsync", 0x2000 + 32 * k, 0x1000 + 16 * k, 8, 82) for k in range(3)]
    assert seen.calls == [*EXPECTED[:6], *lines, EXPECTED[6]]
    assert state[[calls.PLAYED, calls.FAILED, calls.ENDED, calls.ADDED]].tolist() == [len(ROWS), 0, 1, 2]


def test_a_list_waits_for_an_event_with_naps(played, seen):
    """It asks again as long as the driver says that the event has not passed."""
    state, error = played(failing=6, code=600)
    assert seen.calls == [*EXPECTED, EXPECTED[6]]
    assert not error
    assert state[[calls.PLAYED, calls.FAILED, calls.ENDED]].tolist() == [len(ROWS), 0, 1]


LAUNCH = {"begin": 5, "end": 6, "kernel": (0x78, 512, 64), "programs": 132, "stream": 79, "argument": 0x5000}


@pytest.mark.parametrize("copied", [{}, {"source": 0x6000, "nbytes": 4096}])
@pytest.mark.parametrize("failing", range(-1, 3))
def test_a_recorded_launch_is_its_calls_up_to_the_one_that_fails(device, seen, copied, failing):
    seen.failing = failing
    whole = [
        ("cuEventRecord", 5, 79),
        *([("cuMemcpyAsync", 0x5000, 0x6000, 4096, 79)] if copied else []),
        ("cuLaunchKernelEx", 0x78, 0x5000, [*CONFIG, 79, 0, 0], 0),
        ("cuEventRecord", 6, 79),
    ]
    if failing < 0:
        device.launch_recorded(**LAUNCH, **copied)
    else:
        with pytest.raises(DriverError, match=f"{whole[failing][0]} returned"):
            device.launch_recorded(**LAUNCH, **copied)
    assert seen.calls == (whole if failing < 0 else whole[: failing + 1])


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("copied", [0, 152])
@pytest.mark.parametrize("failing", range(-1, 3))
def test_the_launch_of_units_writes_its_slot_before_any_call(device, seen, count, copied, failing):
    """The header's numbers by hand: units behind it, as the kernel sees them, at the slot or at its copy."""
    slot = np.full(9 + 2 * count + 1, 77)
    units, table = np.arange(2 * count).reshape(2, count) + 1000, np.array([0, 4, 2, 0, 0, 31, 32, 33, 1])
    here = slot.ctypes.data
    there = 0x5000 if copied else here
    seen.failing = failing
    given = {**LAUNCH, "argument": there, "source": here, "nbytes": copied, "units": units, "table": table}
    names = ["cuEventRecord", *(["cuMemcpyAsync"] if copied else []), "cuLaunchKernelEx", "cuEventRecord"]
    if failing < 0:
        device.launch_units(**given)
    else:
        with pytest.raises(DriverError, match=f"{names[failing]} returned"):
            device.launch_units(**given)
    header = [count, 4, 2, there + 8 * 9, there + 8 * (9 + count), 31, 32, 33, 1]
    assert slot.tolist() == [*header, *units.ravel().tolist(), 77]
    whole = [("cuEventRecord", 5, 79), *([("cuMemcpyAsync", there, here, copied, 79)] if copied else []),
             ("cuLaunchKernelEx", 0x78, there, [*CONFIG, 79, 0, 0], 0), ("cuEventRecord", 6, 79)]  # fmt: skip
    assert seen.calls == (whole if failing < 0 else whole[: failing + 1])


@pytest.mark.parametrize("failing", range(-1, 3))
@pytest.mark.parametrize("event", [0, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_words_behind_an_event_are_written_by_the_driver_s_own_calls(device, seen, count, event, failing):
    whole = [("cuStreamWaitEvent", 80, 5, 0)] if event else []
    whole += [("cuStreamWriteValue64_v2", 80, 0x1000 + 8 * k, 7 + k, 0) for k in range(count)]
    seen.failing = failing
    addresses, values = tuple(0x1000 + 8 * k for k in range(count)), tuple(7 + k for k in range(count))
    if 0 <= failing < len(whole):
        with pytest.raises(DriverError, match=f"{whole[failing][0].removesuffix('_v2')} returned"):
            device.write_behind(event, 80, addresses, values)
        assert seen.calls == whole[: failing + 1]
    else:
        device.write_behind(event, 80, addresses, values)
        assert seen.calls == whole


def test_all_files_number_the_calls_alike():
    """The compiled loops have constants of their own, because numba keeps their code until their file changes."""
    for name in ("RECORD", "WAIT", "LAUNCH", "COPY", "BATCH", "COPY_2D", "SYNC", "AWAIT", "APART", "PLAYED", "FAILED",
                 "FAILED_ROW", "FAILED_COPY", "ENDED", "ADDED", "HURRIED", "STATE_WORDS", "LAST_ROW"):  # fmt: skip
        assert getattr(calls, name) == getattr(call_list, name), name
    for name in ("RECORD", "WAIT", "LAUNCH", "COPY", "STREAM_WORD"):
        assert getattr(short_calls, name) == getattr(calls, name), name
    assert short_calls.WRITE == len(calls.NAMES) + 1 == calls.NAP + 1
    assert [name.removesuffix("_v2") for name in calls.NAMES] == list(call_list.NAMES)
