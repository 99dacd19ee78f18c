"""The transformers adapter, held against the views that the engine itself reads and writes."""

import pytest

from kvplan.backends import transformers as backend

FULL, SLIDING = "full_attention", "sliding_attention"


def real_cache(dtype="float32", **config):
    """A real PagedAttentionCache of transformers: 24 blocks of 16 tokens on the CPU, without a model."""
    pytest.importorskip("transformers", minversion="5.23")
    import torch
    from transformers import ContinuousBatchingConfig, LlamaConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache
    from transformers.generation.continuous_batching.distributed import DistributedHelper

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "vocab_size": 64}
    return PagedAttentionCache(
        LlamaConfig(**heads | config),
        ContinuousBatchingConfig(page_size=16, num_blocks=24, max_batch_tokens=64, max_memory_percent=0.5),
        "cpu",
        DistributedHelper(device_mesh=None, cpu_group_timeout=None, tp_plan={}),
        dtype=getattr(torch, dtype),
    )


def hybrid_cache():
    kinds = [SLIDING, FULL, SLIDING, SLIDING, FULL]
    return real_cache(num_hidden_layers=5, layer_types=kinds, sliding_window=32)


def hold_against_engine(layout, allocator):
    """Every (layer, part, block, token, head) against both kinds of views that the allocator precomputes."""
    blocks = layout.num_blocks
    assert layout.layers == tuple(allocator.layer_indices)
    assert layout.parts == ("k", "v")
    assert layout.block_tokens == allocator.tokens_per_page
    assert layout.block_nbytes == allocator.bytes_per_block
    # A page view steps by pages of K (or V) alone, of which a block of L layers has 2 L.
    step = 2 * len(allocator.layer_indices)
    for layer in layout.layers:
        for part, pages, rows in zip(
            "kv", allocator._kv_page_views[layer], allocator._kv_token_views[layer], strict=True
        ):
            for block in range(blocks):
                for token in (0, 1, allocator.tokens_per_page - 1):
                    row = rows[block * allocator.block_physical_stride + token]
                    for head in range(allocator.num_key_value_heads):
                        address = layout.address(layer=layer, part=part, block=block, token=token, head=head)
                        assert address == row[head].data_ptr()
                        if block * step < pages.shape[0]:
                            assert address == pages[block * step, token, head].data_ptr()


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_address_of_a_real_cache(dtype):
    cache = real_cache(dtype, num_hidden_layers=3)
    layout = backend.describe(cache)
    hold_against_engine(layout, cache.cache_allocators[FULL])
    assert layout.dtype == dtype
    assert layout.notation == "block layer kv token head dim"
    assert layout.nbytes == cache.cache_tensor.numel()


@pytest.mark.engine
def test_groups_of_a_hybrid_overlay_the_same_bytes():
    cache = hybrid_cache()
    full, sliding = backend.describe(cache, group=FULL), backend.describe(cache, group=SLIDING)
    assert (full.layers, sliding.layers) == ((1, 4), (0, 2, 3))
    # A page is 2 * 16 tokens * 2 heads * 32 elements * 4 bytes = 8192: blocks of 16384 and of 24576 bytes.
    assert (full.block_nbytes, sliding.block_nbytes) == (16384, 24576)
    assert full.address(layer=1, part="k") == sliding.address(layer=0, part="k") == cache.cache_tensor.data_ptr()
    assert full.nbytes == sliding.nbytes == cache.cache_tensor.numel()
    hold_against_engine(full, cache.cache_allocators[FULL])
    hold_against_engine(sliding, cache.cache_allocators[SLIDING])


@pytest.mark.engine
def test_what_the_engine_writes_is_read_by_coordinates():
    import torch

    cache = hybrid_cache()
    for kind, allocator in cache.cache_allocators.items():
        layout = backend.describe(cache, group=kind)
        cache.pool.allocate_sector(allocator.index)
        allocator.allocate_cache_to_request("r", 0, 7)
        write = torch.tensor(allocator.get_write_indices("r", 0, 7))
        keys = torch.randn(7, 2, 32)
        layer = allocator.layer_indices[-1]
        allocator.update(keys, -keys, layer, torch.tensor([], dtype=torch.long), write)
        flat = cache.cache_tensor.view(torch.float32)
        for part, sign in (("k", 1), ("v", -1)):
            at = layout.address(layer=layer, part=part, block=allocator.block_table["r"][0], token=6, head=1)
            first = (at - cache.cache_tensor.data_ptr()) // 4
            assert torch.equal(flat[first : first + 32], sign * keys[6, 1])
