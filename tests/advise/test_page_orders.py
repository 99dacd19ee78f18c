"""One page for parts that differ: found by the search, equal in a spec and in `allocate`, and never slower."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError
from kvplan.advise.advise import advise, host_orders
from kvplan.advise.orders import Pool, candidates
from kvplan.memory.reserve import reserve

PAGE = "block layer | k: head dim.0 token dim.1 | v: head token dim"


def odd_cache() -> KVLayout:
    """K x-packed beside plain V: 12 layers, 6 blocks of 32 tokens, 4 heads of 96 elements of 2 bytes."""
    tensors = [np.zeros((6, 2, 4, 32, 96), np.uint16) for _ in range(12)]
    packed = [one.reshape(6, 2, 4, 12, 32, 8)[:, 0] for one in tensors]
    return KVLayout.merge([
        KVLayout.from_tensors("layer: block head dim.0 token dim.1", packed, part="k"),
        KVLayout.from_tensors("layer: block head token dim", [one[:, 1] for one in tensors], part="v"),
    ])  # fmt: skip


def on_gpu(cache: KVLayout, change: dict | None = None) -> KVLayout:
    """The odd cache as a spec of a GPU, with `v` behind `k` in each block of a layer."""
    k_sizes = {"layer": 12, "block": 6, "head": 4, "token": 32, "dim": 96}
    made = [
        {"notation": notation, "part": part, "dtype": "uint16", "device": "cuda:0", "sizes": k_sizes | split,
         "strides": strides, "address": 1 << 40 | start}
        for notation, part, split, strides, start in (
            ("layer: block head dim.0 token dim.1", "k", {"dim.1": 8}, [24576, 3072, 256, 8, 1], 0),
            ("layer: block head token dim", "v", {}, [24576, 3072, 96, 1], 24576),
        )
    ]  # fmt: skip
    assert KVLayout.from_spec({"layouts": made}).block_nbytes == cache.block_nbytes
    return KVLayout.from_spec({"layouts": [one | (change or {}) for one in made]})


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


def test_a_page_is_offered_where_each_part_has_an_allocation():
    gpu = on_gpu(odd_cache())
    apart = KVLayout.from_spec({"layouts": [
        {"notation": notation, "part": part, "dtype": "uint16",
         "sizes": {"layer": 12, "block": 6, "head": 4, "token": 32, "dim": 96} | split}
        for notation, part, split in (("block layer head dim.0 token dim.1", "k", {"dim.1": 8}),
                                      ("block layer head token dim", "v", {}))
    ]})  # fmt: skip
    assert (kvplan.compile(gpu, apart).runs, extents(gpu, apart)) == (24, 2)
    best = advise(gpu, apart, "dst", (apart.block_tokens,)).orders[0]
    assert (best.notation, best.numbers.runs, best.numbers.extents[0]) == (PAGE, 12, 1)
    assert best.sizes == {"dim.0": 12, "dim.1": 8}
    assert host_orders(gpu).orders[0].notation == PAGE
    assert advise(gpu, KVLayout.from_spec(best.spec), "dst", (apart.block_tokens,)).orders == ()


def test_a_pool_with_a_name_is_one_page(tmp_path):
    cache, name = odd_cache(), str(tmp_path / "pool")
    pools = [kvplan.allocate("auto", like=cache, num_blocks=2, shared=name) for _ in range(2)]
    assert [len(pool.regions) for pool in pools] == [1, 1]
    pools[0].tensors[1][:] = 7  # V of the first user, which the second sees
    assert (int(pools[1].tensors[1].max()), int(pools[1].tensors[0].max())) == (7, 0)
    assert kvplan.verify(cache, pools[1]).ok


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
}  # fmt: skip


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
    return [(pool, one) for one in candidates(cache, pool, tokens)[0] if one.shared]


@pytest.mark.parametrize("tokens", [4, 8, 16])
@pytest.mark.parametrize("kind", sorted(set(CACHES) - {"heads apart"}))
def test_a_page_is_the_same_in_a_spec_and_in_allocate(kind, tokens):
    cache = cache_of(kind)
    tried = pages(cache, tokens)
    assert tried
    for pool, candidate in tried:
        spec = KVLayout.from_spec(candidate.spec(pool))
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
    pool = kvplan.allocate("auto", like=cache, num_blocks=4, block_tokens=tokens)
    assert kvplan.verify(cache, pool).ok
    assert pool.block_tokens == tokens or cache.block_tokens


@pytest.mark.parametrize("kind", CACHES)
def test_a_named_automatic_pool_holds_every_kind_of_parts(kind, tmp_path):
    cache = cache_of(kind)
    pool = kvplan.allocate("auto", like=cache, num_blocks=2, shared=str(tmp_path / "pool"))
    assert (pool.parts, len(pool.regions)) == (cache.parts, 1)
    assert kvplan.verify(cache, pool).ok


def test_heads_of_all_ranks_stand_on_one_page():
    cache = cache_of("K packed")
    pool = kvplan.allocate("auto", like=cache, heads=range(4))
    # A rank has 2 of 4 heads, each of 4 tokens of 32 bytes: 256 bytes a part. Its share of a page is one extent.
    assert (pool.heads, pool.block_nbytes, extents(cache, pool)) == (range(4), 3 * 2 * 512, 1)
    assert pool.address(layer=0, part="k", head=2) - pool.address(layer=0, part="k") == 3 * 512


def test_two_ranks_share_an_automatic_page_by_name(tmp_path):
    specs = [[one | {"head_start": start} for one in CACHES["K packed"]] for start in (0, 2)]
    ranks = [reserve(KVLayout.from_spec({"layouts": spec})) for spec in specs]
    name = str(tmp_path / "pool")
    pools = [kvplan.allocate("auto", like=rank, heads=range(4), num_blocks=4, shared=name) for rank in ranks]
    assert all(kvplan.verify(rank, pools[0]).ok for rank in ranks)
    pools[0].tensors[0][:] = 5
    assert int(pools[1].tensors[0].min()) == 5


def test_parts_stand_in_the_order_of_their_bytes():
    whole = np.zeros((5, 4, 24), np.uint8)  # a block, a token: 16 bytes of `b`, then 8 of `a`
    blocks = whole.reshape(5, 96)
    a, b = (
        KVLayout.from_tensors("layer: block token dim", [blocks[:, at : at + 4 * n].reshape(5, 4, n)], part=name)
        for name, at, n in (("a", 64, 8), ("b", 0, 16))
    )
    cache = KVLayout.merge([a, b])
    assert cache.parts == ("a", "b")
    pool = kvplan.allocate("auto", like=cache)
    assert pool.address(layer=0, part="a") - pool.address(layer=0, part="b") == 64
    assert (kvplan.compile(cache, pool).runs, kvplan.compile(cache, pool).run_nbytes) == (1, (96, 96))


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
