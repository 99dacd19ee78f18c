"""tensorrt_llm: pools folded and unfolded, per-layer views, managers, and the slots of version 2."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import IncompatibleLayoutsError, KVLayout, LayoutError
from kvplan.backends import tensorrt_llm
from tests.backends.moves import move, noise
from tests.backends.rows import hold_every_row

SIZES = {"tokens_per_block": 4, "num_kv_heads": 2}


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_a_folded_pool(kv_layout):
    pool = torch.zeros(5, 3, 2, 64, dtype=torch.bfloat16)  # 64 = 2 heads x 4 tokens x 8
    layout = tensorrt_llm.describe(pool, kv_layout=kv_layout, layers=[1, 4, 6], head_start=2, **SIZES)
    assert (layout.layers, layout.parts, layout.heads) == ((1, 4, 6), ("k", "v"), range(2, 4))
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 4, 3 * 2 * 128)

    def row(layer, kv, block, token, head):
        place = head * 4 + token if kv_layout == "HND" else token * 2 + head
        return pool[block, layer, kv, place * 8 :]

    assert hold_every_row(layout, row) == 3 * 2 * 5 * 4 * 2
    shape = (5, 3, 2, 2, 4, 8) if kv_layout == "HND" else (5, 3, 2, 4, 2, 8)
    unfolded = tensorrt_llm.describe(pool.view(shape), kv_layout=kv_layout, layers=[1, 4, 6], head_start=2)
    assert unfolded == layout
    assert tensorrt_llm.describe(pool.view(shape), kv_layout=kv_layout, **SIZES).layers == (0, 1, 2)


def test_the_order_inside_is_hnd():
    pool = np.zeros((5, 3, 2, 64), np.int8)
    assert tensorrt_llm.describe(pool, **SIZES) == tensorrt_llm.describe(pool, kv_layout="HND", **SIZES)
    assert tensorrt_llm.describe(pool, **SIZES) != tensorrt_llm.describe(pool, kv_layout="NHD", **SIZES)
    assert tensorrt_llm.describe(pool, layer_start=4, **SIZES).layers == (4, 5, 6)
    assert tensorrt_llm.describe(pool, **SIZES).heads == range(2)


@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_bytes_a_block_and_layer(heads):
    """8 KV heads x 128, bf16, 16 tokens; TP 1, 2, 4, 8."""
    pool = torch.zeros(2, 3, 2, heads * 16 * 128, dtype=torch.bfloat16)
    layout = tensorrt_llm.describe(pool, tokens_per_block=16, num_kv_heads=heads)
    assert layout.slice(layers=[1]).block_nbytes == {8: 65_536, 4: 32_768, 2: 16_384, 1: 8_192}[heads]


@pytest.mark.parametrize(("dtype", "nbytes"), [(torch.bfloat16, 73_728), (torch.uint8, 36_864)])
def test_mla_has_k_only(dtype, nbytes):
    pool = torch.zeros(4, 2, 1, 64 * 576, dtype=dtype)
    layout = tensorrt_llm.describe(pool, tokens_per_block=64, num_kv_heads=1)
    assert (layout.parts, layout.notation) == (("kv",), "block layer 1 (head token dim)")
    assert layout.slice(layers=[0]).block_nbytes == nbytes
    hold_every_row(layout, lambda layer, kv, block, token, head: pool[block, layer, 0, token * 576 :])


def test_to_a_page_first_host_of_larger_blocks():
    """GPU blocks of 4 tokens, heads first; host blocks of 8, tokens first."""
    data = noise((6, 3, 2, 2, 4, 16))
    host = np.zeros((4, 3, 2, 8, 2, 16), np.uint8)
    dst = KVLayout.from_tensors("block layer kv token head dim", host)
    program = move(tensorrt_llm.describe(data.reshape(6, 3, 2, 128), **SIZES), dst, [5, 0, 2, 1], [3, 1])
    assert (program.unit_tokens, program.runs, program.run_nbytes, program.alignment) == (4, 48, (16, 16), 16)
    expected = np.zeros_like(host)
    for block, (slot, start) in zip([5, 0, 2, 1], [(3, 0), (3, 4), (1, 0), (1, 4)], strict=True):
        expected[slot, :, :, start : start + 4] = data[block].transpose(0, 1, 3, 2, 4)
    assert (host == expected).all()


def test_primary_to_secondary_is_one_run_a_block():
    primary, secondary = noise((6, 3, 2, 128)), np.zeros((4, 3, 2, 128), np.uint8)
    described = [tensorrt_llm.describe(pool, **SIZES) for pool in (primary, secondary)]
    program = move(*described, [5, 1], [0, 2])
    assert (program.runs, program.run_nbytes) == (1, (768, 768))
    assert (secondary[[0, 2]] == primary[[5, 1]]).all()
    assert not secondary[[1, 3]].any()


class Manager:
    """What describe reads of a KVCacheManager of version 1."""

    def __init__(self, pool, heads=2, tokens=4):
        self.pool, self.heads, self.tokens = pool, heads, tokens
        self.layer_offsets = {7: 1, 3: 0, 9: 2}  # global number to place in the pool
        self.impl = SimpleNamespace(get_primary_pool_data=lambda offset: self.pool[:, offset])

    def get_buffers(self, layer_idx, kv_layout="NHD"):
        data = self.impl.get_primary_pool_data(self.layer_offsets[layer_idx])
        inside = (self.tokens, self.heads) if kv_layout == "NHD" else (self.heads, self.tokens)
        return data.reshape(data.shape[0], data.shape[1], *inside, -1)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_a_manager(kv_layout):
    pool = torch.zeros(5, 3, 2, 64, dtype=torch.bfloat16)
    layout = tensorrt_llm.describe(Manager(pool), kv_layout=kv_layout, head_start=2)
    assert (layout.layers, layout.heads) == ((3, 7, 9), range(2, 4))
    assert layout == tensorrt_llm.describe(pool, kv_layout=kv_layout, layers=[3, 7, 9], head_start=2, **SIZES)
    views = [pool[:, layer].unflatten(2, (2, 4, 8) if kv_layout == "HND" else (4, 2, 8)) for layer in range(3)]
    assert tensorrt_llm.describe(views, kv_layout=kv_layout, layers=[3, 7, 9], head_start=2) == layout
    assert tensorrt_llm.describe([pool[:, 1]], kv_layout=kv_layout, layers=[7], head_start=2, **SIZES) == layout.slice(
        layers=[7]
    )


def test_pools_beside_the_cache():
    """NVFP4 block scales, and the indexer's keys with kv_factor 1, whose blocks are opaque."""
    cache = tensorrt_llm.describe(np.zeros((4, 3, 2, 2 * 16 * 64), np.int8), tokens_per_block=16, num_kv_heads=2)
    scales = np.zeros((4, 3, 2, 2 * 16 * 8), np.uint8)
    scale = tensorrt_llm.describe(scales, tokens_per_block=16, num_kv_heads=2, part="scale")
    index = tensorrt_llm.describe(np.zeros((4, 3, 1, 16 * 132), np.uint8), part="index", whole_blocks=True)
    assert index.notation == "block layer 1 dim"
    layout = KVLayout.merge([cache, scale, index])
    assert layout.parts == ("k", "v", "k_scale", "v_scale", "index")
    assert layout.slice(layers=[2]).block_nbytes == 2 * 2 * 16 * 72 + 2_112
    other = tensorrt_llm.describe(np.zeros((2, 3, 1, 32 * 132), np.uint8), part="index", whole_blocks=True)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(index, other)
    opaque = tensorrt_llm.describe(np.zeros((4, 3, 2, 2, 16, 8), np.uint8), part="scale", whole_blocks=True)
    assert (opaque.notation, opaque.opaque) == ("block layer kv dim.0 dim.1 dim.2", True)
    assert opaque.slice(layers=[0], parts=["v_scale"]).block_nbytes == 256


