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
