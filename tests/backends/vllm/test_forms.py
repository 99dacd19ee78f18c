"""vllm: what a row, a slot or a block holds, the generations before 0.33, byte figures, and what is refused."""

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import vllm
from tests.backends.rows import address_of, hold_every_row


@pytest.mark.parametrize("form", ["paged", "shuffled"])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_x_packed_slots(form, itemsize):
    """Keys (H, D/x, N, x), values (H, D, N) or (H, N/x, D, x), where x is 16 bytes; every element of every row."""
    heads, dim, tokens, x = 2, 32, 16, 16 // itemsize
    cache = torch.zeros(3, 2, tokens, heads * dim, dtype={1: torch.int8, 2: torch.float16}[itemsize])
    layout = vllm.describe([cache], form=form, heads=heads)
    keys = cache[:, 0].reshape(3, heads, dim // x, tokens, x)
    values = cache[:, 1].reshape(3, heads, dim, tokens)
    if form == "shuffled":
        values = cache[:, 1].reshape(3, heads, tokens // x, dim, x)
    assert (layout.parts, layout.block_tokens, layout.heads) == (("k", "v"), 16, range(2))
    assert layout.block_nbytes == 2 * 16 * 64 * itemsize
    count = 0
    for part in ("k", "v"):
        inner = layout.component(0, part).form.dim
        for b, h, t in np.ndindex(3, heads, tokens):
            for d, start in enumerate(offsets(inner, itemsize)):
                if part == "k":
                    element = keys[b, h, d // x, t, d % x]
                else:
                    element = values[b, h, d, t] if form == "paged" else values[b, h, t // x, d, t % x]
                row = layout.address(layer=0, part=part, block=b, token=t, head=h)
                assert row + start == element.data_ptr()
                count += 1
    assert count == 2 * 3 * heads * tokens * dim


def offsets(factors, itemsize):
    """Bytes from a row's first element to each of its elements."""
    found = [0]
    for count, stride in factors:
        found = [start + k * stride for start in found for k in range(count)]
    return found[::itemsize]


def test_x_packed_kernel_blocks():
    cache = torch.zeros(6, 2, 16, 64, dtype=torch.int8)
    layout = vllm.describe([cache], form="paged", heads=2, block_tokens=32)
    assert (layout.num_blocks, layout.block_tokens) == (3, 32)
    assert (
        layout.notation
        == "layer: (block token.0) (head dim.0 token.1 dim.1) + layer: (block token.0) (head dim token.1)"
    )
    values = cache[:, 1].reshape(6, 2, 32, 16)
    for b, h, t in np.ndindex(3, 2, 32):
        element = values[2 * b + t // 16, h, 0, t % 16]
        assert layout.address(layer=0, part="v", block=b, token=t, head=h) == element.data_ptr()
    shuffled = vllm.describe([cache], form="shuffled", heads=2, block_tokens=32)
    assert shuffled.address(layer=0, part="v", block=1, token=17) == cache[3, 1].data_ptr() + 1


def test_packed_rows_are_one_part():
    """TurboQuant at 4 bits: K and V of a (head, token) in one slot of 134 bytes."""
    cache = torch.zeros(3, 8, 16, 134, dtype=torch.uint8)
    layout = vllm.describe([cache], form="packed", head_start=8)
    assert (layout.parts, layout.heads, layout.block_nbytes) == (("kv",), range(8, 16), 17_152)
    hold_every_row(layout, lambda _, part, b, token, head: cache[b, head, token])


def test_whole_blocks_move_whole():
    """A Mamba state is (B, 1, 1, C), padded; an indexer's page (B, 1, N, C) is one piece of bytes."""
    raw = torch.zeros(2 * 3 * 512, dtype=torch.int8)
    states = vllm.place(raw, layers=2, blocks=3, heads=1, tokens=1, row_nbytes=400, page_nbytes=512)
    layout = vllm.describe(states, form="whole_blocks", part="state")
    assert (layout.parts, layout.block_tokens, layout.block_nbytes) == (("state",), 1, 800)
    assert layout.address(layer=1, part="state", block=2) == raw.data_ptr() + 1536 + 1024
    index = vllm.describe(torch.zeros(3, 1, 64, 144, dtype=torch.uint8), form="whole_blocks", part="index")
    assert (index.parts, index.block_nbytes, index.opaque) == (("index",), 9216, True)


def test_whole_blocks_of_a_kernel_in_the_manager_s_blocks(executor):
    """Opaque blocks of 16 tokens, four to each block of 64 of the manager's, which a host block of 128 holds two of."""
    cache = torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1).repeat(1, 1, 16, 24)
    layout = vllm.describe([cache], form="whole_blocks", block_tokens=64, part="index")
    assert (layout.opaque, layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (True, 2, 4, 4 * 384)
    assert layout.address(layer=0, part="index", block=1, token=2) == cache[6].data_ptr()
    assert vllm.describe([cache], form="whole_blocks", block_tokens=16, part="index").num_blocks == 8
    host = kvplan.allocate("block subblock dim", like=layout, num_blocks=1, sizes={"subblock": 8})
    program = kvplan.compile(layout, host)
    assert (program.unit_tokens, program.run_nbytes) == (4, (1536, 1536))
    executor.submit(program.plan([1, 0], [0])).synchronize()
    assert host.tensors[0, :, 5].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    rows = vllm.describe([torch.zeros(8, 1, 16, 32)], form="latent", block_tokens=64)
    assert kvplan.KVLayout.merge([rows, layout]).block_tokens == 64


# form, shape, whose row (kv, block, token, head) -> index
OLDER = {
    "planes": ((2, 3, 4, 2, 8), lambda kv, b, t, h: (kv, b, t, h)),
    "pages": ((3, 2, 4, 2, 8), lambda kv, b, t, h: (b, kv, t, h)),
    "rows": ((3, 4, 2, 16), lambda kv, b, t, h: (b, t, h, slice(8 * kv, None))),
}


@pytest.mark.parametrize("form", OLDER)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_older_generations(form, library):
    shape, index = OLDER[form]
    caches = [torch.zeros(shape, dtype=torch.float16) if library == "torch" else np.zeros(shape, np.float16)
              for _ in range(2)]  # fmt: skip
    layout = vllm.describe(caches, form=form, head_start=2)
    assert (layout.parts, layout.heads, layout.block_tokens, layout.num_blocks) == (("k", "v"), range(2, 4), 4, 3)
    assert layout.block_nbytes == 2 * 2 * 4 * 2 * 16

    def row(layer, kv, block, token, head):
        picked = caches[layer][index(kv, block, token, head)]
        return picked if library == "torch" else np.atleast_1d(picked)

    assert hold_every_row(layout, row) == 2 * 2 * 3 * 4 * 2
    address = layout.address(layer=1, part="v", block=2, token=3, head=3)
    step = {"planes": 384 + 256 + 96 + 16, "pages": 512 + 128 + 96 + 16, "rows": 512 + 192 + 32 + 16}[form]
    assert address == address_of(caches[1]) + step


@pytest.mark.parametrize("form", OLDER)
def test_older_kernel_blocks(form):
    """Two kernel blocks of 4 tokens are one of the manager's: token 5 of block 1 is token 1 of kernel block 3."""
    shape, index = OLDER[form]
    cache = np.zeros([4 if size == 3 else size for size in shape], np.float16)
    layout = vllm.describe([cache], form=form, block_tokens=8)
    assert (layout.num_blocks, layout.block_tokens) == (2, 8)
    assert layout.address(layer=0, part="k", block=1, token=5, head=1) == address_of(
        cache[index(0, 3, 1, 1)][..., None]
    )


@pytest.mark.parametrize("form", ["planes", "pages"])
def test_older_hnd_storage_is_in_the_strides(form):
    storage = torch.zeros(2, 2, 2, 4, 8, dtype=torch.float16)  # ..., heads, tokens, dim; 2 blocks: extents tell nothing
    cache = storage.transpose(2, 3)
    layout = vllm.describe([cache], form=form)
    assert layout.address(layer=0, part="k", token=1) - layout.address(layer=0, part="k") == 16
    assert layout.address(layer=0, part="v") - layout.address(layer=0, part="k") == {"planes": 256, "pages": 128}[form]


def test_rows_of_two_sizes():
    cache = np.zeros((3, 4, 2, 6), np.float16)
    layout = vllm.describe([cache], form="rows", head_size_v=2)
    assert layout.address(layer=0, part="v", block=1, token=1, head=1) == cache.ctypes.data + 96 + 24 + 12 + 8
    assert [layout.slice(parts=[part]).block_nbytes for part in ("k", "v")] == [64, 32]


def test_paged_planes():
    cache = torch.zeros(2, 3, 16 * 2 * 32, dtype=torch.float16)
    layout = vllm.describe([cache], form="paged_planes", heads=2, block_tokens=16)
    keys, values = cache[0].view(3, 2, 4, 16, 8), cache[1].view(3, 2, 32, 16)
    for b, h, t in np.ndindex(3, 2, 16):
        where = {"layer": 0, "block": b, "token": t, "head": h}
        assert layout.address(part="k", **where) == keys[b, h, 0, t].data_ptr()
        assert layout.address(part="v", **where) == values[b, h, 0, t].data_ptr()


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "nbytes"),
    [
        (8, 128, "bf16", 65_536), (4, 128, "bf16", 32_768), (2, 128, "bf16", 16_384), (1, 128, "bf16", 8_192),
        (8, 128, "fp8", 32_768), (1, 128, "fp8", 4_096),
        (8, 64, "bf16", 32_768), (4, 64, "bf16", 16_384), (2, 64, "bf16", 8_192), (1, 64, "bf16", 4_096),
    ],
)  # fmt: skip
def test_bytes_of_a_block_and_layer(heads, dim, dtype, nbytes):
    kind = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype]
    assert vllm.describe([torch.zeros(2, heads, 16, 2 * dim, dtype=kind)]).block_nbytes == nbytes


@pytest.mark.parametrize(
    ("tokens", "row", "nbytes"),
    [(64, 1152, 73_728), (64, 576, 36_864), (64, 656, 41_984), (64, 352, 22_528), (64, 528, 33_792), (64, 584, 37_376)],
)
def test_bytes_of_a_latent_block(tokens, row, nbytes):
    assert vllm.describe([torch.zeros(2, 1, tokens, row, dtype=torch.uint8)], form="latent").block_nbytes == nbytes


def test_the_pad_of_deepseek_v4_is_not_moved():
    """584-byte rows, 64 a page, 37,376 bytes in pages of 37,440."""
    raw = np.zeros(3 * 37_440, np.uint8)
    page = vllm.place(raw, layers=1, blocks=3, heads=1, tokens=64, row_nbytes=584, page_nbytes=37_440)
    layout = vllm.describe(page, form="whole_blocks")
    assert layout.block_nbytes == 37_376
    assert layout.address(layer=0, part="kv", block=2) == raw.ctypes.data + 74_880


@pytest.mark.parametrize(("row", "form", "parts"), [(264, "fused", ("k", "v")), (136, "fused", ("k", "v"))])
def test_scales_per_token_and_head_stay_with_their_half(row, form, parts):
    """int8 and fp8 rows are 2 x (128 + 4) bytes, int4 rows 2 x (64 + 4): each half is data and its scale."""
    layout = vllm.describe([torch.zeros(2, 8, 16, row, dtype=torch.uint8)], form=form)
    assert (layout.parts, layout.block_nbytes) == (parts, 8 * 16 * row)
    assert layout.address(layer=0, part="v") - layout.address(layer=0, part="k") == row // 2


FOUR = np.zeros((3, 2, 4, 16), np.int8)
FIVE = np.zeros((3, 2, 4, 2, 8), np.int8)
SLOTS = {"form": "head_slots", "heads": 2}
CASES = {
    "form": (FOUR, {"form": "NHD"}, "form is 'NHD'; it is one of 'fused', 'latent', 'packed', 'whole_blocks', 'cpu'"),
    "rank": ([FIVE], {}, r"\(3, 2, 4, 2, 8\), 5 dims; form='fused' is \(B, H, N, C\); of 5 dims are planes, pages"),
    "rank of one tensor": (FIVE[0, 0], {}, "has shape .4, 2, 8., 3 dims; .*of 3 dims are paged_planes"),
    "rank by name": ({"layers.0": FIVE}, {}, r"kv_caches\['layers.0'\] has shape"),
    "not 2": (FIVE, {"form": "planes"}, r"whose dim 0 is 3; form='planes' is \(2, B, N, H, D\), with K and V"),
    "not 2 pages": (FIVE.swapaxes(0, 1), {"form": "pages"}, "whose dim 1 is 3; form='pages'"),
    "not 2 slots": (np.zeros((3, 8, 4, 16)), SLOTS, "whose dim 1 is 8; form='head_slots'"),
    "no heads": (FOUR, {"form": "head_slots"}, "form='head_slots' needs heads=; 'head_slots', 'paged', 'shuffled', "),
    "heads": (FOUR, {"heads": 2}, "form='fused' takes no heads="),
    "heads that do not divide": (FOUR, SLOTS | {"heads": 3}, "dim of extent 16 .* cannot be head=3"),
    "heads 0": (FOUR, SLOTS | {"heads": 0}, "heads is 0; it is an integer of at least 1"),
    "v of cpu": (FOUR, {"form": "cpu", "head_size_v": 8}, "head_size_v is given for form='cpu'; only 'fused' and"),
    "v too wide": (FOUR, {"head_size_v": 16}, "head_size_v is 16; a row of 16 elements holds K and V"),
    "v below 0": (FOUR, {"head_size_v": -1}, "head_size_v is -1; it is an integer of at least 0"),
    "no v in rows": (FOUR, {"form": "rows", "head_size_v": 0}, "head_size_v is 0; a row"),
    "latent of heads": (FOUR, {"form": "latent"}, "dim of extent 2 in 'layer: block 1 token dim' cannot be 1"),
    "odd content": (FOUR[..., :15], {}, "dim of extent 15 .* cannot be kv=2"),
    "slots in BHLNC": (FOUR[:, :, ::2], SLOTS | {"form": "paged"}, "x-packed caches are dense there"),
    "shuffled of few": (FOUR, SLOTS | {"form": "shuffled"}, "has blocks of 4 token slots; they come in groups of 16"),
    "kernel blocks": (FOUR, {"block_tokens": 6}, "block_tokens is 6; the tensor's blocks have 4 token slots"),
    "blocks left over": (FOUR, {"block_tokens": 8}, "dim of extent 3 .* cannot be block=. . token.0=2"),
    "tokens of whole": (FOUR, {"form": "whole_blocks", "block_tokens": 6}, "is 6; the tensor's blocks are of 4"),
    "tokens of paged": (FOUR[0], {"form": "paged_planes", "heads": 1}, "form='paged_planes' needs block_tokens="),
    "text": ("cache", {}, "kv_caches is a str; give a dict of layer name to tensor, a list"),
    "a list of text": (["cache"], {}, r"kv_caches\[0\] is a str; form='fused' has tensors \(B, H, N, C\)"),
    "none": ([], {}, "kv_caches holds no layer"),
    "none by name": ({}, {}, "kv_caches holds no layer"),
    "names of a list": ([FOUR], {"names": ["a"]}, "names are given and kv_caches is a list; names pick from a dict"),
    "no such name": ({"layers.0": FOUR}, {"names": ["layers.1"]}, "no layer 'layers.1' in kv_caches; it has 'layers"),
    "nameless": ({"attn": FOUR}, {}, "layer 'attn' has 0 numbers in its name"),
    "layer_start": ({"layers.0": FOUR}, {"layer_start": 3}, "layer_start is 3, and the names of kv_caches tell"),
    "layers": ([FOUR], {"layers": [1, 2]}, r"layers are \[1, 2\]; kv_caches holds 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        vllm.describe(given, **options)


SIZES = {"layers": 2, "blocks": 3, "heads": 2, "tokens": 4, "row_nbytes": 16}
RAW = np.zeros(768, np.int8)
PLACES = {
    "order": (RAW, {"order": "LNBHC"}, "order is 'LNBHC'; vLLM's are LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC, and"),
    "rank": (RAW.reshape(2, 384), {}, r"raw is of shape \(2, 384\) and 1 bytes an element; give the allocation as one"),
    "itemsize": (RAW.view(np.int16), {}, r"raw is of shape \(384,\) and 2 bytes"),
    "steps": (RAW[::2], {}, "raw has a stride of 2"),
    "text": ("raw", {}, "raw is str"),
    "size": (RAW, {"heads": 0}, "heads is 0; it is an integer of at least 1"),
    "stride": (RAW, {"block_stride": 1.5}, "block_stride is 1.5"),
    "page": (RAW, {"page_nbytes": 100}, "page_nbytes is 100; a page holds 2 x 4 x 16 = 128"),
    "pages in pieces": (RAW, {"page_nbytes": 128, "order": "LHBNC"}, "page_nbytes is given for LHBNC, which stores no"),
    "layers in pieces": (RAW, {"page_nbytes": 128, "order": "BHLNC"}, "page_nbytes is given for BHLNC"),
    "too small": (RAW, {"blocks": 4}, "2 layers of 4 blocks in LBHNC from byte 0 reach byte 1024; .* has 768"),
    "offset": (RAW, {"offset": 1}, "from byte 1 reach byte 769"),
    "before": (RAW, {"offset": -1}, "from byte -1"),
    "kernel": (RAW, {"kernel_tokens": 3}, "kernel_tokens is 3; it divides the 4 of a manager's block"),
    "kernel in BLHNC": (RAW, {"kernel_tokens": 2, "order": "BLHNC"}, "blocks of BLHNC are 256 bytes apart and hold"),
    "kernel of padded": (np.zeros(960, np.int8), {"kernel_tokens": 2, "page_nbytes": 160}, "are 160 bytes apart"),
    "kernel in LHBNC": (RAW, {"kernel_tokens": 2, "order": "LHBNC"}, "are 64 bytes apart and hold 128; only dense"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_places_refused(case):
    raw, options, message = PLACES[case]
    with pytest.raises(LayoutError, match=message):
        vllm.place(raw, **(SIZES | options))


def test_a_layer_of_one_head_pads_in_any_order():
    raw = np.zeros(2 * 3 * 96, np.int8)
    options = SIZES | {"heads": 1, "page_nbytes": 96}
    one = vllm.describe(vllm.place(raw, **options, order="LHBNC"))
    assert one == vllm.describe(vllm.place(raw, **options))
    assert kvplan.compile(one, one).unit_nbytes == 128
