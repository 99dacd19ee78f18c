"""Topologies of ranks, drawn, and what each rank of one holds of a sequence: the oracle of resharding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np
from hypothesis import strategies as st

from kvplan import Shard
from tests.oracle import Cache
from tests.strategies import Form, Logical, form_of, ids_of, layout_of


@dataclass(frozen=True)
class Rank:
    """One rank: how its cache is written down, and which tokens it holds."""

    form: Form
    layers: range
    cp_rank: int
    cp_size: int
    interleave: int

    @property
    def span(self) -> int:
        return self.form.sizes["token"] * self.cp_size

    def slot(self, token: int) -> int | None:
        """Slot of a token of a block's span, or None where another rank has it."""
        turn, within = divmod(token, self.interleave)
        if turn % self.cp_size != self.cp_rank:
            return None
        return turn // self.cp_size * self.interleave + within


@dataclass(frozen=True)
class Reshard:
    """Ranks of both sides, and a transfer between them."""

    logical: Logical
    sides: tuple[tuple[Rank, ...], tuple[Rank, ...]]
    ids: tuple[list[int], list[int]]
    skips: tuple[int, int]
    unit: int
    units: int
    seed: int

    @property
    def first(self) -> tuple[int, int]:
        return self.skips[0] * self.unit, self.skips[1] * self.unit


def shard_of(rank: Rank, cache: Cache) -> Shard:
    return Shard(layout_of(cache), rank.cp_rank, rank.cp_size, rank.interleave)


def shards_of(case: Reshard, caches: Sequence[Sequence[Cache]] | None = None) -> list[list[Shard]]:
    """The ranks of both sides, over these caches or over new ones."""
    if caches is None:
        caches = [[rank.form.build(1) for rank in side] for side in case.sides]
    return [list(map(shard_of, *pair)) for pair in zip(case.sides, caches, strict=True)]


def fill(rank: Rank, cache: Cache, ids: list[int], start: int, truth: np.ndarray) -> int:
    """Write the truth, tokens first, into what the rank holds of it; elements written."""
    written = 0
    for token in range(len(truth)):
        block, at = divmod(start + token, rank.span)
        slot = rank.slot(at)
        if slot is None:
            continue
        for k, kv, head in product(range(len(rank.layers)), range(truth.shape[2]), cache.heads):
            row = cache.row(k, kv, ids[block], slot, head)
            for value, (tensor, index) in zip(truth[token, rank.layers[k], kv, head], row, strict=True):
                tensor[index] = value
                written += 1
    return written


def truth_of(case: Reshard) -> np.ndarray:
    """(token, layer, kv, head, dim) elements of the sequence, random."""
    logical, rng = case.logical, np.random.default_rng(case.seed)
    shape = (case.units * case.unit, logical.layers, 1 + logical.kv, logical.heads, logical.dim)
    return rng.integers(0, 256 ** min(logical.itemsize, 2), shape, dtype=np.int64)


@st.composite
def cut_points(draw, count: int, most: int) -> list[range]:
    """A range of numbers in contiguous, perhaps unequal, pieces."""
    edges = sorted(draw(st.sets(st.integers(1, count - 1), max_size=most - 1))) if count > 1 else []
    return [range(a, b) for a, b in zip([0, *edges], [*edges, count], strict=True)]


@st.composite
def head_shares(draw, heads: int, most: int) -> list[range]:
    """Heads of tensor-parallel ranks: dealt evenly, or replicated where there are more ranks, or in any ranges."""
    ranks = draw(st.integers(1, most))
    if heads % ranks == 0:
        return [range(k * heads // ranks, (k + 1) * heads // ranks) for k in range(ranks)]
    if ranks % heads == 0:
        return [range(k * heads // ranks, k * heads // ranks + 1) for k in range(ranks)]
    return draw(cut_points(heads, most))


@st.composite
def sides(draw, logical: Logical, tokens: int, blocks: int, *, ranks: int, cp: bool) -> tuple[Rank, ...]:
    stages = draw(cut_points(logical.layers, 3))
    cp_size = draw(st.sampled_from((1, 1, 2, 3, 4))) if cp else 1
    cp_size = min(cp_size, max(ranks // len(stages), 1))
    interleave = draw(st.sampled_from([n for n in range(1, tokens + 1) if tokens % n == 0])) if cp_size > 1 else 1
    shares = draw(head_shares(logical.heads, max(ranks // len(stages) // cp_size, 1)))
    made = []
    for layers, k, heads in product(stages, range(cp_size), shares):
        held = replace(logical, layers=len(layers), layer_start=logical.layer_start + layers.start)
        form = form_of(draw, held, tokens, blocks, heads)
        made.append(Rank(form, layers, k, cp_size, interleave))
    return tuple(made)


@st.composite
def reshards(draw, *, ranks: int = 8, cp: bool = True) -> Reshard:
    logical = Logical(
        layers=draw(st.integers(1, 3)),
        kv=draw(st.booleans()),
        heads=draw(st.sampled_from((1, 1, 2, 3, 4, 6, 8, 16))),
        dim=draw(st.integers(1, 3)),
        itemsize=draw(st.sampled_from((1, 2))),
        layer_start=draw(st.integers(0, 2)),
    )
    tokens = draw(st.sampled_from(((1, 1), (2, 2), (4, 4), (2, 4), (4, 2), (6, 4), (1, 8), (4, 6))))
    blocks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    pair = tuple(draw(sides(logical, t, b, ranks=ranks, cp=cp)) for t, b in zip(tokens, blocks, strict=True))
    spans = [side[0].span for side in pair]
    unit = gcd(*spans)
    per_block = [span // unit for span in spans]
    skips = [draw(st.integers(0, n - 1)) for n in per_block]
    units = draw(st.integers(0, min(b * n - s for b, n, s in zip(blocks, per_block, skips, strict=True))))
    counts = [-(-(units + s) // n) if units else 0 for s, n in zip(skips, per_block, strict=True)]
    ids = tuple(ids_of(draw, b, c, distinct=True) for b, c in zip(blocks, counts, strict=True))
    # Ids say no more than this: one side's last block is used to its end.
    units = min(c * n - s for c, n, s in zip(counts, per_block, skips, strict=True)) if units else 0
    return Reshard(logical, pair, ids, tuple(skips) if units else (0, 0), unit, units, draw(st.integers(0, 2**31)))
