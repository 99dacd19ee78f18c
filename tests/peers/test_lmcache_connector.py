"""LMCache 0.5.6: its own engine, on the CPU, stores and retrieves through kvplan's connector."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvplan.engines import lmcache as engine

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():  # its imports use what others deprecate
    warnings.simplefilter("ignore")
    try:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
        from lmcache.v1.metadata import LMCacheMetadata
    except ModuleNotFoundError as missing:
        pytest.skip(f"LMCache's engine imports {missing.name}", allow_module_level=True)

LAYERS, BLOCKS, TOKENS, HEADS, DIM, CHUNK = 3, 16, 4, 2, 8, 16


class Hinted(MockGPUConnector):
    """LMCache's connector of no GPU, with what vLLM tells those of a GPU; a shape as theirs."""

    def __init__(self, kv_shape, planes, width, hints=None):
        super().__init__(kv_shape)
        self.planes, self.width, self.layout_hints = planes, width, hints

    def get_shape(self, num_tokens):
        return torch.Size((self.planes, LAYERS, num_tokens, self.width))


def noise(*shape):
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.float16)


CACHES = {
    "K and V planes": (lambda: [noise(2, BLOCKS, TOKENS, HEADS, DIM) for _ in range(LAYERS)], {"kv_layout": "NHD"}),
    "K and V of a block": (lambda: [noise(BLOCKS, 2, TOKENS, HEADS, DIM) for _ in range(LAYERS)], {"kv_layout": "NHD"}),
    "HND": (
        lambda: [noise(BLOCKS, 2, HEADS, TOKENS, DIM).transpose(2, 3) for _ in range(LAYERS)],
        {"kv_layout": "HND"},
    ),
    "K and V of a row": (
        lambda: [noise(BLOCKS, TOKENS, HEADS, 2 * DIM).transpose(1, 2) for _ in range(LAYERS)],
        {"kv_layout": "NHD"},
    ),
    "latents": (lambda: [noise(BLOCKS, TOKENS, 24) for _ in range(LAYERS)], {}),
}


def rows(cache, name, slots):
    """Each slot's content: (layer, slot, K and V, head, dim), or (layer, slot, dim)."""
    made = []
    for layer in cache:
        dense = {
            "K and V planes": lambda t=layer: t.permute(1, 2, 0, 3, 4),
            "K and V of a block": lambda t=layer: t.permute(0, 2, 1, 3, 4),
            "HND": lambda t=layer: t.permute(0, 2, 1, 3, 4),
            "K and V of a row": lambda t=layer: t.permute(0, 2, 1, 3),
            "latents": lambda t=layer: t,
        }[name]()
        made.append(dense.flatten(0, 1)[slots].view(torch.int16))
    return torch.stack(made)


@pytest.mark.parametrize("name", CACHES)
def test_its_engine_stores_and_retrieves(name):
    """40 tokens: two chunks and a short one; back into other slots, of which a block has been there already."""
    make, hints = CACHES[name]
    cache, latent = make(), name == "latents"
    width = 24 if latent else HEADS * DIM
    shape = (LAYERS, 1, CHUNK, 1, 24) if latent else (LAYERS, 2, CHUNK, HEADS, DIM)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, local_cpu=True, max_local_cpu_size=0.01, save_unfull_chunk=True
    )
    metadata = LMCacheMetadata(model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
                               kv_dtype=torch.float16, kv_shape=shape, use_mla=latent)  # fmt: skip
    own = Hinted(shape, 1 if latent else 2, width, hints)
    there = LMCacheEngineBuilder.get_or_create(f"kvplan {name}", config, metadata, own, lambda t, _: t, lambda o, _: o)
    try:
        there.post_init(kvcaches=cache)
        made = engine.connect(there, device="cpu")
        tokens = torch.arange(40)
        slots = torch.tensor([b * TOKENS + k for b in (9, 3, 4, 15, 0, 7, 1, 12, 2, 6) for k in range(TOKENS)])
        before = rows(cache, name, slots)
        there.store(tokens, kvcaches=cache, slot_mapping=slots)
        assert made.executor.stats().nbytes == before.nbytes
        for layer in cache:
            layer.zero_()
        back = torch.tensor([b * TOKENS + k for b in (5, 8, 10, 11, 13, 14, 0, 1, 2, 3) for k in range(TOKENS)])
        found = there.retrieve(tokens, kvcaches=cache, slot_mapping=back)
        assert found.all()
        assert torch.equal(rows(cache, name, back), before)
        rest = [slot for slot in range(BLOCKS * TOKENS) if slot not in set(back.tolist())]
        assert not rows(cache, name, rest).any()
        made.executor.close()
    finally:
        loop = there.storage_manager.loop
        LMCacheEngineBuilder.destroy(f"kvplan {name}")
        loop.close()  # which it leaves open
