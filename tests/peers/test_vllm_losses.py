"""What vLLM 0.33.0's own offloading leaves out: bytes of the cache that its canonical form does not name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvplan.backends import vllm
from tests.peers.vllm_worker import allocated

pytestmark = pytest.mark.peers

BLOCKS = 32
NAMES = ["layers.0.attn", "layers.1.attn"]


def registered(order, **changes):
    """vLLM's caches of two layers, and the bytes that its connector registers of them, by their first address."""
    spec = FullAttentionSpec(**{"block_size": 8, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float16} | changes)
    config, plan, caches = allocated([KVCacheGroupSpec(NAMES, spec)], order, BLOCKS, total_heads=spec.num_kv_heads)
    taken = []
    own = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0))
    offload = SimpleNamespace(replicated_layout=False, get_worker=taken.append, config=own)
    OffloadingConnectorWorker(offload, config, plan).register_kv_caches(caches)
    return caches, {tensor.tensor.data_ptr(): tensor.tensor.numel() for tensor in taken[0].tensors}


def test_heads_outside_blocks():
    """LHBNC, two heads: of 65,536 bytes, 16,384 are registered, which is head 0 of layer 0."""
    caches, found = registered("LHBNC")
    layout = vllm.describe(caches)
    assert layout.nbytes == 65_536
    assert found == {layout.address(layer=0, part="k"): 16_384}
    assert layout.address(layer=0, part="k", head=1) == layout.address(layer=0, part="k") + 16_384
    _, whole = registered("LHBNC", num_kv_heads=1)
    assert sum(whole.values()) == 32_768


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_blocks_padded_by_alignment(order):
    """Pages of 1,024 bytes, 1,536 apart: the blocks of layer 0 are registered, those of layer 1 are not."""
    caches, found = registered(order, block_stride_alignment=1536)
    layout = vllm.describe(caches)
    if layout.address(layer=1, part="k") == layout.address(layer=0, part="k") + 32 * 1024:
        pytest.skip("this vLLM pads no blocks here")
    assert found == {layout.address(layer=0, part="k"): 32 * 1536}
    assert layout.address(layer=1, part="k") == layout.address(layer=0, part="k") + 32 * 1536
    _, whole = registered(order)
    assert sum(whole.values()) == layout.nbytes == 65_536
