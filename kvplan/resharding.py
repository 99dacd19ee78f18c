"""Caches of n ranks into caches of m: every pair of them compiled, and each byte given to one writer.

Nothing is new here: a pair's share is a slice of both layouts, compiled; a rank's turn is a choice among block ids;
tokens dealt to ranks are a view of the other side's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from math import gcd
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from kvplan.blockmap import block_ids, count_units
from kvplan.components import check_disjoint
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError, OverlapError
from kvplan.facade import CopyProgram, compile  # noqa: A004
from kvplan.layout import KVLayout
from kvplan.plan import Plan, join, shares_memory
from kvplan.program import Int64Array
from kvplan.shards import Shard, Share, shares
from kvplan.slicing import number_ranges
from kvplan.views import some_tokens, split_blocks, stretch_of

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
    unit = gcd(*(shard.span_tokens for side in ranks for shard in side))
    return Resharding(*ranks, {
        (s, d): PairProgram(ranks[0][s], ranks[1][d], pieces, unit) for (s, d), pieces in found.items()
    })  # fmt: skip


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
        elif a.num_blocks != b.num_blocks and any(c.form.table is not None for c in (*a.components, *b.components)):
            clash = any(
                x.hull()[0] < y.hull()[1] and y.hull()[0] < x.hull()[1] for x in a.components for y in b.components
            )
        else:
            try:
                check_disjoint((*a.components, *b.components), a.num_blocks)
                clash = False
            except LayoutError:
                clash = True
        if clash:
            raise OverlapError(f"destinations {i} and {j} share bytes; each byte has one writer: name it once")


def _different_content(a: KVLayout, b: KVLayout) -> bool:
    there = {(c.layer, c.part): c.form for c in b.components}
    for c in a.components:
        other = there.get((c.layer, c.part))
        if other is None:
            continue
        if not c.form.headed or max(c.form.heads.start, other.heads.start) < min(c.form.heads.stop, other.heads.stop):
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
    ) -> None:
        self.sources = sources
        self.destinations = destinations
        self.unit_tokens: int = gcd(*(shard.span_tokens for shard in (*sources, *destinations)))
        self._programs = MappingProxyType(dict(programs))

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


class _Tokens(NamedTuple):
    """One side of a transfer: block ids, and tokens of the sequence skipped in the first of them."""

    ids: Int64Array
    skip: int


class PairProgram:
    """What one source moves to one destination. Made by :func:`kvplan.reshard`.

    Attributes:
        src, dst: the two shards.
        shares: what is moved, as products of layers, parts and heads, each with the block ids whose turn it is.
        unit_tokens: tokens of the sequence that skips count in: of one resharding the same for all pairs.
    """

    def __init__(self, src: Shard, dst: Shard, pieces: tuple[Share, ...], unit_tokens: int) -> None:
        self.src = src
        self.dst = dst
        self.shares = pieces
        self.unit_tokens = unit_tokens
        self._moves = tuple(move for share in pieces for move in _moves(src, dst, share))
        for move in self._moves:
            _ = move.program  # what does not meet is refused here, and not by the first plan

    @property
    def programs(self) -> tuple[CopyProgram, ...]:
        """The compiled copy program of each share."""
        return tuple(move.program for move in self._moves)

    def plan(self, src_blocks: Any, dst_blocks: Any, src_skip: int = 0, dst_skip: int = 0) -> Plan:
        """Plan this pair's part of a transfer: of the blocks, those whose turn it is, and the tokens both sides hold.

        Args:
            src_blocks, dst_blocks: block ids of the two ranks, in order of tokens. Under context parallelism a block id
                stands for the tokens of all ranks (:attr:`kvplan.Shard.span_tokens`).
            src_skip, dst_skip: units of :attr:`unit_tokens` skipped at the front of the first block.

        Raises:
            BlockIndexError: ids that are no blocks, lists that cover different tokens, a skip of a block or more.
            OverlapError: a destination named twice, or memory both read and written.
        """
        src, dst = block_ids(src_blocks, "src_blocks"), block_ids(dst_blocks, "dst_blocks")
        unit = self.unit_tokens
        units = self.src.span_tokens // unit, self.dst.span_tokens // unit
        count = count_units(src, dst, src_skip, dst_skip, units)
        for name, ids, side in (("src", src, self.src), ("dst", dst, self.dst)):  # also those of other ranks' turns
            last = side.layout.num_blocks - 1
            wrong = np.flatnonzero((ids < 0) | (ids > last))
            if wrong.size:
                raise BlockIndexError(
                    f"{name}_blocks[{wrong[0]}] is {int(ids[wrong[0]])}; {name} blocks are 0 to {last}"
                )
        _check_once(dst)
        sides = _Tokens(src, src_skip * unit), _Tokens(dst, dst_skip * unit)
        plans = [move.plan(*sides, count * unit) for move in self._moves]
        return plans[0] if len(plans) == 1 else join(plans)

    def told(self) -> list[str]:
        """Each share in words."""
        lines = []
        for share in self.shares:
            words = [f"layer{'s' * (len(share.layers) > 1)} {number_ranges(share.layers)}", " ".join(share.dst_parts)]
            if share.heads is not None:
                words.append(f"head{'s' * (len(share.heads) > 1)} {number_ranges(share.heads)}")
            if share.turn.ranks > 1:
                words.append(f"blocks {share.turn.number} modulo {share.turn.ranks}")
            words += [
                f"tokens {side.cp_rank} of {side.cp_size} of the {name}"
                for name, side in (("source", self.src), ("destination", self.dst))
                if side.cp_size > 1
            ]
            lines.append(", ".join(words))
        return lines

    def __repr__(self) -> str:
        return f"PairProgram({'; '.join(self.told())})"


def _check_once(ids: Int64Array) -> None:
    ordered = np.sort(ids)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise OverlapError(
            f"dst_blocks name block {int(ordered[twice[0]])} more than once; each destination is written once"
        )


def _moves(src: Shard, dst: Shard, share: Share) -> Iterator[_Move]:
    """A share as moves: one, unless split head axes on both sides refuse its range of heads."""
    whole = share._replace(heads=None)
    if share.heads is None:
        yield _Move(src, dst, whole, *_layouts(src, dst, whole))
        return
    for sliced in (None, dst, src):  # one side is enough: compile takes the heads that both hold
        try:
            layouts = _layouts(src, dst, whole if sliced is None else share, sliced)
        except LayoutError:
            continue
        if _common_heads(*layouts) == share.heads:
            yield _Move(src, dst, share, *layouts)
            return
    middle = (share.heads.start + share.heads.stop) // 2
    for heads in (range(share.heads.start, middle), range(middle, share.heads.stop)):
        yield from _moves(src, dst, share._replace(heads=heads))


def _common_heads(src: KVLayout, dst: KVLayout) -> range:
    return range(max(src.heads.start, dst.heads.start), min(src.heads.stop, dst.heads.stop))


def _layouts(src: Shard, dst: Shard, share: Share, sliced: Shard | None = None) -> tuple[KVLayout, KVLayout]:
    """Both layouts with the layers and parts of a share, and one of them with its heads."""
    return (
        _cut(src.layout, share.layers, share.src_parts, share.heads if sliced is src else None),
        _cut(dst.layout, share.layers, share.dst_parts, share.heads if sliced is dst else None),
    )


def _cut(layout: KVLayout, layers: tuple[int, ...], parts: tuple[str, ...], heads: range | None) -> KVLayout:
    """A slice; the layout itself where that is all it holds, so that its programs are found again."""
    if heads is None and set(layers) == set(layout.layers) and set(parts) == set(layout.parts):
        return layout
    return layout.slice(layers=layers, heads=heads, parts=parts)


class _Move:
    """A share, compiled. Plans whole blocks where it can, and else the stretches of tokens that both sides hold."""

    def __init__(self, src: Shard, dst: Shard, share: Share, src_layout: KVLayout, dst_layout: KVLayout) -> None:
        self._share = share
        self._src = replace(src, layout=src_layout)
        self._dst = replace(dst, layout=dst_layout)
        # Where one side's tokens are dealt to ranks, and the other side's blocks hold whole rounds of that, the tokens
        # of this rank are a view of the other side: then blocks are planned as everywhere else.
        self._period = 1
        self._whole: tuple[KVLayout, KVLayout] | None = self._src.layout, self._dst.layout
        if src.cp_size > 1 and dst.cp_size > 1:
            self._whole = None
        elif src.cp_size > 1:
            view = _own_tokens(self._dst.layout, src)
            self._whole, self._period = (self._src.layout, view) if view is not None else None, src.period
        elif dst.cp_size > 1:
            view = _own_tokens(self._src.layout, dst)
            self._whole, self._period = (view, self._dst.layout) if view is not None else None, dst.period
        self._cp = max(src.cp_size, dst.cp_size)
        self._stretches: dict[int, CopyProgram] = {}

    @cached_property
    def program(self) -> CopyProgram:
        """Of whole blocks where these can be planned, else of the longest stretches."""
        return compile(*self._whole) if self._whole is not None else self._of_stretches(self._stretch(0))

    def plan(self, src: _Tokens, dst: _Tokens, tokens: int) -> Plan:
        """Plan so many tokens of the sequence."""
        own = self._cp if self._whole is not None else 1  # tokens of the sequence for each of this rank's own
        whole = self._whole is not None and not any(
            skip % self._period or skip // own % self.program.unit_tokens for skip in (src.skip, dst.skip)
        )
        if not whole:
            return self._plan_stretches(src, dst, tokens)
        unit = self.program.unit_tokens
        skips = src.skip // own // unit, dst.skip // own // unit
        if self._share.turn.ranks == 1:
            return self.program.plan(src.ids, dst.ids, *skips)
        return self._plan_turns(src.ids, dst.ids, skips, tokens // own // unit)

    def _plan_turns(self, src: Int64Array, dst: Int64Array, skips: tuple[int, int], count: int) -> Plan:
        """Blocks of the destination whose turn it is, whole; of the source, the units that go there."""
        program, turn = self.program, self._share.turn
        per_src, per_dst = (max(side.block_tokens // program.unit_tokens, 1) for side in (program.src, program.dst))
        mine = dst % turn.ranks == turn.number
        unit = np.arange(count)
        unit = unit[mine[(unit + skips[1]) // per_dst]]
        at = unit + skips[0]
        units = src[at // per_src] * per_src + at % per_src
        kept = dst[mine]
        first = skips[1] if len(mine) and mine[0] else 0
        return self._split_source.plan(units, kept, 0, first)

    @cached_property
    def _split_source(self) -> CopyProgram:
        unit = self.program.unit_tokens
        if unit == self.program.src.block_tokens:
            return self.program
        return compile(_split(self.program.src, unit), self.program.dst)

    def _stretch(self, skip: int) -> int:
        """Most tokens that follow one another on both sides, whatever the block."""
        most = gcd(self._src.turn_tokens, self._dst.turn_tokens, skip)
        return stretch_of((self._src.layout, self._dst.layout), most)

    def _of_stretches(self, stretch: int) -> CopyProgram:
        if stretch not in self._stretches:
            self._stretches[stretch] = compile(*(_split(side.layout, stretch) for side in (self._src, self._dst)))
        return self._stretches[stretch]

    def _plan_stretches(self, src: _Tokens, dst: _Tokens, tokens: int) -> Plan:
        """Stretches that both ranks hold, of blocks whose turn it is, one by one."""
        stretch = self._stretch(gcd(src.skip, dst.skip))
        at = np.arange(tokens // stretch) * stretch
        turn, kept = self._share.turn, np.ones(len(at), dtype=bool)
        places: list[tuple[Int64Array, Int64Array, int]] = []
        for side, given in ((self._src, src), (self._dst, dst)):
            block, token = np.divmod(at + given.skip, side.span_tokens)
            kept &= side.holds(token)
            places.append((given.ids[block], side.slot(token) // stretch, side.layout.block_tokens // stretch))
        kept &= places[1][0] % turn.ranks == turn.number
        src_units, dst_units = ((block * per_block + unit)[kept] for block, unit, per_block in places)
        return self._of_stretches(stretch).plan(src_units, dst_units)


def _own_tokens(layout: KVLayout, rank: Shard) -> KVLayout | None:
    """Of another layout's blocks, the tokens of a context-parallel rank, if each block holds whole rounds."""
    if layout.block_tokens % rank.period:
        return None
    return some_tokens(layout, rank.cp_rank, rank.cp_size, rank.interleave)


def _split(layout: KVLayout, tokens: int) -> KVLayout:
    view = split_blocks(layout, tokens)
    if view is None:  # stretch_of and compile let no such stretch through
        raise KVPlanError(f"blocks of {layout} cannot be split into {tokens} tokens")
    return view
