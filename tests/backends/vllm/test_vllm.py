"""vllm: the six storage orders, padded pages, groups, kernel blocks, head slots, and the generations before."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan.backends import vllm
from tests.backends.rows import hold_every_row

# 2 layers, 3 blocks, 2 heads, 4 tokens, rows of 2 x 4 elements of 2 bytes: pages of 128 bytes.
# Bytes from a layer, block, head and token to the next.
ORDERS = {
    "LBHNC": (384, 128, 64, 16),
    "LBNHC": (384, 128, 16, 32),
    "LHBNC": (384, 64, 192, 16),
    "BLHNC": (128, 256, 64, 16),
    "BLNHC": (128, 256, 16, 32),
    "BHLNC": (64, 256, 128, 16),
}
SIZES = {"layers": 2, "blocks": 3, "heads": 2, "tokens": 4, "row_nbytes": 16}


@pytest.mark.parametrize("order", ORDERS)
def test_the_six_orders(order):
    """Each order is a permutation of one storage tensor: fill it in order, and look rows up in the logical one."""
    axes = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 8}
    storage = torch.zeros([axes[axis] for axis in order], dtype=torch.float16)
    logical = storage.permute([order.index(axis) for axis in "LBHNC"])
    layout = vllm.describe({f"model.layers.{k}.self_attn.attn": logical[k] for k in (1, 0)}, head_start=6)
    assert layout.notation == "layer: block head token (kv dim)"
    assert (layout.layers, layout.parts, layout.heads) == ((0, 1), ("k", "v"), range(6, 8))
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (3, 4, 256)
    layer, block, head, token = ORDERS[order]
    address = layout.address(layer=1, part="v", block=2, token=3, head=7)
    assert address == storage.data_ptr() + layer + 2 * block + head + 3 * token + 8
    rows = hold_every_row(layout, lambda layer, kv, b, token, head: logical[layer, b, head, token, 4 * kv :])
    assert rows == 2 * 2 * 3 * 4 * 2
    assert layout == vllm.describe(logical, head_start=6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [lambda n: torch.zeros(n, dtype=torch.int8), lambda n: np.zeros(n, np.uint8)])
def test_place_makes_the_orders_from_one_allocation(order, make):
    raw = make(768 + 40)
    layout = vllm.describe(vllm.place(raw, **SIZES, order=order, offset=40))
    layer, block, head, token = ORDERS[order]
    first = vllm.describe(raw[:, None, None, None], head_size_v=0).address(layer=0, part="kv")
    assert layout.regions[0].address == first
    assert layout.address(layer=0, part="k") == first + 40
    assert layout.address(layer=0, part="v", block=1, token=1, head=1) == first + 40 + block + head + token + 8
    assert layout.address(layer=1, part="k", token=2) == first + 40 + layer + 2 * token


def test_the_names_of_old_are_orders():
    raw = torch.zeros(768, dtype=torch.int8)
    for name, order in (("HND", "LBHNC"), ("NHD", "LBNHC")):
        views = vllm.place(raw, **SIZES, order=name)
        assert vllm.describe(views) == vllm.describe(vllm.place(raw, **SIZES, order=order))
    assert vllm.place(raw, **SIZES)[0].stride() == (128, 64, 16, 1)


def test_padded_pages_move_no_pad():
    """Pages of 128 bytes padded to 160: layer-outer, and block-outer with 64 bytes more after each block."""
    raw = torch.zeros(2 * 3 * 160, dtype=torch.int8)
    outer = vllm.describe(vllm.place(raw, **SIZES, page_nbytes=160))
    assert (outer.block_nbytes, outer.nbytes) == (256, 768)
    assert outer.address(layer=1, part="k", block=2) == raw.data_ptr() + 480 + 320
    raw = torch.zeros(3 * 384, dtype=torch.int8)
    inner = vllm.describe(vllm.place(raw, **SIZES, order="BLHNC", page_nbytes=160, block_stride=384))
    assert inner.address(layer=1, part="v", block=2, token=3, head=1) == raw.data_ptr() + 160 + 768 + 64 + 48 + 8
    program = kvplan.compile(inner, vllm.describe(vllm.place(torch.zeros(768, dtype=torch.int8), **SIZES)))
    assert (program.runs, program.run_nbytes) == (2, (128, 128))
    plan = program.plan([0, 1, 2], [0, 1, 2])
    assert plan.nbytes == 768


def test_groups_overlay_one_another():
    """A hybrid model: one allocation, two groups from byte 0, each with blocks of its own; their plans are joined."""
    raw = torch.arange(768, dtype=torch.int64).to(torch.int8)
    caches = dict(zip(("layers.0.attn", "layers.2.attn"), vllm.place(raw, **SIZES, order="BLHNC"), strict=True))
    window = vllm.place(raw, **{**SIZES, "heads": 1, "tokens": 8}, order="BLHNC")
    caches |= dict(zip(("layers.1.attn", "layers.3.attn"), window, strict=True))
    full = vllm.describe(caches, names=["layers.0.attn", "layers.2.attn"])
    local = vllm.describe(caches, names=["layers.3.attn", "layers.1.attn"])
    assert (full.layers, full.block_tokens, local.layers, local.block_tokens) == ((0, 2), 4, (1, 3), 8)
    assert full.address(layer=2, part="k", block=1) == local.address(layer=3, part="k", block=1)
    with pytest.raises(kvplan.LayoutError, match="block_tokens differ"):
        vllm.describe(caches)
    same = vllm.place(raw, **SIZES, order="BLHNC")
    with pytest.raises(kvplan.LayoutError, match="overlap: they share bytes"):
        vllm.describe(caches | {"layers.1.attn": same[0]}, names=["layers.0.attn", "layers.1.attn"])
    pools = [kvplan.allocate("block layer token head (kv dim)", like=group) for group in (full, local)]
    plans = [
        kvplan.compile(group, pool).plan([block], [0])
        for group, pool, block in zip((full, local), pools, (1, 2), strict=True)
    ]
    assert kvplan.join(plans).nbytes == 512


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_kernel_blocks_are_the_manager_s_blocks(order):
    """Manager blocks of 8 tokens, each two kernel blocks of 4: kernel block 2b + j holds tokens 4j to 4j + 3 of b."""
    raw = torch.zeros(2 * 3 * 256, dtype=torch.int8)
    views = vllm.place(raw, **{**SIZES, "tokens": 8}, order=order, kernel_tokens=4)
    assert views[0].shape == (6, 2, 4, 16)
    layout = vllm.describe(views, block_tokens=8)
    assert layout.notation == "layer: (block token.0) head token.1 (kv dim)"
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (3, 8, 512)
    inside = {"LBHNC": 64 + 2 * 16, "LBNHC": 16 + 2 * 32}[order]  # head 1, token 2 of a kernel block
    assert layout.address(layer=1, part="k", block=2, token=6, head=1) == raw.data_ptr() + 768 + 512 + 128 + inside
    hold_every_row(
        layout, lambda layer, kv, b, token, head: views[layer][2 * b + token // 4, head, token % 4, 8 * kv :]
    )
    assert vllm.describe(views).num_blocks == 6
    whole = vllm.describe(vllm.place(raw, **{**SIZES, "tokens": 8}, order=order))
    assert (whole == layout) == (order == "LBNHC")  # with tokens outside heads, a split block is the block


def test_v_of_another_size():
    storage = torch.zeros(2, 3, 4, 2, 6, dtype=torch.float16)  # LBNHC: K of 4 elements, V of 2
    views = list(storage.transpose(2, 3))
    layout = vllm.describe(views, head_size_v=2)
    assert (layout.parts, layout.block_nbytes) == (("k", "v"), 192)
    assert layout.address(layer=1, part="v", block=2, token=3, head=1) == storage[1, 2, 3, 1, 4:].data_ptr()
    hold_every_row(layout, lambda layer, kv, b, token, head: storage[layer, b, token, head, 4 * kv :])
    assert layout.slice(parts=["v"]).block_nbytes == 64
    assert vllm.describe(views, head_size_v=3) == vllm.describe(views)


def test_an_mla_latent():
    views = [torch.zeros(3, 1, 64, 576, dtype=torch.bfloat16) for _ in range(2)]
    layout = vllm.describe(views, form="latent", layers=[3, 4])
    assert (layout.notation, layout.parts, layout.block_nbytes) == ("layer: block 1 token dim", ("kv",), 2 * 73_728)
    assert layout == vllm.describe(views, head_size_v=0, layers=[3, 4])
    hold_every_row(layout, lambda layer, _, b, token, head: views[layer][b, 0, token])


def test_a_latent_and_its_indexer_have_one_number():
    caches = {
        "model.layers.3.self_attn.attn": np.zeros((3, 1, 64, 656), np.uint8),
        "model.layers.3.self_attn.indexer.k_cache": np.zeros((3, 1, 64, 132), np.uint8),
    }
    with pytest.raises(kvplan.LayoutError, match=r"'model.layers.3.self_attn.attn' and '.*k_cache' are both layer 3"):
        vllm.describe(caches, form="latent")
    latent, index = caches
    layout = kvplan.KVLayout.merge([
        vllm.describe(caches, form="latent", names=[latent]),
        vllm.describe(caches, form="whole_blocks", names=[index], part="index"),
    ])  # fmt: skip
    assert (layout.layers, layout.parts, layout.block_nbytes) == ((3,), ("kv", "index"), 41_984 + 8_448)


def test_head_slots():
    """B12X: (B, 2, N, H * D). In LBHNC a block is all of K, then all of V; in LHBNC K of all blocks comes first."""
    page = torch.zeros(2, 3, 2, 4, 2 * 8, dtype=torch.float16)
    layout = vllm.describe(page, form="head_slots", heads=2)
    assert layout.notation == "layer: block kv token (head dim)"
    assert (layout.parts, layout.heads, layout.block_nbytes) == (("k", "v"), range(2), 2 * 256)
    hold_every_row(layout, lambda layer, kv, b, token, head: page[layer, b, kv, token, 8 * head :])
    assert layout.address(layer=1, part="v", block=2, token=3, head=1) == page.data_ptr() + 768 + 512 + 128 + 96 + 16
    planes = torch.zeros(2, 3, 4, 16, dtype=torch.float16)
    layout = vllm.describe([planes.transpose(0, 1)], form="head_slots", heads=2)
    assert layout.address(layer=0, part="v") == planes.data_ptr() + 384


def test_layers_of_several_shapes_are_one_layout():
    raw = torch.zeros(3 * 256, dtype=torch.int8)
    wide = vllm.place(raw, **{**SIZES, "layers": 1}, order="BLHNC", block_stride=256)
    narrow = vllm.place(
        raw, **{**SIZES, "layers": 2, "heads": 1}, order="BLHNC", block_stride=256, offset=128
    )  # pages of 64 bytes beside the one of 128
    layout = vllm.describe({"layers.1.attn": wide[0], "layers.0.attn": narrow[0], "layers.2.attn": narrow[1]})
    assert (layout.layers, layout.block_nbytes) == ((0, 1, 2), 256)
    assert layout.address(layer=2, part="v", block=2, token=3) == raw.data_ptr() + 512 + 192 + 48 + 8
    program = kvplan.compile(layout, vllm.describe({"0": narrow[0].clone(), "1": wide[0].clone(),
                                                    "2": narrow[1].clone()}))  # fmt: skip
    assert program.unit_nbytes == 256


def test_layers_that_share_a_cache_are_one():
    cache, other = (torch.zeros(3, 2, 4, 16, dtype=torch.int8) for _ in range(2))
    layout = vllm.describe({"layers.5.attn": cache, "layers.3.attn": cache, "layers.10.attn": other})
    assert layout.layers == (3, 10)
    assert layout.address(layer=10, part="k") == other.data_ptr()


def test_layers_by_number_not_by_text():
    caches = {f"model.layers.{k}.attn": torch.zeros(3, 2, 4, 16, dtype=torch.int8) for k in (10, 9)}
    layout = vllm.describe(caches)
    assert layout.layers == (9, 10)
    assert layout.address(layer=9, part="k") == caches["model.layers.9.attn"].data_ptr()
    two = {f"model.layers.0.self_attn.{k}.attn": cache for k, cache in enumerate(caches.values())}
    with pytest.raises(kvplan.LayoutError, match=r"has 2 numbers in its name.*otherwise give layers="):
        vllm.describe(two)
    assert vllm.describe(two, layers=[1, 0]).address(layer=1, part="k") == layout.address(layer=10, part="k")


def test_lists_are_counted_from_layer_start():
    views = [np.zeros((3, 2, 4, 16), np.int8) for _ in range(2)]
    seam = views[1].ctypes.data
    layout = vllm.describe(views, layer_start=40, head_start=2, seams=[seam])
    assert (layout.layers, layout.heads, layout.seams) == ((40, 41), range(2, 4), (seam,))
    assert vllm.describe(views[0]) == vllm.describe([views[0]])


def test_eighty_interleaved_layers():
    raw = np.zeros(80 * 4 * 16_384, np.int8)
    layout = vllm.describe(
        vllm.place(raw, layers=80, blocks=4, heads=2, tokens=16, row_nbytes=512, order="BHLNC"), layer_start=0
    )
    assert layout.block_nbytes == 80 * 16_384
    assert layout.address(layer=79, part="v", block=3, token=15, head=1) == (
        raw.ctypes.data + 79 * 8_192 + 3 * 80 * 16_384 + 80 * 8_192 + 15 * 512 + 256
    )
