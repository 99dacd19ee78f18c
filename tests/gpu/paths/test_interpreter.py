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
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair

pytestmark = pytest.mark.gpu

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged")
every_path = pytest.mark.parametrize("path", PATHS)
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
KEEPS = ctypes.PyDLL(None)  # calls through it keep the interpreter
LONG_ENOUGH = 300_000  # microseconds: for some hundred calls, and for some MiB through any link
BLOCKS, DIM = 64, 4096
MOVE = Move([(7 * k) % BLOCKS for k in range(48)], [(5 * k + 1) % BLOCKS for k in range(48)])


def warm(executor: kvplan.Executor, *pairs: Pair) -> None:
    """Compile, load and allocate what a first transfer does, so that the next one finds it there."""
    for pair in pairs:
        executor.submit(pair.plan(Move([1], [1]))).synchronize()
        for root in pair.src_roots + pair.dst_roots:
            root.clone()
    torch.cuda.synchronize()


@pytest.fixture
def executor_with() -> Iterator[Callable[[str], kvplan.Executor]]:
    """Makes executors of cuda:0 by path. Their rings are so small that each transfer needs hundreds of calls."""
    made: list[kvplan.Executor] = []

    def executor(path: str) -> kvplan.Executor:
        made.append(kvplan.Executor("cuda:0", kvplan.Policy(path=path, staging_bytes=1 << 20)))
        return made[-1]

    yield executor
    for each in made:
        each.close()


def pair_of_layers(direction: str, host: str = "pinned") -> Pair:
    device = Paged(DEVICE_NOTATION, layer=6, block=BLOCKS, dim=DIM, padded=True)
    pool = Paged(HOST_NOTATIONS["page-first"], layer=6, block=BLOCKS, dim=DIM)
    if direction == "load":
        return Pair(pool, device, (host, "cuda:0"))
    return Pair(device, pool, ("cuda:0", host))


def kept_right_after(submit: Callable[[], kvplan.Transfer]) -> None:
    """Submit, keep the interpreter, and look before any other thread gets its turn."""
    transfer: Any = submit()
    KEEPS.usleep(LONG_ENOUGH)
    assert transfer.done()
    transfer.synchronize()


@every_path
@both_ways
@pytest.mark.parametrize("host", ["pinned", "cpu"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_transfer_ends_while_a_thread_keeps_the_interpreter(path, direction, host, by_layer, executor_with):
    if host == "cpu" and path in ("kernel", "staged"):
        pytest.skip("kernels do not reach pageable memory")
    executor, pair = executor_with(path), pair_of_layers(direction, host)
    warm(executor, pair)
    executor.submit(pair.plan(MOVE), by_layer=by_layer).synchronize()  # the issuer's thread is in its loop
    plan = pair.plan(MOVE)
    kept_right_after(lambda: executor.submit(plan, by_layer=by_layer))
    pair.check()


@every_path
def test_a_transfer_behind_another_lane_s_goes_on_while_a_thread_keeps_the_interpreter(path, executor_with):
    executor, store = executor_with(path), pair_of_layers("store")
    load = store.onward(store.src, "cuda:0")
    warm(executor, store, load)
    plans = store.plan(MOVE), load.plan(MOVE._replace(src=MOVE.dst, dst=MOVE.src))
    kept_right_after(lambda: executor.submit(plans[1], after=executor.submit(plans[0])))
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
