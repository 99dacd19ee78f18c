"""The best order of a host pool: it compiles as promised, in a spec and in `allocate`, and moves every byte."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError
from kvplan.advise.advise import Pool, candidates, host_orders, numbers_of
from kvplan.memory.shared_mappings import reserve


def odd_cache() -> KVLayout:
    """K x-packed beside plain V: 12 layers, 6 blocks of 32 tokens, 4 heads of 96 elements of 2 bytes."""
    tensors = [np.zeros((6, 2, 4, 32, 96), np.uint16) for _ in range(12)]
    packed = [one.reshape(6, 2, 4, 12, 32, 8)[:, 0] for one in tensors]
    return KVLayout.merge([
        KVLayout.from_tensors("layer: block head dim.0 token dim.1", packed, part="k"),
        KVLayout.from_tensors("layer: block head token dim", [one[:, 1] for one in tensors], part="v"),
    ])  # fmt: skip


def extents(src: KVLayout, dst: KVLayout) -> int:
    return kvplan.compile(src, dst).program.extents("dst")[0]


def test_an_automatic_pool_is_one_page_where_k_and_v_are_neighbours():
    cache = odd_cache()
    pool = kvplan.allocate("auto", like=cache)
    program = kvplan.compile(cache, pool)
    # A run is K and V of a layer: 2 parts of 4 heads of 32 tokens of 96 elements of 2 bytes. A block is one extent.
    assert (program.runs, program.run_nbytes, extents(cache, pool)) == (12, (49152, 49152), 1)
    assert [region.nbytes for region in pool.regions] == [6 * 12 * 49152]
    assert pool.address(layer=0, part="v") - pool.address(layer=0, part="k") == 24576
    assert kvplan.verify(cache, pool).ok


X = {"layer": 3, "block": 8, "token": 4, "head": 2, "dim": 16}


def part(notation: str, name: str, dtype: str = "fp16", layers: list[int] | None = None, **sizes: int) -> dict:
    words = notation.replace(":", " ").replace("(", " ").replace(")", " ").split()
    named = {*words, *(word.partition(".")[0] for word in words)}
    held = {axis: size for axis, size in (X | sizes).items() if axis in named}
    return {"notation": notation, "part": name, "dtype": dtype, "sizes": held} | ({"layers": layers} if layers else {})


CACHES = {
    "K packed": [part("layer: block head dim.0 token dim.1", "k", **{"dim.1": 8}),
                 part("layer: block head token dim", "v")],
    "K wide": [part("layer: block head dim.0 token dim.1", "k", dim=24, **{"dim.1": 8}),
               part("layer: block head dim.0 token dim.1", "v", **{"dim.1": 8})],
    "scales": [part("layer: kv block token head dim", "kv", "int8"),
               part("layer: block kv head token", "scale", "fp32")],
    "K in V": [part("layer: block head token (kv dim)", "kv", "int8"),
               part("layer: block kv head token", "scale", "fp32")],
    "index": [part("layer: block token dim", "kv", "uint8", dim=65), part("layer: block token dim", "index", dim=13)],
    "opaque": [part("layer: block token dim", "kv", "uint8", dim=65), part("layer: block dim", "index", dim=13)],
    "cross layer": [part("block layer token dim", "kv", "uint8", dim=65),
                    part("block token layer dim", "index", dim=13)],
    "layers of two sizes": [part("layer: block kv token head dim", "kv", layers=[0, 1, 3], layer=3),
                            part("layer: block kv token head dim", "kv", layers=[2, 4], layer=2, head=1, dim=32)],
    "index of some layers": [part("layer: block kv token head dim", "kv"),
                             part("layer: block token dim", "index", layers=[1, 2], layer=2, dim=8)],
    "pages of an index": [part("layer: block token dim", "kv", "uint8", dim=65),
                          part("layer: block subblock dim", "index", "uint8", dim=13, subblock=2)],
    "heads apart": [part("layer head: block token dim", "kv")],
    "no heads": [part("layer: block head token dim", "k"), part("layer: block head token dim", "v", dim=8),
                 part("layer: block token dim", "s", "fp32", dim=1)],
    **{notation: [part(notation, "kv")] for notation in (
        "layer: kv block token head dim", "layer: block kv head token dim", "block layer kv token head dim",
        "kv layer: (block token) head dim", "layer: block head token (kv dim)", "layer: block token dim")},
    "x": [part("layer: kv block head dim.0 token dim.1", "kv", **{"dim.1": 8})],
}  # fmt: skip
SEVERAL = [kind for kind, parts in CACHES.items() if len(parts) > 1]


def cache_of(kind: str) -> KVLayout:
    return reserve(KVLayout.from_spec({"layouts": CACHES[kind]}))


def from_first(layout: KVLayout) -> dict:
    """Bytes from the first byte of a layout to rows of each layer and part."""
    rows = {
        (component.layer, component.part, block, token): layout.address(
            layer=component.layer, part=component.part, block=block, token=token
        )
        for component in layout.components
        for block in range(layout.num_blocks)
        for token in ((0,) if component.form.opaque else (0, 1))
    }
    return {row: address - min(rows.values()) for row, address in rows.items()}


def pages(cache: KVLayout, tokens: int) -> list:
    pool = Pool("cpu", cache.num_blocks * cache.block_tokens)
    return [order for order in candidates(cache, pool, tokens)[0] if order.shared]


@pytest.mark.parametrize("tokens", [4, 8, 16])
@pytest.mark.parametrize("kind", SEVERAL)
def test_a_page_is_the_same_in_a_spec_and_in_allocate(kind, tokens):
    cache = cache_of(kind)
    tried = pages(cache, tokens)
    assert tried
    for candidate in tried:
        spec = KVLayout.from_spec(candidate.spec)
        made = kvplan.allocate(
            candidate.notation, like=cache, num_blocks=spec.num_blocks, block_tokens=tokens, sizes=candidate.sizes,
            pin=False,
        )  # fmt: skip
        assert from_first(made) == from_first(spec)
        assert len(made.regions) == 1
        assert kvplan.compile(cache, made).runs == kvplan.compile(cache, spec).runs
        assert kvplan.verify(cache, made).ok


@pytest.mark.parametrize("tokens", [None, 8, 16])
@pytest.mark.parametrize("kind", CACHES)
def test_an_automatic_pool_moves_every_byte(kind, tokens):
    cache = cache_of(kind)
    orders = host_orders(cache, tokens).orders
    assert orders
    for order in orders:
        program = kvplan.compile(cache, KVLayout.from_spec(order.spec)).program
        assert numbers_of(program, "dst") == order.numbers
    pool = kvplan.allocate("auto", like=cache, num_blocks=4, block_tokens=tokens)
    assert kvplan.verify(cache, pool).ok
    assert kvplan.compile(cache, pool).runs == orders[0].numbers.runs
    assert (pool.parts, pool.layers) == (cache.parts, cache.layers)


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_named_automatic_pool_holds_every_kind_of_parts(kind, tmp_path):
    cache = cache_of(kind)
    pool = kvplan.allocate("auto", like=cache, num_blocks=2, shared=str(tmp_path / "pool"))
    assert (pool.parts, len(pool.regions)) == (cache.parts, 1)
    assert kvplan.verify(cache, pool).ok


def test_parts_that_no_call_can_put_on_a_page_have_an_allocation_each(tmp_path):
    # dim is 3 * 8 for K and 4 * 4 for V: `sizes` has one extent for dim.0 and one for dim.1.
    specs = [part("layer: block head dim.0 token dim.1", "k", dim=24, **{"dim.1": 8}),
             part("layer: block head dim.0 token dim.1", "v", **{"dim.1": 4})]  # fmt: skip
    cache = reserve(KVLayout.from_spec({"layouts": specs}))
    assert pages(cache, 4) == []
    pool = kvplan.allocate("auto", like=cache)
    assert (len(pool.regions), kvplan.compile(cache, pool).runs) == (2, 6)
    assert kvplan.verify(cache, pool).ok
    with pytest.raises(LayoutError, match="no order holds all parts in one allocation"):
        kvplan.allocate("auto", like=cache, shared=str(tmp_path / "pool"))
