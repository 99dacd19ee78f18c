"""vllm: pages of NVFP4 are K data, K scales, V data, V scales, heads or tokens outside in each, as the strides say."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import quantized, vllm
from tests.backends.moves import move, noise

# 2 layers, 3 blocks, 2 heads (4 slots), 4 tokens, 16 + 2 bytes a row: pages of 288 bytes.
SIZES = {"layers": 2, "blocks": 3, "heads": 4, "tokens": 4, "row_nbytes": 18}
DENSE = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
PARTS = ("k", "k_scale", "v", "v_scale")


def caches(order, **more):
    raw = np.zeros(2 * 3 * 320, np.uint8)
    return vllm.place(raw, **SIZES, order=order, **more)


@pytest.mark.parametrize("order", DENSE)
def test_where_a_part_of_a_head_lies(order):
    first, second = caches(order)
    layout = vllm.describe([first, second], form="whole_blocks", head_start=6)
    assert (layout.parts, layout.heads, layout.opaque) == (PARTS, range(6, 8), True)
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (3, 1, 2 * 288)
    page = first.ctypes.data + {"LB": 864 + 2 * 288, "BL": 2 * 576 + 288}[order[:2]]
    rows = 4 if order.endswith("HNC") else 1  # all rows of head 6 stand before head 7, or one
    for part, start, row in zip(PARTS, (0, 128, 144, 272), (16, 2, 16, 2), strict=True):
        assert layout.address(layer=1, part=part, block=2, head=6) == page + start
        assert layout.address(layer=1, part=part, block=2, head=7) == page + start + rows * row


def rows_of(cache):
    """The four parts of a page by (block, head, token), read as the page's strides say."""
    nhd = cache.strides[2] > cache.strides[1]
    pages = (cache.swapaxes(1, 2) if nhd else cache).reshape(3, -1)
    found = []
    for start, row in ((0, 16), (128, 2), (144, 16), (272, 2)):
        region = pages[:, start : start + 8 * row].reshape(3, *((4, 2) if nhd else (2, 4)), row)
        found.append(region.swapaxes(1, 2) if nhd else region)
    return found


@pytest.mark.parametrize("src_order", DENSE)
@pytest.mark.parametrize("dst_order", DENSE)
def test_pages_move_between_orders(src_order, dst_order):
    """Bytes of a page in NHD stand elsewhere in HND, though both are 288."""
    src, dst = caches(src_order), caches(dst_order, page_nbytes=320 if dst_order.startswith("L") else None)
    for layer, cache in enumerate(src):
        cache[:] = noise(cache.shape, layer)
    move(*(vllm.describe(side, form="whole_blocks") for side in (src, dst)), [2, 0], [0, 1])
    for layer in range(2):
        for theirs, ours in zip(rows_of(src[layer]), rows_of(dst[layer]), strict=True):
            assert np.array_equal(ours[:2], theirs[[2, 0]])
            assert not ours[2].any()


def test_ranks_of_other_numbers_of_heads():
    whole = noise((3, 8, 4, 18))
    ranks = [np.zeros((3, 4, 4, 18), np.uint8) for _ in range(2)]
    layouts = [vllm.describe(rank, form="whole_blocks", head_start=2 * k) for k, rank in enumerate(ranks)]
    programs = kvplan.reshard(vllm.describe(whole, form="whole_blocks"), layouts)
    with kvplan.Executor() as executor:
        for plan in programs.plan([0, 1, 2], [2, 1, 0]).values():
            executor.submit(plan).result()
    k, k_scale = whole.reshape(3, -1)[:, :256].reshape(3, 4, 64), whole.reshape(3, -1)[:, 256:288].reshape(3, 4, 8)
    for at, rank in enumerate(ranks):
        pages = rank.reshape(3, -1)[::-1]
        assert np.array_equal(pages[:, :128], k[:, 2 * at : 2 * at + 2].reshape(3, -1))
        assert np.array_equal(pages[:, 128:144], k_scale[:, 2 * at : 2 * at + 2].reshape(3, -1))


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_the_bytes_are_those_of_the_row_format(kv_layout):
    """`quantized` tells tokens apart; block for block, both name the same bytes."""
    pages = torch.zeros(3, 576 * 2, dtype=torch.uint8)
    rows = quantized.describe(pages, "nvfp4", kv_layout=kv_layout, block_tokens=4, num_kv_heads=2)
    view = pages.view(3, 4, 4, 72)
    whole = vllm.describe(view if kv_layout == "HND" else view.transpose(1, 2), form="whole_blocks")
    assert whole.parts == rows.parts
    for part in PARTS:
        for head in range(2):
            where = {"layer": 0, "part": part, "block": 2, "head": head}
            assert whole.address(**where) == rows.address(**where)
    with pytest.raises(kvplan.IncompatibleLayoutsError, match=r"opaque.* 4 token slots"):
        kvplan.compile(whole, rows)


def test_other_names_of_parts():
    layout = vllm.describe(caches("LBNHC"), form="whole_blocks", part="draft")
    assert layout.parts == ("k_draft", "k_draft_scale", "v_draft", "v_draft_scale")


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_a_page_in_pieces_is_refused(order):
    with pytest.raises(LayoutError, match=r"an NVFP4 cache of shape .* its pages are dense, as in LBHNC, LBNHC, BLHNC"):
        vllm.describe(caches(order), form="whole_blocks")


def test_layers_of_both_orders():
    """Each layer by its own strides."""
    both = [caches("LBHNC")[0], caches("LBNHC")[0]]
    layout = vllm.describe(both, form="whole_blocks")
    assert [layout.address(layer=k, part="k", head=1) - both[k].ctypes.data for k in range(2)] == [64, 16]


@pytest.mark.parametrize("shape", [(3, 4, 4, 16), (3, 3, 4, 18), (3, 1, 4, 18), (3, 4, 1, 18)])
def test_what_is_no_nvfp4_is_one_part(shape):
    layout = vllm.describe(np.zeros(shape, np.uint8), form="whole_blocks")
    assert (layout.parts, layout.block_nbytes) == (("kv",), np.prod(shape[1:]))
    wide = vllm.describe(np.zeros((3, 4, 4, 18), np.int16), form="whole_blocks")
    assert wide.parts == ("kv",)
