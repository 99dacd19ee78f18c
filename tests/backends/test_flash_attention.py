"""flash_attention: split planes in one tensor, or a pair of paged caches."""

import numpy as np
import pytest
import torch

from kvplan import LayoutError
from kvplan.backends import flash_attention
from tests.backends.rows import hold_every_row


def test_planes():
    caches = [torch.zeros(2, 5, 4, 3, 8, dtype=torch.bfloat16) for _ in range(2)]
    layout = flash_attention.describe(caches)
    assert layout.notation == "layer: kv block token head dim"
    assert (layout.layers, layout.parts, layout.heads) == ((0, 1), ("k", "v"), range(3))
    assert (layout.num_blocks, layout.block_tokens) == (5, 4)
    assert layout.block_nbytes == 768  # 2 layers x 2 x 4 tokens x 3 heads x 8 x 2 bytes
    assert layout.nbytes == 3840
    assert layout.tensors is caches
    base = caches[1].data_ptr()
    assert layout.address(layer=1, part="k") == base
    assert layout.address(layer=1, part="v") == base + 960  # 5 blocks x 4 tokens x 3 heads x 16 bytes
    assert layout.address(layer=1, part="v", block=2, token=3, head=1) == base + 960 + 2 * 192 + 3 * 48 + 16
    assert hold_every_row(layout, lambda layer, kv, *row: caches[layer][kv, *row]) == 2 * 2 * 5 * 4 * 3


def test_pairs():
    pairs = [tuple(torch.zeros(3, 4, 2, 8, dtype=torch.float16) for _ in "kv") for _ in range(3)]
    layout = flash_attention.describe(pairs)
    assert layout.notation == "layer kv: block token head dim"
    assert (layout.layers, layout.parts, layout.heads) == ((0, 1, 2), ("k", "v"), range(2))
    assert layout.block_nbytes == 768  # 3 layers x 2 x 4 tokens x 2 heads x 8 x 2 bytes
    assert layout.address(layer=2, part="v", block=1, token=1, head=1) == pairs[2][1].data_ptr() + 128 + 32 + 16
    assert hold_every_row(layout, lambda layer, kv, *row: pairs[layer][kv][row]) == 3 * 2 * 3 * 4 * 2


@pytest.mark.parametrize("extents", [(2, 2, 2, 2, 8), (2, 3, 2, 2, 8)])
def test_one_layer_needs_no_list(extents):
    tensor = np.zeros(extents, np.float32)
    alone = flash_attention.describe(tensor)
    assert alone == flash_attention.describe([tensor])
    pair = flash_attention.describe((tensor[0], tensor[1]))
    # The planes of one tensor are a pair: the same bytes in the same order, written down in another way.
    assert pair == alone
    assert pair.notation != alone.notation


def test_a_list_of_two_layers_is_no_pair():
    caches = [np.zeros((2, 2, 2, 2, 8), np.int8) for _ in range(2)]
    layout = flash_attention.describe(caches)
    assert layout.layers == (0, 1)
    assert layout.address(layer=1, part="k") == caches[1].ctypes.data


def test_hnd_strides_under_the_same_shape():
    storage = torch.zeros(2, 3, 4, 8, 16, dtype=torch.float16)  # kv, block, head, token, dim
    cache = storage.permute(0, 1, 3, 2, 4)
    layout = flash_attention.describe([cache])
    assert (layout.block_tokens, layout.heads) == (8, range(4))
    origin = storage.data_ptr()
    assert layout.address(layer=0, part="k", head=1) == origin + 256  # 8 tokens x 32 bytes
    assert layout.address(layer=0, part="k", token=1) == origin + 32
    hold_every_row(layout, lambda _, kv, *row: cache[kv, *row])


def test_blocks_first_storage_under_the_same_shape():
    storage = torch.zeros(3, 2, 4, 2, 8, dtype=torch.float16)  # block, kv, token, head, dim
    layout = flash_attention.describe(storage.transpose(0, 1))
    assert layout.address(layer=0, part="v") == storage.data_ptr() + 128  # 4 tokens x 2 heads x 16 bytes
    assert layout.address(layer=0, part="k", block=1) == storage.data_ptr() + 256


def test_padded_heads_are_not_content():
    storage = torch.zeros(2, 3, 4, 2, 24, dtype=torch.uint8)
    layout = flash_attention.describe([storage[..., :16]])
    assert layout.block_nbytes == 256  # 2 x 4 x 2 x 16
    assert layout.address(layer=0, part="k", head=1) == storage.data_ptr() + 24
    hold_every_row(layout, lambda _, kv, *row: storage[kv, *row])


def test_global_numbers_and_seams():
    storage = np.zeros((2, 2, 4, 4, 2, 8), np.int8)
    seam = storage[1].ctypes.data
    layout = flash_attention.describe(list(storage), layer_start=40, head_start=6, seams=[seam])
    assert (layout.layers, layout.heads, layout.seams) == ((40, 41), range(6, 8), (seam,))
    hold_every_row(layout, lambda layer, kv, *row: storage[layer, kv, *row])
    assert flash_attention.describe(list(storage), layers=[3, 7]).layers == (3, 7)


FIVE = np.zeros((2, 4, 16, 2, 8), np.int8)
FOUR = np.zeros((4, 16, 2, 8), np.int8)
CASES = {
    "rank 4": ([FOUR], r"kv_caches\[0\] has shape \(4, 16, 2, 8\), 4 dims; a layer is one tensor \(2, num_blocks"),
    "rank 6": ([FIVE, FIVE[None]], r"kv_caches\[1\] has shape \(1, 2, 4, 16, 2, 8\), 6 dims; "),
    "leading 4": (FIVE[0, :, :, None], r"first extent 4 is not 2; a layer is one tensor \(2, "),
    "blocks first": (np.zeros((8, 2, 4, 2, 8)), "first extent 8 is not 2; .*second, use backends.flashinfer"),
    "a third": ([(FOUR, FOUR, FOUR)], r"kv_caches\[0\] is a sequence of 3 with ranks \[4, 4, 4\]; .*or a pair of K"),
    "pair of planes": ([(FIVE, FIVE)], r"kv_caches\[0\] is a sequence of 2 with ranks \[5, 5\]; "),
    "K list, V list": (([FOUR] * 3, [FOUR] * 3), r"kv_caches\[0\] is a sequence of 3 with ranks \[4, 4, 4\]; "),
    "mixed": ([FIVE, (FOUR, FOUR)], r"kv_caches\[0\] and kv_caches\[1\] are of different forms"),
    "dict": ({"layer.0": FIVE}, "kv_caches is a dict; give a list with one entry a layer, in order of layers"),
    "text": (["cache"], r"kv_caches\[0\] is a str; a layer is one tensor"),
    "none": ([], "no tensors along 'layer'"),
    "unequal": ([FIVE, FIVE[:, :3]], r"tensor 1 has shape \(2, 3, 16, 2, 8\), tensor 0 has \(2, 4, 16, 2, 8\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        flash_attention.describe(given)