def test_slots():
    """Version 2: the same bytes on every tier; a pool group's pools share slot ids, whatever their slots' sizes."""
    gpu, host = noise((6, 4_096)), np.zeros((9, 4_096), np.uint8)
    src, dst = tensorrt_llm.describe(gpu, layers=[2]), tensorrt_llm.describe(host, layers=[2])
    assert (src.parts, src.layers, src.num_blocks, src.block_tokens) == (("slot",), (2,), 6, 1)
    assert src.address(layer=2, part="slot", block=5) == gpu.ctypes.data + 5 * 4_096
    assert (move(src, dst, [5, 2], [8, 0]).runs, src.block_nbytes) == (1, 4_096)
    assert (host[[8, 0]] == gpu[[5, 2]]).all()
    assert tensorrt_llm.describe(gpu, layer_start=2) == src
    assert tensorrt_llm.describe(gpu).layers == (0,)
    group = tensorrt_llm.describe([gpu, np.zeros((6, 96), np.uint8)])
    assert (group.parts, group.block_nbytes) == (("slot_0", "slot_1"), 4_192)
    assert tensorrt_llm.describe([gpu, gpu[:, :96].copy()], part="swa").parts == ("swa_0", "swa_1")
    assert tensorrt_llm.describe([gpu], part="swa").parts == ("swa",)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(src, tensorrt_llm.describe(np.zeros((12, 2_048), np.uint8), layers=[2]))


