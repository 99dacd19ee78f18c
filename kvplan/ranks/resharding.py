"""Reshard the caches of n ranks into caches of m ranks: compile every pair of ranks; each byte has one writer.

A share of a pair is a slice of both layouts, compiled as usual. A rank's turn selects block ids of the destination.
Under context parallelism, a rank's tokens are a view of the other side's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import gcd
from typing import Any

import numpy as np

from kvplan.base.numbers import count_of, number_ranges
from kvplan.base.process import cached_property
from kvplan.errors import BlockIndexError, IncompatibleLayoutsError, LayoutError, OverlapError
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import some_tokens, split_blocks, stretch_of
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.placement import count_units, outside, own_block_ids, skipped_units
from kvplan.plan.plan import Plan, check_not_read, shares_memory, unite
from kvplan.program.matching import check_element_types
from kvplan.ranks.shards import Shard, Share, shares

Side = KVLayout | Shard
Ranks = tuple[Shard, Shard]  # the source and the destination
Ids = tuple[Int64Array, Int64Array]  # block ids of both


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
        if shares_memory(a, b):
            try:
                check_disjoint((*a.components, *b.components))
            except LayoutError:
                raise OverlapError(
                    f"destinations {i} and {j} share bytes; each byte has one writer, so give each memory once"
                ) from None


@dataclass(frozen=True, eq=False, repr=False)
class Resharding(Mapping[tuple[int, int], "PairProgram"]):
    """A mapping from (source, destination) to the program of this pair. :func:`kvplan.reshard` makes it.

    Attributes:
        sources, destinations: the ranks of both sides.
        programs: the program of each pair.
        unit_tokens: tokens of the sequence per unit; skips count units.
    """

    sources: tuple[Shard, ...]
    destinations: tuple[Shard, ...]
    programs: dict[tuple[int, int], PairProgram]
    unit_tokens: int

    def __getitem__(self, pair: tuple[int, int]) -> PairProgram:
        return self.programs[pair]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.programs)

    def __len__(self) -> int:
        return len(self.programs)

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

    def __str__(self) -> str:
        counts = [count_of(len(self.sources), "source"), count_of(len(self.destinations), "destination")]
        counts.append(count_of(len(self), "pair"))
        rows = [f"{s} -> {d}  {words}" for (s, d), program in self.items() for words in program.words]
        return "\n".join([f"{', '.join(counts)}; skips count units of {self.unit_tokens} tokens", *rows])

    def __repr__(self) -> str:
        return f"Resharding({len(self.sources)} to {len(self.destinations)}, {len(self)} pairs)"


class PairProgram:
    """A program that moves content from one source rank to one destination rank. :func:`kvplan.reshard` makes it.

    Attributes:
        src, dst: the two shards.
        shares: the content that moves; each share is a product of layers, parts and heads, with its turn.
        unit_tokens: tokens of the sequence per unit; skips count units. All pairs of a resharding have the same unit.
        spans: tokens of the sequence per block id of the source and of the destination. Blocks without token slots
            stand for the same number of tokens as blocks of the other side.
    """

    def __init__(
        self, src: Shard, dst: Shard, pieces: tuple[Share, ...], unit_tokens: int, *, reinterpret: bool = False
    ) -> None:
        self.src = src
        self.dst = dst
        self.shares = pieces
        self.unit_tokens = unit_tokens
        spans = [None if side.layout.opaque else side.span_tokens for side in (src, dst)]
        self.spans = spans[0] or spans[1] or unit_tokens, spans[1] or spans[0] or unit_tokens
        self._moves = tuple(move for share in pieces for move in _moves(src, dst, share))
        self._reinterpret = reinterpret
        for program in self.programs:  # raises an error for incompatible layouts here, not in the first plan
            if program.reinterprets and not reinterpret:
                check_element_types(program.src.geometry, program.dst.geometry)
        whole = (c for program in self.programs for c in program.src.components if c.form.opaque)
        self._moves_whole = next(whole, None)
        opaque = src.layout.opaque and dst.layout.opaque
        held = (src.span_tokens, dst.span_tokens) if opaque else self.spans
        if self._moves_whole is not None and held[0] != held[1]:
            what = "sub-blocks" if opaque else "tokens"
            raise IncompatibleLayoutsError(
                f"{self._moves_whole} moves whole blocks, but blocks hold {held[0]} {what} in the source "
                f"and {held[1]} in the destination; they have no common unit"
            )
        self._aliased = shares_memory(src.layout, dst.layout)

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(PairProgram, reinterpret=self._reinterpret)
        return made, (self.src, self.dst, self.shares, self.unit_tokens)

    @property
    def programs(self) -> tuple[CopyProgram, ...]:
        """Return the compiled copy programs of all shares; a share has one or several."""
        return tuple(move.program for move in self._moves)

    def plan(self, src_blocks: Any, dst_blocks: Any, src_skip: int = 0, dst_skip: int = 0) -> Plan:
        """Plan this pair's share of a transfer: the blocks of this source's turn, and the tokens that both ranks hold.

        Args:
            src_blocks, dst_blocks: block ids of the two ranks, in order of tokens. Under context parallelism a block id
                stands for the tokens of all ranks (:attr:`kvplan.Shard.span_tokens`).
            src_skip, dst_skip: units of :attr:`unit_tokens` to skip at the front of the first block.

        Raises:
            BlockIndexError: an id is out of range, the lists cover different tokens, or a skip is a block or more.
            OverlapError: a destination is named twice, or the plan writes memory that it also reads.
        """
        src_skip, dst_skip = skipped_units(src_skip, dst_skip)
        ids = own_block_ids(src_blocks, "src_blocks"), own_block_ids(dst_blocks, "dst_blocks")
        unit = self.unit_tokens
        count = count_units(*ids, src_skip, dst_skip, (self.spans[0] // unit, self.spans[1] // unit))
        self._check_skips(src_skip, dst_skip)
        _check_ids(ids, (self.src.layout.num_blocks, self.dst.layout.num_blocks))
        plans = [move.plan(ids, (src_skip * unit, dst_skip * unit), count * unit) for move in self._moves]
        plan = unite(plans)  # no two shares have a byte in common
        if self._aliased and len(plans) > 1:
            check_not_read(plan)
        return plan

    def _check_skips(self, src_skip: int, dst_skip: int) -> None:
        for name, skip in (("src", src_skip), ("dst", dst_skip)):
            if skip and self._moves_whole is not None:
                raise BlockIndexError(
                    f"{name}_skip is {skip}; {self._moves_whole} has no token slots and moves whole blocks, so it is 0"
                )
        # The common tokens hold for lists that begin at the same token. A side that holds all tokens has period 1.
        rounds, apart = gcd(self.src.period, self.dst.period), (src_skip - dst_skip) * self.unit_tokens
        if apart % rounds:
            raise BlockIndexError(
                f"src_skip is {src_skip} and dst_skip {dst_skip}: the two sides would begin {abs(apart)} tokens "
                f"apart, but they deal tokens to ranks in rounds that meet every {rounds}"
            )

    @property
    def words(self) -> list[str]:
        """One line for each share."""
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
        return f"PairProgram({'; '.join(self.words)})"


def _check_ids(ids: Ids, counts: tuple[int, int]) -> None:
    """Check the block ids of both sides, also those that are of other ranks' turns.

    Raises:
        BlockIndexError: an id is out of range.
        OverlapError: a destination is named twice.
    """
    for name, some, count in zip(("src", "dst"), ids, counts, strict=True):
        wrong = np.flatnonzero((some < 0) | (some >= count))
        if wrong.size:
            raise outside(name, some, int(wrong[0]), count)
    ordered = np.sort(ids[1])
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        raise OverlapError(
            f"dst_blocks name block {int(ordered[twice[0]])} more than once; each destination is written once"
        )


def _moves(src: Shard, dst: Shard, share: Share) -> Iterator[_Move]:
    """Yield the moves of a share: one; or several, if head axes are split so that no slice has exactly its heads."""
    heads = share.heads
    for src_heads, dst_heads in ((None, None), (None, heads), (heads, None)):  # compile moves the common heads
        try:
            layouts = (
                _cut(src.layout, share.layers, share.src_parts, src_heads),
                _cut(dst.layout, share.layers, share.dst_parts, dst_heads),
            )
        except LayoutError:
            continue
        named = [layout.heads for layout in layouts if any(c.form.headed for c in layout.components)]
        if heads is None or not named or set(heads) == set(named[0]).intersection(*named):
            yield _Move(replace(src, layout=layouts[0]), replace(dst, layout=layouts[1]), share)
            return
    assert heads is not None
    middle = (heads.start + heads.stop) // 2
    yield from _moves(src, dst, share._replace(heads=range(heads.start, middle)))
    headed = {c.part for side in (src, dst) for c in side.layout.components if c.form.headed}
    rest = share._replace(  # parts without heads are in the first half
        src_parts=tuple(part for part in share.src_parts if part in headed),
        dst_parts=tuple(part for part in share.dst_parts if part in headed),
        heads=range(middle, heads.stop),
    )
    yield from _moves(src, dst, rest)


def _cut(layout: KVLayout, layers: tuple[int, ...], parts: tuple[str, ...], heads: range | None) -> KVLayout:
    """Slice a layout. If the slice is the whole layout, return the layout itself, so that its programs are reused."""
    if heads is None and set(layers) == set(layout.layers) and set(parts) == set(layout.parts):
        return layout
    return layout.slice(layers=layers, heads=heads, parts=parts)


class _Move:
    """A compiled share. It plans whole blocks if possible, otherwise stretches of tokens that both ranks hold.

    If only one side deals its tokens to ranks, and blocks of the other side hold whole rounds, then the rank's tokens
    are a view of the other side, and whole blocks of both views are planned.
    """

    def __init__(self, src: Shard, dst: Shard, share: Share) -> None:
        self._ranks, self._turn = (src, dst), share.turn
        self._period, self._own = 1, 1  # tokens of the sequence per round, and per token of whole blocks
        self._whole: Ranks | None = src, dst
        if src.cp_size > 1 and dst.cp_size > 1:
            self._whole = None
        elif src.cp_size > 1 or dst.cp_size > 1:
            rank, other = (src, dst) if src.cp_size > 1 else (dst, src)
            view, all_of_it = _own_tokens(other.layout, rank), Shard(rank.layout)
            self._period, self._own = rank.period, rank.cp_size
            self._whole = None if view is None else (all_of_it, view) if rank is src else (view, all_of_it)
        self._split: dict[tuple[bool, int], CopyProgram] = {}

    @cached_property
    def program(self) -> CopyProgram:
        """Return the program of whole blocks; if whole blocks cannot be planned, that of the longest stretches."""
        if self._whole is None:
            return self._of_stretches(self._ranks, self._stretch(0))
        return compile_quietly(self._whole[0].layout, self._whole[1].layout, reinterpret=True)

    def plan(self, ids: Ids, skips: tuple[int, int], tokens: int) -> Plan:
        """Plan ``tokens`` tokens of the sequence, behind the tokens to skip in the first block of each side."""
        whole, unit = self._whole, self.program.unit_tokens
        if whole is None or any(skip % self._period or skip // self._own % unit for skip in skips):
            return self._plan_stretches(self._ranks, ids, skips, tokens, self._stretch(gcd(*skips)))
        first = skips[0] // self._own, skips[1] // self._own
        if self._turn.ranks == 1:
            return self.program.plan(*ids, first[0] // unit, first[1] // unit)
        opaque = whole[0].layout.opaque or whole[1].layout.opaque
        own = len(ids[1]) * whole[1].layout.block_tokens if opaque else tokens // self._own
        return self._plan_stretches(whole, ids, first, own, unit)

    def _plan_stretches(self, ranks: Ranks, ids: Ids, skips: tuple[int, int], tokens: int, stretch: int) -> Plan:
        """Plan each stretch that both ranks hold, in the destination blocks of this source's turn."""
        at = np.arange(0, tokens, stretch)
        if self._turn.ranks > 1:
            mine = ids[1] % self._turn.ranks == self._turn.number
            at = at[mine[(at + skips[1]) // ranks[1].span_tokens]]
        for rank, skip in zip(ranks, skips, strict=True):
            if rank.cp_size > 1:
                at = at[rank.holds((at + skip) % rank.span_tokens)]
        units = []
        for rank, blocks, skip in zip(ranks, ids, skips, strict=True):
            number, token = np.divmod(at + skip, rank.span_tokens)
            each = rank.layout.block_tokens // stretch
            units.append(blocks[number] if each == 1 else blocks[number] * each + rank.slot(token) // stretch)
        return self._of_stretches(ranks, stretch).plan(units[0], units[1])

    def _stretch(self, skip: int) -> int:
        """Return the largest number of tokens that follow one another on both sides, in every block."""
        src, dst = self._ranks
        return stretch_of((src.layout.built, dst.layout.built), gcd(src.turn_tokens, dst.turn_tokens, skip))

    def _of_stretches(self, ranks: Ranks, stretch: int) -> CopyProgram:
        key = ranks is self._ranks, stretch
        if key not in self._split:
            sides = [_in_stretches(rank.layout, stretch) for rank in ranks]
            self._split[key] = compile_quietly(*sides, reinterpret=True)
        return self._split[key]


def _own_tokens(layout: KVLayout, rank: Shard) -> Shard | None:
    """Return a view of a context-parallel rank's tokens in another layout's blocks; None if a block cuts a round."""
    if layout.block_tokens % rank.period:
        return None
    view = some_tokens(layout.built, rank.cp_rank, rank.cp_size, rank.interleave)
    return None if view is None else Shard(KVLayout(view, tensors=layout.tensors))


def _in_stretches(layout: KVLayout, tokens: int) -> KVLayout:
    if tokens == layout.block_tokens:
        return layout
    view = split_blocks(layout.built, tokens)
    assert view is not None  # stretch_of and compile raise an error before
    return KVLayout(view, tensors=layout.tensors)
