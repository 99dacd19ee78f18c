"""vLLM's offloading on a simulated GPU: by every path, after the engine's stream, by layer, with refused calls."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from kvplan.engines.vllm.layer_loads import LayerLoads, places_of
from tests.simulated import Device
from tests.simulated.executors import every_path
from tests.simulated.vllm_worker import LAYERS, PAGE, chunks, one, spec, worker_on

NAMES = [f"model.layers.{k}.attn" for k in range(LAYERS)]
BLOCKS_OF_JOB, CHUNKS_OF_JOB = [7, 2, 9, 4, 11], (3, 0)


@every_path
@pytest.mark.parametrize("expedited", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_the_engine_has_written_are_stored_and_loaded(path, expedited, seed):
    device = Device(seed, eager=False)
    if seed == 2:
        device.lent = device.stream()  # loads and stores share a stream for their kernels
    with worker_on(device, path) as (worker, cache, pool, stream):
        written = np.random.default_rng(seed).integers(-128, 128, (4, LAYERS, PAGE), dtype=np.int8)
        gate = device.gate(stream)

        def compute():
            cache[[7, 2, 9, 4]] = written.reshape(4, -1)

        device.put(stream, compute)
        worker.submit_store(1, spec([7, 2, 9, 4], first=5), chunks(3, 0))  # the last of a chunk, and a whole one
        device.advance(200)
        assert worker.get_finished() == []
        assert not pool.any()
        gate.set()
        assert one(worker, 1)[1:3] == (True, 4 * LAYERS * PAGE)
        assert np.array_equal(pool[3, :, 2], written[0])
        assert np.array_equal(pool[0].swapaxes(0, 1), written[1:])
        assert not pool[3, :, :2].any()
        assert not pool[[1, 2, 4, 5]].any()
        wanted = cache.copy()
        worker.submit_load(2, chunks(0), spec([12, 1], first=4), expedited=expedited)
        assert one(worker, 2).success
        wanted[[12, 1]] = written[2:].reshape(2, -1)
        assert np.array_equal(cache, wanted)


@every_path
@pytest.mark.parametrize("call", ["cuEventRecord", "cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuLaunchKernelEx"])
def test_a_call_that_the_driver_refuses_is_a_job_that_failed(path, call, caplog):
    device = Device(0)
    with worker_on(device, path) as (worker, cache, pool, _):
        worker.submit_store(1, spec([1, 2, 3]), chunks(0))
        assert one(worker, 1).success
        used = call in device.calls
        device.fail(call, code=719)
        worker.submit_store(2, spec([4, 5, 6]), chunks(1))
        refused = one(worker, 2)
        assert (refused.success, refused.transfer_size) == ((False, None) if used else (True, 3 * LAYERS * PAGE))
        assert (f"Error: {call} returned CUDA_ERROR_SIMULATED (719)" in caplog.text) == used
        device.faults.clear()
        worker.submit_store(3, spec([4, 5, 6]), chunks(1))
        assert one(worker, 3).success
        assert np.array_equal(pool[1].swapaxes(0, 1).reshape(3, -1), cache[4:7])


# ---- loads by layer ----


@contextmanager
def engine_on(device, path, names=NAMES):
    """A worker whose hooks are known, and a function that runs the model and returns what each layer reads."""
    with worker_on(device, path) as (worker, cache, pool, stream):
        worker.keep_failures()
        layers = LayerLoads(worker, places_of([NAMES], worker.groups))

        def forward(order=NAMES, *, hooks=names, read=None):
            """Launch a model; each layer reads its rows when the stream comes to it."""
            for name in order:
                if name in hooks and layers.waiting:
                    layers.wait_layer(name)
                k = NAMES.index(name)

                def reads(k=k):
                    if read is not None:
                        read[k] = cache[BLOCKS_OF_JOB, k * PAGE : (k + 1) * PAGE].copy()

                device.put(stream, reads)

        layers.begin_forward()
        forward()
        layers.leave_forward()
        layers.settle()
        pool[:] = np.random.default_rng(2).integers(-128, 128, pool.shape, dtype=np.int8)
        # Of chunk 3, blocks 1 and 2; of chunk 0, all three.
        wanted = [np.concatenate([pool[3, k, 1:], pool[0, k]]) for k in range(LAYERS)]
        yield worker, layers, forward, wanted, stream


def job(number=1):
    return number, chunks(*CHUNKS_OF_JOB), spec(BLOCKS_OF_JOB, first=4)


@every_path
@pytest.mark.parametrize("seed", range(3))
def test_each_layer_reads_what_was_loaded(path, seed):
    device = Device(seed, eager=False)
    with engine_on(device, path) as (worker, layers, forward, wanted, _):
        read = {}
        layers.begin_forward()
        layers.load([job()], hooked=True)
        forward(read=read)
        layers.leave_forward()
        layers.settle()
        device.run()
        assert all(np.array_equal(read[k], wanted[k]) for k in range(LAYERS))
        assert one(worker, 1).success
        assert worker.take_failures() == []


def test_an_early_layer_is_read_before_the_last_has_arrived():
    early = 0
    for seed in range(6):
        device = Device(seed, eager=False)
        with engine_on(device, "copy_engine") as (worker, layers, forward, wanted, _):
            read = {}
            layers.begin_forward()
            layers.load([job()], hooked=True)
            forward(read=read)
            layers.leave_forward()
            layers.settle()
            while 0 not in read and device.advance(1):
                pass
            early += not worker.get_finished()
            device.run()
            assert all(np.array_equal(read[k], wanted[k]) for k in range(LAYERS))
    assert early


def test_layers_in_another_order_and_skipped_layers_lose_no_wait():
    for order in ([2, 0, 1], [1], [1, 0], [2]):
        device = Device(0, eager=False)
        with engine_on(device, "copy_engine") as (_, layers, forward, wanted, stream):
            read = {}
            layers.begin_forward()
            layers.load([job()], hooked=True)
            forward([NAMES[k] for k in order], read=read)
            layers.leave_forward()
            layers.settle()
            device.put(stream, lambda read=read: read.update(later=True))  # the next step's work
            device.run()
            assert all(np.array_equal(read[k], wanted[k]) for k in order)


def test_a_replayed_graph_waits_for_all_layers_before():
    device = Device(0, eager=False)
    with engine_on(device, "copy_engine") as (_, layers, forward, wanted, _):
        read = {}
        layers.begin_forward()
        layers.load([job()], hooked=False)
        assert not layers.waiting
        (flight,) = layers._flights
        assert flight.transfer.layer_groups == ((0, 1, 2),)
        forward(hooks=(), read=read)
        layers.leave_forward()
        layers.settle()
        device.run()
        assert all(np.array_equal(read[k], wanted[k]) for k in range(LAYERS))


def test_a_forward_pass_that_calls_no_hook_fails_its_loads(caplog):
    device = Device(0)
    with engine_on(device, "copy_engine") as (worker, layers, forward, wanted, _):
        layers.begin_forward()
        layers.load([job()], hooked=True)
        forward(hooks=())
        layers.leave_forward()
        layers.settle()
        assert worker.take_failures() == [(1, tuple(BLOCKS_OF_JOB))]
        assert "the hooks of the attention layers were not called" in caplog.text
        read = {}
        layers.begin_forward()
        layers.load([job(2)], hooked=True)
        forward(hooks=(), read=read)
        layers.leave_forward()
        layers.settle()
        device.run()
        assert all(np.array_equal(read[k], wanted[k]) for k in range(LAYERS))
        assert one(worker, 2).success


@every_path
@pytest.mark.parametrize("call", ["cuEventRecord", "cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuLaunchKernelEx"])
def test_a_refused_call_fails_its_load_in_the_same_step(path, call):
    device = Device(0)
    with engine_on(device, path) as (worker, layers, forward, wanted, _):
        used = len(device.calls)
        layers.begin_forward()
        layers.load([job(1)], hooked=True)
        forward()
        layers.leave_forward()
        layers.settle()
        assert one(worker, 1).success
        used = call in device.calls[used:]
        device.fail(call, code=719)
        layers.begin_forward()
        layers.load([job(2)], hooked=True)
        forward()  # raises nothing
        layers.leave_forward()
        layers.settle()
        assert worker.take_failures() == ([(2, tuple(BLOCKS_OF_JOB))] if used else [])
        device.faults.clear()
        read = {}
        layers.begin_forward()
        layers.load([job(3)], hooked=True)
        forward(read=read)
        layers.leave_forward()
        layers.settle()
        device.run()
        assert all(np.array_equal(read[k], wanted[k]) for k in range(LAYERS))


def test_loads_of_one_step_are_awaited_together():
    device = Device(1, eager=False)
    with engine_on(device, "copy_engine") as (worker, layers, forward, wanted, _):
        read = {}
        layers.begin_forward()
        layers.load([job(1), (2, chunks(1), spec([5, 6]))], hooked=True)
        forward(read=read)
        layers.leave_forward()
        layers.settle()
        device.run()
        assert all(np.array_equal(read[k], wanted[k]) for k in range(LAYERS))
        worker.wait({1, 2})
        assert [result.job_id for result in worker.get_finished()] == [1, 2]
