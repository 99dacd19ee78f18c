"""Compile two layouts into a copy program by five passes over plain integers.

The passes are match, refine, coalesce, fuse and analyse. Each pass takes and returns plain data. :func:`passes` keeps
the result of each pass, and :meth:`kvplan.CopyProgram.explain` prints these results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import gcd, prod
from typing import NamedTuple

from kvplan.base.files import LIMITS
from kvplan.errors import IncompatibleLayoutsError
from kvplan.layout.components import Component, Form, Geometry
from kvplan.layout.strides import (
    Int64Array,
    Loop,
    Piece,
    check_refined,
    coalesce,
    extent,
    offset,
    offsets_of,
    refine,
)
from kvplan.program.matching import Pair, match
from kvplan.program.program import BlockAxis, Program, Run, RunGroup


class Shape(NamedTuple):
    """All pairs of one shape, and what copies one unit of each pair, with offsets from the components' addresses.

    Attributes:
        pairs: the pairs.
        boxes: copies of single bytes, as the second pass makes them: nested loops.
        runs: the same copies after the third pass.
    """

    pairs: tuple[Pair, ...]
    boxes: tuple[Run, ...]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Passes:
    """The result of each pass."""

    pairs: tuple[Pair, ...]
    unit_tokens: int
    shapes: tuple[Shape, ...]
    program: Program


@lru_cache(maxsize=128)
def compile_geometry(src: Geometry, dst: Geometry) -> Program:
    """Compile two layouts; the program is cached by value and keeps no memory alive."""
    return passes(src, dst).program


def passes(src: Geometry, dst: Geometry) -> Passes:
    """Run all passes and keep the result of each.

    Raises:
        IncompatibleLayoutsError: one side lacks content of the other, or their blocks have no common unit.
    """
    pairs = match(src, dst)
    unit_tokens = choose_unit(pairs, src.block_tokens, dst.block_tokens)
    units = (src.block_tokens // unit_tokens, dst.block_tokens // unit_tokens)
    shapes = tuple(Shape(alike, boxes, tuple(map(coalesced, boxes))) for alike, boxes in refine_pairs(pairs, units))
    groups = fuse(shapes, units, (src.num_blocks, dst.num_blocks))
    opaque = all(pair.src.form.opaque and pair.dst.form.opaque for pair in pairs)
    return Passes(pairs, unit_tokens, shapes, Program(unit_tokens, *units, groups, opaque))


# ---- pass 2: refine ----------------------------------------------------------------------------------------------


def choose_unit(pairs: tuple[Pair, ...], src_tokens: int, dst_tokens: int) -> int:
    """Return the most token slots per unit that divide both blocks, hold whole sub-blocks and repeat evenly.

    If all content is opaque, the number counts sub-blocks.

    Raises:
        IncompatibleLayoutsError: opaque blocks or sub-blocks hold different numbers of tokens.
    """
    sides = [(pair.src, src_tokens) for pair in pairs], [(pair.dst, dst_tokens) for pair in pairs]
    for (a, _), (b, _) in zip(*sides, strict=True):
        if (a.form.opaque or b.form.opaque) and (
            extent(a.form.token) * dst_tokens != extent(b.form.token) * src_tokens
        ):
            raise _no_common_subblock(a, b, src_tokens, dst_tokens)
    largest = gcd(src_tokens, dst_tokens)
    axes = {(component.form.token, tokens) for side in sides for component, tokens in side}
    spread = [(offsets_of(axis), tokens) for axis, tokens in axes]
    for unit in range(largest, 0, -1):
        if largest % unit == 0 and all(_holds_whole(offsets, unit, tokens) for offsets, tokens in spread):
            return unit
    raise IncompatibleLayoutsError(
        f"blocks of {src_tokens} tokens in the source and {dst_tokens} in the destination have no unit that holds "
        "whole sub-blocks and has the same layout at every place in a block"
    )


def _no_common_subblock(a: Component, b: Component, src_tokens: int, dst_tokens: int) -> IncompatibleLayoutsError:
    src, dst = extent(a.form.token), extent(b.form.token)
    return IncompatibleLayoutsError(
        f"{a} moves whole blocks: a block of {src_tokens} tokens is {src} sub-blocks in the source, and one of "
        f"{dst_tokens} is {dst} in the destination; they have no common unit: a sub-block holds equally many tokens "
        "on both sides. Where a block holds several opaque ones, name their axis: subblock"
    )


def _holds_whole(offsets: Int64Array, unit: int, tokens: int) -> bool:
    """Tell whether units are whole coordinates of an axis, with the same offsets in every unit.

    Args:
        offsets: bytes from the first coordinate of the axis to each coordinate, in one block.
        unit: token slots per unit.
        tokens: token slots per block.
    """
    held = unit * offsets.size  # coordinates per unit, times the tokens of a block
    return held % tokens == 0 and _repeats(offsets, held // tokens)


def _repeats(offsets: Int64Array, unit: int) -> bool:
    """Tell whether every stretch of ``unit`` coordinates has the same offsets from its first coordinate."""
    stretches = offsets.reshape(-1, unit)
    return bool((stretches - stretches[:, :1] == stretches[0]).all())


def refine_pairs(pairs: tuple[Pair, ...], units: tuple[int, int]) -> Iterator[tuple[tuple[Pair, ...], tuple[Run, ...]]]:
    """Refine tokens, heads and content of both sides to common loops, once for each pair of forms.

    Yields all pairs of one shape, and the copies of single bytes of one unit of each pair.

    Args:
        pairs: the pairs of the first pass.
        units: units per block of the source and of the destination.
    """
    shapes: dict[tuple[int, int, int, int, int], list[Pair]] = defaultdict(list)
    for pair in pairs:
        shapes[id(pair.src.form), id(pair.dst.form), pair.src_dim, pair.dst_dim, pair.nbytes].append(pair)
    for alike in shapes.values():
        pair = alike[0]
        a, b = pair.src.form, pair.dst.form
        tokens = extent(a.token) // units[0]  # or sub-blocks, per unit
        src_head = pair.heads.start - a.head_start if a.headed and b.headed else 0
        dst_head = pair.heads.start - b.head_start if a.headed and b.headed else 0
        axes = (
            refine(a.token, 0, b.token, 0, tokens),
            refine(a.head, src_head, b.head, dst_head, len(pair.heads)),
            refine(a.dim, pair.src_dim, b.dim, pair.dst_dim, pair.nbytes),
        )
        check_refined(prod(map(len, axes)))
        yield tuple(alike), tuple(_box(pieces) for pieces in product(*axes))


def _box(pieces: tuple[Piece, ...]) -> Run:
    loops = tuple(loop for piece in pieces for loop in piece.loops)
    return Run(sum(piece.src for piece in pieces), sum(piece.dst for piece in pieces), 1, loops)


# ---- pass 4: fuse ------------------------------------------------------------------------------------------------


def fuse(shapes: tuple[Shape, ...], units: tuple[int, int], num_blocks: tuple[int, int]) -> tuple[RunGroup, ...]:
    """Place the runs of every pair, merge runs that are adjacent on both sides, fold runs that are equally spaced."""
    check_copies(sum(len(shape.pairs) * len(shape.runs) for shape in shapes), LIMITS.listed, "runs")
    placed: dict[tuple[BlockAxis, BlockAxis], list[Run]] = defaultdict(list)
    for shape in shapes:
        forms = (shape.pairs[0].src.form, shape.pairs[0].dst.form)
        axes = [_block_axis(*side) for side in zip(forms, units, num_blocks, strict=True)]
        runs = placed[axes[0], axes[1]]
        for pair in shape.pairs:
            for run in shape.runs:
                runs.append(run._replace(src=run.src + pair.src.address, dst=run.dst + pair.dst.address))
    groups = []
    for (src, dst), runs in placed.items():
        fused = merge_and_fold(runs)
        check_copies(sum(unrolled(run) for run in fused), LIMITS.listed, "runs")
        check_copies(sum(run.copies for run in fused), LIMITS.copies)
        fused = limit_loops(fused)
        src_base, dst_base = min(run.src for run in fused), min(run.dst for run in fused)
        moved = [run._replace(src=run.src - src_base, dst=run.dst - dst_base) for run in fused]
        groups.append(RunGroup(src, dst, src_base, dst_base, tuple(sorted(moved, key=lambda run: (run.dst, run.src)))))
    return tuple(groups)


def check_copies(count: int, most: int, noun: str = "copies") -> None:
    """Check that what one unit takes fits in memory.

    Raises:
        IncompatibleLayoutsError: it takes too many copies, or runs of a table.
    """
    if count > most:
        raise IncompatibleLayoutsError(
            f"one unit would take {count:,} {noun}, and at most {most:,} are compiled; give smaller blocks, or "
            "layouts whose orders differ less"
        )


def _block_axis(form: Form, units: int, num_blocks: int) -> BlockAxis:
    each = extent(form.token) // units
    offsets = tuple(offset(form.token, unit * each) for unit in range(units))
    return BlockAxis(form.block, form.table, offsets, num_blocks)


def merge_and_fold(runs: list[Run]) -> list[Run]:
    """Merge adjacent runs and fold equally spaced runs until the result stays the same.

    >>> merge_and_fold([Run(0, 0, 8, ()), Run(8, 8, 8, ()), Run(100, 50, 16, ()), Run(200, 100, 16, ())])
    [Run(src=0, dst=0, nbytes=16, loops=((3, 100, 50),))]
    """
    while True:
        before = runs
        runs = list(map(coalesced, _fold(_merge(runs))))
        if runs == before:
            return runs


def coalesced(run: Run) -> Run:
    """Drop loops of one step, and merge loops whose copies touch on both sides.

    >>> coalesced(Run(0, 0, 1, ((2, 64, 128), (16, 1, 1))))
    Run(src=0, dst=0, nbytes=16, loops=((2, 64, 128),))
    """
    nbytes, loops = coalesce(run.nbytes, run.loops)
    return Run(run.src, run.dst, nbytes, loops)


def _merge(runs: list[Run]) -> list[Run]:
    """Join runs of equal loops if one run begins, on both sides, at the end of the other run."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.loops, run.dst - run.src, run.src)):
        if merged:
            last = merged[-1]
            if last.loops == run.loops and (last.src + last.nbytes, last.dst + last.nbytes) == (run.src, run.dst):
                merged[-1] = last._replace(nbytes=last.nbytes + run.nbytes)
                continue
        merged.append(run)
    return merged


