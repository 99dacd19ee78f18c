"""Figures that engines publish, or that their shapes imply, as literal tables: bytes a block, and runs a copy."""

import pytest

import kvplan
from kvplan import KVLayout

KV = "layer: block kv token head dim"
ROWS = "layer: block token dim"


def spec(notation, dtype="bf16", **more):
    """A layout from a spec: ``sizes`` as keywords in the order of the axes."""
    sizes = {axis: more.pop(axis) for axis in ("layer", "block", "token", "head", "dim") if axis in more}
    return KVLayout.from_spec({"notation": notation, "dtype": dtype, "sizes": sizes, **more})


BLOCK_NBYTES = {
    # 8 KV heads x 128, 16 tokens, K and V
    "bf16 TP 1": (KV, "bf16", {"token": 16, "head": 8, "dim": 128}, 65_536),
    "bf16 TP 2": (KV, "bf16", {"token": 16, "head": 4, "dim": 128}, 32_768),
    "bf16 TP 4": (KV, "bf16", {"token": 16, "head": 2, "dim": 128}, 16_384),
    "bf16 TP 8": (KV, "bf16", {"token": 16, "head": 1, "dim": 128}, 8_192),
    "fp8 TP 1": (KV, "fp8", {"token": 16, "head": 8, "dim": 128}, 32_768),
    "fp8 TP 2": (KV, "fp8", {"token": 16, "head": 4, "dim": 128}, 16_384),
    "fp8 TP 4": (KV, "fp8", {"token": 16, "head": 2, "dim": 128}, 8_192),
    "fp8 TP 8": (KV, "fp8", {"token": 16, "head": 1, "dim": 128}, 4_096),
    # gpt-oss: 8 KV heads x 64
    "gpt-oss TP 1": (KV, "bf16", {"token": 16, "head": 8, "dim": 64}, 32_768),
    "gpt-oss TP 2": (KV, "bf16", {"token": 16, "head": 4, "dim": 64}, 16_384),
    "gpt-oss TP 4": (KV, "bf16", {"token": 16, "head": 2, "dim": 64}, 8_192),
    "gpt-oss TP 8": (KV, "bf16", {"token": 16, "head": 1, "dim": 64}, 4_096),
    # MLA, 64 tokens
    "MLA bf16": (ROWS, "bf16", {"token": 64, "dim": 576}, 73_728),
    "MLA fp8": (ROWS, "fp8", {"token": 64, "dim": 576}, 36_864),
    "fp8_ds_mla": (ROWS, "uint8", {"token": 64, "dim": 512 + 16 + 128}, 41_984),
    "nvfp4_ds_mla": (ROWS, "uint8", {"token": 64, "dim": 256 + 64 + 32}, 22_528),
    "V3.2 indexer": (ROWS, "uint8", {"token": 64, "dim": 128 + 4}, 8_448),
    "V4 indexer MXFP4": (ROWS, "uint8", {"token": 64, "dim": 68}, 4_352),
    "V4 C4": (ROWS, "uint8", {"token": 64, "dim": 448 + 128 + 8}, 37_376),
    "V4.1": (ROWS, "uint8", {"token": 64, "dim": 528}, 33_792),
    "V4.1 nvfp4": (ROWS, "uint8", {"token": 64, "dim": 288}, 18_432),
    # scales inside the row, 8 heads x 16 tokens at D = 128
    "per-token-head int8": ("layer: block head token (kv dim)", "int8", {"token": 16, "head": 8, "dim": 132}, 33_792),
    "per-token-head int4": ("layer: block head token (kv dim)", "uint8", {"token": 16, "head": 8, "dim": 68}, 17_408),
    "TurboQuant k8v4": ("layer: block token head dim", "uint8", {"token": 16, "head": 8, "dim": 196}, 25_088),
    "TurboQuant 4-bit": ("layer: block token head dim", "uint8", {"token": 16, "head": 8, "dim": 134}, 17_152),
    "TurboQuant k3v4": ("layer: block token head dim", "uint8", {"token": 16, "head": 8, "dim": 118}, 15_104),
    "TurboQuant 3-bit": ("layer: block token head dim", "uint8", {"token": 16, "head": 8, "dim": 102}, 13_056),
}  # fmt: skip


@pytest.mark.parametrize("case", BLOCK_NBYTES)
def test_bytes_a_block_and_layer(case):
    notation, dtype, sizes, nbytes = BLOCK_NBYTES[case]
    one = spec(notation, dtype, layer=1, block=10, **sizes)
    assert one.block_nbytes == nbytes
    three = spec(notation, dtype, layer=3, block=10, **sizes)
    assert (three.block_nbytes, three.nbytes) == (3 * nbytes, 30 * nbytes)
    assert three.slice(layers=[1]).block_nbytes == nbytes
    # One tensor for all layers holds as much.
    pool = notation.replace("layer: block", "block layer")
    assert spec(pool, dtype, layer=3, block=10, **sizes).block_nbytes == 3 * nbytes


def test_deepseek_v4_pages_are_padded_to_576():
    layout = spec(ROWS, "uint8", layer=1, block=10, token=64, dim=584, strides=[37_440, 584, 1])
    assert layout.block_nbytes == 37_376
    assert layout.address(layer=0, part="kv", block=1) - layout.address(layer=0, part="kv", block=0) == 37_440
    assert 37_440 % 576 == 0


