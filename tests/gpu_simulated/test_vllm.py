"""vLLM's offloading on a simulated GPU: by every path, after the engine's stream, and when the driver refuses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.simulated import Device
from tests.simulated.executors import every_path
from tests.simulated.vllm_worker import LAYERS, PAGE, chunks, one, spec, worker_on


def test_transfers_are_made_ready_at_the_start(prepared):
    device = Device()
    with worker_on(device, "auto") as (worker, cache, pool, _):
        regular, expedited = worker._executors
        assert prepared == [(None, False), ("store", False), ("load", False), (None, False), ("load", False)]
        ready = [len(executor._backend.resources.tables._functions) for executor in (regular, expedited)]
        assert min(ready) > 0
        before = cache.copy()
        assert not pool.any()
        worker.submit_store(1, spec([7, 2, 9, 4], first=5), chunks(3, 0))
        assert one(worker, 1).success
        assert np.array_equal(cache, before)
        assert [len(executor._backend.resources.tables._functions) for executor in (regular, expedited)] == ready


@every_path
@pytest.mark.parametrize("expedited", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_the_engine_has_written_are_stored_and_loaded(path, expedited, seed):
    device = Device(seed, eager=False)
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
