"""Jobs of vLLM 0.33's offloading, without vLLM: how they fail, and how all of it ends."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest

import kvplan
from kvplan.engines.vllm.worker import JobResult, Worker
from tests.contract.engines.vllm.stand_ins import (
    finish,
    on_device,
    on_host,
    reference,
    rows_of,
    torch,
    two_layers,
    workers,
)


@pytest.fixture
def made():
    """Makes workers, and shuts them down."""
    with workers() as make:
        yield make


MISTAKES = [
    (on_device([12]), on_host([0]), "src_blocks[0] is 12; src blocks are 0 to 11"),
    (on_device([1, 2]), on_host([0, 0]), "dst_blocks name block 0 more than once"),
    (on_device([1, 2], [1]), on_host([0]), "2 device blocks are given"),
    (SimpleNamespace(block_ids=[1]), on_host([0]), "has no attribute 'group_sizes'"),
]


@pytest.mark.parametrize(("device", "host", "told"), MISTAKES)
def test_a_job_that_cannot_be_planned_is_a_job_that_failed(made, caplog, device, host, told):
    worker, cache, pool = two_layers(made)
    assert worker.submit_store(1, device, host) is True
    worker.submit_store(2, on_device([3]), on_host([4]))
    worker.wait({1, 2})
    assert [(r.job_id, r.success) for r in worker.get_finished()] == [(1, False), (2, True)]
    assert told in caplog.text
    assert torch.equal(pool[4], cache[3])
    assert not pool[:4].any()


def test_a_connector_may_take_failures_for_itself(made):
    worker, *_ = two_layers(made)
    worker.submit_load(1, on_host([9]), on_device([3]))
    assert finish(worker, 1) == JobResult(1, success=False)
    worker.keep_failures()
    worker.submit_load(2, on_host([9, 1]), on_device([3, 7]))
    worker.submit_load(3, on_host([1]), on_device([3]))
    worker.wait({2, 3})
    assert worker.take_failures() == []
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(3, True)]
    assert worker.take_failures() == [(2, (3, 7))]
    assert worker.take_failures() == []


def test_shutdown_finishes_jobs_and_lets_go_of_every_tensor():
    """The rows are released last, when the mapping behind them can be closed."""
    region = mmap.mmap(-1, 4 * 128)
    base = torch.frombuffer(memoryview(region), dtype=torch.int8).view(4, 128)
    cache, device = rows_of([64, 64], 4, seed=1)
    seen = []

    def release():
        seen.append(bytes(region[3 * 128 :]))
        region.close()  # raises BufferError where anything still holds a view

    worker = Worker([[reference(0, 64), reference(1, 64)]], device, [base[:, :64], base[:, 64:]], 1, release=release)
    del base
    worker.submit_store(1, on_device([2]), on_host([3]))
    worker.shutdown()
    assert seen == [cache[2].numpy().tobytes()]
    worker.shutdown()
    assert worker.get_finished() == []
    worker.wait({1})
    with pytest.raises(kvplan.TransferError, match="shut down; submit before shutdown"):
        worker.submit_load(2, on_host([0]), on_device([0]))


def test_a_pool_without_a_chunk_takes_no_job(made, caplog):
    _, device = rows_of([64], 4)
    worker = made([[reference(0, 64)]], device, [torch.zeros((0, 64), dtype=torch.int8)], 1)
    worker.submit_store(1, on_device([]), on_host([]))
    assert finish(worker, 1).success
    worker.submit_store(2, on_device([0]), on_host([0]))
    assert not finish(worker, 2).success
    assert "no chunk; give more cpu_bytes_to_use" in caplog.text
