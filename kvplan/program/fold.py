"""Steps of the fourth pass: merge runs that touch, fold runs that are equally spaced, keep two loops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from kvplan.layout.strides import Loop, coalesce
from kvplan.program.program import Run


def merge_and_fold(runs: list[Run]) -> list[Run]:
    """Merge adjacent runs and fold equally spaced runs until the result stays the same.

    >>> merge_and_fold([Run(0, 0, 8, ()), Run(8, 8, 8, ()), Run(100, 50, 16, ()), Run(200, 100, 16, ())])
    [Run(src=0, dst=0, nbytes=16, loops=((3, 100, 50),))]
    """
    while True:
        before = runs
        runs = [run._replace(nbytes=nbytes, loops=loops)
                for run in _fold(_merge(runs)) for nbytes, loops in (coalesce(run.nbytes, run.loops),)]  # fmt: skip
        if runs == before:
            return runs


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


class _Line(NamedTuple):
    """Equally spaced runs: the first run, their number, and the steps in bytes."""

    first: Run
    length: int
    src_step: int
    dst_step: int


def _fold(runs: list[Run]) -> list[Run]:
    """Turn equally spaced runs of equal shape into one run with one more loop."""
    shapes: dict[tuple[int, tuple[Loop, ...]], list[Run]] = defaultdict(list)
    for run in runs:
        shapes[run.nbytes, run.loops].append(run)
    folded: list[Run] = []
    for alike in shapes.values():
        lines = list(_lines(sorted(alike, key=lambda run: (run.src, run.dst))))
        even = len({line[1:] for line in lines}) == 1
        for line in lines:
            # Two runs are always equally spaced: a lone pair is folded only if all other runs make equal pairs.
            if line.length > 2 or (even and line.length > 1):
                loop = (line.length, line.src_step, line.dst_step)
                folded.append(line.first._replace(loops=(loop, *line.first.loops)))
            else:
                folded.extend(
                    line.first._replace(src=line.first.src + k * line.src_step, dst=line.first.dst + k * line.dst_step)
                    for k in range(line.length)
                )
    return folded


def _lines(runs: list[Run]) -> Iterator[_Line]:
    """Cut a sorted list of runs, from the front, into its longest equally spaced stretches."""
    at = 0
    while at < len(runs):
        first, count, step = runs[at], 1, (0, 0)
        if at + 1 < len(runs):
            step = (runs[at + 1].src - first.src, runs[at + 1].dst - first.dst)
            count = 2
            while at + count < len(runs):
                last, following = runs[at + count - 1], runs[at + count]
                if (following.src - last.src, following.dst - last.dst) != step:
                    break
                count += 1
        yield _Line(first, count, *step)
        at += count


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
