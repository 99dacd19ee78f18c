"""Show the result of each pass of the compiler as text, for readers who know strides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from math import gcd

from kvplan.base.numbers import number_ranges
from kvplan.layout.strides import Factors, Loop
from kvplan.program.matching import Pair, heads_of
from kvplan.program.passes import Passes
from kvplan.program.program import BlockAxis, Program, Run

MAX_ROWS = 8  # lines of one kind; further lines are only counted
TITLE = 13  # columns
LEAST_WIDTH = 40
_TOGETHER = re.compile(r"(?<=\d) (?=B\b)|(?<=\bx) (?=\d)| (?=\|)")  # 8,192 B; x 80(...); a bar ends its line


def explain(made: Passes, sides: tuple[str, str], width: int | None = None, unwritten: Sequence[str] = ()) -> str:
    """Return the text of a copy program after each pass; see :meth:`kvplan.CopyProgram.explain`.

    Args:
        made: the result of each pass.
        sides: the source and the destination in words.
        width: most characters of a line.
        unwritten: lines about content of the destination that the program does not write.
    """
    sections = (
        ("source", iter([sides[0]])),
        ("destination", iter([sides[1]])),
        ("1 match", chain(_match(made.pairs), unwritten)),
        ("2 refine", _refine(made)),
        ("3 coalesce", _coalesce(made)),
        ("4 fuse", _fuse(made.program)),
        ("5 analyse", _analyse(made.program)),
    )
    lines: list[str] = []
    for title, body in sections:
        for k, line in enumerate(body):
            lines += fitted(f"{title if k == 0 else '':<{TITLE}}{line}", width, TITLE + 2)
    return "\n".join(lines) + "\n"


def fitted(line: str, width: int | None, indent: int) -> list[str]:
    """Break a line into lines of at most ``width`` characters, the later ones indented; with None, into one line.

    A number and its unit stay together. Widths below 40 count as 40.

    >>> fitted("fuse  +0|+0: 512 B x 16(+512|+40,960) 80(+18,874,368|+512)", 44, 8)
    ['fuse  +0|+0: 512 B x 16(+512|+40,960)', '        80(+18,874,368|+512)']
    """
    if width is None or len(line) <= width:
        return [line]
    from textwrap import wrap

    held = _TOGETHER.sub("\N{NO-BREAK SPACE}", line)
    wrapped = wrap(held, max(width, LEAST_WIDTH), subsequent_indent=" " * indent, break_on_hyphens=False)
    return [part.replace("\N{NO-BREAK SPACE}", " ") for part in wrapped]


def _match(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield lines about the pairs of the first pass: their number, layers and parts, and the heads of each side."""
    layers = number_ranges(sorted({pair.layer for pair in pairs}))
    parts = ", ".join(dict.fromkeys(pair.part for pair in pairs))
    yield f"{len(pairs):,} pair{'s' * (len(pairs) != 1)}: layers {layers}; parts {parts}"
    for heads, src, dst in heads_of(pairs):
        moved, here, there = map(number_ranges, (heads, src, dst))
        yield f"heads {moved} of {here} in the source, {there} in the destination"


def _refine(made: Passes) -> Iterator[str]:
    program = made.program
    yield f"unit of {program.unit_words}; {program.src_units} a source block, {program.dst_units} a destination block"
    sides = (("src_skip", program.src_units), ("dst_skip", program.dst_units))
    skips = "; ".join(f"{name} is 0{f' to {units - 1}' * (units > 1)}" for name, units in sides)
    yield f"skips count units{'' if program.opaque else ', not tokens'}: {skips}"
    shared = gcd(program.src_units, program.dst_units)
    if shared > 1:
        largest = shared * program.unit_tokens
        yield f"blocks of both sides are multiples of {largest} tokens: a split token axis is cut unevenly by that"
    yield "loops are count(+source stride|+destination stride), in bytes, outermost first"
    rows = [f"{len(shape.pairs)} x {_loops(box.loops)}" for shape in made.shapes for box in shape.boxes]
    yield from _some(rows)


def _coalesce(made: Passes) -> Iterator[str]:
    yield from _some([f"{len(shape.pairs)} x {_run(run)}" for shape in made.shapes for run in shape.runs])


def _fuse(program: Program) -> Iterator[str]:
    for number, group in enumerate(program.groups):
        if len(program.groups) > 1:
            yield f"group {number} of {len(program.groups)}: {group.nbytes:,} B a unit"
        yield from _some([f"+{run.src:,}|+{run.dst:,}: {_run(run)}" for run in group.runs])


def _analyse(program: Program) -> Iterator[str]:
    yield f"{program.unit_nbytes:,} B a unit in {run_times(program.runs, *program.run_nbytes)}"
    for side, name in (("src", "source"), ("dst", "destination")):
        yield f"{name} extents a unit: {run_times(*program.extents(side))}"
    yield f"alignment {program.alignment:,} B"
    for group in program.groups:
        yield f"source units:      {_axis(group.src, group.src_base)}"
        yield f"destination units: {_axis(group.dst, group.dst_base)}"
        (src_low, src_high), (dst_low, dst_high) = group.hulls
        yield f"a unit reaches {src_high - src_low:,} B in the source, {dst_high - dst_low:,} B in the destination"


def _axis(axis: BlockAxis, base: int) -> str:
    where = f"each block looked up in a table of {axis.num_blocks}" if axis.table else f"block {_factors(axis.factors)}"
    units = f", unit {number_steps(axis.units)}" if len(axis.units) > 1 else ""
    return f"{base:#x} + {where}{units}"


def _factors(factors: Factors) -> str:
    return " ".join(f"{count}(+{stride:,})" for count, stride in factors) or "0"


def number_steps(offsets: Sequence[int]) -> str:
    """Write offsets as a count and a step if they are evenly spaced, otherwise one by one.

    >>> number_steps((0, 512, 1024)), number_steps((0, 512, 4096))
    ('3(+512)', '+0 +512 +4,096')
    """
    steps = {b - a for a, b in pairwise(offsets)}
    if len(steps) == 1:
        return f"{len(offsets)}(+{steps.pop():,})"
    return " ".join(f"+{offset:,}" for offset in offsets)


def _loops(loops: Sequence[Loop]) -> str:
    return " ".join(f"{count}(+{src:,}|+{dst:,})" for count, src, dst in loops) or "1 byte"


def _run(run: Run) -> str:
    return f"{run.nbytes:,} B" + (f" x {_loops(run.loops)}" if run.loops else "")


def run_times(count: int, least: int, most: int) -> str:
    """Write a number of copies and their sizes: ``160 x 8,192 B``.

    >>> run_times(160, 8192, 8192), run_times(3, 64, 128)
    ('160 x 8,192 B', '3 of 64 B to 128 B')
    """
    return f"{count:,} x {most:,} B" if least == most else f"{count:,} of {least:,} B to {most:,} B"


def _some(rows: Sequence[str]) -> Iterator[str]:
    """Yield at most :data:`MAX_ROWS` rows, with equal neighbours counted."""
    counted: list[tuple[str, int]] = []
    for row in rows:
        if counted and counted[-1][0] == row:
            counted[-1] = (row, counted[-1][1] + 1)
        else:
            counted.append((row, 1))
    for row, times in counted[:MAX_ROWS]:
        yield row if times == 1 else f"{row}  ({times} alike)"
    if len(counted) > MAX_ROWS:
        yield f"... and {len(counted) - MAX_ROWS} more"
