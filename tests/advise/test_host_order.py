"""The best order of a host pool: what is offered compiles, moves every byte, and is never slower than what is there."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError
from kvplan.advise.host_order import Wanted, host_orders, plain_pool, pricing_for
from kvplan.cost.profile import default
from kvplan.memory.reserve import reserve

SMALL = {"layer": 3, "block": 8, "token": 8, "head": 4, "dim": 16}
X_PACKED = {"notation": "layer: block head dim.0 token dim.1", "dtype": "fp16", "sizes": {**SMALL, "dim.1": 8}}
NOTATIONS = (
    "layer: kv block token head dim",
    "layer: block kv head token dim",
    "block layer kv token head dim",
    "kv layer: (block token) head dim",
    "layer: kv block head dim.0 token dim.1",
    "layer: block head token (kv dim)",
    "layer: block token dim",
)


def layout_of(notation: str, device: str = "cuda:0") -> KVLayout:
    sizes = {**SMALL, "dim.1": 8}
    held = {axis: size for axis, size in sizes.items() if axis in notation}
    return KVLayout.from_spec({"notation": notation, "dtype": "fp16", "device": device, "sizes": held})


def asked(layout: KVLayout, **given: object) -> tuple:
    pricing = pricing_for(layout, "cpu", default(), tokens=64)
    return host_orders(layout, pricing, **given), pricing


@pytest.mark.parametrize("tokens", [None, 8, 16, 32])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_is_offered_compiles_with_the_block_size_asked_for(notation, tokens):
    gpu = layout_of(notation)
    found, _ = asked(gpu, wanted=Wanted(block_tokens=tokens))
    assert found.orders
    for order in found.orders:
        pool = KVLayout.from_spec(order.spec)
        assert pool.block_tokens == order.block_tokens == (tokens or gpu.block_tokens)
        program = kvplan.compile(gpu, pool)
        assert (program.unit_tokens, program.runs, program.run_nbytes) == (
            order.numbers.unit_tokens, order.numbers.runs, order.numbers.run_nbytes
        )  # fmt: skip


@pytest.mark.parametrize("here", NOTATIONS[:6])
@pytest.mark.parametrize("there", NOTATIONS[:6])
def test_nothing_slower_than_what_is_there_is_offered(here, there):
    gpu, host = layout_of(here), layout_of(there, "cpu")
    found, pricing = asked(gpu, present=host)
    programs = {"load": kvplan.compile(host, gpu).program, "store": kvplan.compile(gpu, host).program}
    now = pricing.of(programs).seconds
    for order in found.orders:
        pool = KVLayout.from_spec(order.spec)
        made = {"load": kvplan.compile(pool, gpu).program, "store": kvplan.compile(gpu, pool).program}
        assert pricing.of(made).seconds == order.price.seconds <= now
    assert [order.price.seconds for order in found.orders] == sorted(
        (order.price.seconds for order in found.orders), key=lambda seconds: round(seconds / now, 1)
    )


def test_of_two_equal_layouts_nothing_is_offered():
    gpu = layout_of("block layer kv token head dim")
    assert asked(gpu, present=layout_of("block layer kv token head dim", "cpu"))[0].orders == ()


def test_splits_are_searched_and_parts_that_differ_stand_on_one_page():
    values = {**X_PACKED, "notation": "layer: block head dim token", "part": "v", "sizes": SMALL}
    gpu = KVLayout.from_spec({"layouts": [{**X_PACKED, "part": "k"}, values]})
    best = asked(gpu, wanted=Wanted(block_tokens=32))[0].orders[0]
    assert best.notation == "block token.0 layer | k: head dim.0 token.1 dim.1 | v: head dim token.1"
    assert [spec["part"] for spec in best.spec["layouts"]] == ["k", "v"]
    # A unit of 8 tokens is one run a layer and part: 8 tokens of 4 heads of 16 elements of 2 bytes.
    assert best.numbers.runs == 6
    assert best.numbers.run_nbytes == (1024, 1024)


def test_a_transfer_in_one_direction_is_priced_alone():
    gpu = layout_of("layer: kv block token head dim")
    for direction in ("load", "store"):
        pricing = pricing_for(gpu, "cpu", default(), directions=(direction,))
        assert set(host_orders(gpu, pricing).orders[0].price.routes) == {direction}


def test_routes_without_costs_are_compared_by_runs():
    host = layout_of("layer: kv block token head dim", "cpu")
    assert pricing_for(host, "cpu", default()) is None
    found = host_orders(host, None)
    assert found.orders[0].price is None
    assert found.orders[0].numbers.runs <= 6


def test_parts_that_differ_between_layers_are_refused():
    narrow = {"notation": "layer: kv block token head dim", "sizes": {**SMALL, "layer": 1}}
    wide = {**narrow, "sizes": {**narrow["sizes"], "dim": 32}, "layers": [1]}
    with pytest.raises(LayoutError, match="parts differ between layers, so no order holds all of them"):
        plain_pool(KVLayout.from_spec({"layouts": [narrow, wide]}), Wanted())


def test_the_work_is_told():
    told = []
    asked(layout_of(NOTATIONS[0]), tell=lambda share, text: told.append((share, text)))
    assert told[0] == (0.0, f"order 1 of {len(told)}")
    assert [share for share, _ in told] == sorted(share for share, _ in told)


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_pool_of_the_best_order_moves_every_byte(notation):
    cache = reserve(layout_of(notation, "cpu"))
    pool = kvplan.allocate("auto", like=cache, num_blocks=4, block_tokens=16)
    assert (pool.num_blocks, pool.block_tokens, pool.parts, pool.layers) == (4, 16, cache.parts, cache.layers)
    assert kvplan.verify(cache, pool, markers=True).ok


def test_an_automatic_pool_has_the_layers_and_heads_that_are_asked_for():
    cache = kvplan.KVLayout.from_tensors("layer: kv block token head dim", [np.zeros((2, 8, 8, 2, 16), np.int8)] * 1)
    pool = kvplan.allocate("auto", like=cache, layers=range(3), heads=range(4), num_blocks=2)
    assert (pool.layers, pool.heads, pool.num_blocks) == ((0, 1, 2), range(4), 2)


def test_an_automatic_pool_refuses_sizes_and_holds_scales_beside_values(tmp_path):
    kv = np.zeros((2, 8, 8, 2, 16), np.int8)
    scales = np.zeros((8, 8, 2), np.float32)
    cache = kvplan.KVLayout.from_tensors("layer: kv block token head dim", [kv])
    with pytest.raises(LayoutError, match="'auto' chooses the extents of split axes itself"):
        kvplan.allocate("auto", like=cache, sizes={"dim.1": 8})
    both = kvplan.KVLayout.merge([
        cache, kvplan.KVLayout.from_tensors("layer: block token head", [scales], part="scale")
    ])  # fmt: skip
    for shared in (None, str(tmp_path / "pool")):
        pool = kvplan.allocate("auto", like=both, shared=shared)
        assert [region.nbytes for region in pool.regions] == [8 * (2 * 8 * 2 * 16 + 8 * 2 * 4)]
        assert [one.dtype.name for one in pool.tensors] == ["int8", "int8", "float32"]
