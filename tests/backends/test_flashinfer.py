"""flashinfer: combined pages and tuples, NHD and HND, scales beside them."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import flash_attention, flashinfer
from tests.backends.rows import hold_every_row


def test_combined_nhd():
    caches = [torch.zeros(5, 2, 4, 3, 8, dtype=torch.bfloat16) for _ in range(2)]
    layout = flashinfer.describe(caches)
    assert layout.notation == "layer: block kv token head dim"
    assert (layout.layers, layout.parts, layout.heads) == ((0, 1), ("k", "v"), range(3))
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 4, 768)
    base = caches[0].data_ptr()
    assert layout.address(layer=0, part="v") == base + 192  # 4 tokens x 3 heads x 16 bytes
    assert layout.address(layer=0, part="v", block=2, token=3, head=1) == base + 192 + 2 * 384 + 3 * 48 + 16
    hold_every_row(layout, lambda layer, kv, block, token, head: caches[layer][block, kv, token, head])


def test_combined_hnd():
    caches = [torch.zeros(5, 2, 3, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    layout = flashinfer.describe(caches, kv_layout="HND")
    assert layout.notation == "layer: block kv head token dim"
    assert (layout.num_blocks, layout.block_tokens, layout.heads, layout.block_nbytes) == (5, 4, range(3), 768)
    base = caches[1].data_ptr()
    assert layout.address(layer=1, part="v", block=2, token=3, head=1) == base + 192 + 2 * 384 + 3 * 16 + 64
    hold_every_row(layout, lambda layer, kv, block, token, head: caches[layer][block, kv, head, token])


def test_tuples_nhd():
    pairs = [tuple(torch.zeros(3, 4, 2, 8, dtype=torch.float16) for _ in "kv") for _ in range(2)]
    layout = flashinfer.describe(pairs)
    assert layout.notation == "layer kv: block token head dim"
    assert (layout.block_tokens, layout.heads, layout.block_nbytes) == (4, range(2), 512)
    hold_every_row(layout, lambda layer, kv, block, token, head: pairs[layer][kv][block, token, head])


def test_tuples_hnd():
    pairs = [[torch.zeros(3, 2, 4, 8, dtype=torch.float16) for _ in "kv"] for _ in range(2)]
    layout = flashinfer.describe(pairs, kv_layout="HND")
    assert layout.notation == "layer kv: block head token dim"
    assert (layout.block_tokens, layout.heads, layout.block_nbytes) == (4, range(2), 512)
    assert layout.address(layer=1, part="v", block=2, token=3, head=1) == pairs[1][1].data_ptr() + 256 + 64 + 48
    hold_every_row(layout, lambda layer, kv, block, token, head: pairs[layer][kv][block, head, token])


def test_all_k_then_all_v_is_a_zip_away():
    k_caches, v_caches = np.zeros((2, 3, 4, 8, 2, 16), np.int8)
    layout = flashinfer.describe(list(zip(k_caches, v_caches, strict=True)))
    assert layout.layers == (0, 1, 2)
    assert layout == kvplan.KVLayout.from_tensors("kv layer: block token head dim", [list(k_caches), list(v_caches)])


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_the_layout_is_never_guessed(kv_layout):
    cache = np.zeros((4, 2, 4, 4, 8), np.int8)  # tokens and heads are equally many
    layout = flashinfer.describe(cache, kv_layout=kv_layout)
    step = {"NHD": (32, 8), "HND": (8, 32)}[kv_layout]
    address = layout.address(layer=0, part="k")
    assert layout.address(layer=0, part="k", token=1) - address == step[0]
    assert layout.address(layer=0, part="k", head=1) - address == step[1]


def test_hnd_storage_in_nhd_shape():
    storage = torch.zeros(3, 2, 2, 4, 8, dtype=torch.float16)  # block, kv, head, token, dim
    assert flashinfer.describe(storage.transpose(2, 3)) == flashinfer.describe(storage, kv_layout="HND")


def test_padded_pages():
    storage = torch.zeros(3, 320, dtype=torch.uint8)  # 256 bytes of content a page, 64 of padding
    cache = storage[:, :256].view(3, 2, 4, 2, 16)
    layout = flashinfer.describe([cache], layer_start=7, head_start=2)
    assert (layout.block_nbytes, layout.nbytes, layout.layers, layout.heads) == (256, 768, (7,), range(2, 4))
    assert layout.address(layer=7, part="k", block=2, head=2) == storage.data_ptr() + 640
    hold_every_row(layout, lambda _, kv, block, token, head: cache[block, kv, token, head])


def test_layers_and_seams():
    storage = np.zeros((2, 4, 2, 4, 2, 8), np.int8)
    seam = storage[1].ctypes.data
    layout = flashinfer.describe(list(storage), layers=[3, 7], seams=[seam])
    assert (layout.layers, layout.seams) == ((3, 7), (seam,))


def test_nvfp4_has_four_parts():
    """128 values a head: 64 bytes of content and 8 of scales, for K and for V."""
    pages, scales = np.zeros((2, 6, 2, 16, 8, 64), np.uint8), np.zeros((2, 6, 2, 16, 8, 8), np.uint8)
    layout = kvplan.KVLayout.merge([
        flashinfer.describe(list(pages)), flashinfer.describe(list(scales), part="scale"),
    ])  # fmt: skip
    assert layout.parts == ("k", "v", "k_scale", "v_scale")
    assert layout.block_nbytes == 36_864  # 2 layers x 16 tokens x 8 heads x 2 x (64 + 8)
    address = layout.address(layer=1, part="v_scale", block=5, token=15, head=7)
    assert address == scales[1, 5, 1, 15, 7].ctypes.data


def test_the_two_backends_read_one_tensor_of_two_blocks_differently():
    cache = np.zeros((2, 2, 4, 2, 8), np.int8)
    planes, pages = flash_attention.describe(cache), flashinfer.describe(cache)
    assert planes.address(layer=0, part="k", block=1) == pages.address(layer=0, part="v", block=0)


FIVE = np.zeros((8, 2, 16, 4, 8), np.int8)
FOUR = np.zeros((8, 16, 4, 8), np.int8)
CASES = {
    "kv_layout": (FIVE, "HDN", "kv_layout is 'HDN'; it is one of 'NHD', 'HND'"),
    "rank 4": ([FOUR], "NHD", r"shape \(8, 16, 4, 8\), 4 dims; in NHD .* \(num_pages, 2, page_tokens, heads, "),
    "rank 6": (FIVE[None], "HND", r"6 dims; in HND a layer is one tensor \(num_pages, 2, heads, page_tokens, head_dim"),
    "shared K and V": (FIVE[:, :1], "NHD", "second extent 1 is not 2; in NHD"),
    "planes": (np.zeros((2, 8, 16, 4, 8)), "NHD", "second extent 8 is not 2; .*first, use backends.flash_attention"),
    "a third": ([(FOUR,) * 3], "NHD", r"kv_caches\[0\] is a sequence of 3 with ranks \[4, 4, 4\]"),
    "mixed": ([(FOUR, FOUR), FIVE], "NHD", r"kv_caches\[0\] and kv_caches\[1\] are of different forms"),
    "dict": ({"0": FIVE}, "NHD", "kv_caches is a dict; give a list"),
    "text": (["cache"], "NHD", r"kv_caches\[0\] is a str; in NHD a layer"),
    "V of another width": ([(FOUR, FOUR[..., :4])], "NHD", r"tensor 1 has shape \(8, 16, 4, 4\), tensor 0 has"),
    "none": ([], "NHD", "no tensors along 'layer'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, kv_layout, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        flashinfer.describe(given, kv_layout=kv_layout)
