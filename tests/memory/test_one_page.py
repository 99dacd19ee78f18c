"""One page for all parts: values and scales of different dtypes and sizes, in an order that the notation says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, LayoutError
from kvplan.layout.spec import document_of
from tests.profiles import examples

QUANTIZED = "block layer | k v: head token dim | k_scale v_scale: head token"
LAYERS, BLOCKS, TOKENS = 2, 4, 8
DTYPES = ("uint8", "int8", "float16", "float32", "float64")


def quantized(dtype=np.int8, scale=np.float32, heads=range(2)) -> KVLayout:
    """A cache as an engine holds it: K and V, and a scale for each row of a head."""
    n = len(heads)
    values = [np.zeros((2, BLOCKS, TOKENS, n, 16), dtype) for _ in range(LAYERS)]
    scales = [np.zeros((2, BLOCKS, TOKENS, n), scale) for _ in range(LAYERS)]
    return KVLayout.merge([
        KVLayout.from_tensors("layer: kv block token head dim", values, head_start=heads.start),
        KVLayout.from_tensors("layer: kv block token head", scales, head_start=heads.start, part="scale"),
    ])  # fmt: skip


def starts(pool: KVLayout, **where) -> list[int]:
    """First bytes of the parts, from the first byte of the pool."""
    first = min(pool.address(layer=layer, part=part) for layer in pool.layers for part in pool.parts)
    return [pool.address(part=part, **{"layer": 0} | where) - first for part in pool.parts]


def test_the_page_of_a_quantized_cache():
    pool = kvplan.allocate(QUANTIZED, like=quantized(), num_blocks=3)
    assert pool.parts == ("k", "v", "k_scale", "v_scale")
    assert starts(pool) == [0, 256, 512, 576]  # 2 heads * 8 tokens * 16 bytes, and 2 heads * 8 tokens * 4 bytes
    assert starts(pool, layer=1) == [640, 896, 1152, 1216]
    assert starts(pool, block=1, token=3, head=1)[0] == 1280 + (8 + 3) * 16
    assert starts(pool, block=1, token=3, head=1)[3] == 1280 + 576 + (8 + 3) * 4
    assert pool.block_nbytes == 1280
    assert pool.notation == QUANTIZED
    assert str(pool).startswith(f"{QUANTIZED} | layer=2 block=3 token=8 head=2 | k v dim=16 int8, ")
    assert starts(kvplan.allocate(pool.notation, like=pool), layer=1) == starts(pool, layer=1)
    assert KVLayout.from_spec(document_of(pool.built)).notation == QUANTIZED
    assert [region.nbytes for region in pool.regions] == [3 * 1280]
    k, v, k_scale, v_scale = pool.tensors
    assert [one.dtype for one in (k, v, k_scale, v_scale)] == [np.int8, np.int8, np.float32, np.float32]
    assert k.shape == (3, LAYERS, 2, TOKENS, 16)
    assert v_scale.shape == (3, LAYERS, 2, TOKENS)


def test_all_ranks_share_a_page(name):
    pools = [
        kvplan.allocate(QUANTIZED, like=quantized(heads=heads), heads=range(4), shared=name)
        for heads in (range(2), range(2, 4))
    ]
    pools[0].tensors[3][1, 1, 3, 2] = 7
    assert pools[1].tensors[3][1, 1, 3, 2] == 7
    assert pools[1].address(layer=1, part="v_scale", block=1, token=2, head=3)
    with pytest.raises(LayoutError, match="bytes a page"):
        kvplan.allocate(QUANTIZED, like=quantized(np.float16), heads=range(2), shared=name)


@st.composite
def pages(draw):
    """Parts of drawn dtypes, heads and sizes, and a notation that holds all of them."""
    heads = draw(st.integers(1, 3))
    layouts, sections = [], []
    outer = ["block", *draw(st.permutations(["layer", "token", "head"]))[: draw(st.integers(0, 3))]]
    outer = list(draw(st.permutations(outer)))
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        dim = draw(st.integers(1, 5))
        own = heads if "head" in outer else draw(st.integers(1, 3))
        held = np.zeros((LAYERS, BLOCKS, TOKENS, own, dim), dtype)
        layouts.append(KVLayout.from_tensors("layer block token head dim", held, part=f"part_{number}"))
        inner = draw(st.permutations([axis for axis in ("layer", "token", "head", "dim") if axis not in outer]))
        sections.append((f"part_{number}", " ".join(inner)))
    order = draw(st.permutations(sections))
    like = KVLayout.merge(layouts)
    return like, " | ".join([" ".join(outer), *(f"{part}: {dims}" for part, dims in order)])


@given(page=pages(), tokens=st.sampled_from([None, 4, 16]))
@examples(80)
def test_every_page_holds_all_parts_apart_with_their_dtypes(page, tokens):
    like, notation = page
    pool = kvplan.allocate(notation, like=like, block_tokens=tokens, num_blocks=2)
    assert sorted(pool.parts) == sorted(like.parts)
    for part in like.parts:
        one, other = (side.slice(parts=(part,)) for side in (like, pool))
        assert one.components[0].dtype == other.components[0].dtype
        assert one.heads == other.heads
    assert len(pool.regions) == 1
    assert pool.regions[0].nbytes >= pool.nbytes  # parts do not overlap: the layout itself checks that
    assert pool.regions[0].nbytes % np.lcm.reduce([np.dtype(c.dtype).itemsize for c in pool.components]) == 0
    assert kvplan.verify(like, pool).ok
    first = [min(c.address for c in pool.slice(parts=(part,)).components) for part in pool.parts]
    assert first == sorted(first)  # in the order of the notation


@pytest.mark.parametrize("notation", ["block layer kv token head dim", "block token layer kv head dim", "auto",
                                      "layer: block kv token head dim", "block: layer kv head token dim"])  # fmt: skip
def test_layers_of_two_head_sizes_are_put_on_one_page(notation):
    """Layers like those of Gemma 4, whose full attention has fewer, larger heads."""
    tensors = {layer: np.zeros((4, 2, 8, 1, 8) if layer in (2, 5) else (4, 2, 8, 4, 2), np.int16) for layer in range(6)}
    like = KVLayout.merge([
        KVLayout.from_tensors("layer: block kv token head dim", [tensors[layer] for layer in layers], layers=layers)
        for layers in ((0, 1, 3, 4), (2, 5))
    ])  # fmt: skip
    pool = kvplan.allocate(notation, like=like, num_blocks=3)
    assert len(pool.regions) == {"layer:": 6, "block:": 3}.get(notation.split()[0], 1)
    assert pool.block_nbytes == like.block_nbytes == 4 * 2 * 8 * 4 * 2 * 2 + 2 * 2 * 8 * 8 * 2
    assert kvplan.verify(like, pool).ok
    assert "| layers 0-1,3-4: k v head=4 dim=2 | layers 2,5: k v head=1 dim=8 |" in str(pool)
    assert set(pool.sizes) == {"layer", "kv", "block", "token"}


def test_the_page_that_a_refusal_proposes_holds_the_cache():
    kv = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((4, 2, 8, 2, 16), np.int16)] * 1)
    index = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 12), np.uint8), part="index")
    page = KVLayout.from_tensors("block dim", np.zeros((4, 5), np.uint8), part="page")
    later = KVLayout.from_tensors("block token dim", np.zeros((4, 8, 12), np.uint8), part="index", layers=[3])
    for like, first in ((KVLayout.merge([kv, index, page]), "block layer"), (KVLayout.merge([kv, later]), "block")):
        with pytest.raises(LayoutError, match="write one page, as in '") as caught:
            kvplan.allocate("block layer token dim", like=like)
        notation = str(caught.value).split("'")[-2]
        assert notation.startswith(f"{first} | k: ")
        assert kvplan.verify(like, kvplan.allocate(notation, like=like)).ok


def test_parts_whose_layers_differ_are_told_by_their_layers():
    like = KVLayout.merge([
        KVLayout.from_tensors("layer block token head dim", np.zeros((2, 4, 8, heads, 4)), part="k", layer_start=start)
        for heads, start in ((8, 0), (4, 2))
    ])  # fmt: skip
    with pytest.raises(
        LayoutError, match="'head', which is 8 for part 'k' of layers 0-1 and 4 for part 'k' of layers 2"
    ):
        kvplan.allocate("block head | k: layer token dim", like=like)
