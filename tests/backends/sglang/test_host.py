"""sglang's host pools: every layout, and bytes moved to and from the device's."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

import kvplan
from kvplan.backends import sglang
from tests.backends.rows import hold_every_row
from tests.backends.sglang.sglang_pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    dsa_pool,
    host_index,
    host_mha,
    host_mla,
    mha_pool,
    mha_row,
    mla_pool,
    mla_row,
    unified_pool,
)

NOTATIONS = {
    "layer_first": "kv layer (block token) head dim",
    "page_first": "kv (block token) layer head dim",
    "page_first_direct": "kv block layer token head dim",
    "page_head": "kv block head token layer dim",
    "page_unified": "block head.0 layer kv token head.1 dim",
}
LATENTS = {
    "layer_first": "layer (block token) 1 dim",
    "page_first": "(block token) layer 1 dim",
    "page_first_direct": "block layer token 1 dim",
    "page_unified": "block layer token dim",
}
# Where V of layer 2, page 3, token 1, head 3 begins, in bytes: 4 pages of 4 tokens, 3 layers, 4 heads of 16 bytes.
OFFSETS = {
    "layer_first": 3072 + 2 * 1024 + 13 * 64 + 48,
    "page_first": 3072 + 13 * 192 + 2 * 64 + 48,
    "page_first_direct": 3072 + 3 * 768 + 2 * 256 + 64 + 48,
    "page_head": 3072 + 3 * 768 + 3 * 192 + 48 + 2 * 16,
    "page_unified": 3 * 1536 + 768 + 2 * 256 + 128 + 32 + 16,  # the second head of the second group
}


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_keys_and_values(layout):
    pool = host_mha(layout, start=5)
    described = sglang.describe(pool, head_start=8)
    assert described.notation == NOTATIONS[layout]
    assert (described.layers, described.parts, described.heads) == ((5, 6, 7), ("k", "v"), range(8, 12))
    assert (described.num_blocks, described.block_tokens, described.block_nbytes) == (4, 4, 1536)
    at = described.address(layer=7, part="v", block=3, token=1, head=11)
    assert at == pool.kv_buffer.data_ptr() + OFFSETS[layout]
    assert hold_every_row(described, mha_row(layout, pool.kv_buffer)) == 384
    assert described == sglang.describe(pool.kv_buffer, layout=layout, page_size=4, layer_start=5, head_start=8)


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_latents(layout):
    pool = host_mla(layout, start=5)
    described = sglang.describe(pool)
    assert described.notation == LATENTS[layout]
    assert (described.layers, described.parts, described.num_blocks, described.block_tokens) == (
        (5, 6, 7),
        ("kv",),
        4,
        4,
    )
    assert described.block_nbytes == 576
    assert hold_every_row(described, mla_row(layout, pool.kv_buffer)) == 48
    assert described == sglang.describe(pool.kv_buffer, layout=layout, page_size=4, layer_start=5)


def fill(tensors):
    for tensor in tensors:
        tensor.view(torch.uint8).copy_(torch.randint(0, 256, tensor.view(torch.uint8).shape, dtype=torch.uint8))


# By the host's layout, runs a page of 4 tokens, from each device pool; 3 layers of 4 heads of 16 bytes.
RUNS = {
    ("nhd", "layer_first"): (6, 256),
    ("nhd", "page_first"): (24, 64),
    ("nhd", "page_first_direct"): (6, 256),
    ("nhd", "page_head"): (96, 16),
    ("nhd", "page_unified"): (48, 32),
    ("hnd", "layer_first"): (96, 16),
    ("hnd", "page_first"): (96, 16),
    ("hnd", "page_first_direct"): (96, 16),
    ("hnd", "page_head"): (96, 16),
    ("hnd", "page_unified"): (96, 16),
    ("unified", "layer_first"): (24, 64),
    ("unified", "page_first"): (24, 64),
    ("unified", "page_first_direct"): (24, 64),
    ("unified", "page_head"): (96, 16),
    ("unified", "page_unified"): (48, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", MHA_LAYOUTS)
@pytest.mark.parametrize("form", ["nhd", "hnd", "unified"])
def test_bytes_move_to_the_host_and_back(form, layout, executor):
    pool = unified_pool() if form == "unified" else mha_pool(form=form)
    host = host_mha(layout)
    fill([*pool.k_buffer, *pool.v_buffer] if form != "unified" else [pool.raw])
    before = [[t.clone() for t in half] for half in (pool.k_buffer, pool.v_buffer)]
    device, described = sglang.describe(pool), sglang.describe(host)
    program = kvplan.compile(device, described)
    assert (program.runs, program.run_nbytes[0]) == RUNS[form, layout]
    executor.submit(program.plan([3, 1, 2], [0, 3, 2])).synchronize()
    row = mha_row(layout, host.kv_buffer)

    def row_on_device(layer, kv, block, token, head):
        return before[kv][layer][block, head, token] if form == "hnd" else before[kv][layer][4 * block + token, head]

    for (there, here), layer, kv, token, head in product(
        ((3, 0), (1, 3), (2, 2)), range(3), range(2), range(4), range(4)
    ):
        moved = row(layer, kv, here, token, head)
        assert torch.equal(moved.view(torch.uint8), row_on_device(layer, kv, there, token, head).view(torch.uint8))
    assert not any(row(layer, kv, 1, 0, 0).view(torch.uint8).any() for layer in range(3) for kv in range(2))
    for half in (pool.k_buffer, pool.v_buffer):
        for tensor in half:
            tensor.zero_()
    executor.submit(kvplan.compile(described, device).plan([0, 3, 2], [3, 1, 2])).synchronize()
    start = 1 if form == "hnd" else 4
    for half, kept in zip((pool.k_buffer, pool.v_buffer), before, strict=True):
        for tensor, content in zip(half, kept, strict=True):
            assert torch.equal(tensor[start:].view(torch.int16), content[start:].view(torch.int16))
            assert not tensor[:start].any()  # page 0 was not named


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
def test_latents_move(layout, executor):
    pool, host = mla_pool(), host_mla(layout)
    fill(pool.kv_buffer)
    program = kvplan.compile(sglang.describe(pool), sglang.describe(host))
    assert (program.runs, program.run_nbytes[0]) == ((12, 48) if layout == "page_first" else (3, 192))
    executor.submit(program.plan([3, 1], [0, 2])).synchronize()
    row = mla_row(layout, host.kv_buffer)
    for (there, here), layer, token in product(((3, 0), (1, 2)), range(3), range(4)):
        expected = pool.kv_buffer[layer][4 * there + token, 0]
        assert torch.equal(row(layer, 0, here, token, 0).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_ranks_share_a_host_pool_of_all_heads(layout, executor):
    """TP 2: each rank's two heads, to their place among four; a head group of page_unified is one rank's."""
    ranks, host = [mha_pool(heads=2) for _ in range(2)], host_mha(layout)
    described = sglang.describe(host)
    for rank, pool in enumerate(ranks):
        fill([*pool.k_buffer, *pool.v_buffer])
        device = sglang.describe(pool, head_start=2 * rank)
        program = kvplan.compile(device, described.slice(heads=range(2 * rank, 2 * rank + 2)))
        executor.submit(program.plan(range(4), range(4))).synchronize()
    row = mha_row(layout, host.kv_buffer)
    for layer, kv, block, token, head in product(range(3), range(2), range(4), range(4), range(4)):
        half = (ranks[head // 2].k_buffer, ranks[head // 2].v_buffer)[kv]
        expected = half[layer][4 * block + token, head % 2]
        assert torch.equal(row(layer, kv, block, token, head).view(torch.uint8), expected.view(torch.uint8))


def test_a_head_group_of_page_unified_is_one_run():
    """A group holds two heads of every layer, K and V: all that a rank of two heads holds of a page."""
    whole = sglang.describe(host_mha("page_unified"))
    rank = sglang.describe(host_mha("page_unified", heads=2, groups=1), head_start=2)
    program = kvplan.compile(rank, whole.slice(heads=range(2, 4)))
    assert (program.runs, program.run_nbytes) == (1, (768, 768))


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_values_of_another_width(layout):
    """AsymmetricMHATokenToKVPoolHost: a buffer for K, one for V."""
    k, v = host_mha(layout).kv_buffer[0].clone(), host_mha(layout, dim=4).kv_buffer[0].clone()
    pool = SimpleNamespace(**{**vars(host_mha(layout)), "kv_buffer": (k, v)})
    described = sglang.describe(pool)
    assert (described.parts, described.block_nbytes) == (("k", "v"), 3 * 4 * 4 * 24)
    rows = [mha_row(layout, half[None]) for half in (k, v)]
    hold_every_row(described, lambda layer, kv, block, token, head: rows[kv](layer, 0, block, token, head))
    assert kvplan.compile(sglang.describe(mha_pool(v_dim=4)), described).unit_nbytes == 1152


def test_mxfp8_scales(executor):
    """Pages of 128 tokens; on the host a page's scales are one row of bytes a layer."""
    device = mha_pool(page=128, size=256, dim=128, heads=2, layers=2, dtype=torch.uint8)
    host = host_mha("page_first", page=128, dim=128, heads=2, layers=2, pages=3, dtype=torch.uint8)
    for half in "kv":
        scales = [torch.zeros(3, 2, 32, 4, 4, dtype=torch.uint8) for _ in range(2)]
        fill(scales)
        setattr(device, f"{half}_scale_buffer", scales)
        setattr(host, f"{half}_scale_host", torch.zeros(3, 2, 2 * 512, dtype=torch.uint8))
    described = sglang.describe(host)
    assert described.parts == ("k", "v", "k_scale", "v_scale")
    assert described.block_nbytes == 2 * 128 * 2 * 2 * 132
    program = kvplan.compile(sglang.describe(device), described)
    executor.submit(program.plan([1, 2], [2, 0])).synchronize()
    for half, layer, (there, here) in product("kv", range(2), ((1, 2), (2, 0))):
        scales = getattr(device, f"{half}_scale_buffer")[layer][there].flatten()
        assert torch.equal(getattr(host, f"{half}_scale_host")[here, layer], scales)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_index_keys(layout):
    """The pool beside the latents' has a page more, which no id names; merged, the two mirror a DSA pool."""
    latents, keys = host_mla(layout, page=64, dim=656, dtype=torch.uint8), host_index(layout)
    described = kvplan.KVLayout.merge([sglang.describe(latents), sglang.describe(keys)])
    assert (described.parts, described.num_blocks, described.block_nbytes) == (("kv", "index"), 4, 3 * (41_984 + 8448))
    buffer = keys.index_k_with_scale_buffer
    expected = buffer[2, 3] if layout == "layer_first" else buffer[3, 2]
    assert described.address(layer=2, part="index", block=3) == expected.data_ptr()
    program = kvplan.compile(sglang.describe(dsa_pool()), described)
    assert program.unit_nbytes == 3 * (41_984 + 8448)


