"""vLLM's offloading on a simulated GPU: by every path, after the engine's stream, by layer, with refused calls."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from kvplan import Policy
from kvplan.engines.vllm.layer_loads import LayerLoads, places_of
from kvplan.engines.vllm.worker import Worker
from tests.contract.engines.vllm.stand_ins import finish, on_device, on_host, reference
from tests.contract.gpu.caches import every_path
from tests.simulated.objects import Tensor, current_stream
from tests.simulated_driver import SimulatedDriver, simulated

LAYERS, BLOCKS, CHUNKS, PER_CHUNK = 3, 16, 6, 3
PAGE, LONG_PAGE = 96, 3 << 20  # with long pages, loads are cut into groups of layers
NAMES = [f"model.layers.{k}.attn" for k in range(LAYERS)]
BLOCKS_OF_JOB, CHUNKS_OF_JOB = [7, 2, 9, 4, 11], (3, 0)
CALLS = ("cuEventRecord", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2", "cuLaunchKernelEx")


class Rows(Tensor):
    """Pages of one tensor, with what else is read of torch's rows."""

    ndim = 2

    def storage_offset(self):
        return 0

    def as_strided(self, shape, strides, offset):
        return Tensor(as_strided(self.array.reshape(-1)[offset:] if self.array.flags.c_contiguous
                                 else self.array[0, offset:], shape, strides), self.device)  # fmt: skip


def side(root, nbytes, device):
    return [Rows(root[:, end - nbytes : end], device) for end in accumulate([nbytes] * LAYERS)]


class Offloading(NamedTuple):
    """A worker of one group, its cache, its pool as (chunk, layer, block, byte), and the engine's stream."""

    driver: SimulatedDriver
    worker: Worker
    cache: np.ndarray
    pool: np.ndarray
    stream: int


@contextmanager
def offloading(path, seed=0, page=PAGE):
    rng = np.random.default_rng(1)
    cache = rng.integers(-128, 128, (BLOCKS, LAYERS * page), dtype=np.int8)
    pool = np.zeros((CHUNKS, LAYERS * PER_CHUNK * page), np.int8)
    policy = Policy(path=path, staging_bytes=max(2 * pool[0].nbytes, 2048))
    with simulated(1, seed) as driver:
        driver.own(cache, 0)
        driver.pin(pool)
        stream = driver.stream()
        with current_stream(stream):
            worker = Worker([[reference(k, page) for k in range(LAYERS)]], side(cache, page, "cuda:0"),
                            side(pool, page * PER_CHUNK, "cpu"), PER_CHUNK, policy=policy, by_layer=True)  # fmt: skip
            try:
                yield Offloading(driver, worker, cache, pool.reshape(CHUNKS, LAYERS, PER_CHUNK, page), stream)
            finally:
                worker.shutdown()


