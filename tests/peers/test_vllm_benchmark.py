"""What the benchmark takes for vLLM is vLLM's own worker over memory of ours: it moves every byte."""

from __future__ import annotations

import pytest

from benchmarks.gpu import vllm_peer
from benchmarks.gpu.vllm_caches import Caches, Setup
from benchmarks.gpu.vllm_jobs import SMOKE_JOBS, Model
from benchmarks.gpu.vllm_rows import packed
from kvplan.measure.workload import DIRECTIONS
from tests.peers.vllm_worker import OnDevice

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_vllm_s_worker_moves_every_byte(direction, copies, monkeypatch):
    whole = vllm_peer.vllm_worker
    monkeypatch.setattr(
        vllm_peer, "vllm_worker",
        lambda vllm, caches, pool: whole(vllm, [cache.as_subclass(OnDevice) for cache in caches], pool),
    )  # fmt: skip
    vllm = vllm_peer.load(vllm_peer.by_memmove)
    setup = Setup(SMOKE_JOBS, vllm=vllm)
    assert setup.peer.name == "vLLM 0.33.0"
    caches = Caches(setup, Model("tiny", 3, 64, (5, 12), ()))
    try:
        for specs in caches.specs(5):
            for name in caches.workers:
                copies.clear()
                caches.verify(name, direction, specs)
                assert len(copies) == {setup.peer.name: 15, packed(setup.peer.name): 5}.get(name, 0)
    finally:
        caches.close()