def test_nvfp4_has_up_to_four_tensors_a_block():
    """D = 128: 64 bytes of K, 64 of V, 8 of scales for each; 8 heads x 16 tokens."""
    pages = {"notation": KV, "dtype": "uint8", "sizes": {"layer": 1, "block": 4, "token": 16, "head": 8, "dim": 64}}
    scales = {**pages, "part": "scale", "sizes": {**pages["sizes"], "dim": 8}, "address": 1 << 40}
    layout = KVLayout.from_spec({"layouts": [pages, scales]})
    assert layout.parts == ("k", "v", "k_scale", "v_scale")
    assert layout.block_nbytes == 18_432  # 16 x 8 x 2 x (64 + 8)


ALIGNMENT = {
    656: 16, 528: 16, 384: 128, 352: 32, 288: 32, 584: 8, 264: 8, 136: 8, 132: 4, 68: 4, 196: 4, 134: 2, 118: 2, 102: 2,
}  # fmt: skip


@pytest.mark.parametrize("row", ALIGNMENT)
def test_alignment_of_rows(row):
    """Rows copied one by one, into rows a kilobyte apart: no path may assume words of 16 bytes."""
    packed = spec(ROWS, "uint8", layer=1, block=4, token=64, dim=row, device="cuda:0")
    spread = spec(ROWS, "uint8", layer=1, block=4, token=64, dim=row, strides=[65_536, 1024, 1])
    program = kvplan.compile(packed, spread)
    assert (program.runs, program.run_nbytes, program.alignment) == (64, (row, row), ALIGNMENT[row])


# 16-token blocks, 80 layers, 128 values a head, bf16: Llama-70B at TP 4 (2 heads a rank).
SPLIT = "layer: kv block token head dim"
POOL = "block layer kv token head dim"
WHOLE = (1, 1_310_720, 1_310_720)  # 80 layers x 2 x 16 tokens x 2 heads x 256 bytes
RUNS = {
    # GPU, host, heads of the host, runs a block, bytes each, host extents: (how many, smallest, largest)
    "split planes": (SPLIT, POOL, 2, 160, 8_192, WHOLE),
    "blocks first": (KV, POOL, 2, 80, 16_384, WHOLE),
    "cross-layer": (POOL, POOL, 2, 1, 1_310_720, WHOLE),
    "HND to NHD": ("layer: block head token (kv dim)", POOL, 2, 5_120, 256, WHOLE),
    "page_first": (SPLIT, "kv (block token) layer head dim", 2, 2_560, 512, (2, 655_360, 655_360)),
    "TP 4 to TP 1 NHD": (SPLIT, POOL, 8, 2_560, 512, (2_560, 512, 512)),
    "TP 4 to TP 1 HND": (
        "layer: kv block head token dim", "block layer kv head token dim", 8, 160, 8_192, (160, 8_192, 8_192),
    ),
}  # fmt: skip


def llama_70b(notation, *, heads, **more):
    return spec(notation, layer=80, block=32, token=16, head=heads, dim=128, **more)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("case", RUNS)
def test_runs_a_block(case, rank):
    gpu_notation, host_notation, heads, runs, nbytes, extents = RUNS[case]
    gpu = llama_70b(gpu_notation, heads=2, head_start=2 * rank, device="cuda:0")
    held = range(2 * rank, 2 * rank + 2)
    host = llama_70b(host_notation, heads=heads, head_start=2 * rank if heads == 2 else 0).slice(heads=held)
    store = kvplan.compile(gpu, host)
    assert (store.unit_tokens, store.unit_nbytes, store.direction) == (16, 1_310_720, "store")
    assert (store.runs, store.run_nbytes) == (runs, (nbytes, nbytes))
    assert store.program.extents("dst") == extents
    load = kvplan.compile(host, gpu)
    assert (load.runs, load.run_nbytes, load.direction) == (runs, (nbytes, nbytes), "load")
    assert load.program.extents("src") == extents


@pytest.mark.parametrize("case", RUNS)
def test_descriptors_of_scattered_blocks(case):
    """No two blocks are neighbours on both sides, so a plan has what one block has, three times over."""
    gpu_notation, host_notation, heads, runs, nbytes, _ = RUNS[case]
    gpu = llama_70b(gpu_notation, heads=2, head_start=2, device="cuda:0")
    host = llama_70b(host_notation, heads=heads, head_start=2 if heads == 2 else 0).slice(heads=range(2, 4))
    made = kvplan.compile(gpu, host).plan([9, 4, 20], [0, 1, 2]).descriptors()
    assert made.size.tolist() == [nbytes] * (3 * runs)


def test_consecutive_cross_layer_blocks_merge():
    gpu, host = llama_70b(POOL, heads=2, device="cuda:0"), llama_70b(POOL, heads=2)
    made = kvplan.compile(gpu, host).plan([5, 6, 7, 20], [0, 1, 2, 3]).descriptors()
    assert sorted(made.size.tolist()) == [1_310_720, 3_932_160]
