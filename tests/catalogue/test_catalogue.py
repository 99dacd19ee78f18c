"""The catalogue: geometries of models and named layouts, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvplan
from kvplan.catalogue.layouts import STATE, NamedLayout, layout_for, named_layouts
from kvplan.catalogue.models import Group, find_model, models

MODELS = models()
LAYOUTS = named_layouts()
LLAMA = MODELS["llama-3.1-70b"].groups[0]


# ---- models ------------------------------------------------------------------------------------------------------

# Bytes a token in bf16, all layers and heads, windows left aside: layers x 2 x heads x dim x 2, or layers x row x 2.
TOKEN_NBYTES = {
    "llama-3.1-70b": 327_680,
    "qwen3-235b-a22b": 192_512,
    "qwen3-next-80b-a3b": 24_576,  # 12 of 48 layers
    "gpt-oss-120b": 73_728,
    "gemma-3-27b": 507_904,
    "glm-5": 78 * (1_152 + 132),
    "deepseek-v3.2": 61 * (1_152 + 132),
    "deepseek-v4-pro": 30 * (256 + 17) + 31 * 8 + 61 * 1_024,
    "kimi-k2": 70_272,
    "jamba-v0.1": 16_384,  # 4 of 32 layers
}


def token_nbytes(group):
    bf16 = 2 if group.dtype is None else 1
    return len(group.layers) * (2 if group.kind == "mha" else 1) * group.heads * group.dim * bf16 // group.row_tokens


def test_bytes_of_a_token():
    nbytes = {name: sum(token_nbytes(g) for g in MODELS[name].groups if g.kind != "state") for name in TOKEN_NBYTES}
    assert nbytes == TOKEN_NBYTES


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_well_formed(name):
    model = MODELS[name]
    assert find_model(name.upper()) is model
    assert model.source
    names = [group.name for group in model.groups]
    assert len(set(names)) == len(names)
    for group in model.groups:
        assert group.kind in ("mha", "mla", "state")
        assert group.layers
        assert group.layers == tuple(sorted(set(group.layers)))
        assert 0 <= group.layers[0] <= group.layers[-1] < model.layers
    exclusive = [g for g in model.groups if g.name in ("full", "sliding", "state", "csa", "hca") and g.row_tokens == 1]
    if not any(group.kind == "mla" for group in model.groups):  # each layer has one cache
        assert sorted(layer for group in exclusive for layer in group.layers) == list(range(model.layers))


@pytest.mark.parametrize(
    ("tp", "rank", "heads"),
    [(1, 0, range(8)), (4, 3, range(6, 8)), (8, 5, range(5, 6)), (16, 15, range(7, 8)), (16, 2, range(1, 2))],
)
def test_heads_of_a_rank(tp, rank, heads):
    assert LLAMA.rank_heads(tp, rank) == heads
    assert LLAMA.copies(tp) == max(tp // 8, 1)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 128])
@pytest.mark.parametrize("row_tokens", [1, 4])
def test_rows_held_by_counting(window, row_tokens):
    """A block is held where it has the row of a token that is within the window."""
    group = Group("any", "mla", (0,), dim=1, window=window, row_tokens=row_tokens)
    for tokens in range(1, 300, 7):
        kept = range(0 if window is None else max(tokens - window, 0), tokens)
        blocks = {token // row_tokens // 16 for token in kept}
        assert group.rows_held(tokens, 16) == 16 * len(blocks)


# ---- layouts -----------------------------------------------------------------------------------------------------


def test_a_layout_for_a_rank():
    layout = layout_for(LAYOUTS["vllm-LBHNC"], LLAMA, num_blocks=8, block_tokens=16, dtype="bf16", tp=4, rank=1)
    assert (layout.heads, layout.block_nbytes, layout.device) == (range(2, 4), 1_310_720, "cuda:0")
    shared = layout_for(
        LAYOUTS["sglang-page-unified"], LLAMA, num_blocks=8, block_tokens=16, dtype="bf16", tp=4, rank=1
    )
    assert (shared.heads, shared.block_nbytes, shared.device) == (range(2, 4), 1_310_720, "cpu")
    # The pool holds all ranks, each rank's heads in one piece: rank 1 begins after 80 x 2 x 16 x 2 x 128 elements.
    assert shared.address(layer=0, part="k", head=2) - shared.regions[0].address == 1_310_720


def fitting(group: Group, side: str) -> list[NamedLayout]:
    if group.kind == "state":
        return [STATE[side]]
    return [layout for layout in LAYOUTS.values() if (layout.side, layout.kind) == (side, group.kind)]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_every_pair_of_layouts(name):
    """Three layers of each group: any device layout compiles with any host layout, and every byte is accounted for."""
    for group in MODELS[name].groups:
        short, tokens = replace(group, layers=group.layers[:3]), 1 if group.kind == "state" else 16
        tp = 2
        known = {"num_blocks": 4, "block_tokens": tokens, "dtype": "bf16", "tp": tp, "rank": 1}
        hosts = [layout_for(named, short, **known) for named in fitting(group, "host")]
        for named in fitting(group, "device"):
            device = layout_for(named, short, **known)
            for host in hosts:
                program = kvplan.compile(device, host)
                assert program.unit_nbytes == device.block_nbytes == host.block_nbytes
                assert program.runs * program.run_nbytes[0] <= program.unit_nbytes
        expected = token_nbytes(replace(short, dtype=None, row_tokens=1)) * tokens
        expected = expected // 2 if group.dtype == "uint8" else expected
        assert device.block_nbytes == expected // (1 if group.kind == "mla" else tp)
