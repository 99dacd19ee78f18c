"""Bytes between two processes: a push or a pull of any pair of layouts is what the oracle copies, and no byte more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.peers.pairs import BLOCKS, LAYERS, Pair, form
from tests.contract.peers.transports import agents, every, over
from tests.profiles import examples
from tests.strategies import Case, cases, neighbour_cases

SPLIT = {"layer": 2, "kv": 2, "head": 2, "dim": 8}
PAIRS = {
    "larger blocks here, left early": (
        form("block layer kv token head dim", block=3, token=8, **SPLIT),
        form("kv layer: (block token) head dim", block=9, token=2, **SPLIT),
        [2, 0], [8, 1, 4, 3, 6], (2, 0),
    ),
    "blocks that divide neither": (
        form("layer block token dim", block=4, token=6, layer=3, dim=5),
        form("block layer token dim", block=6, token=4, layer=3, dim=5),
        [3, 1], [5, 0, 2], (1, 1),
    ),
    "blocks of their own": (
        form("block: layer token head dim", apart=True, block=5, token=4, layer=2, head=2, dim=8),
        form("block: layer token head dim", apart=True, block=6, token=4, layer=2, head=2, dim=8),
        [4, 0, 3], [2, 5, 1], (0, 0),
    ),
    "heads of two ranks": (
        form("layer block head token dim", block=5, token=4, layer=2, head=2, dim=8, heads_from=2),
        form("block layer token head dim", block=5, token=4, layer=2, head=4, dim=8),
        [4, 0], [2, 3], (0, 0),
    ),
    "x-packed keys, transposed": (
        form("layer: block head dim.0 token dim.1", **{"layer": 2, "block": 4, "head": 2, "token": 4, "dim.0": 4,
             "dim.1": 2, "dim": 8}),
        form("layer block token head dim", order=(1, 0, 3, 2, 4), block=4, token=4, layer=2, head=2, dim=8),
        [2, 3, 0], [0, 1, 3], (0, 0),
    ),
}  # fmt: skip


@every
@pytest.mark.parametrize("reading", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair(transport, standing, name, reading):
    near, far, mine, theirs, skips = PAIRS[name]
    pair = Pair(transport, standing["near"], standing["far"], (near, far))
    pair.move(mine, theirs, skips, reading=reading)
    pair.check()
    standing.close()


@every
def test_drawn_pairs(transport, standing):
    @examples(8)
    @given(case=st.one_of(cases(), neighbour_cases()), reading=st.booleans(), urgent=st.booleans())
    def moved(case: Case, reading: bool, urgent: bool) -> None:
        sides = (case.src, case.src_ids, case.src_skip), (case.dst, case.dst_ids, case.dst_skip)
        (near, mine, here), (far, theirs, there) = reversed(sides) if reading else sides
        pair = Pair(transport, standing["near"], standing["far"], (near, far), case.seed)
        options = {"priority": "high"} if urgent and transport.of == "Agent" else {}
        pair.move(mine, theirs, (here, there), reading=reading, **options)
        pair.check()
        standing.close()

    moved()


@agents
def test_both_ends_begin(pair):
    pair.far.meet(pair.near_card)
    options = pair.transport.options
    numbers = [pair.submit([k], [k], reading=k % 2 == 0) for k in range(8)]
    theirs = [pair.far.submit("near", [k], [k], reading=k % 2 == 0, **options) for k in range(8, 16)]
    for k, number in enumerate(numbers):
        pair.near.end(number)
        pair.copied([k], [k], reading=k % 2 == 0)
    for k, number in enumerate(theirs, 8):
        pair.far.end(number)
        pair.copied([k], [k], reading=k % 2 == 1)
    pair.check()


@agents
@pytest.mark.parametrize("reading", [False, True], ids=["push", "pull"])
@pytest.mark.parametrize("priority", ["normal", "high"])
def test_by_layer(pair, reading, priority):
    number = pair.submit([3, 1], [2, 5], reading=reading, by_layer=True, priority=priority)
    for layer in range(LAYERS):
        pair.near.wait_layer(number, layer)
    pair.near.end(number)
    pair.copied([3, 1], [2, 5], reading=reading)
    pair.check()


@over("cuda_ipc")
def test_processes_that_number_two_gpus_otherwise(transport, start):
    if len(list(Path("/dev").glob("nvidia[0-9]"))) < 2:
        pytest.skip("fewer than two GPUs")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    pair = Pair(transport, start(), start(CUDA_VISIBLE_DEVICES=",".join(reversed(seen))))
    pair.move(range(BLOCKS), range(BLOCKS), reading=True)
    pair.move([1], [2], reading=False)
    pair.check()