def _fold(runs: list[Run]) -> list[Run]:
    """Turn equally spaced runs of equal shape into one run with one more loop."""
    shapes: dict[tuple[int, tuple[Loop, ...]], list[Run]] = defaultdict(list)
    for run in runs:
        shapes[run.nbytes, run.loops].append(run)
    folded: list[Run] = []
    for alike in shapes.values():
        lines = list(_lines(sorted(alike, key=lambda run: (run.src, run.dst))))
        even = len({step for _, step in lines}) == len({len(line) for line, _ in lines}) == 1
        for line, step in lines:
            # Two runs are always equally spaced: a lone pair is folded only if all other runs make equal pairs.
            if len(line) > 2 or (even and len(line) > 1):
                folded.append(line[0]._replace(loops=((len(line), *step), *line[0].loops)))
            else:
                folded += line
    return folded


def _lines(runs: list[Run]) -> Iterator[tuple[list[Run], tuple[int, int]]]:
    """Cut a sorted list of runs, from the front, into its longest equally spaced stretches; each with its step."""
    steps = [(b.src - a.src, b.dst - a.dst) for a, b in pairwise(runs)]
    at = 0
    while at < len(runs):
        end = at + 1
        while end < len(runs) and steps[end - 1] == steps[at]:
            end += 1
        yield runs[at:end], steps[at] if end > at + 1 else (0, 0)
        at = end


def unrolled(run: Run) -> int:
    """Return the number of runs that :func:`limit_loops` makes of one run.

    >>> unrolled(Run(0, 0, 8, ((3, 100, 200), (4, 20, 40), (2, 9, 9))))
    2
    """
    return prod(sorted(count for count, _, _ in run.loops)[:-2])


def limit_loops(runs: list[Run]) -> list[Run]:
    """Unroll all but the two longest loops of every run."""
    limited: list[Run] = []
    for run in runs:
        longest = sorted(range(len(run.loops)), key=lambda k: -run.loops[k][0])
        kept = tuple(run.loops[k] for k in sorted(longest[:2]))
        rest = [run.loops[k] for k in longest[2:]]
        for steps in product(*(range(count) for count, _, _ in rest)):
            src = run.src + sum(step * loop[1] for step, loop in zip(steps, rest, strict=True))
            dst = run.dst + sum(step * loop[2] for step, loop in zip(steps, rest, strict=True))
            limited.append(Run(src, dst, run.nbytes, kept))
    return limited
