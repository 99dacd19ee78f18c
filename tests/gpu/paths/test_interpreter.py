"""Neither the calls of a long transfer nor its copying need the interpreter: a thread may keep it right after a submit.

``usleep`` through ``ctypes.PyDLL`` keeps the interpreter: no bytecode of any thread runs in the meantime. So a thread
that needed its turn would have made no call when ``usleep`` returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvplan
from kvplan.cuda.call_list import ENDED
from kvplan.cuda.device import Device
from kvplan.execute.gpu import backend
from kvplan.execute.gpu.resources import Limits
from kvplan.execute.gpu.waits import LAST_ROW
from tests.gpu.flights import MOVE, small_pair, warm
from tests.gpu.gate import Gate
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Paged, Pair

pytestmark = pytest.mark.gpu

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged")
every_path = pytest.mark.parametrize("path", PATHS)
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
KEEPS = ctypes.PyDLL(None)  # calls through it keep the interpreter
LONG_ENOUGH = 300_000  # microseconds: for some hundred calls, and for a few MiB through any link
LONG = {"inline_effort": 0, "lane_calls": -1, "layer_group_nbytes": 1}  # every list goes to the issuer


@pytest.fixture
def executor_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., kvplan.Executor]]:
    """``executor_with(path, calls_in_flight=4)``: an executor of cuda:0 with other limits."""
    made: list[kvplan.Executor] = []

    def executor(path: str, **limits: int) -> kvplan.Executor:
        policy = kvplan.Policy(path=path)
        parts = backend.GpuBackend(Device(0), policy, None, Limits(**LONG | limits))
        monkeypatch.setattr("kvplan.execute.executor._backend", lambda *_: parts)
        made.append(kvplan.Executor("cuda:0", policy))
        monkeypatch.undo()
        return made[-1]

    yield executor
    for each in made:
        each.close()


def pair_of_layers(direction: str, host: str = "pinned") -> Pair:
    device = Paged(DEVICE_NOTATION, layer=6, block=32, dim=4096, padded=True)
    pool = Paged(HOST_NOTATIONS["page-first"], layer=6, block=32, dim=4096)
    if direction == "load":
        return Pair(pool, device, (host, "cuda:0"))
    return Pair(device, pool, ("cuda:0", host))


def kept_right_after(submit: Callable[[], kvplan.Transfer], *, passed: bool) -> kvplan.Transfer:
    """Submit, keep the interpreter, and look before any other thread gets its turn.

    Args:
        submit: submits one transfer, whose list goes to the issuer.
        passed: whether the end event must have passed on the GPU, too.
    """
    transfer: Any = submit()
    state, driver, end = transfer._state, transfer.resources.device.driver, transfer._end
    played, query = ctypes.c_int64.from_address(state.ctypes.data + 8 * ENDED), driver.cuEventQuery
    KEEPS.usleep(LONG_ENOUGH)
    ended, code = played.value, query(end)
    assert ended == 1, f"{int(state[0])} calls had been made"
    assert code == 0 or not passed
    return transfer


@every_path
@both_ways
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_transfer_is_issued_and_ends_while_a_thread_keeps_the_interpreter(path, direction, by_layer, executor_with):
    executor, pair = executor_with(path), pair_of_layers(direction)
    warm(executor, pair)
    executor.submit(pair.plan(MOVE), by_layer=by_layer).synchronize()  # the issuer's thread is in its loop
    plan = pair.plan(MOVE)
    transfer = kept_right_after(lambda: executor.submit(plan, by_layer=by_layer), passed=True)
    assert len(transfer.layer_groups) == (6 if by_layer else 1)
    transfer.synchronize()
    pair.check()


@both_ways
@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d"])
def test_pageable_memory_is_copied_while_a_thread_keeps_the_interpreter(path, direction, executor_with):
    executor, pair = executor_with(path), pair_of_layers(direction, "cpu")
    warm(executor, pair)
    plan = pair.plan(MOVE)
    kept_right_after(lambda: executor.submit(plan), passed=False).synchronize()
    pair.check()


@every_path
@both_ways
def test_calls_that_wait_for_the_gpu_go_on_while_a_thread_keeps_the_interpreter(path, direction, executor_with):
    executor, pair = executor_with(path, calls_in_flight=4, batch_copies=4), pair_of_layers(direction)
    warm(executor, pair)
    executor.submit(pair.plan(MOVE), by_layer=True).synchronize()
    plan = pair.plan(MOVE)
    kept_right_after(lambda: executor.submit(plan, by_layer=True), passed=True).synchronize()
    pair.check()


@every_path
def test_a_transfer_behind_another_lane_s_goes_on_while_a_thread_keeps_the_interpreter(path, executor_with):
    executor, store = executor_with(path), small_pair("store")
    load = store.onward(store.src, "cuda:0")
    warm(executor, store)
    warm(executor, load)
    plans = store.plan(MOVE), load.plan(MOVE._replace(src=MOVE.dst, dst=MOVE.src))

    def submit() -> kvplan.Transfer:
        return executor.submit(plans[1], after=executor.submit(plans[0]))

    kept_right_after(submit, passed=True).synchronize()
    load.check()


@every_path
def test_a_thread_that_computes_in_python_does_not_hold_up_a_transfer(path, executor_with):
    executor, pair, stop = executor_with(path), pair_of_layers("load"), threading.Event()
    warm(executor, pair)

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    busy = threading.Thread(target=compute)
    busy.start()
    try:
        for _ in range(10):
            executor.submit(pair.plan(MOVE), by_layer=True).synchronize()
    finally:
        stop.set()
        busy.join()
    pair.check()


@pytest.mark.parametrize("path", ["copy_engine", "staged"])
def test_a_wait_for_the_first_layer_does_not_wait_for_the_list(path, executor_with):
    """Behind the gate no copy begins, so the list stops after twice its calls in flight."""
    pair, stream, reader = pair_of_layers("load"), torch.cuda.Stream(), torch.cuda.Stream()
    whole = executor_with(path, batch_copies=1, batch_nbytes=0)
    transfer: Any = whole.submit(pair.plan(MOVE), by_layer=True)
    transfer.await_issue()
    first, rows = transfer._marks[0].rows, int(transfer._state[0])
    transfer.synchronize()
    every = first  # the list stops after 2 * first calls, of at least 6 * first
    assert rows > 3 * every
    executor = executor_with(path, batch_copies=1, batch_nbytes=0, calls_in_flight=every)
    warm(executor, pair)
    plan = pair.plan(MOVE)
    with Gate(stream) as gate:
        transfer = executor.submit(plan, after=stream, by_layer=True)
        transfer.wait_layer(transfer.layer_groups[0][0], reader)
        assert transfer.unplayed
        assert not transfer._await_rows(LAST_ROW, 0.01)
        gate.open()
        transfer.wait_layer(transfer.layer_groups[-1][0], reader)
        transfer.synchronize()
    reader.synchronize()
    pair.check()
