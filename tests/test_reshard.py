"""Law 6: resharding n ranks to m and back is the identity, by slicing nothing and compiling every pair."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan

NHD, HND = "layer: block kv token head dim", "block layer kv head token dim"


def rank_layouts(notation: str, ranks: int, heads: int, blocks: int, seed: int, replicas: int = 1):
    """One cache a rank; with replicas, that many neighbouring ranks hold the same heads."""
    rng, groups = np.random.default_rng(seed), ranks // replicas
    held = heads // groups
    tensors, layouts = [], []
    for rank in range(ranks):
        shape = {"layer": 2, "block": blocks, "kv": 2, "token": 4, "head": held, "dim": 3}
        nested = notation.startswith("layer:")
        names = notation.rpartition(":")[2].split()
        arrays = [rng.integers(0, 255, [shape[n] for n in names], np.uint8) for _ in range(2 if nested else 1)]
        given_tensors = arrays if nested else arrays[0]
        tensors.append(arrays)
        start = rank // replicas * held
        layouts.append(kvplan.KVLayout.from_tensors(notation, given_tensors, head_start=start))
    return tensors, layouts


def move_all(sources, destinations, blocks: int, executor) -> None:
    """Every source rank to every destination rank that shares heads with it; block b of replicas by rank b % n."""
    for src, dst in product(sources, destinations):
        alike = [s for s in sources if s.heads == src.heads]
        mine = [b for b in range(blocks) if alike[b % len(alike)] is src]
        if set(src.heads) & set(dst.heads):
            executor.submit(kvplan.compile(src, dst).plan(mine, mine)).synchronize()


@st.composite
def topologies(draw):
    heads = draw(st.sampled_from((2, 4, 6, 8, 12)))
    divisors = [n for n in range(1, 9) if heads % n == 0]
    return heads, draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors)), draw(st.integers(0, 99))


@given(topology=topologies())
def test_resharding_there_and_back_is_the_identity(topology, executor):
    heads, n, m, seed = topology
    held, sources = rank_layouts(NHD, n, heads, 3, seed)
    _, middle = rank_layouts(HND, m, heads, 3, seed + 1)
    before = [[array.copy() for array in arrays] for arrays in held]
    move_all(sources, middle, 3, executor)
    for arrays in held:
        for array in arrays:
            array[...] = 0xEE
    move_all(middle, sources, 3, executor)
    for arrays, originals in zip(held, before, strict=True):
        for array, original in zip(arrays, originals, strict=True):
            np.testing.assert_array_equal(array, original)


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 2), (4, 2), (8, 4)])
def test_replicated_heads_are_read_in_rotation_and_written_to_every_replica(ranks, replicas, executor):
    heads = 2 * (ranks // replicas)
    held, sources = rank_layouts(NHD, ranks, heads, 5, 7, replicas)
    for rank, arrays in enumerate(held):  # replicas hold the same bytes
        for array, first in zip(arrays, held[rank // replicas * replicas], strict=True):
            array[...] = first
    before = [[array.copy() for array in arrays] for arrays in held]
    _, (canonical,) = rank_layouts(HND, 1, heads, 5, 8)
    move_all(sources, [canonical], 5, executor)
    for arrays in held:
        for array in arrays:
            array[...] = 0xEE
    move_all([canonical], sources, 5, executor)
    for arrays, originals in zip(held, before, strict=True):
        for array, original in zip(arrays, originals, strict=True):
            np.testing.assert_array_equal(array, original)
