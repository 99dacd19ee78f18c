"""Caches of n ranks into caches of m: every pair of them compiled, and each byte given to one writer.

Nothing is new here: a pair's share is a slice of both layouts, compiled; a rank's turn is a choice among block ids;
tokens dealt to ranks are a view of the other side's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import gcd
from types import MappingProxyType
from typing import Any

from kvplan.errors import LayoutError, OverlapError
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import common_heads, heads_held
from kvplan.plan.plan import Plan, shares_memory
from kvplan.ranks.rank_pair import PairProgram
from kvplan.ranks.shards import Shard, shares

Side = KVLayout | Shard


def reshard(
    sources: Side | Sequence[Side], destinations: Side | Sequence[Side], *, complete: bool = True
) -> Resharding:
    """Programs that bring the caches of some ranks into those of others, or into a pool that belongs to no topology.

    Ranks are layouts with global numbers of layers and heads: tensor parallelism is ``head_start``, pipeline
    parallelism ``layer_start``, context parallelism a :class:`kvplan.Shard`. What several sources hold (heads of which
    there are fewer than ranks, latents, indexer rows) each of them moves in turn: of ``n``, number ``k`` moves the
    block ids of the destination that leave ``k`` when divided by ``n``. Every destination is written whole, also where
    destinations hold the same. What sources hold beyond that is not read.

    A rank that is in another process is described from its spec: its programs then compile, and only the pairs of
    ranks that are here can be executed.

    Args:
        sources: layouts or shards to read, one a rank.
        destinations: layouts or shards to write; no two share a byte.
        complete: refuse destinations with content that no source holds; without it, that stays as it is.

    Returns:
        A mapping from (source, destination), by their places in the arguments, to a :class:`PairProgram`. Pairs that
        share nothing have no entry.

    Raises:
        IncompatibleLayoutsError: content of a destination that no source holds, or that does not meet.
        LayoutError: what is no layout; sources that deal the same tokens in two ways.
        OverlapError: two destinations that share bytes.

    >>> import kvplan, numpy as np
    >>> ranks = [kvplan.KVLayout.from_tensors("layer: kv block token head dim", [np.zeros((2, 8, 16, 2, 64), np.int8)],
    ...                                       head_start=2 * rank) for rank in range(4)]
    >>> pool = kvplan.KVLayout.from_tensors("block kv head token dim", np.zeros((4, 2, 8, 32, 64), np.int8))
    >>> programs = kvplan.reshard(ranks, pool)
    >>> programs[3, 0].plan([5, 6], [1])
    Plan(host of 2 units, 8192 bytes)
    >>> print(programs)
    4 sources, 1 destination, 4 pairs; skips count units of 16 tokens
    0 -> 0  layer 0, k v, heads 0-1
    1 -> 0  layer 0, k v, heads 2-3
    2 -> 0  layer 0, k v, heads 4-5
    3 -> 0  layer 0, k v, heads 6-7
    """
    ranks = _shards("sources", sources), _shards("destinations", destinations)
    _check_apart(ranks[1])
    found = shares(*ranks, complete=complete)
    spans = [shard.span_tokens for side in ranks for shard in side if not shard.layout.opaque]
    unit = gcd(*spans) if spans else 1
    programs = {(s, d): PairProgram(ranks[0][s], ranks[1][d], pieces, unit) for (s, d), pieces in found.items()}
    return Resharding(*ranks, programs, unit)


def _shards(name: str, given: Any) -> tuple[Shard, ...]:
    side = (given,) if isinstance(given, (KVLayout, Shard)) else given
    if not isinstance(side, Sequence) or not side:
        raise LayoutError(f"{name} is {given!r}; give a sequence of one layout or shard a rank")
    for k, rank in enumerate(side):
        if not isinstance(rank, (KVLayout, Shard)):
            raise LayoutError(f"{name}[{k}] is a {type(rank).__name__}; ranks are KVLayouts or Shards")
    return tuple(rank if isinstance(rank, Shard) else Shard(rank) for rank in side)


def _check_apart(destinations: Sequence[Shard]) -> None:
    """No two destinations share a byte.

    Raises:
        OverlapError: two that do.
    """
    for (i, a), (j, b) in combinations([(k, shard.layout) for k, shard in enumerate(destinations)], 2):
        if not shares_memory(a, b):
            continue
        if a.regions is b.regions:  # slices of one layout, in which no two coordinates share a byte
            clash = not _different_content(a, b)
        else:
            try:
                check_disjoint((*a.components, *b.components))
                clash = False
            except LayoutError:
                clash = True
        if clash:
            raise OverlapError(f"destinations {i} and {j} share bytes; each byte has one writer: name it once")


def _different_content(a: KVLayout, b: KVLayout) -> bool:
    here, there = heads_held(a.components), heads_held(b.components)
    for key in here.keys() & there.keys():
        heads, others = here[key], there[key]
        if heads is None or others is None or common_heads((heads, others)):
            return False
    return True


class Resharding(Mapping[tuple[int, int], "PairProgram"]):
    """Programs by (source, destination). Made by :func:`kvplan.reshard`.

    Attributes:
        sources, destinations: the ranks of both sides.
        unit_tokens: tokens of the sequence that skips count in.
    """

    def __init__(
        self,
        sources: tuple[Shard, ...],
        destinations: tuple[Shard, ...],
        programs: Mapping[tuple[int, int], PairProgram],
        unit_tokens: int,
    ) -> None:
        self.sources = sources
        self.destinations = destinations
        self.unit_tokens = unit_tokens
        self._programs = MappingProxyType(dict(programs))

    def __reduce__(self) -> tuple[Any, ...]:
        return Resharding, (self.sources, self.destinations, dict(self._programs), self.unit_tokens)

    def __getitem__(self, pair: tuple[int, int]) -> PairProgram:
        return self._programs[pair]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._programs)

    def __len__(self) -> int:
        return len(self._programs)

    def plan(
        self, src_blocks: Any, dst_blocks: Any, src_skip: int = 0, dst_skip: int = 0
    ) -> dict[tuple[int, int], Plan]:
        """A plan for every pair, where all ranks of a side have the same block ids.

        Args:
            src_blocks, dst_blocks: block ids in order of tokens.
            src_skip, dst_skip: units of :attr:`unit_tokens` skipped at the front of the first block.

        Raises:
            BlockIndexError, OverlapError: as :meth:`kvplan.CopyProgram.plan`.

        >>> import kvplan, numpy as np
        >>> pools = [kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8)) for _ in range(3)]
        >>> kvplan.reshard(pools[:2], pools[2]).plan([3, 4, 5], [0, 1, 2])  # replicas share the blocks
        {(0, 0): Plan(host of 2 units, 2048 bytes), (1, 0): Plan(host of 1 units, 1024 bytes)}
        """
        return {pair: program.plan(src_blocks, dst_blocks, src_skip, dst_skip) for pair, program in self.items()}

    def diagram(self) -> str:
        """A picture of some blocks of every rank and the copies between them, as SVG text: the first layer and part."""
        from kvplan.draw.ranks import ranks

        return ranks(self)

    def __str__(self) -> str:
        counts = [f"{n} {name}{'s' * (n != 1)}" for n, name in (
            (len(self.sources), "source"), (len(self.destinations), "destination"), (len(self), "pair"),
        )]  # fmt: skip
        rows = [f"{s} -> {d}  {told}" for (s, d), program in self.items() for told in program.told()]
        return "\n".join([f"{', '.join(counts)}; skips count units of {self.unit_tokens} tokens", *rows])

    def __repr__(self) -> str:
        return f"Resharding({len(self.sources)} to {len(self.destinations)}, {len(self)} pairs)"
