"""Reshard the caches of n ranks into caches of m ranks: compile every pair of ranks; each byte has one writer.

A share of a pair is a slice of both layouts, compiled as usual. A rank's turn selects block ids of the destination.
Under context parallelism, a rank's tokens are a view of the other side's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import gcd, lcm
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import count_of, number_ranges
from kvplan.errors import LayoutError, OverlapError
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import heads_held
from kvplan.plan.plan import Plan, shares_memory
from kvplan.ranks.rank_pair import PairProgram
from kvplan.ranks.shards import Shard, shares

if TYPE_CHECKING:
    from kvplan.draw.ranks import RankPicture

Side = KVLayout | Shard
MOST_SHOWN = 8  # maximum blocks per rank in a picture


def reshard(
    sources: Side | Sequence[Side],
    destinations: Side | Sequence[Side],
    *,
    complete: bool = True,
    reinterpret: bool = False,
) -> Resharding:
    """Compile programs that copy the caches of source ranks to destination ranks, or to a pool of any topology.

    Ranks are layouts with global numbers of layers and heads. Give ``head_start`` for tensor parallelism,
    ``layer_start`` for pipeline parallelism, and a :class:`kvplan.Shard` for context parallelism. Several sources may
    hold the same content, such as replicated heads, latents or indexer rows. These ``n`` sources take turns: source
    ``k`` moves the destination's block ids with remainder ``k`` modulo ``n``. Every destination is written completely,
    also if two destinations hold the same content. Other content of the sources is not read.

    Make the layout of a rank in another process from its spec. Its programs compile, but an executor moves only plans
    between ranks of this process.

    Args:
        sources: layouts or shards to read, one per rank.
        destinations: layouts or shards to write, one per rank; no two destinations share a byte.
        complete: whether content of a destination that no source holds is an error; if False, it is not written.
        reinterpret: whether bytes of one number format may be read as another one; see :func:`kvplan.compile`.

    Returns:
        A mapping from (source, destination), the positions in the arguments, to a :class:`PairProgram`. Pairs without
        common content have no entry.

    Raises:
        IncompatibleLayoutsError: no source holds some content of a destination, a pair has no common unit, or number
            formats differ without ``reinterpret``.
        LayoutError: an argument is not a layout or shard, or sources deal the same tokens to ranks in different ways.
        OverlapError: two destinations share bytes.

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
    programs = {
        (s, d): PairProgram(ranks[0][s], ranks[1][d], pieces, unit, reinterpret=reinterpret)
        for (s, d), pieces in found.items()
    }
    return Resharding(*ranks, programs, unit)


def _shards(name: str, given: Any) -> tuple[Shard, ...]:
    side = (given,) if isinstance(given, (KVLayout, Shard)) else given
    if not isinstance(side, Sequence) or not side:
        raise LayoutError(f"{name} is {given!r}; give a sequence with one layout or shard per rank")
    for k, rank in enumerate(side):
        if not isinstance(rank, (KVLayout, Shard)):
            raise LayoutError(f"{name}[{k}] is a {type(rank).__name__}; ranks are KVLayouts or Shards")
    return tuple(rank if isinstance(rank, Shard) else Shard(rank) for rank in side)


def _check_apart(destinations: Sequence[Shard]) -> None:
    """Check that no two destinations share a byte.

    Raises:
        OverlapError: two destinations share a byte.
    """
    for (i, a), (j, b) in combinations([(k, shard.layout) for k, shard in enumerate(destinations)], 2):
        if not shares_memory(a, b):
            continue
        if a.regions is b.regions:  # two slices of one layout, in which no two coordinates share a byte
            clash = not _different_content(a, b)
        else:
            try:
                check_disjoint((*a.components, *b.components))
                clash = False
            except LayoutError:
                clash = True
        if clash:
            raise OverlapError(
                f"destinations {i} and {j} share bytes; each byte has one writer, so give each memory once"
            )


def _different_content(a: KVLayout, b: KVLayout) -> bool:
    here, there = heads_held(a.components), heads_held(b.components)
    for key in here.keys() & there.keys():
        heads, others = here[key], there[key]
        if heads is None or others is None or set(heads) & set(others):
            return False
    return True


