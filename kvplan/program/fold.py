"""Steps of the fourth pass: merge runs that touch, fold runs that are equally spaced, keep two loops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product
from math import prod

from kvplan.layout.strides import Loop, coalesce
from kvplan.program.program import Run


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
