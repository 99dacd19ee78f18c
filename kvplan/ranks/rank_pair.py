"""Plan the transfer from one rank to another: compile each share, choose blocks by turn, and choose tokens by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.base.numbers import number_ranges
from kvplan.errors import BlockIndexError, IncompatibleLayoutsError, KVPlanError, LayoutError, OverlapError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import some_tokens, split_blocks, stretch_of
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.plan.placement import count_units, outside, own_block_ids, skipped_units
from kvplan.plan.plan import Plan, check_not_read, shares_memory, unite
from kvplan.program.matching import check_element_types
from kvplan.ranks.shards import Shard, Share


class _Tokens(NamedTuple):
    """One side of a transfer: its block ids, and the tokens of the sequence to skip in its first block."""

    ids: Int64Array
    skip: int


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
        for move in self._moves:
            program = move.program  # raises an error for incompatible layouts here, not in the first plan
            if program.reinterprets and not reinterpret:
                check_element_types(program.src.geometry, program.dst.geometry)
        whole = (c for move in self._moves for c in move.program.src.components if c.form.opaque)
        self._moves_whole = next(whole, None)
        held = self.spans if not (src.layout.opaque and dst.layout.opaque) else (src.span_tokens, dst.span_tokens)
        if self._moves_whole is not None and held[0] != held[1]:
            what = "sub-blocks" if src.layout.opaque and dst.layout.opaque else "tokens"
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
        src, dst = own_block_ids(src_blocks, "src_blocks"), own_block_ids(dst_blocks, "dst_blocks")
        unit = self.unit_tokens
        count = count_units(src, dst, src_skip, dst_skip, (self.spans[0] // unit, self.spans[1] // unit))
        self._check_skips(src_skip, dst_skip)
        for name, ids, side in (
            ("src", src, self.src),
            ("dst", dst, self.dst),
        ):  # also checks ids of other ranks' turns
            wrong = np.flatnonzero((ids < 0) | (ids >= side.layout.num_blocks))
            if wrong.size:
                raise outside(name, ids, int(wrong[0]), side.layout.num_blocks)
        _check_once(dst)
        sides = _Tokens(src, src_skip * unit), _Tokens(dst, dst_skip * unit)
        plans = [move.plan(*sides, count * unit) for move in self._moves]
        if len(plans) == 1:
            return plans[0]
        plan = unite(plans)  # no two shares have a byte in common
        if self._aliased:
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

    def told(self) -> list[str]:
        """Return one line of words for each share."""
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
    """Yield the moves of a share: one; or several, if head axes are split so that no slice has exactly its heads."""
    whole = share._replace(heads=None)
    if share.heads is None:
        yield _Move(src, dst, whole, *_layouts(src, dst, whole))
        return
    for sliced in (None, dst, src):  # slicing one side is enough: compile moves the common heads
        try:
            layouts = _layouts(src, dst, whole if sliced is None else share, sliced)
        except LayoutError:
            continue
        if _hold_just(share.heads, layouts):
            yield _Move(src, dst, share, *layouts)
            return
    middle = (share.heads.start + share.heads.stop) // 2
    yield from _moves(src, dst, share._replace(heads=range(share.heads.start, middle)))
    headed = {c.part for side in (src, dst) for c in side.layout.components if c.form.headed}
    rest = share._replace(  # parts without heads are in the first half
        src_parts=tuple(part for part in share.src_parts if part in headed),
        dst_parts=tuple(part for part in share.dst_parts if part in headed),
        heads=range(middle, share.heads.stop),
    )
    yield from _moves(src, dst, rest)


def _hold_just(heads: range, layouts: tuple[KVLayout, KVLayout]) -> bool:
    """Return whether these are the common heads of two layouts. A layout without a head axis matches any one head."""
    named = [layout.heads for layout in layouts if any(c.form.headed for c in layout.components)]
    return not named or set(heads) == set(named[0]).intersection(*named)


def _layouts(src: Shard, dst: Shard, share: Share, sliced: Shard | None = None) -> tuple[KVLayout, KVLayout]:
    """Slice both layouts to the layers and parts of a share, and the layout of ``sliced`` to its heads."""
    return (
        _cut(src.layout, share.layers, share.src_parts, share.heads if sliced is src else None),
        _cut(dst.layout, share.layers, share.dst_parts, share.heads if sliced is dst else None),
    )


def _cut(layout: KVLayout, layers: tuple[int, ...], parts: tuple[str, ...], heads: range | None) -> KVLayout:
    """Slice a layout. If the slice is the whole layout, return the layout itself, so that its programs are reused."""
    if heads is None and set(layers) == set(layout.layers) and set(parts) == set(layout.parts):
        return layout
    return layout.slice(layers=layers, heads=heads, parts=parts)


class _Move:
    """A compiled share. It plans whole blocks if possible, otherwise stretches of tokens that both ranks hold."""

    def __init__(self, src: Shard, dst: Shard, share: Share, src_layout: KVLayout, dst_layout: KVLayout) -> None:
        self._share = share
        self._opaque = src_layout.opaque or dst_layout.opaque
        self._src = replace(src, layout=src_layout)
        self._dst = replace(dst, layout=dst_layout)
        # If only one side deals its tokens to ranks, and blocks of the other side hold whole rounds, then the rank's
        # tokens are a view of the other side, and whole blocks are planned.
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
        """Return the program of whole blocks; if whole blocks cannot be planned, that of the longest stretches."""
        return (
            compile_quietly(*self._whole, reinterpret=True)
            if self._whole is not None
            else self._of_stretches(self._stretch(0))
        )

    def plan(self, src: _Tokens, dst: _Tokens, tokens: int) -> Plan:
        """Plan the transfer of ``tokens`` tokens of the sequence."""
        own = self._cp if self._whole is not None else 1  # tokens of the sequence per token of this rank
        whole = self._whole is not None and not any(
            skip % self._period or skip // own % self.program.unit_tokens for skip in (src.skip, dst.skip)
        )
        if not whole:
            return self._plan_stretches(src, dst, tokens)
        unit = self.program.unit_tokens
        skips = src.skip // own // unit, dst.skip // own // unit
        if self._share.turn.ranks == 1:
            return self.program.plan(src.ids, dst.ids, *skips)
        count = len(dst.ids) if self._opaque else tokens // own // unit
        return self._plan_turns(src.ids, dst.ids, skips, count)

    def _plan_turns(self, src: Int64Array, dst: Int64Array, skips: tuple[int, int], count: int) -> Plan:
        """Plan the whole destination blocks of this source's turn, from the source units with the same tokens."""
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
        return compile_quietly(_split(self.program.src, unit), self.program.dst, reinterpret=True)

    def _stretch(self, skip: int) -> int:
        """Return the largest number of tokens that follow one another on both sides, in every block."""
        most = gcd(self._src.turn_tokens, self._dst.turn_tokens, skip)
        return stretch_of((self._src.layout.built, self._dst.layout.built), most)

    def _of_stretches(self, stretch: int) -> CopyProgram:
        if stretch not in self._stretches:
            self._stretches[stretch] = compile_quietly(
                *(_split(side.layout, stretch) for side in (self._src, self._dst)), reinterpret=True
            )
        return self._stretches[stretch]

    def _plan_stretches(self, src: _Tokens, dst: _Tokens, tokens: int) -> Plan:
        """Plan each stretch that both ranks hold, in the destination blocks of this source's turn."""
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
    """Return a view of a context-parallel rank's tokens in another layout's blocks; None if a block cuts a round."""
    if layout.block_tokens % rank.period:
        return None
    view = some_tokens(layout.built, rank.cp_rank, rank.cp_size, rank.interleave)
    return None if view is None else KVLayout(view, tensors=layout.tensors)


def _split(layout: KVLayout, tokens: int) -> KVLayout:
    view = split_blocks(layout.built, tokens)
    if view is None:  # not reached: stretch_of and compile raise an error before
        raise KVPlanError(f"blocks of {layout} cannot be split into {tokens} tokens")
    return KVLayout(view, tensors=layout.tensors)