class Resharding(Mapping[tuple[int, int], "PairProgram"]):
    """A mapping from (source, destination) to the program of this pair. :func:`kvplan.reshard` makes it.

    Attributes:
        sources, destinations: the ranks of both sides.
        unit_tokens: tokens of the sequence per unit; skips count units.
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
        """Plan one transfer for every pair, if all ranks of a side use the same block ids.

        Args:
            src_blocks, dst_blocks: block ids in order of tokens.
            src_skip, dst_skip: units of :attr:`unit_tokens` to skip at the front of the first block.

        Raises:
            BlockIndexError, OverlapError: as :meth:`kvplan.CopyProgram.plan`.

        >>> import kvplan, numpy as np
        >>> pools = [kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8)) for _ in range(3)]
        >>> kvplan.reshard(pools[:2], pools[2]).plan([3, 4, 5], [0, 1, 2])  # replicas share the blocks
        {(0, 0): Plan(host of 2 units, 2048 bytes), (1, 0): Plan(host of 1 units, 1024 bytes)}
        """
        return {pair: program.plan(src_blocks, dst_blocks, src_skip, dst_skip) for pair, program in self.items()}

    def diagram(self) -> str:
        """Draw some blocks of every rank and the copies between them, for the first layer and part, as SVG text."""
        from kvplan.draw.ranks import ranks

        return ranks(_picture_of(self))

    def _repr_html_(self) -> str:
        from kvplan.draw.notebook import text_html

        return text_html(str(self), self.diagram())

    def __str__(self) -> str:
        counts = [count_of(len(self.sources), "source"), count_of(len(self.destinations), "destination")]
        counts.append(count_of(len(self), "pair"))
        rows = [f"{s} -> {d}  {told}" for (s, d), program in self.items() for told in program.told()]
        return "\n".join([f"{', '.join(counts)}; skips count units of {self.unit_tokens} tokens", *rows])

    def __repr__(self) -> str:
        return f"Resharding({len(self.sources)} to {len(self.destinations)}, {len(self)} pairs)"


# ---- data for the picture ------------------------------------------------------------------------------------------


def _picture_of(resharding: Resharding) -> RankPicture:
    """Return the names of all ranks and the copies of some blocks, for the first layer and part that moves."""
    from kvplan.draw.ranks import RankCopy, RankPicture

    sides = resharding.sources, resharding.destinations
    first = min(
        (share for program in resharding.values() for share in program.shares), key=lambda share: share.layers[0],
        default=None,
    )  # fmt: skip
    layer = 0 if first is None else first.layers[0]
    names = [[_name_of(k, shard, layer) for k, shard in enumerate(side)] for side in sides]
    if first is None:
        return RankPicture(repr(resharding), "layer 0, ", "nothing is moved", (names[0], names[1]), [])
    alike = first.src_parts[0] == first.dst_parts[0]
    parts = first.dst_parts[:1] if alike else first.dst_parts
    chosen = (parts if alike else first.src_parts, parts)
    held = [[_one_part(shard, layer, some) for shard in side] for side, some in zip(sides, chosen, strict=True)]
    places = [[k for k, shard in enumerate(side) if shard is not None] for side in held]
    small = reshard(
        *[[shard for shard in side if shard is not None] for side in held], complete=False, reinterpret=True
    )
    turns = max(share.turn.ranks for program in small.values() for share in program.shares)
    copies, counts = [], set()
    for (s, d), program in small.items():
        blocks = _block_counts(program, turns)
        counts.add(blocks)
        made = program.plan(range(blocks[0]), range(blocks[1])).descriptors()
        rows = zip(made.src.tolist(), made.dst.tolist(), made.size.tolist(), strict=True)
        copies += [RankCopy(places[0][s], places[1][d], *row) for row in rows]
    above, below = (count_of(n, "block") for n in max(counts))
    told = f"above {above} of each source, below {below} of each destination"
    copies.sort(key=lambda one: (one.destination, one.dst))
    return RankPicture(repr(resharding), f"layer {layer}, {' '.join(parts)}", told, (names[0], names[1]), copies)


def _block_counts(program: PairProgram, turns: int) -> tuple[int, int]:
    """Return how many blocks of two ranks to show. They hold the same tokens, with a destination block per turn."""
    spans = program.spans
    tokens = lcm(*spans)
    tokens *= -(-turns * spans[1] // tokens)
    shards = program.src, program.dst
    most = [min(shard.layout.num_blocks, MOST_SHOWN) * span for shard, span in zip(shards, spans, strict=True)]
    large = max(spans)
    if min(most) < large:  # one large block; the small blocks hold a part of its tokens
        return (1, most[1] // spans[1]) if spans[0] == large else (most[0] // spans[0], 1)
    tokens = min(tokens, min(most) // large * large)
    return tokens // spans[0], tokens // spans[1]


def _one_part(shard: Shard, layer: int, parts: tuple[str, ...]) -> Shard | None:
    """Slice one layer and some parts of a rank, at virtual addresses, because the layouts of a picture may overlap."""
    layout = shard.layout
    if layer not in layout.layers or not set(parts) <= set(layout.parts):
        return None
    held = layout.slice(layers=(layer,), parts=parts)
    regions = tuple(replace(region, virtual=True) for region in held.regions)
    return replace(shard, layout=KVLayout(held.built._replace(regions=regions)))


def _name_of(number: int, shard: Shard, layer: int) -> tuple[str, str]:
    """Return two lines: a rank's number, and its heads and tokens of a layer (its layers, if it lacks that layer)."""
    name, layout = f"rank {number}", shard.layout
    if layer not in layout.layers:
        return name, f"layers {number_ranges(layout.layers)}"
    heads = f"head{'s' * (len(layout.heads) > 1)} {number_ranges(layout.heads)}"
    if not any(c.form.headed for c in layout.components):
        heads = "no heads"
    return name, heads if shard.cp_size == 1 else f"{heads}, tokens {shard.cp_rank} of {shard.cp_size}"
