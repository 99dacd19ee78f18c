"""The thread that plays lists of calls: it needs no interpreter, keeps the order, and tells what failed."""

from __future__ import annotations

import contextlib
import ctypes
import time
from types import SimpleNamespace

import numba
import numpy as np
import pytest

from kvplan.cuda import call_list, calls, intrinsics, issuer
from kvplan.cuda.call_list import CallList, new_state
from kvplan.cuda.issuer import Issuer
from tests.patience import PATIENCE, until

C = ctypes.CDLL(None)
C_WITH_THE_INTERPRETER = ctypes.PyDLL(None)  # its calls keep it: no other thread of Python runs meanwhile
REFUSED = 13  # the event whose record fails


@numba.cfunc("int32(int64, int64)")
def record(event, stream):
    return 719 if event == REFUSED else 0


@numba.cfunc("int32(int64, int64, int64, int64)")
def copy(dst, src, nbytes, stream):
    return 0


@numba.cfunc("int32(int64, int64, int64)")
def wait(stream, event, flags):
    intrinsics.publish(stream, event)
    return 0


@numba.cfunc("int32(int64)")
def query(event):
    """Tell whether an event has passed: it is a word's address, and the word is 1 then."""
    return 0 if intrinsics.observe(event) else 600


class Machine:
    """The parts of a device that an issuer needs; its driver is compiled, and copies nothing."""

    attributes = (0, 0)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda mode: 0)

    def __init__(self) -> None:
        nap = ctypes.cast(C.usleep, ctypes.c_void_p).value
        entries = [record.address, wait.address, 0, copy.address, 0, 0, query.address, nap]
        self.entries = np.array(entries, dtype=np.int64)

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def watch(self, state: np.ndarray, rows: int, *, hurry: bool = True) -> bool:
        return bool(calls.watch(state.ctypes.data, rows, hurry, self.entries[calls.NAP], 50))


@pytest.fixture
def thread():
    made = Issuer(Machine(), "issuer", set())
    yield made
    made.stop()
    assert made.worker.join(PATIENCE)


def listed(*events: int) -> CallList:
    made = CallList()
    for event in events:
        made.record(event, 5)
    made.close()
    return made


def test_lists_are_played_while_a_thread_keeps_the_interpreter(thread):
    thread.push(listed(1).segments, new_state())
    until(lambda: thread.idle)  # the thread has started, and its loop is loaded
    states = [new_state() for _ in range(20)]
    for state in states:
        thread.push(listed(*range(14, 114)).segments, state)
    words = (ctypes.c_int64 * 20)(*(state.ctypes.data for state in states))
    C_WITH_THE_INTERPRETER.usleep(200_000)  # no bytecode runs for 0.2 s
    played = [ctypes.c_int64.from_address(address + 8 * calls.PLAYED).value for address in words]
    assert played == [100] * 20
    assert all(state[calls.ENDED] for state in states)


def test_a_list_that_fails_ends_and_the_next_one_is_played(thread):
    broken, whole = new_state(), new_state()
    thread.push([*listed(1, 2).segments, *listed(3, REFUSED, 4).segments], broken)
    thread.push(listed(1, 2).segments, whole)
    until(lambda: broken[calls.FAILED])
    assert broken[[calls.PLAYED, calls.FAILED, calls.FAILED_ROW, calls.ENDED]].tolist() == [3, 719, 3, 0]
    assert thread._device.watch(broken, calls.LAST_ROW)  # a wait for its end ends
    time.sleep(0.01)
    assert not whole[calls.PLAYED]  # the caller may make calls first
    broken[calls.ENDED] = 1
    until(lambda: thread.idle)
    assert whole[[calls.PLAYED, calls.FAILED, calls.ENDED]].tolist() == [2, 0, 1]


@pytest.fixture
def waiting(thread):
    """A list of three rows whose second one waits for an event: for a stream, or for nobody's."""

    def push(*, stream):
        told = SimpleNamespace(event=np.zeros(1, np.int64), stream=np.zeros(1, np.int64), state=new_state())
        rows = np.array([[call_list.RECORD, 1, 0, 5],
                         [call_list.SYNC, told.event.ctypes.data, 0, told.stream.ctypes.data if stream else 0],
                         [call_list.RECORD, 2, 0, 5]])  # fmt: skip
        thread.push([call_list.Segment(rows)], told.state)
        until(lambda: told.state[calls.PLAYED] == 1)
        time.sleep(0.01)
        assert told.state[calls.PLAYED] == 1
        return told

    return push


