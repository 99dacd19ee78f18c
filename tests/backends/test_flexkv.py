"""flexkv: three layout types, shaped and flat, pools and lists of GPU tensors, with and without MLA."""

from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvplan import LayoutError
from kvplan.backends import flexkv
from tests.backends.moves import move, noise
from tests.backends.rows import hold_every_row

Type = Enum("Type", {name: name for name in ("LAYERFIRST", "BLOCKFIRST", "LAYERBLOCK", "OTHER")})


def told(name, *, mla=False, **other):
    """A KVCacheLayout of 3 layers, 5 blocks of 4 tokens, 2 heads (1 for MLA) of 8."""
    sizes = {"num_layer": 3, "num_block": 5, "tokens_per_block": 4, "num_head": 1 if mla else 2, "head_size": 8}
    return SimpleNamespace(**({"type": Type[name], "is_mla": mla} | sizes | other))


ORDERS = {
    "BLOCKFIRST": ("block", "layer", "kv"), "LAYERFIRST": ("layer", "kv", "block"),
    "LAYERBLOCK": ("layer", "block", "kv"),
}  # fmt: skip


def shaped(name, kv=2, heads=2):
    extents = {"layer": 3, "block": 5, "kv": kv}
    return tuple(extents[axis] for axis in ORDERS[name]), (4, heads, 8)


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize("name", ORDERS)
def test_a_pool(name, mla):
    outer, inner = shaped(name, *((1, 1) if mla else (2, 2)))
    pool = torch.zeros(*outer, *inner, dtype=torch.bfloat16)
    layout = flexkv.describe(pool, name, layer_start=2, head_start=6)
    assert (layout.layers, layout.heads.start) == ((2, 3, 4), 6)
    assert layout.parts == (("kv",) if mla else ("k", "v"))
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 4, 192 if mla else 768)

    def row(layer, kv, block, token, head):
        where = {"layer": layer, "kv": kv, "block": block}
        return pool[tuple(where[axis] for axis in ORDERS[name])][token, head]

    hold_every_row(layout, row)
    assert flexkv.describe(pool, told(name, mla=mla), layer_start=2, head_start=6) == layout
    flat = flexkv.describe(pool.flatten(), told(name, mla=mla), layer_start=2, head_start=6)
    assert (flat == layout, flat.sizes["block"], flat.sizes["dim"]) == (True, 5, 8)
    handle = SimpleNamespace(data=pool.flatten(), kv_layout=told(name, mla=mla))
    assert flexkv.describe(handle, layer_start=2, head_start=6) == layout


@pytest.mark.parametrize("name", ["LAYERFIRST", "LAYERBLOCK"])
def test_one_gpu_tensor_a_layer(name):
    outer, inner = shaped(name)
    caches = [torch.zeros(*outer[1:], *inner, dtype=torch.float16) for _ in range(3)]
    layout = flexkv.describe(caches, name, layers=[1, 5, 9])
    assert (layout.layers, layout.parts) == ((1, 5, 9), ("k", "v"))

    def row(layer, kv, block, token, head):
        return caches[layer][(kv, block) if name == "LAYERFIRST" else (block, kv)][token, head]

    assert hold_every_row(layout, row) == 3 * 2 * 5 * 4 * 2
    assert flexkv.describe(caches, told(name), layers=[1, 5, 9]) == layout
    assert flexkv.describe([cache.flatten() for cache in caches], told(name), layers=[1, 5, 9]) == layout


@pytest.mark.parametrize("name", ["LAYERFIRST", "LAYERBLOCK"])
def test_mla_gpu_tensors(name):
    """As vLLM has them: three dims, no kv and no head."""
    caches = [torch.zeros(5, 4, 8, dtype=torch.uint8) for _ in range(3)]
    layout = flexkv.describe(caches, told(name, mla=True))
    assert (layout.notation, layout.parts) == ("layer: block token dim", ("kv",))
    assert hold_every_row(layout, lambda layer, kv, block, token, head: caches[layer][block, token]) == 60
    assert flexkv.describe(caches, name) == layout
    ones = [cache[None, :, :, None] if name == "LAYERFIRST" else cache[:, None, :, None] for cache in caches]
    assert flexkv.describe(ones, name) == layout
    assert flexkv.describe(caches, name, part="index").parts == ("index",)


def test_older_and_newer_objects():
    pool = np.zeros((5, 3, 2, 4, 2, 8), np.float16)
    layout = flexkv.describe(pool, "BLOCKFIRST")
    assert flexkv.describe(pool, "BLOCKWISE") == layout
    assert flexkv.describe(pool.transpose(1, 2, 0, 3, 4, 5), "LAYERWISE") == layout
    newer = told("BLOCKFIRST", kv_dim=2, layer_groups=None, packed_kv=False)
    del newer.is_mla
    assert flexkv.describe(pool.ravel(), newer) == layout
    latent = told("BLOCKFIRST", mla=False, kv_dim=1, num_head=1)
    assert flexkv.describe(np.zeros(5 * 3 * 4 * 8, np.float16), latent).parts == ("kv",)


@pytest.mark.parametrize("heads", [8, 4, 2, 1])
def test_bytes_a_block_and_layer(heads):
    """8 KV heads x 128, bf16, 16 tokens; TP 1, 2, 4, 8."""
    layout = flexkv.describe(torch.zeros(2, 3, 2, 16, heads, 128, dtype=torch.bfloat16), "BLOCKFIRST")
    assert layout.slice(layers=[1]).block_nbytes == {8: 65_536, 4: 32_768, 2: 16_384, 1: 8_192}[heads]


