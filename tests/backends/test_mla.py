"""mla: latent rows, plain, packed, padded, flat, split, and blocks that move whole."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan import IncompatibleLayoutsError, LayoutError
from kvplan.backends import mla
from tests.backends.rows import hold_every_row


def test_three_dims():
    caches = [torch.zeros(5, 4, 576, dtype=torch.bfloat16) for _ in range(2)]
    layout = mla.describe(caches, layer_start=30)
    assert layout.notation == "layer: block token dim"
    assert (layout.layers, layout.parts, layout.num_blocks, layout.block_tokens) == ((30, 31), ("kv",), 5, 4)
    assert layout.block_nbytes == 9216  # 2 layers x 4 tokens x 1,152 bytes
    assert layout.address(layer=31, part="kv", block=3, token=2) == caches[1].data_ptr() + 3 * 4608 + 2 * 1152
    assert hold_every_row(layout, lambda layer, _, block, token, head: caches[layer][block, token]) == 2 * 5 * 4


@pytest.mark.parametrize(
    ("shape", "notation"),
    [
        ((5, 1, 4, 576), "layer: block 1 token dim"),
        ((5, 4, 1, 576), "layer: block token 1 dim"),
    ],
)
def test_four_dims(shape, notation):
    cache = torch.zeros(shape, dtype=torch.float16)
    layout = mla.describe([cache])
    assert layout.notation == notation
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 4, 4608)
    assert layout == mla.describe(cache.reshape(5, 4, 576))
    hold_every_row(layout, lambda layer, kv, block, token, head: cache.reshape(5, 4, 576)[block, token])


@pytest.mark.parametrize(
    ("shape", "notation"),
    [
        ((20, 1, 576), "layer: (block token) 1 dim"),
        ((20, 576), "layer: (block token) dim"),
    ],
)
def test_flat_slots(shape, notation):
    caches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(3)]
    layout = mla.describe(caches, block_tokens=4)
    assert layout.notation == notation
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 4, 6912)
    hold_every_row(layout, lambda layer, kv, block, token, head: caches[layer][4 * block + token])


def test_flat_slots_of_pages_of_one_token_are_blocks():
    cache = np.zeros((20, 1, 576), np.uint8)
    assert mla.describe(cache) == mla.describe(cache, block_tokens=1)


@pytest.mark.parametrize("row", [656, 352, 528])
def test_packed_rows_are_opaque_bytes(row):
    cache = torch.zeros(3, 64, row, dtype=torch.uint8)
    layout = mla.describe([cache])
    assert (layout.block_nbytes, layout.dtype) == (64 * row, "uint8")
    assert layout.address(layer=0, part="kv", block=2, token=63) == cache.data_ptr() + (2 * 64 + 63) * row


def test_padded_rows_and_blocks_are_not_content():
    storage = torch.zeros(3, 70, 672, dtype=torch.uint8)  # 64 rows of 656 bytes, with pads after rows and after blocks
    layout = mla.describe([storage[:, :64, :656]])
    assert layout.block_nbytes == 41_984
    assert layout.address(layer=0, part="kv", block=2, token=5) == storage.data_ptr() + 2 * 70 * 672 + 5 * 672
    assert layout == mla.describe([storage[:, :64]], row_nbytes=656)
    assert layout != mla.describe([storage[:, :64]])
    dense = mla.describe(np.zeros((3, 64, 656), np.uint8))
    program = kvplan.compile(layout, dense)
    assert (program.runs, program.run_nbytes) == (64, (656, 656))


def test_row_nbytes_counts_bytes_not_elements():
    cache = np.zeros((3, 4, 640), np.float16)
    layout = mla.describe(cache, row_nbytes=1152)
    assert (layout.block_nbytes, layout.sizes["dim"]) == (4608, 576)
    assert layout.address(layer=0, part="kv", token=1) == cache.ctypes.data + 1280
    assert mla.describe(cache, row_nbytes=1280) == mla.describe(cache)


def test_split_into_ckv_and_kpe():
    ckv = [torch.zeros(3, 4, 512, dtype=torch.bfloat16) for _ in range(2)]
    kpe = [torch.zeros(3, 4, 64, dtype=torch.bfloat16) for _ in range(2)]
    layout = mla.describe(ckv, kpe=kpe, layers=[2, 9])
    assert (layout.layers, layout.parts, layout.block_tokens) == ((2, 9), ("ckv", "kpe"), 4)
    assert layout.block_nbytes == 9216  # 2 layers x 4 tokens x (1,024 + 128) bytes
    hold_every_row(layout, lambda layer, part, block, token, head: (ckv, kpe)[part][layer][block, token])
    alone = mla.describe(ckv, part="ckv", layers=[2, 9])
    assert alone.parts == ("ckv",)
    assert layout.slice(parts=("ckv",)) == alone


def test_split_views_of_one_latent():
    latent = torch.zeros(3, 4, 576, dtype=torch.bfloat16)
    layout = mla.describe(latent[..., :512], kpe=latent[..., 512:])
    assert layout.block_nbytes == 4608
    assert layout.address(layer=0, part="kpe", block=1, token=1) == latent.data_ptr() + 4608 + 1152 + 1024
    pool = mla.describe(np.zeros((3, 4, 512), np.uint16), kpe=np.zeros((3, 4, 64), np.uint16))
    program = kvplan.compile(layout, pool)
    assert (program.runs, program.run_nbytes) == (8, (128, 1024))


def test_split_flat_slots():
    ckv, kpe = np.zeros((20, 1, 512), np.int8), np.zeros((20, 1, 64), np.int8)
    layout = mla.describe(ckv, kpe=kpe, block_tokens=4, layer_start=6)
    assert layout.layers == (6,)
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 4, 2304)


def test_whole_blocks_have_no_token_slots():
    """DeepSeek-V4: 64 rows of 584 bytes, all data and then all scales, rounded up to a multiple of 576."""
    storage = torch.zeros(3, 37_440, dtype=torch.uint8)
    pages = storage[:, :37_376].view(3, 64, 584)
    layout = mla.describe([pages], whole_blocks=True)
    assert layout.notation == "layer: block dim.0 dim.1"
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (3, 1, 37_376)
    assert layout.address(layer=0, part="kv", block=2) == storage.data_ptr() + 74_880
    assert layout == mla.describe([storage], whole_blocks=True, row_nbytes=37_376)
    assert layout == mla.describe([pages[:, None]], whole_blocks=True)
    assert layout == mla.describe([pages[:, :, None]], whole_blocks=True)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(layout, mla.describe(np.zeros((3, 64, 584), np.uint8)))
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(layout, mla.describe(np.zeros((6, 32, 584), np.uint8), whole_blocks=True))


def test_whole_blocks_of_flat_slots():
    cache = np.zeros((20, 1, 132), np.uint8)
    layout = mla.describe(cache, whole_blocks=True, block_tokens=4)
    assert layout.notation == "layer: (block dim.0) 1 dim.1"
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (5, 1, 528)
    assert layout == mla.describe(cache.reshape(5, 528), whole_blocks=True)


def test_an_indexer_beside_the_latent():
    """DeepSeek-V3.2: both in blocks of 64 tokens, the indexer's as rows of (num_blocks, 64 * 132)."""

    def cache():
        latent = mla.describe(np.zeros((3, 64, 656), np.uint8))
        return kvplan.KVLayout.merge([
            latent, mla.describe(np.zeros((3, 8448), np.uint8), part="index", whole_blocks=True),
        ])  # fmt: skip

    src, dst = cache(), cache()
    assert (src.parts, src.block_tokens, src.block_nbytes) == (("kv", "index"), 64, 41_984 + 8448)
    program = kvplan.compile(src, dst)
    assert (program.runs, program.run_nbytes) == (2, (8448, 41_984))


