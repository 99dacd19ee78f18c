"""``python -m benchmarks.engines.cuts``: groups of layers of kvplan's loads by layer, in turn in one engine.

Engines are started minutes apart, and the pace of a machine's CPU changes within seconds. Here one engine changes the
groups of layers, and the path, from hit to hit. Each turn has a hit of every kind, in random order. Hits of one turn
are compared, and the median over all turns counts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.engines.__main__ import PACKAGES, about
from benchmarks.engines.columns import SLOW
from benchmarks.engines.engine import Setup, environment, start
from benchmarks.engines.measures import Measures
from benchmarks.engines.rows import save
from benchmarks.engines.shapes import FULL, SHAPES, SMOKE
from benchmarks.engines.ways import way_of
from benchmarks.gpu.environment import versions
from benchmarks.record import document, machine
from kvplan.cli.arguments.values import positive
from kvplan.execute.gpu.selection import Choice, Selection
from kvplan.plan.layers import Cutting

WAY = "kvplan-layers-chunks"
# None: as a load is cut whose compute is not told, or as one whose compute the worker tells, if it knows it.
CUTS: Mapping[str, Cutting | None] = {"equal": None, "told": None, "doubling": Cutting(4, doubling=True),
                                      "whole": Cutting(1)}  # fmt: skip
KERNEL = "-kernel"
DEFAULT = ("equal", "told", "whole", "equal-kernel", "told-kernel")
_WARM_UPS, _RESAMPLES = 3, 1000


class Hit(NamedTuple):
    """One hit, and behind it one whose prefix is on the GPU already.

    Attributes:
        kind: name of the groups of layers.
        ttft, cpu: ms to the first token, and CPU time of all threads.
        pace: ms of a fixed piece of Python, the longer one of before and behind the hit.
        resident: ms to the first token where nothing is loaded.
    """

    kind: str
    ttft: float
    cpu: float
    pace: float
    resident: float


class Range(NamedTuple):
    """A median over turns, and the range of 95 % of its resamples."""

    median: float
    least: float
    most: float


def pairs(turns: Sequence[Sequence[Hit]], kind: str, base: str) -> list[tuple[Hit, Hit]]:
    """Return the two hits of each turn in which the CPU had the same pace for both, within a tenth; or of all turns."""
    every = [(by_kind[kind], by_kind[base]) for by_kind in ({hit.kind: hit for hit in turn} for turn in turns)]
    alike = [pair for pair in every if max(one.pace for one in pair) <= SLOW * min(one.pace for one in pair)]
    return alike or every


def paired(turns: Sequence[Sequence[Hit]], kind: str, base: str, compare: Callable[[Hit, Hit], float]) -> Range:
    """Return the median, over turns, of what a function says of a hit of one kind and the hit of another.

    Turns in which the CPU had different paces for the two hits are left out, unless there are no others.

    >>> turns = [[Hit("a", 2.0 * k, 1, 1, 1), Hit("b", 4.0 * k, 1, 1, 1)] for k in (1, 2, 3)]
    >>> paired(turns, "a", "b", lambda one, other: one.ttft / other.ttft)
    Range(median=0.5, least=0.5, most=0.5)
    """
    found = [compare(one, other) for one, other in pairs(turns, kind, base)]
    chance = random.Random(0)  # noqa: S311  # not secret, and the same each time
    medians = sorted(statistics.median(chance.choices(found, k=len(found))) for _ in range(_RESAMPLES))
    edge = _RESAMPLES // 40
    return Range(statistics.median(found), medians[edge], medians[-1 - edge])


# What is compared with the hit of the first kind in the same turn: ratios, and ms.
COMPARED: Mapping[str, Callable[[Hit, Hit], float]] = {
    "ttft, ratio": lambda one, other: one.ttft / other.ttft,
    "cpu, ratio": lambda one, other: one.cpu / other.cpu,
    "ttft, ms more": lambda one, other: one.ttft - other.ttft,
    "cpu, ms more": lambda one, other: one.cpu - other.cpu,
    "ttft over resident, ms more": lambda one, other: (one.ttft - one.resident) - (other.ttft - other.resident),
}


def summary(turns: Sequence[Sequence[Hit]]) -> list[dict[str, Any]]:
    """Return a row for each kind: medians, and comparisons with the first kind in the order of the defaults."""
    places = {kind: place for place, kind in enumerate(DEFAULT)}
    kinds = sorted({hit.kind for hit in turns[0]}, key=lambda kind: (places.get(kind, len(places)), kind))
    rows = []
    for kind in kinds:
        mine = [hit for turn in turns for hit in turn if hit.kind == kind]
        row: dict[str, Any] = {"kind": kind, "hits": len(mine)}
        row |= {name: round(statistics.median(getattr(hit, name) for hit in mine), 2) for name in Hit._fields[1:]}
        row["ttft over resident"] = round(statistics.median(hit.ttft - hit.resident for hit in mine), 2)
        if kind != kinds[0]:
            row["pairs"] = len(pairs(turns, kind, kinds[0]))
            for name, compare in COMPARED.items():
                row[name] = [round(value, 3) for value in paired(turns, kind, kinds[0], compare)]
        rows.append(row)
    return rows


@contextmanager
def changing(cut: dict[str, list[int]]) -> Iterator[list[str]]:
    """Let the first name of the yielded list say how loads by layer are cut, and by which path they go.

    Args:
        cut: for each name, the layers of each group of its latest load; written.
    """
    now_is, groups, choose = [DEFAULT[0]], Selection.groups, Selection.choose

    def sizes(self: Selection, plan: Any, *, by_layer: bool, beside_seconds: float | None = None) -> Cutting | None:
        kind = now_is[0].removesuffix(KERNEL)
        made = CUTS[kind]
        if not by_layer or made is None:
            told = beside_seconds if kind == "told" else None
            made = groups(self, plan, by_layer=by_layer, beside_seconds=told)
        if by_layer and made is not None:
            cut[now_is[0]] = made.sizes(len(plan.layers))
        return made

    def path(self: Selection, plan: Any, *, capturing: bool, groups: Cutting | None = None) -> Choice:
        if groups is not None and now_is[0].endswith(KERNEL):
            return Choice(self._paths["kernel"], None, pageable=False)
        return choose(self, plan, capturing=capturing, groups=groups)

    with mock.patch.object(Selection, "groups", sizes), mock.patch.object(Selection, "choose", path):
        yield now_is


def hit(measures: Measures, kind: str, number: int) -> Hit:
    """Serve a hit of the host, and one of the GPU."""
    work = measures.work
    (held,) = work.held
    loaded = measures.alone(held, work.suffix, 1, number)
    if loaded["cached"] != [held]:
        raise RuntimeError(f"{loaded['cached'][0]} tokens of a hit were held; {held} were stored")
    there = measures.resident(held, work.suffix, 1, number)
    seconds = [*loaded["ttft"], *loaded["cpus"], *loaded["pace"], *there["ttft"]]
    return Hit(kind, *(round(1e3 * each, 3) for each in seconds))


def turns_of(
    measures: Measures, kinds: Sequence[str], seconds: float, cut: dict[str, list[int]]
) -> Iterator[list[Hit]]:
    """Yield turns for some seconds, at least one; the kinds are warmed up first.

    Args:
        measures: the engine.
        kinds: names of what is compared.
        seconds: time for all turns.
        cut: for each kind, the layers of each group of its latest load; written.
    """
    chance, numbers = random.Random(1), count()  # noqa: S311  # as above
    with changing(cut) as now_is:

        def turn() -> list[Hit]:
            made = []
            for now_is[0] in chance.sample(kinds, len(kinds)):
                made.append(hit(measures, now_is[0], next(numbers)))
            return made

        for _ in range(_WARM_UPS):
            turn()
        end = time.monotonic() + seconds
        yield turn()
        while time.monotonic() < end:
            yield turn()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0, or 2 for usage or no GPU. The file is written after each turn, so a run may be cut short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.cuts", description=__doc__)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="gqa1")
    parser.add_argument("--held", type=int, default=6000, help="tokens that the host holds; default 6000")
    parser.add_argument("--new", type=positive, help="new tokens behind them; default 512")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=DEFAULT,
                        help=f"{', '.join(CUTS)}, each also with {KERNEL}; default {','.join(DEFAULT)}")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, where loads are not cut")
    chosen = parser.parse_args(arguments)
    if unknown := [kind for kind in chosen.kinds if kind.removesuffix(KERNEL) not in CUTS]:
        parser.error(f"unknown {', '.join(unknown)}; give some of {', '.join(CUTS)}, also with {KERNEL}")
    shape, base = ("tiny", SMOKE) if chosen.smoke else (chosen.shape, FULL)
    held = base.held[0] if chosen.smoke else chosen.held
    new = chosen.new or base.suffix
    work = replace(base, held=(held,), prompts=base.prompts[:1] if held < base.held[1] else base.prompts[1:],
                   suffix=new, suffixes=(new,))  # fmt: skip
    setup = Setup(shape, "kvplan-layers" if chosen.smoke else WAY, work, "cpu" if chosen.smoke else "cuda", "piecewise")
    os.environ.update(environment(way_of(setup.way), SHAPES[shape], work))
    if not chosen.smoke:
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device: this benchmark needs one, or --smoke", file=sys.stderr)
            return 2
    made = {**document([], scale=work, started=machine()), "shape": shape, "way": setup.way, "fields": Hit._fields}
    made["machine"]["gpu"] = about(setup.device)
    made["versions"] |= versions(PACKAGES)
    measures = Measures(start(setup), work)
    measures.fill(held)
    turns: list[list[Hit]] = []
    cut: dict[str, list[int]] = {}
    for turn in turns_of(measures, chosen.kinds, chosen.seconds, cut):
        turns.append(turn)
        if chosen.out is not None:
            save(chosen.out, {**made, "groups": cut, "rows": summary(turns), "samples": turns})
    for row in summary(turns):
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of an engine may outlive it
