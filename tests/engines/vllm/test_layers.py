"""Loads by layer, without vLLM: what they move, and how they fail.

The waits of layers in any order are held by the bytes that they read, on a GPU: see test_simulated_gpu.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.engines.vllm.layer_loads import LayerLoads, places_of
from tests.contract.engines.vllm.stand_ins import on_device, on_host, reference, rows_of, torch, two_layers, workers


@pytest.fixture
def made():
    """Makes workers, and shuts them down."""
    with workers() as make:
        yield make


def references(*tensors):
    return [reference(tensor, 64) for tensor in tensors]


def test_a_job_that_cannot_be_planned_is_told_in_its_step(made, caplog):
    worker, cache, pool = two_layers(made)
    worker.keep_failures()
    pool.fill_(3)
    layers = LayerLoads(worker, places_of([["a", "b"]], worker.groups))
    layers.load([(1, on_host([77]), on_device([3])), (2, on_host([1]), on_device([4]))], hooked=True)
    layers.wait_layer("a")
    layers.leave_forward()
    layers.settle()
    assert worker.take_failures() == [(1, (3,))]
    assert "expedited load job 1 failed: BlockIndexError: src_blocks[0] is 77" in caplog.text
    assert (cache[4] == 3).all()
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(2, True)]
    worker.wait({1, 2})


def test_the_loads_of_one_step_share_their_transfers(made):
    """Otherwise the first layer of the last load would arrive behind all layers of the others."""
    worker, cache, pool = two_layers(made)
    pool.copy_(torch.arange(pool.numel()).view(pool.shape) % 100)
    loads = [(1, on_host([5]), on_device([2])), (2, on_host([0, 3]), on_device([9, 4]))]
    transfers = worker.submit_layers(loads)
    assert [(one.groups, [job.job_id for job in one.jobs]) for one in transfers] == [((0,), [1, 2])]
    worker.wait({1, 2})
    assert torch.equal(cache[[2, 9, 4]], pool[[5, 0, 3]])
    results = worker.get_finished()
    assert [(one.job_id, one.success, one.transfer_size) for one in results] == [(1, True, 128), (2, True, 256)]
    whole = transfers[0].transfer.result()
    assert whole.nbytes == 384
    assert sum(one.transfer_time for one in results) == pytest.approx(whole.seconds)


@st.composite
def steps(draw):
    """Loads of one step: blocks per chunk, and for each load and each of two groups (first block, number of blocks)."""
    per_chunk = draw(st.integers(1, 3))
    whole = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda one: (one[0] * per_chunk, one[1] * per_chunk))
    group = whole | st.tuples(st.integers(0, 4), st.integers(0, 4))
    return per_chunk, draw(st.lists(st.tuples(group, group), min_size=1, max_size=4))


@given(steps(), st.sets(st.integers(0, 1)))
def test_loads_of_one_step_move_what_each_moves_alone(step, whole):
    per_chunk, loads = step
    sizes = [64, 32]
    rng = np.random.default_rng(len(loads))
    blocks, chunks = iter(rng.permutation(64).tolist()), iter(rng.permutation(64).tolist())
    asked = []
    for number, groups in enumerate(loads):
        device = [next(blocks) for _, count in groups for _ in range(count)]
        held = [
            next(chunks)
            for first, count in groups
            if count
            for _ in range(-(-(first % per_chunk + count) // per_chunk))
        ]
        target = on_device(device, [count for _, count in groups], [first for first, _ in groups])
        asked.append((number, on_host(held), target))
    moved = []
    with workers() as make:
        for parts in ([asked], [[one] for one in asked]):
            cache, device = rows_of(sizes, 64, seed=1)
            _, host = rows_of([size * per_chunk for size in sizes], 64, seed=2)
            worker = make([references(0), [reference(1, 32)]], device, host, per_chunk)
            for part in parts:
                worker.submit_layers(part, whole)
            worker.wait(range(len(asked)))
            done = [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()]
            moved.append((cache, done))
    expected = [(number, True, sum(count * size for (_, count), size in zip(groups, sizes, strict=True)))
                for number, groups in enumerate(loads)]  # fmt: skip
    assert [done for _, done in moved] == [expected, expected]
    assert torch.equal(moved[0][0], moved[1][0])