def test_index_keys_of_some_layers():
    keys = host_index("page_first", layers=2)
    assert sglang.describe(keys, layers=[4, 6]).layers == (4, 6)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_keys_of_an_index_branch(layout):
    pool = host_mha(layout)
    pool.k_buffer = pool.kv_buffer[0].clone()
    del pool.kv_buffer
    described = sglang.describe(pool)
    assert (described.parts, described.block_nbytes) == (("index",), 768)
    row = mha_row(layout, pool.k_buffer[None])
    hold_every_row(described, lambda layer, kv, block, token, head: row(layer, 0, block, token, head))


def test_registrations_are_seams():
    """A large pool is registered in chunks of whole pages, noted on the tensor; no copy may span two."""
    pool = host_mha("page_first_direct")
    base = pool.kv_buffer.data_ptr()
    pool.kv_buffer._sglang_cuda_host_registered_ranges = [(base, 2304), (base + 2304, 2304), (base + 4608, 1536)]
    described = sglang.describe(pool)
    assert described.seams == (base + 2304, base + 4608)
    same = sglang.describe(host_mha("page_first_direct"))
    plan = kvplan.compile(described, same).plan(range(4), range(4))
    assert plan.descriptors().size.tolist() == [2304, 2304, 1536]
    assert sglang.describe(pool.kv_buffer, layout="page_first_direct", page_size=4).seams == described.seams
    pool.kv_buffer._sglang_cuda_host_registered_ranges = []
    assert sglang.describe(pool).seams == ()


def test_seams_of_tensors():
    buffer = host_mha("page_first").kv_buffer
    seam = buffer[1].data_ptr()
    assert sglang.describe(buffer, layout="page_first", page_size=4, seams=[seam]).seams == (seam,)