def test_seams():
    cache = np.zeros((4, 4, 16), np.int8)
    seam = cache[2].ctypes.data
    assert mla.describe(cache, seams=[seam]).seams == (seam,)


THREE = np.zeros((8, 64, 576), np.float16)
CASES = {
    "many heads": (THREE[:, :, None].repeat(2, 2), {}, r"shape \(8, 64, 2, 576\): an MLA cache has one head"),
    "both one": (np.zeros((8, 1, 1, 576)), {}, r"shape \(8, 1, 1, 576\): dims 1 and 2 both have extent 1; squeeze"),
    "rank 5": (THREE[None, None], {}, r"shape \(1, 1, 8, 64, 576\): an MLA cache has one head, and is \(num_blocks, b"),
    "rank 2": (THREE[0], {}, r"shape \(64, 576\): say block_tokens= .* or whole_blocks=True"),
    "rank 1": (THREE[0, 0], {}, r"shape \(576,\): an MLA cache"),
    "paged as flat": (THREE, {"block_tokens": 64}, r"\(8, 64, 576\) with block_tokens=: flat slots are \(slots, 1, "),
    "slots left over": (THREE[0], {"block_tokens": 48}, "dim of extent 64 .* cannot be block=. [*] token=48"),
    "no tokens": (THREE[0], {"block_tokens": 0}, "'token'.* is 0; an extent is an integer of at least 1"),
    "long row": (THREE, {"row_nbytes": 1153}, "row_nbytes is 1153; rows have 1152 bytes, in elements of 2"),
    "half an element": (THREE, {"row_nbytes": 1151}, "row_nbytes is 1151; rows have 1152 bytes, in elements of 2"),
    "no row": (THREE, {"row_nbytes": 0}, "row_nbytes is 0; rows have"),
    "pairs": ([(THREE, THREE)], {}, r"'kv' of layer 0 is a tuple; .* describe\(ckv_caches, kpe=kpe_caches\)"),
    "pair as two layers": ((THREE[..., :512], THREE[..., 512:]), {}, "tensor 1 has shape .8, 64, 64., tensor 0 has"),
    "dict": ({0: THREE}, {"part": "index"}, "'index' is a dict; give a list with one tensor a layer"),
    "none": ([], {}, "no tensors along 'layer'"),
    "kpe and part": (THREE, {"kpe": THREE, "part": "c"}, "kpe= names the parts 'ckv' and 'kpe' and takes no part"),
    "kpe and row": (THREE, {"kpe": THREE, "row_nbytes": 2}, "takes no part, row_nbytes or seams; for those, describe"),
    "kpe and seams": (THREE, {"kpe": THREE, "seams": [1]}, "takes no part, row_nbytes or seams"),
    "kpe of other blocks": (THREE, {"kpe": THREE[:4, :, :64].copy()}, "layout 1 has 4 blocks, layout 0 has 8"),
    "kpe of other tokens": (THREE, {"kpe": THREE[:, :32, :64].copy()}, r"block_tokens differ: \[32, 64\]"),
    "kpe within ckv": (THREE, {"kpe": THREE[..., 512:]}, "layer 0 'ckv' and layer 0 'kpe' overlap"),
    "layers": ([THREE], {"layers": [1, 2]}, r"layers are \(1, 2\); the tensors hold 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        mla.describe(given, **options)
