"""A submit's fast paths: a device that is current already, events and launch in one call, a compiled header."""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.cuda import short_calls
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.launches import headers as slots
from kvplan.plan import loops
from tests.paged_caches import Move
from tests.profiles import examples
from tests.simulated import Device
from tests.simulated.executors import MOVE, both_ways, every_path, executor_on, pair_on


@examples(100)
@given(
    count=st.integers(0, 40), headers=st.integers(1, 3), at=st.integers(0, 2), base=st.integers(1, 1 << 40),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_compiled_header_is_the_header_that_python_writes(count, headers, at, base, seed):
    """Law 8: the compiled loop writes the words of ``headers.write_units``, and no others."""
    rng = np.random.default_rng(seed)
    at, base, size = min(at, headers - 1), 8 * base, slots.HEADER
    units, table = rng.integers(0, 1 << 50, (2, count)), rng.integers(0, 1 << 50, size)
    table[-1] = headers
    first = size * headers + int(rng.integers(0, 5))
    made = [rng.integers(0, 9, first + 2 * count + 3)] * 2
    slow, fast = (words.copy() for words in made)
    piece = Piece(slow.ctypes.data, slow.nbytes, slow)
    slots.write_units(piece, base, at, first, units, tuple(table.tolist()), headers)
    short_calls.write_units(fast, base, size * at, first, units, table)
    assert fast.tolist() == slow.tolist()


class Watched(Device):
    """A device that keeps what kernels are launched with."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.launched = []
        self.at_once = 0

    def launch(self, function, programs, threads, shared, stream, argument):
        # The words before the columns' addresses; units are beside them, and differ by the slot's own address.
        self.launched.append((programs, threads, shared))
        super().launch(function, programs, threads, shared, stream, argument)

    def launch_recorded(self, *arguments):
        self.at_once += 1
        super().launch_recorded(*arguments)


@both_ways
@pytest.mark.parametrize("move", [Move([3], [5]), MOVE, Move([], [])])
def test_a_plan_of_one_run_group_is_one_call_and_moves_the_same(direction, move):
    seen = []
    for loaded in (loops.loaded, None):
        device = Watched()
        pair = pair_on(device, direction)
        plan = pair.plan(move)
        with executor_on(device, "kernel") as executor, mock.patch.object(loops, "loaded", loaded):
            device.calls.clear()
            device.launched.clear()
            result = executor.submit(plan).result()
        calls = [name for name in device.calls if name in ("cuEventRecord", "cuLaunchKernelEx")]
        seen.append((device.launched, calls[-3:], result.nbytes, result.descriptors, result.launches))
        assert device.at_once == bool(plan.nbytes)
        pair.check()
    assert seen[0] == seen[1]


def test_layers_and_several_launches_record_their_own_events():
    device = Watched()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        executor.submit(pair.plan(MOVE), by_layer=True).synchronize()
    assert device.launched
    assert not device.at_once
    pair.check()


@every_path
def test_a_device_that_is_not_current_is_entered_and_one_that_is_is_not(path):
    for now in (True, False):
        device = Device()
        pair = pair_on(device, "load")
        entered = []

        @contextlib.contextmanager
        def current(entered=entered):
            if threading.current_thread() is threading.main_thread():  # and not the reaper's
                entered.append("in")
            yield

        with executor_on(device, path) as executor:
            executor.submit(pair.plan(Move([0], [1]))).synchronize()  # creates streams and events
            device.is_current = lambda now=now: now
            with mock.patch.object(device, "current", current):
                transfer = executor.submit(pair.plan(MOVE))
                submitted, polls = len(entered), 1
                while not transfer.done():
                    polls += 1
            del device.is_current
            assert (submitted, len(entered)) == ((0, 0) if now else (1, 1 + polls))
            executor.submit(pair.plan(Move([6], [6]))).synchronize()
        pair.check()


def test_a_closed_executor_refuses_on_any_thread_s_device():
    device = Device()
    pair = pair_on(device, "load")
    plan = pair.plan(MOVE)
    with executor_on(device, "kernel") as executor:
        pass
    for now in (True, False):
        device.is_current = lambda now=now: now
        with pytest.raises(kvplan.TransferError, match="closed"):
            executor.submit(plan)
