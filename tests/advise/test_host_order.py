"""The best order of a host pool: what is offered compiles, moves every byte, and is never slower than what is there."""

from __future__ import annotations

import pytest

import kvplan
from kvplan import KVLayout
from kvplan.advise.advise import Wanted, advise, host_orders
from kvplan.cost.model import candidates
from kvplan.cost.policy import Policy
from kvplan.cost.profile import default
from kvplan.cost.statistics import facts_of
from kvplan.memory.shared_mappings import reserve

SMALL = {"layer": 3, "block": 8, "token": 8, "head": 4, "dim": 16}
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


def seconds(src: KVLayout, dst: KVLayout) -> float:
    """The predicted time of 4,096 tokens there and back, as on an H100."""
    total = 0.0
    for route, pair in (("store", (src, dst)), ("load", (dst, src))):
        program = kvplan.compile(*pair).program
        counts = [(facts_of(group, route), 4096 // program.unit_tokens) for group in program.groups]
        total += candidates(counts, route, default(), Policy())[0].score
    return total


@pytest.mark.parametrize("tokens", [None, 8, 16, 32])
@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_is_offered_compiles_with_the_block_size_asked_for(notation, tokens):
    gpu = layout_of(notation)
    found = host_orders(gpu, Wanted(block_tokens=tokens))
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
def test_what_is_offered_is_not_predicted_to_be_slower(here, there):
    gpu, host = layout_of(here), layout_of(there, "cpu")
    advice = advise(gpu, host, "dst", (host.block_tokens,))
    for order in advice.orders:
        assert order.numbers.rank < advice.present.rank
        assert seconds(gpu, KVLayout.from_spec(order.spec)) <= 1.02 * seconds(gpu, host)


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_pool_of_the_best_order_moves_every_byte(notation):
    cache = reserve(layout_of(notation, "cpu"))
    pool = kvplan.allocate("auto", like=cache, num_blocks=4, block_tokens=16)
    assert (pool.num_blocks, pool.block_tokens, pool.parts, pool.layers) == (4, 16, cache.parts, cache.layers)
    assert kvplan.verify(cache, pool).ok