def test_seams():
    pool = np.zeros((4, 3, 2, 64), np.int8)
    seam = pool[2].ctypes.data
    assert tensorrt_llm.describe(pool, seams=[seam], **SIZES).seams == (seam,)
    assert tensorrt_llm.describe(pool.reshape(4, -1), seams=[seam]).seams == (seam,)


POOL, TWO = np.zeros((4, 3, 2, 64), np.float16), np.zeros((4, 384), np.float16)
V2 = SimpleNamespace(get_buffers=None, layer_offsets={0: 0}, impl=SimpleNamespace(get_mem_pool_base_address=None))
CASES = {
    "order": (POOL, {"kv_layout": "DHN"}, "kv_layout is 'DHN'; it is one of 'NHD', 'HND'"),
    "no sizes": (POOL, {}, r"shape \(4, 3, 2, 64\) folds .* into 64 elements: give tokens_per_block= and num_kv_"),
    "one size": (POOL, {"num_kv_heads": 2}, "give tokens_per_block= and num_kv_heads="),
    "sizes": (POOL, {"tokens_per_block": 5, "num_kv_heads": 2}, "dim of extent 64 .* cannot be head=2 . token=5 . "),
    "other sizes": (POOL.reshape(4, 3, 2, 2, 4, 8), {"tokens_per_block": 2}, "cannot be token=2|sizes say token=2"),
    "factor": (POOL.reshape(4, 2, 3, 64), SIZES, r"shape \(4, 2, 3, 64\): dim 2 is the kv_factor, 1 or 2, not 3; a "),
    "layer factor": ([POOL], SIZES, r"shape \(4, 3, 2, 64\) has 4 dims; a pool is"),
    "view's factor": ([POOL[:, :, 0]], SIZES, r"shape \(4, 3, 64\): dim 1 is the kv_factor, 1 or 2, not 3"),
    "five dims": (POOL.reshape(4, 3, 2, 8, 8), SIZES, r"shape \(4, 3, 2, 8, 8\) has 5 dims; a pool is"),
    "nothing": (None, {}, "pool is a NoneType of no tensors; a pool is"),
    "no views": ([], {}, "pool is a list of no tensors"),
    "slots of tokens": (TWO, {"tokens_per_block": 4}, r"shape \(4, 384\): slots are opaque; drop tokens_per_block="),
    "opaque tokens": (POOL, {"whole_blocks": True, **SIZES}, "whole_blocks=True has no tokens or heads; drop"),
    "a manager's layers": (Manager(POOL), {"layers": [1]}, "a manager numbers its own layers; drop layers="),
    "a manager's start": (Manager(POOL), {"layer_start": 1}, "a manager numbers its own layers"),
    "version 2": (V2, {}, r"SimpleNamespace has no primary pool; version 2 keeps slots: give one tensor \(slots, "),
    "slots differ": ([TWO, TWO[:3].copy()], {}, "layout 1 has 3 blocks, layout 0 has 4"),
    "layers": (POOL, {"layers": [1], **SIZES}, r"layers are \(1,\); the tensors hold 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        tensorrt_llm.describe(given, **options)