@every_path
@pytest.mark.parametrize("expedited", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_the_engine_has_written_are_stored_and_loaded(path, expedited, seed):
    with offloading(path, seed) as (driver, worker, cache, pool, stream):
        written = np.random.default_rng(seed).integers(-128, 128, (4, LAYERS, PAGE), dtype=np.int8)
        gate = driver.gate(stream)
        driver.put(stream, lambda: cache.__setitem__([7, 2, 9, 4], written.reshape(4, -1)))
        worker.submit_store(1, on_device([7, 2, 9, 4], firsts=[5]), on_host([3, 0]))  # the last of a chunk, and a whole
        driver.finish()
        assert worker.get_finished() == []
        assert not pool.any()
        gate.open()
        assert finish(worker, 1)[1:3] == (True, 4 * LAYERS * PAGE)
        assert np.array_equal(pool[3, :, 2], written[0])
        assert np.array_equal(pool[0].swapaxes(0, 1), written[1:])
        assert not pool[3, :, :2].any()
        assert not pool[[1, 2, 4, 5]].any()
        wanted = cache.copy()
        worker.submit_load(2, on_host([0]), on_device([12, 1], firsts=[4]), expedited=expedited)
        assert finish(worker, 2).success
        wanted[[12, 1]] = written[2:].reshape(2, -1)
        assert np.array_equal(cache, wanted)


@every_path
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_the_driver_refuses_is_a_job_that_failed(path, call, caplog):
    with offloading(path) as (driver, worker, cache, pool, _):
        driver.fail(call, code=719)
        worker.submit_store(2, on_device([4, 5, 6]), on_host([1]))
        refused, used = finish(worker, 2), driver.failed(call)
        assert (refused.success, refused.transfer_size) == ((False, None) if used else (True, 3 * LAYERS * PAGE))
        assert (f"Error: {call.removesuffix('_v2')} returned CUDA_ERROR_SIMULATED (719" in caplog.text) == used
        worker.submit_store(3, on_device([4, 5, 6]), on_host([1]))
        assert finish(worker, 3).success
        assert np.array_equal(pool[1].swapaxes(0, 1).reshape(3, -1), cache[4:7])


# ---- loads by layer ----


class Engine:
    """A worker whose hooks are known, and a model that reads its rows."""

    def __init__(self, made: Offloading) -> None:
        self.made, self.read = made, dict[int, np.ndarray]()
        made.worker.keep_failures()
        self.layers = LayerLoads(made.worker, places_of([NAMES], made.worker.groups))
        self.step()
        made.driver.finish()
        pool = made.pool
        pool[:] = np.random.default_rng(2).integers(-128, 128, pool.shape, dtype=np.int8)
        # Of chunk 3, blocks 1 and 2; of chunk 0, all three.
        self.wanted = [np.concatenate([pool[3, k, 1:], pool[0, k]]) for k in range(LAYERS)]

    def step(self, *jobs, order=NAMES, hooks=NAMES, hooked=True):
        """Load jobs, and launch a model; each layer reads its rows when the stream comes to it."""
        self.read.clear()
        if jobs:
            self.layers.load(list(jobs), hooked=hooked)
        for name in order:
            if name in hooks:
                self.layers.wait_layer(name)
            self.made.driver.put(self.made.stream, partial(self._reads, NAMES.index(name)))
        self.layers.leave_forward()
        self.layers.settle()

    def _reads(self, k):
        page = self.made.pool.shape[-1]
        self.read[k] = self.made.cache[BLOCKS_OF_JOB, k * page : (k + 1) * page].copy()

    def check(self):
        """All layers that were launched have read what was loaded."""
        self.made.driver.finish()
        assert self.read
        assert all(np.array_equal(rows, self.wanted[k]) for k, rows in self.read.items())


@contextmanager
def engine_on(path, seed=0, page=PAGE):
    with offloading(path, seed, page) as made:
        yield Engine(made), made.worker


def job(number=1):
    return number, on_host(CHUNKS_OF_JOB), on_device(BLOCKS_OF_JOB, firsts=[4])


@every_path
@pytest.mark.parametrize(("seed", "page"), [(0, PAGE), (1, PAGE), pytest.param(0, LONG_PAGE, marks=pytest.mark.slow)])
def test_each_layer_reads_what_was_loaded(path, seed, page):
    with engine_on(path, seed, page) as (engine, worker):
        engine.step(job())
        engine.check()
        assert finish(worker, 1).success
        assert worker.take_failures() == []


@pytest.mark.slow
def test_layers_in_another_order_and_skipped_layers_lose_no_wait():
    for order in ([2, 0, 1], [1], [1, 0], [2]):
        with engine_on("copy_engine", page=LONG_PAGE) as (engine, _):
            engine.step(job(), order=[NAMES[k] for k in order])
            engine.check()


def test_a_replayed_graph_waits_for_all_layers_before():
    with engine_on("copy_engine") as (engine, _):
        engine.step(job(), hooks=(), hooked=False)
        engine.check()


def test_a_forward_pass_that_calls_no_hook_fails_its_loads(caplog):
    with engine_on("copy_engine") as (engine, worker):
        engine.step(job(), hooks=())
        assert worker.take_failures() == [(1, tuple(BLOCKS_OF_JOB))]
        assert "the hooks of the attention layers were not called" in caplog.text
        engine.step(job(2), hooks=())
        engine.check()
        assert finish(worker, 2).success


@every_path
@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_fails_its_load_in_the_same_step(path, call):
    with engine_on(path) as (engine, worker):
        driver = engine.made.driver
        driver.fail(call, code=719)
        engine.step(job(2))  # raises nothing
        used = driver.failed(call)
        assert worker.take_failures() == ([(2, tuple(BLOCKS_OF_JOB))] if used else [])
        engine.step(job(3))
        engine.check()