@pytest.mark.parametrize("stream", [True, False])
def test_a_list_waits_for_an_event_in_place_of_a_stream(thread, waiting, stream):
    told = waiting(stream=stream)
    assert not thread._device.watch(told.state, 3, hurry=False)
    told.event[0] = 1
    until(lambda: thread.idle)
    assert told.state[calls.PLAYED] == 3
    assert not told.stream[0]


@pytest.mark.parametrize("who", ["a thread that waits for its rows", "a list that waits for it", "the next list"])
def test_a_stream_waits_if_somebody_waits_for_the_list(thread, waiting, who):
    told, other = waiting(stream=True), Issuer(Machine(), "other", set())
    if who == "the next list":
        thread.push(listed(1).segments, new_state())
    elif who == "a list that waits for it":
        behind = CallList()
        behind.await_list(told.state)
        behind.close()
        other.push(behind.segments, new_state())
    else:
        assert not thread._device.watch(told.state, 1 + 1, hurry=False)
        until(lambda: thread._device.watch(told.state, 1 + 1))
    until(lambda: told.state[calls.ENDED])
    assert told.stream[0] == told.event.ctypes.data
    assert not told.event[0]
    until(lambda: other.idle)
    other.stop()
    assert not other.worker.started or other.worker.join(PATIENCE)


def test_rows_in_front_of_the_wait_hurry_nobody(thread, waiting):
    told = waiting(stream=True)
    assert thread._device.watch(told.state, 1)
    time.sleep(0.01)
    assert told.state[calls.PLAYED] == 1
    told.event[0] = 1
    until(lambda: thread.idle)
    assert not told.stream[0]


def test_a_wait_that_bounds_the_queue_does_not_hurry(thread, waiting):
    told = waiting(stream=False)
    assert not thread._device.watch(told.state, 3)
    assert told.state[calls.PLAYED] == 1
    told.event[0] = 1
    until(lambda: thread.idle)


def test_a_list_waits_for_rows_of_another_list(thread):
    other, mine = new_state(), new_state()
    waiting = CallList()
    waiting.await_list(other)
    waiting.record(1, 5)
    waiting.close()
    thread.push(waiting.segments, mine)
    time.sleep(0.01)
    assert not mine[calls.PLAYED]
    other[calls.FAILED] = 719
    time.sleep(0.01)
    assert not mine[calls.PLAYED]
    other[calls.ENDED] = 1
    until(lambda: thread.idle)
    assert mine[calls.PLAYED] == 2


def test_a_list_that_checks_another_list_fails_if_that_one_has_failed(thread):
    other, mine = new_state(), new_state()
    waiting = CallList()
    waiting.record(1, 5)
    waiting.await_list(other, checked=True)
    waiting.record(1, 5)
    waiting.close()
    thread.push(waiting.segments, mine)
    other[calls.FAILED], other[calls.ENDED] = 719, 1
    until(lambda: mine[calls.FAILED])
    assert mine[[calls.PLAYED, calls.FAILED, calls.FAILED_ROW]].tolist() == [1, 719, 1]
    mine[calls.ENDED] = 1
    until(lambda: thread.idle)


def test_lists_that_were_played_are_not_kept(thread):
    for _ in range(5):
        thread.push(listed(1).segments, new_state())
        until(lambda: thread.idle)
    assert sum(held is not None for held in thread._held) == 1


def test_a_queue_that_is_full_takes_more_lists_later(thread, monkeypatch):
    monkeypatch.setattr(issuer, "SLOTS", len(thread._queue))
    other, states = new_state(), [new_state() for _ in range(3 * issuer.SLOTS)]
    first = CallList()
    first.await_list(other)
    first.close()
    thread.push(first.segments, new_state())
    for state in states[: issuer.SLOTS - 3]:
        thread.push(listed(1).segments, state)
    other[calls.ENDED] = 1
    for state in states[issuer.SLOTS - 3 :]:
        thread.push(listed(1).segments, state)
    until(lambda: thread.idle)
    assert all(state[calls.ENDED] for state in states)


def test_a_thread_that_was_never_started_has_nothing_to_stop():
    Issuer(Machine(), "issuer", set()).stop()
