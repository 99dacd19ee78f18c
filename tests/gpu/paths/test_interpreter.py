"""Neither the calls of a long transfer nor its copying need the interpreter: a thread may keep it right after a submit.

``usleep`` through ``ctypes.PyDLL`` keeps the interpreter: no bytecode of any thread runs in the meantime. So a thread
that needed its turn would have made no call when ``usleep`` returns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import kvplan
from tests.contract.gpu.caches import DEVICE_NOTATION, PAGE_FIRST, Ids, Pair, both_ways, way
from tests.contract.gpu.machines import Real
from tests.paged_caches import Paged

pytestmark = pytest.mark.gpu

every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged"])
KEEPS = ctypes.PyDLL(None)  # calls through it keep the interpreter
LONG_ENOUGH = 300_000  # microseconds: for some hundred calls, and for some MiB through any link
BLOCKS = 64
CACHE = Paged(DEVICE_NOTATION, layer=6, block=BLOCKS, dim=4096, padded=True)
POOL = Paged(PAGE_FIRST, layer=6, block=BLOCKS, dim=4096)
MOVE = Ids([(7 * k) % BLOCKS for k in range(48)], [(5 * k + 1) % BLOCKS for k in range(48)])
RING = {"staging_bytes": 1 << 20}  # so small that each transfer needs hundreds of calls


def kept_right_after(submit: Callable[[], kvplan.Transfer]) -> None:
    """Submit, keep the interpreter, and look before any other thread gets its turn."""
    transfer: Any = submit()
    KEEPS.usleep(LONG_ENOUGH)
    assert transfer.done()
    transfer.synchronize()


@every_path
@both_ways
@pytest.mark.parametrize("host", ["", "pageable "])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_transfer_ends_while_a_thread_keeps_the_interpreter(path, route, host, by_layer):
    if host and path in ("kernel", "staged"):
        pytest.skip("kernels do not reach pageable memory")
    with Real() as machine:
        executor, pair = machine.executor(path, **RING), way(machine, host + route, CACHE, POOL)
        pair.warm(executor)
        executor.submit(pair.plan(MOVE), by_layer=by_layer).synchronize()  # the issuer's thread is in its loop
        plan = pair.plan(MOVE)
        kept_right_after(lambda: executor.submit(plan, by_layer=by_layer))
        pair.check()


@every_path
def test_a_transfer_behind_another_lane_s_goes_on_while_a_thread_keeps_the_interpreter(path):
    with Real() as machine:
        executor, store = machine.executor(path, **RING), way(machine, "store", CACHE, POOL)
        load = Pair(machine, POOL, CACHE, "load", seed=2).behind(store)
        for pair in (store, load):
            pair.warm(executor)
        plans = store.plan(MOVE), load.plan(MOVE.back)
        kept_right_after(lambda: executor.submit(plans[1], after=executor.submit(plans[0])))
        load.check()
