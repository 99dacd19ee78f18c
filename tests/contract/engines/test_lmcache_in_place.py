"""kvplan in the place of LMCache's own GPU connector: what LMCache is asked for, and unknown engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import kvplan
from kvplan.engines import lmcache as engine
from tests.contract.engines.lmcache_caches import DIM, HEADS, LAYERS, flash, hold, noise, objects_of

torch = pytest.importorskip("torch", reason="the engine's tensors are torch's")


class VLLMPagedMemGPUConnectorV2:
    """LMCache's own, by what is looked at."""

    def batched_from_gpu(self, *given, **more):
        raise AssertionError("kvplan's is asked")

    def initialize_kvcaches_ptr(self, **given):
        self.kvcaches = given["kvcaches"]


def engine_of(own):
    return SimpleNamespace(gpu_connector=own, metadata=SimpleNamespace(local_worker_id=0))


def test_the_connector_in_its_place():
    there = engine_of(VLLMPagedMemGPUConnectorV2())
    made = engine.connect(there, device="cpu", policy=kvplan.Policy(threads=1))
    assert there.gpu_connector is made
    cache, (memory,) = flash(), objects_of(1, 8)
    mapping = [12, 13, 14, 15, 0, 1, 2, 3]
    there.gpu_connector.batched_from_gpu([memory], [0], [8], kvcaches=cache, slot_mapping=mapping)
    hold(cache, [memory], [0], [8], mapping)
    with pytest.raises(kvplan.KVPlanError, match="connector already"):
        engine.connect(there)
    made.executor.close()


@pytest.mark.parametrize("nested", [False, True])
def test_flat_slots_in_pages_that_are_told(nested):
    """SGLang's: whole pages of 4 slots move as such."""
    own = type("SGLangGPUConnector", (VLLMPagedMemGPUConnectorV2,), {})()
    made = engine.connect(engine_of(own), page_size=4, device="cpu")
    cache = [[noise((32, HEADS, DIM), 10 * half + layer) for layer in range(LAYERS)] for half in range(2)]
    (memory,) = objects_of(1, 8)
    caches = cache if nested else cache[0] + cache[1]
    stored = made.store([memory], [0], [8], kvcaches=caches, slot_mapping=[20, 21, 22, 23, 4, 5, 6, 7])
    stored.synchronize()
    assert stored.plan.units == 2
    for layer in range(LAYERS):
        expected = cache[1][layer][[20, 21, 22, 23, 4, 5, 6, 7]].view(8, -1)
        assert torch.equal(memory.tensor[1, layer].view(torch.int16), expected.view(torch.int16))
    made.executor.close()


BLOCKS, TOKENS = 9, 4


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("outer", ["heads", "tokens"])
def test_vllms_cache_is_read_by_its_dims(outer, heads):
    """With two heads, and tokens outside of heads in memory, a block also looks like a plane of K and one of V."""
    first = (heads, TOKENS) if outer == "heads" else (TOKENS, heads)
    rows = [noise((BLOCKS, *first, 2 * DIM), layer) for layer in range(LAYERS)]
    cache = rows if outer == "heads" else [layer.transpose(1, 2) for layer in rows]
    made = engine.connect(engine_of(VLLMPagedMemGPUConnectorV2()), device="cpu")
    (memory,) = objects_of(1, 8, width=heads * DIM)
    slots = torch.tensor([5, 30, 2, 17, 0, 35, 11, 8])
    made.from_gpu(memory, 0, 8, kvcaches=cache, slot_mapping=slots)
    for layer in range(LAYERS):
        content = cache[layer].permute(0, 2, 1, 3).flatten(0, 1)[slots]  # slot, head, K and V
        for kv in range(2):
            expected = content[..., kv * DIM : (kv + 1) * DIM].reshape(8, -1)
            assert torch.equal(memory.tensor[kv, layer].view(torch.int16), expected.view(torch.int16))
    made.executor.close()


@pytest.mark.parametrize("shape", [(2, 2, TOKENS, HEADS, DIM), (3, 5, TOKENS, HEADS, DIM), (BLOCKS, DIM)])
def test_tensors_with_no_meaning_or_two_are_refused(shape):
    with pytest.raises(kvplan.LayoutError, match="whose dims are not known; give caches="):
        engine.described([torch.zeros(shape)])
    with pytest.raises(kvplan.LayoutError, match="whose dims are not known; give caches="):
        engine.described([torch.zeros(BLOCKS, 1, 64, 132, dtype=torch.uint8)])
