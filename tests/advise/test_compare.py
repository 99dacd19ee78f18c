"""Where two layouts stop being contiguous together, and what would be better; numbers by hand."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.advise.advise import advise, numbers_of
from kvplan.advise.compare import first_break
from kvplan.program.passes import passes
from tests.profiles import examples

# Llama-3-70B at tensor parallel 4: a token row is 2 heads x 128 x 2 bytes = 512, a page of one layer and part 8 KiB.
SIZES = {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}


def layout(notation, device="cpu", dtype="bf16", strides=None, **sizes):
    named = {*notation.translate(dict.fromkeys(map(ord, ":()"), " ")).split()}
    axes = named | {name.partition(".")[0] for name in named}
    extents = {axis: extent for axis, extent in {**SIZES, **sizes}.items() if axis in axes}
    spec = {"notation": notation, "sizes": extents, "device": device, "dtype": dtype}
    return KVLayout.from_spec(spec | ({"strides": strides} if strides else {}))


def broken(src, dst):
    return first_break(src, dst, passes(src.geometry, dst.geometry))


GPU = layout("layer: kv block token head dim", "cuda:0")


@pytest.mark.parametrize(
    ("src", "dst", "nbytes", "holds", "a", "b", "axis"),
    [
        pytest.param(
            layout("layer: block kv token head dim"), layout("block layer kv head token dim"),
            256, "layer 0, part k, token 0, head 0", "goes on with head 1", "goes on with token 1", "head",
            id="NHD to HND",
        ),
        pytest.param(
            GPU, layout("kv (block token) layer head dim"),
            512, "layer 0, part k, token 0, head 0-1", "goes on with token 1", "goes on with layer 1", "token",
            id="split K/V to token-major",
        ),
        pytest.param(
            layout("layer: block token dim", "cuda:0", "uint8", [45056, 704, 1], layer=61, token=64, dim=656),
            layout("(block token) layer dim", dtype="uint8", layer=61, token=64, dim=656),
            656, "layer 0, part kv, token 0", "skips 48 bytes up to token 1", "goes on with layer 1", "token",
            id="MLA in padded rows to token-major",
        ),
        pytest.param(
            layout("layer: kv block head dim.0 token dim.1", **{"dim.1": 8}), layout("block layer kv head token dim"),
            16, "layer 0, part k, token 0, head 0, byte 0-15", "goes on with token 1",
            "goes on with byte 16", "token",
            id="x-packed keys",
        ),
        pytest.param(
            GPU, layout("block layer kv token head dim", token=64),
            8192, "layer 0, part k, token 0-15, head 0-1", "goes on with block 1",
            "goes on with the next unit of its block", "part",
            id="16 tokens to 64",
        ),
        pytest.param(
            layout("block layer kv token head dim"), layout("block layer kv token head dim"),
            1310720, "layer 0-79, part k v", "goes on with block 1",
            "goes on with block 1", None,
            id="equal",
        ),
    ],
)  # fmt: skip
def test_where_they_part(src, dst, nbytes, holds, a, b, axis):
    found = broken(src, dst)
    assert (found.nbytes, found.holds, found.src.text, found.dst.text, found.axis) == (nbytes, holds, a, b, axis)


# ---- laws ----------------------------------------------------------------------------------------------------


AXES = ("layer", "kv", "block", "token", "head")
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # hundreds of compiles an example
ORDERS = [order for order in permutations(AXES) if order.index("block") < order.index("token")]


@st.composite
def pairs(draw):
    layers, heads = draw(st.sampled_from((1, 3, 7))), draw(st.integers(1, 3))
    made = []
    for _ in range(2):
        order = draw(st.sampled_from(ORDERS))
        nested = order[0] in ("layer", "kv") and draw(st.booleans())
        notation = f"{order[0]}: {' '.join(order[1:])} dim" if nested else f"{' '.join(order)} dim"
        tokens = draw(st.sampled_from((2, 4, 6)))
        made.append(layout(notation, layer=layers, block=6, token=tokens, head=heads, dim=4))
    return made


@given(pairs(), st.sampled_from(("src", "dst")))
@settings(examples(10), phases=UNSHRUNK)
def test_advice_is_never_worse_and_exactly_so(pair, change):
    src, dst = pair
    found = advise(src, dst, change)
    now = kvplan.compile(src, dst).program
    assert found.present == numbers_of(now, change)
    ranks = [found.present.rank]
    for order in reversed(found.orders):
        built = KVLayout.from_spec(order.spec)
        program = kvplan.compile(*((built, dst) if change == "src" else (src, built))).program
        assert numbers_of(program, change) == order.numbers
        assert program.runs * now.unit_tokens <= now.runs * program.unit_tokens
        ranks.append(order.numbers.rank)
    assert ranks == sorted(set(ranks), reverse=True)  # each better than the one after it, and all than the present


@given(pairs())
@examples(60)
def test_the_first_run_is_the_first_descriptor(pair):
    src, dst = pair
    made = passes(src.geometry, dst.geometry)
    found = first_break(src, dst, made)
    at = src.address(layer=found.start.layer, part=found.start.part, block=found.start.block, token=found.start.token,
                     head=found.start.head) + found.start.byte  # fmt: skip
    begins = {
        int(a) + g.src_base: int(n) for g in made.program.groups for a, n in zip(g.packed[0], g.packed[2], strict=True)
    }
    assert begins[at] == found.nbytes
    assert (found.axis is None) == (found.nbytes == made.program.unit_nbytes)