def test_from_the_gpu_to_a_flat_pool_of_larger_blocks_and_back():
    caches = [noise((2, 6, 4, 2, 16), seed) for seed in range(3)]
    sizes = told("BLOCKFIRST", num_block=4, tokens_per_block=8, head_size=16)
    flat = np.zeros(4 * 3 * 2 * 8 * 2 * 16, np.uint8)
    host, gpu = flexkv.describe(flat, sizes), flexkv.describe(caches, "LAYERFIRST")
    program = move(gpu, host, [5, 0, 2, 1], [3, 1])
    # A unit is half a host block: 4 tokens x 2 heads x 16 bytes, for 3 layers and K and V.
    assert (program.unit_tokens, program.runs, program.run_nbytes) == (4, 6, (128, 128))
    expected = np.zeros((4, 3, 2, 8, 2, 16), np.uint8)
    for block, (slot, start) in zip([5, 0, 2, 1], [(3, 0), (3, 4), (1, 0), (1, 4)], strict=True):
        for layer in range(3):
            expected[slot, layer, :, start : start + 4] = caches[layer][:, block]
    assert (flat.reshape(expected.shape) == expected).all()
    back = [np.zeros((6, 2, 4, 2, 16), np.uint8) for _ in range(3)]
    move(host, flexkv.describe(back, "LAYERBLOCK"), [1], [4, 3])
    for layer in range(3):
        assert (back[layer][[4, 3]] == caches[layer][:, [2, 1]].swapaxes(0, 1)).all()
        assert not back[layer][[0, 1, 2, 5]].any()


def test_parts_and_seams():
    pool = np.zeros((5, 3, 2, 4, 2, 8), np.int8)
    seam = pool[2].ctypes.data
    layout = flexkv.describe(pool, "BLOCKFIRST", part="scale", seams=[seam])
    assert (layout.parts, layout.seams) == (("k_scale", "v_scale"), (seam,))
    assert (layout.layers, layout.heads) == ((0, 1, 2), range(2))


POOL, FLAT = np.zeros((5, 3, 2, 4, 2, 8), np.float16), np.zeros(5 * 3 * 2 * 4 * 2 * 8, np.float16)
LAYER = np.zeros((2, 5, 4, 2, 8), np.float16)
HANDLE = SimpleNamespace(data=POOL, kv_layout=told("BLOCKFIRST"))
CASES = {
    "no type": (POOL, None, {}, "kv_layout is a NoneType; give a KVCacheLayout, or one of .BLOCKFIRST., "),
    "unknown": (POOL, "PAGEFIRST", {}, "kv_layout is 'PAGEFIRST'; give a KVCacheLayout, or one of 'BLOCKFIRST'"),
    "unknown type": (POOL, told("OTHER"), {}, "kv_layout is 'OTHER'; give a KVCacheLayout"),
    "two of them": (HANDLE, "BLOCKFIRST", {}, "a StorageHandle brings its own kv_layout; drop the argument"),
    "files": (["/ssd/0"], "BLOCKFIRST", {}, "storage is a list of no tensors; FlexKV's files are not in memory"),
    "none": ([], "LAYERFIRST", {}, "storage is a list of no tensors"),
    "a list": ([POOL], "BLOCKFIRST", {}, "a list of tensors is LAYERFIRST or LAYERBLOCK, one a layer; BLOCKFIRST is "),
    "K and V": ([LAYER] * 6, told("LAYERFIRST"), {}, "6 tensors, and num_layer is 3; .* backends.sglang"),
    "flat by name": (FLAT, "BLOCKFIRST", {}, r"shape \(1920,\) is flat; give the KVCacheLayout it was allocated by"),
    "other size": (FLAT[:-8], told("BLOCKFIRST"), {}, "dim of extent 1912 .* cannot be block=5 . layer=3 . kv"),
    "other block": (POOL, told("BLOCKFIRST", num_block=4), {}, "cannot be block=4|sizes say block=4"),
    "other layers": (POOL, told("BLOCKFIRST", num_layer=2), {}, "cannot be layer=2|sizes say layer=2"),
    "five dims": (POOL[0], "BLOCKFIRST", {}, r"shape \(3, 2, 4, 2, 8\) has 5 dims; expected 6, \(block, layer, "),
    "six dims": ([POOL], "LAYERFIRST", {}, r"has 6 dims; expected 5, \(kv, block, token, head, dim\)"),
    "MHA of three": ([LAYER[0, :, :, 0]] * 3, told("LAYERFIRST"), {}, r"\(5, 4, 8\) has 3 dims; expected 5"),
    "other type": (POOL, "LAYERFIRST", {}, r"the kv dim of \(layer, kv, block, .*\) is 3; it is 2, or 1 for MLA"),
    "MLA as MHA": (POOL, told("BLOCKFIRST", mla=True), {}, "the kv dim of .* is 2; it is 1$"),
    "MHA as MLA": (POOL[:, :, :1], told("BLOCKFIRST"), {}, "the kv dim of .* is 1; it is 2$"),
    "groups": (POOL, told("BLOCKFIRST", layer_groups=[1]), {}, "kv_layout has layer_groups: describe each group"),
    "packed": (POOL, told("BLOCKFIRST", packed_kv=True), {}, "kv_layout has packed_kv: K and V share the content"),
    "layers": (POOL, "BLOCKFIRST", {"layers": [1]}, r"layers are \(1,\); the tensors hold 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, kv_layout, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        flexkv.describe(given, kv_layout, **options)
