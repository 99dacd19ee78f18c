"""Transfers between machines at scale, on paper: descriptors of kvplan's own plans, and the model of a wire.

Each rank has a NIC of its own. The blocks of a request are scattered over the pool of every rank, so that no two of
them touch. A transfer takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from kvplan.catalogue.layouts import layout_for, named_layouts
from kvplan.catalogue.models import Group, Model
from kvplan.cost.wires.crossing import Crossing, crossing_of, sum_of
from kvplan.cost.wires.wire_model import best_slot, direct_cost, packed_cost
from kvplan.cost.wires.wire_profile import WireProfile
from kvplan.errors import LayoutError
from kvplan.layout.strides import Int64Array
from kvplan.ranks.resharding import reshard
from kvplan.ranks.shards import Shard

DTYPE = "bf16"
TOKENS = (32 << 10, 128 << 10)


class Engine(NamedTuple):
    """The layouts of an engine's caches.

    Attributes:
        name: ``"vllm"`` or ``"sglang"``.
        layouts: (kind of group, name of its layout in the catalogue).
        block_tokens: (kind of group, rows of a block).
    """

    name: str
    layouts: tuple[tuple[str, str], ...]
    block_tokens: tuple[tuple[str, int], ...]


ENGINES = (
    Engine("vllm", (("mha", "vllm-LBHNC"), ("mla", "mla")), (("mha", 16), ("mla", 64))),
    Engine("sglang", (("mha", "sglang-device"), ("mla", "sglang-device-mla")), (("mha", 64), ("mla", 64))),
)


class Ranks(NamedTuple):
    """The ranks of one side.

    Attributes:
        tp: tensor-parallel ranks, which share the heads.
        pp: pipeline stages, which share the layers.
        cp: ranks that share the tokens, one by one, of the ranks that hold the same heads (decode context parallel).

    >>> str(Ranks(16, cp=2)), str(Ranks(4, pp=2)), Ranks(4, pp=2).number
    ('TP 16 DCP 2', 'PP 2 TP 4', 8)
    """

    tp: int
    pp: int = 1
    cp: int = 1

    @property
    def number(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"PP {self.pp} " * (self.pp > 1) + f"TP {self.tp}" + f" DCP {self.cp}" * (self.cp > 1)


class Change(NamedTuple):
    """The ranks that prefill a request, and the ranks that decode it."""

    prefill: Ranks
    decode: Ranks

    def __str__(self) -> str:
        return f"{self.prefill} to {self.decode}"


CHANGES = (
    Change(Ranks(4), Ranks(4)),
    Change(Ranks(8), Ranks(4)),
    Change(Ranks(4), Ranks(1)),
    Change(Ranks(4, pp=2), Ranks(8)),
)
SMALL_CHANGES = (Change(Ranks(2), Ranks(2)), Change(Ranks(2), Ranks(1)))  # of models whose heads are not a power of two


@dataclass(frozen=True)
class Prefill:
    """One request's transfer from the ranks that prefill it to the ranks that decode it.

    Attributes:
        receivers, senders: counts of each rank that moves bytes, over all its peers.
    """

    receivers: tuple[Crossing, ...]
    senders: tuple[Crossing, ...]

    @property
    def busiest(self) -> Crossing:
        """Return the counts of the receiver with the most descriptors."""
        return max(self.receivers, key=lambda one: (one.descriptors, one.nbytes))

    def direct(self, wire: WireProfile) -> float:
        """Return the seconds with a descriptor for each piece, which the receivers post."""
        idle = replace(wire, post=0.0, descriptor=0.0)
        took = [direct_cost(one, wire).seconds for one in self.receivers]
        return max([*took, *(direct_cost(one, idle).seconds for one in self.senders)])

    def packed(self, wire: WireProfile) -> float:
        """Return the seconds of packed transfers, with the best size of a slot for the busiest receiver."""
        size = best_slot(self.busiest, wire)
        return max(packed_cost(one, wire, size).seconds for one in (*self.receivers, *self.senders))

    def messages(self, wire: WireProfile) -> int:
        """Return the messages of the packed transfers of the receiver with the most bytes."""
        return packed_cost(max(self.receivers), wire, best_slot(self.busiest, wire)).messages


def engine_of(name: str) -> Engine:
    """Return an engine of :data:`ENGINES` by its name.

    Raises:
        LayoutError: another name.
    """
    for one in ENGINES:
        if one.name == name:
            return one
    raise LayoutError(f"engine is {name!r}; there are {', '.join(one.name for one in ENGINES)}")


def groups_of(model: Model) -> list[Group]:
    """Return the cache groups of a model whose rows are tokens. States of fixed size are left out: they are small."""
    return [group for group in model.groups if group.kind != "state"]


def changes_of(model: Model) -> tuple[Change, ...]:
    """Return the changes of ranks that fit a model: its heads divide, and tokens are dealt only to equal heads.

    >>> from kvplan.catalogue.models import find_model
    >>> [str(change) for change in changes_of(find_model("deepseek-v3"))][-2:]
    ['PP 2 TP 4 to TP 8', 'TP 8 to TP 8 DCP 8']
    >>> str(changes_of(find_model("llama-3.1-70b"))[-1])
    'TP 8 to TP 16 DCP 2'
    """
    found = [change for change in CHANGES if all(_fits(model, ranks.tp) for ranks in change)]
    for tp in (8, 16):
        copies = {group.copies(tp) if _fits(model, tp) else 1 for group in groups_of(model)}
        whole = all(group.window is None and group.row_tokens == 1 for group in groups_of(model))
        if whole and copies != {1} and len(copies) == 1 and _fits(model, 8):
            return (*found, Change(Ranks(8), Ranks(tp, cp=copies.pop())))
    return tuple(found) or SMALL_CHANGES


def _fits(model: Model, tp: int) -> bool:
    return all(group.kind != "mha" or not (group.heads % tp and tp % group.heads) for group in groups_of(model))


def prefills_of(model: Model, change: Change, lengths: Sequence[int], engine: Engine) -> list[Prefill]:
    """Plan requests of some lengths for every pair of ranks, and count what each rank receives and sends.

    Args:
        model: a model of the catalogue.
        change: ranks of both sides.
        lengths: tokens of each request.
        engine: layouts of both sides.

    Raises:
        LayoutError: the heads of the model cannot be divided among these ranks.

    >>> from kvplan.catalogue.models import find_model
    >>> (made,) = prefills_of(find_model("llama-3.1-8b"), Change(Ranks(8), Ranks(4)), [1024], ENGINES[0])
    >>> made.busiest.pairs, made.busiest.descriptors, made.busiest.descriptor_nbytes
    (2, 4096, 8192)
    """
    found: list[dict[tuple[int, int], Crossing]] = [{} for _ in lengths]
    for group in groups_of(model):
        for number, pair, crossing in _crossings(group, change, tuple(lengths), engine):
            pairs = found[number]
            pairs[pair] = sum_of([crossing, *filter(None, [pairs.get(pair)])])._replace(pairs=1)
    return [_prefill(pairs, change) for pairs in found]


def _prefill(pairs: Mapping[tuple[int, int], Crossing], change: Change) -> Prefill:
    sides = ([sum_of(one for pair, one in pairs.items() if pair[side] == rank) for rank in range(ranks.number)]
             for side, ranks in ((1, change.decode), (0, change.prefill)))  # fmt: skip
    return Prefill(*(tuple(rank for rank in side if rank.nbytes) for side in sides))


@lru_cache(maxsize=64)  # some models have the same cache
def _crossings(
    group: Group, change: Change, lengths: tuple[int, ...], engine: Engine
) -> tuple[tuple[int, tuple[int, int], Crossing], ...]:
    """Return the number of a length, a pair of ranks, and the counts of its plan, for each. Pairs are compiled once."""
    rows = dict(engine.block_tokens)[group.kind]
    counts = [[-(-group.rows_held(tokens, rows) // rows // ranks.cp) for ranks in change] for tokens in lengths]
    pools = [2 * max(column) for column in zip(*counts, strict=True)]
    sides = [_shards(group, ranks, pool, engine) for ranks, pool in zip(change, pools, strict=True)]
    names = [sorted(side) for side in sides]
    programs = reshard(*([side[name] for name in held] for side, held in zip(sides, names, strict=True)))
    found = []
    for number, blocks in enumerate(counts):
        ids = scattered(blocks[0], pools[0]), scattered(blocks[1], pools[1])[::-1]
        for (source, destination), program in programs.items():
            plan = program.plan(*ids)
            if plan.nbytes:
                found.append((number, (names[0][source], names[1][destination]), crossing_of(plan)))
    return tuple(found)


@lru_cache(maxsize=16)  # the changes of a model have ranks in common
def _shards(group: Group, ranks: Ranks, pool: int, engine: Engine) -> Mapping[int, Shard]:
    """Return the cache of each rank by its number; a stage without layers of the group has no cache of it."""
    named = named_layouts()[dict(engine.layouts)[group.kind]]
    rows = dict(engine.block_tokens)[group.kind]
    last = max(group.layers) + 1
    made = {}
    for stage in range(ranks.pp):
        layers = tuple(k for k in group.layers if k * ranks.pp // last == stage)
        for rank in range(ranks.tp if layers else 0):
            layout = layout_for(named, replace(group, layers=layers), num_blocks=pool, block_tokens=rows, dtype=DTYPE,
                                tp=ranks.tp, rank=rank)  # fmt: skip
            made[stage * ranks.tp + rank] = Shard(layout, rank % ranks.cp, ranks.cp, 1)
    return made


def scattered(count: int, pool: int) -> Int64Array:
    """Return block ids of a request in a pool that is used up: no two neighbours are neighbours in the pool.

    >>> scattered(4, 8).tolist(), scattered(2, 4).tolist()
    ([0, 5, 2, 7], [0, 3])
    """
    step = max(int(pool * 0.618), 1)
    while gcd(step, pool) > 1:
        step += 1
    return np.arange(count, dtype=np.int64) * step % pool
