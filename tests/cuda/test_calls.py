"""Compiled loops that call the driver: each makes the driver's own calls, until one fails."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.cuda import calls
from kvplan.cuda import device as cuda
from kvplan.cuda.device import DriverError
from tests.profiles import examples


@examples(250)
@given(
    moves=st.lists(st.tuples(st.integers(0, 1 << 60), st.integers(0, 1 << 60), st.integers(0, 1 << 40)), max_size=20),
    stream=st.integers(0, 1 << 60),
    failing=st.integers(0, 20),
)
def test_copies_one_by_one_are_the_driver_s_own_calls_until_one_fails(moves, stream, failing):
    seen = []

    def copy(dst, src, nbytes, stream):
        seen.append((dst, src, nbytes, stream))
        return 719 if len(seen) == failing + 1 else 0

    entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(copy)
    dst, src, size = np.array(moves, np.int64).reshape(-1, 3).T.copy()
    at, code = calls.copy_each(ctypes.cast(entry, ctypes.c_void_p).value, dst, src, size, stream)
    issued = [(*move, stream) for move in moves[: failing + 1]]
    assert seen == issued
    assert (at, code) == ((failing, 719) if failing < len(moves) else (len(moves), 0))


def test_a_copy_of_many_that_fails_is_named(device):
    refuses = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(lambda dst, src, nbytes, stream: 719 * (dst == 7))
    device.driver.cuMemcpyAsync = refuses
    three = np.array([5, 7, 9])
    with pytest.raises(DriverError, match=r"cuMemcpyAsync returned CUDA_ERROR_PLAYED \(719.*: of 3 copies") as caught:
        device.copy_each(three, three, three, 4)
    assert (caught.value.at, caught.value.code) == (1, 719)
    device.copy_each(three[:1], three[:1], three[:1], 4)


ENTRIES = {"cuEventRecord": 2, "cuStreamWaitEvent": 3, "cuLaunchKernelEx": 4, "cuMemcpyAsync": 4,
           "cuMemcpyBatchAsync": 9}  # fmt: skip


def words_at(address, count):
    return np.frombuffer((ctypes.c_int64 * count).from_address(address), np.int64).tolist()


@pytest.fixture
def seen(device):
    """What the driver is called with, past the interpreter; the call that fails, what it returns, its descriptor."""
    seen = SimpleNamespace(calls=[], failing=-1, at=99)

    def entry(name, *given):
        if name == "cuLaunchKernelEx":
            config, function, arguments, extra = given
            (header,) = words_at(words_at(arguments, 1)[0], 1)
            given = function, header, words_at(config, 7), extra
        if name == "cuMemcpyBatchAsync":
            ctypes.c_int64.from_address(given[7]).value = seen.at
            given = [words_at(column, given[3]) for column in given[:3]], given[8]
        seen.calls.append((name, *given))
        return 719 if len(seen.calls) == seen.failing + 1 else 0

    seen.entries = []
    for name, count in ENTRIES.items():
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * count)
        seen.entries.append(kind(lambda *given, name=name: entry(name, *given)))
        setattr(device.driver, name, seen.entries[-1])
    return seen


ROWS = np.array([[calls.COPY, 1, 0, 80], [calls.BATCH, 2, 4, 81], [calls.RECORD, 5, 0, 77], [calls.WAIT, 6, 0, 78],
                 [calls.LAUNCH, 0x5000, 0, 79]])  # fmt: skip
COLUMNS = np.array([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])  # source, destination, bytes


def test_calls_that_are_written_down_are_the_driver_s_own(device, seen):
    device.issue(ROWS, COLUMNS, (0x78, 512, 64), 132)
    config = np.array([132, 1, 1, 512, 1, 1, 64, 0], np.uint32).view(np.int64).tolist()
    assert seen.calls == [
        ("cuMemcpyAsync", 21, 11, 31, 80),
        ("cuMemcpyBatchAsync", [[22, 23], [12, 13], [32, 33]], 81),
        ("cuEventRecord", 5, 77),
        ("cuStreamWaitEvent", 78, 6, 0),
        ("cuLaunchKernelEx", 0x78, 0x5000, [*config, 79, 0, 0], 0),
    ]


@pytest.mark.parametrize(("failing", "name"), [
    (0, "cuMemcpyAsync"), (1, "cuMemcpyBatchAsync"), (2, "cuEventRecord"), (3, "cuStreamWaitEvent"),
    (4, "cuLaunchKernelEx"),
])  # fmt: skip
def test_of_calls_that_are_written_down_the_one_that_fails_is_named_and_the_last(device, seen, failing, name):
    seen.failing = failing
    with pytest.raises(DriverError, match=f"{name} returned CUDA_ERROR_PLAYED") as caught:
        device.issue(ROWS, COLUMNS, (0x78, 512, 64), 132)
    assert (caught.value.call, caught.value.code, caught.value.at) == (name, 719, None)
    assert len(seen.calls) == failing + 1


LAUNCH = {"begin": 5, "end": 6, "kernel": (0x78, 512, 64), "programs": 132, "stream": 79, "argument": 0x5000}


def launches(device, seen, loaded, monkeypatch, failing, **copied):
    """The calls of a recorded launch, and the error."""
    monkeypatch.setattr(cuda.loops, "loaded", loaded)
    monkeypatch.setattr(device, "_cell", threading.local())
    seen.calls.clear()
    seen.failing = failing
    try:
        device.launch_recorded(**LAUNCH, **copied)
    except DriverError as error:
        return list(seen.calls), str(error), error.call, error.code, error.at
    return list(seen.calls), ""


@pytest.mark.parametrize("copied", [{}, {"source": 0x6000, "nbytes": 4096}])
@pytest.mark.parametrize("failing", range(-1, 4))
def test_a_recorded_launch_is_its_calls_one_by_one(device, seen, monkeypatch, copied, failing):
    """Law 8: the compiled call makes the calls that Python makes, up to the one that fails, and raises its error."""
    for name, count in ENTRIES.items():  # Python passes None for a null pointer
        entry = getattr(device.driver, name)
        monkeypatch.setattr(
            device.driver, name, ctypes.cast(entry, ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count))
        )
    one_by_one = launches(device, seen, None, monkeypatch, failing, **copied)
    at_once = launches(device, seen, calls, monkeypatch, failing, **copied)
    assert at_once == one_by_one
    config = np.array([132, 1, 1, 512, 1, 1, 64, 0], np.uint32).view(np.int64).tolist()
    whole = [
        ("cuEventRecord", 5, 79),
        *([("cuMemcpyAsync", 0x5000, 0x6000, 4096, 79)] if copied else []),
        ("cuLaunchKernelEx", 0x78, 0x5000, [*config, 79, 0, 0], 0),
        ("cuEventRecord", 6, 79),
    ]
    assert at_once[0] == (whole if failing < 0 else whole[: failing + 1])


def test_a_batch_that_fails_names_its_descriptor(device, seen):
    seen.failing, seen.at = 1, 1
    with pytest.raises(DriverError) as caught:
        device.issue(ROWS, COLUMNS, (0x78, 512, 64), 132)
    assert caught.value.at == 3
