"""sglang: DeepSeek-V4's pages, states of recurrent layers, index pages inside larger blocks; what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import sglang
from tests.backends.sglang.sglang_pools import dsa_pool

Pool = SimpleNamespace


def kv_layout(data, scales, *, interleaved=False):
    """SGLang's KVLayout, what is asked of it."""
    step = data + scales if interleaved else data
    return Pool(
        data_bytes=data, scale_bytes=scales, bytes_per_token=data + scales, is_interleaved=interleaved,
        row_addressing=lambda page: (step, data if interleaved else page * data, step if interleaved else scales),
    )  # fmt: skip


def v4_pool(form, *, page=64, pages=4, layers=2, align=1, row=None):
    """DeepSeekV4SingleKVPool: pages of bytes, padded to ``align``; of plain values with ``row`` bytes a token."""
    nbytes = page * (row or form.bytes_per_token)
    padded = -(-nbytes // align) * align
    return Pool(
        page_size=page, kv_layout=form, kv_cache_total_dim=row or form.bytes_per_token, bytes_per_page_padded=padded,
        qk_nope_head_dim=448, start_layer=0, kv_buffer=[torch.zeros(pages, padded, dtype=torch.uint8) for _ in "ab"],
    )  # fmt: skip


def test_pages_of_data_and_then_scales_are_two_parts():
    """V4: 64 rows of 576 bytes, 64 of 8, and 64 bytes of pad: 37,440 bytes a page."""
    pool = v4_pool(kv_layout(576, 8), align=576)
    assert pool.bytes_per_page_padded == 37_440
    layout = sglang.describe(pool, layers=[3, 5])
    assert (layout.parts, layout.layers, layout.block_tokens) == (("kv", "kv_scale"), (3, 5), 64)
    assert (layout.num_blocks, layout.block_nbytes) == (4, 2 * 64 * 584)
    page = pool.kv_buffer[1][2].data_ptr()
    assert layout.address(layer=5, part="kv", block=2, token=7) == page + 7 * 576
    assert layout.address(layer=5, part="kv_scale", block=2, token=7) == page + 64 * 576 + 7 * 8


@pytest.mark.parametrize(("form", "row", "nbytes"), [
    (kv_layout(512, 16, interleaved=True), None, 528),  # V4.1, each token's scales behind its data
    (kv_layout(576, 8), 512, 512),  # plain fp8 values, under the layout of a pool with scales
    (kv_layout(512, 0), None, 512),
])  # fmt: skip
def test_pages_of_whole_rows_are_one_part(form, row, nbytes):
    pool = v4_pool(form, row=row)
    layout = sglang.describe(pool)
    assert (layout.parts, layout.block_nbytes) == (("kv",), 2 * 64 * nbytes)
    at = pool.kv_buffer[0][3].data_ptr() + 5 * nbytes
    assert layout.address(layer=0, part="kv", block=3, token=5) == at


def test_tokens_of_a_page_go_to_larger_blocks(executor):
    pool = v4_pool(kv_layout(512, 16), page=4)
    for layer, pages in enumerate(pool.kv_buffer):
        pages[:] = torch.arange(4, dtype=torch.uint8)[:, None] + 10 * layer
    gpu = sglang.describe(pool)
    host = kvplan.KVLayout.merge([
        kvplan.allocate("block layer token dim", like=gpu.slice(parts=[part]), num_blocks=1, block_tokens=16)
        for part in gpu.parts
    ])  # fmt: skip
    executor.submit(kvplan.compile(gpu, host).plan([2, 0, 3], [0], 0, 1)).synchronize()
    for tensors in host.tensors:
        assert tensors[0, 1, 4:, 0].tolist() == [12] * 4 + [10] * 4 + [13] * 4


def test_an_index_pool_of_its_own():
    keys = [torch.zeros(4, 64 * 132, dtype=torch.uint8) for _ in range(3)]
    pool = Pool(page_size=64, index_head_dim=128, index_k_with_scale_buffer=keys)
    layout = sglang.describe(pool)
    assert (layout.parts, layout.opaque, layout.block_nbytes) == (("index",), True, 3 * 8448)


def test_index_pages_in_blocks_of_four_times_the_tokens(executor):
    """A DSA pool with pages of 64, and a host pool with blocks of 256: latents by token, index keys by page."""
    pool = dsa_pool()
    for layer in range(3):
        pool.kv_buffer[layer].view(4, -1)[:] = torch.arange(4, dtype=torch.uint8)[:, None] + 10 * layer
        pool.index_k_with_scale_buffer[layer][:4] = torch.arange(4, dtype=torch.uint8)[:, None] + 10 * layer + 100
    gpu = sglang.describe(pool)
    latents = kvplan.allocate("block layer token dim", like=gpu.slice(parts=["kv"]), num_blocks=2, block_tokens=256)
    keys = kvplan.allocate("block layer subblock dim", like=gpu.slice(parts=["index"]), num_blocks=2,
                           sizes={"subblock": 4})  # fmt: skip
    host = kvplan.KVLayout.merge([latents, keys])
    program = kvplan.compile(gpu, host)
    assert (program.unit_tokens, program.unit_nbytes) == (64, 3 * 64 * (656 + 132))
    executor.submit(program.plan([3, 1], [1], 0, 2)).synchronize()
    assert latents.tensors[1, 2, 128::64, 0].tolist() == [23, 21]
    assert keys.tensors[1, 2, 2:, 8447].tolist() == [123, 121]
    for pages in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        pages.zero_()
    executor.submit(kvplan.compile(host, gpu).plan([1], [2, 0], 2)).synchronize()
    assert [rows.view(4, -1)[:, 0].tolist() for rows in pool.kv_buffer] == [
        [1, 0, 3, 0],
        [11, 0, 13, 0],
        [21, 0, 23, 0],
    ]
    assert pool.index_k_with_scale_buffer[0][:4, 9].tolist() == [101, 0, 103, 0]


def states(layers, slots, *, host=False, kinds=1):
    """conv of (3, 8) fp16 and a recurrent state of (2, 4, 4) fp32; a host pool counts slots first."""
    outer = (slots, layers, 1) if host else (layers, slots)
    conv = [torch.zeros(*outer, 3, 8, dtype=torch.float16) for _ in range(kinds)]
    return conv, torch.zeros(*outer, 2, 4, 4)


def mamba(layers=3, slots=5, kinds=1):
    conv, temporal = states(layers, slots, kinds=kinds)
    return Pool(mamba_cache=Pool(conv=conv, temporal=temporal), mamba_layer_ids=list(range(1, 2 * layers, 2)))


def mamba_host(layers=3, slots=7, kinds=1, layout="page_first"):
    conv, temporal = states(layers, slots, host=True, kinds=kinds)
    return Pool(layout=layout, page_size=1, conv_buffer=conv, temporal_buffer=temporal, slot_state_buffers=[])


def test_states_go_to_their_host_pool_and_back(executor):
    pool, host = mamba(), mamba_host()
    device, mirror = sglang.describe(pool), sglang.describe(host, layers=[1, 3, 5])
    assert (device.parts, device.layers, device.num_blocks) == (("conv", "ssm"), (1, 3, 5), 5)
    assert (device.block_nbytes, mirror.num_blocks) == (3 * (48 + 128), 7)
    pool.mamba_cache.temporal[2, 4] = torch.arange(32).view(2, 4, 4)
    pool.mamba_cache.conv[0][0, 4] = 7
    executor.submit(kvplan.compile(device, mirror).plan([4], [6])).synchronize()
    assert torch.equal(host.temporal_buffer[6, 2, 0], pool.mamba_cache.temporal[2, 4])
    assert (host.conv_buffer[0][6, 0, 0] == 7).all()
    assert not host.conv_buffer[0][:6].any()
    executor.submit(kvplan.compile(mirror, device).plan([6], [1])).synchronize()
    assert torch.equal(pool.mamba_cache.temporal[2, 1], pool.mamba_cache.temporal[2, 4])


def test_several_convolutions_and_no_recurrent_state():
    pool = mamba(kinds=2)
    assert sglang.describe(pool).parts == ("conv", "conv_1", "ssm")
    pool.mamba_cache.temporal = torch.zeros(3, 5, 0)
    assert sglang.describe(pool).parts == ("conv", "conv_1")


BYTES = torch.zeros(4, 2, 64, dtype=torch.uint8)
REFUSED = {
    "ring before rows": (Pool(kv_buffer=[BYTES], kv_buffer_rope=[None]), "keeps a ring .* from pool.swa_pages on"),
    "fp4 keys": (Pool(index_k_payload_buffer=[], index_head_dim=128), "FP4 keys and their scales in two buffers"),
    "page rows": (Pool(layout="page_first_direct", kv_buffer=BYTES, item_bytes=64),
                  r"both sides as whole pages, KVLayout.from_tensors\('block layer 1 dim', pool.kv_buffer\)"),
    "state rows": (Pool(layout="layer_first", kv_buffer=[BYTES], state_page_bytes=64), "'layer: block dim', pool.kv_b"),
    "side states": (Pool(**{**vars(mamba_host()), "slot_state_buffers": [BYTES]}), "keeps 1 kinds of side state"),
    "side states of a device": (Pool(**{**vars(mamba()), "_slot_siblings": [1, 2]}), "keeps 2 kinds of side state"),
    "all of DeepSeek-V4": (Pool(swa_kv_pool=1, kv_pools={4: 1}, index_pools={4: 1}),
                           "pool of pools, .* describe what swa_kv_pool, kv_pools, index_pools hold, one by one"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_what_to_do_instead(case):
    pool, message = REFUSED[case]
    with pytest.raises(LayoutError, match=message):
        sglang.describe(pool)
