"""What the GPU's benchmarks compare is what a plan moves; nothing here is timed."""

from __future__ import annotations

import pytest

import kvplan
from kvplan.measure.workload import DIRECTIONS, Geometry, between

pytestmark = pytest.mark.slow


@pytest.fixture
def pages(monkeypatch):
    """``pages(direction, count)``: blocks of a pool of kvplan.allocate and a cache of a tensor a layer, on the CPU."""
    pytest.importorskip("torch")
    from benchmarks.gpu import rig

    monkeypatch.setattr(rig, "RUN_NBYTES", 512)
    host, device = rig.pool_and_cache(3, 10, "cpu")
    assert (len(host.parts), len(device.parts)) == (1, 3)

    def work(direction, count, seed=0):
        return between(host, device, Geometry(direction, "contiguous", 512, 6 * count, 6), "cpu", seed)

    return work


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 7])
def test_what_is_compared_is_what_a_plan_moves(direction, count, pages, executor):
    import torch

    moved = pages(direction, count)
    src_ids, dst_ids = (torch.from_numpy(ids) for ids in (moved.src_ids, moved.dst_ids))
    for part in moved.dst.parts:
        part.zero_()
    executor.submit(moved.plan).synchronize()
    assert torch.equal(moved.dst.select(dst_ids, 6), moved.src.select(src_ids, 6))
    assert bool(moved.src.select(src_ids, 6).all())
    others = sorted(set(range(10)) - set(dst_ids.tolist()))
    assert not bool(moved.dst.select(torch.tensor(others), 6).any())
    moved.verify("host", lambda: executor.submit(moved.plan).synchronize())
    with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
        moved.verify("nothing", lambda: None)
