"""``python -m benchmarks.engines``: whole vLLM engines, ways of offloading in turn; prints tables and saves JSON."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engines.engine import GRAPHS
from benchmarks.engines.figures import different_tokens, faults, rows, steady
from benchmarks.engines.shapes import FULL, SHAPES, SMOKE, Work
from benchmarks.engines.turns import Run, Visit, phases
from benchmarks.engines.ways import DEFAULT, way_of
from benchmarks.gpu.environment import PACKAGES, gpu
from benchmarks.record import default_path, document, machine, save, table

SMOKE_WAYS = ("none", "kvplan", "kvplan-sync", "kvplan-layers")  # vLLM's own worker refuses the CPU


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line.

    >>> chosen = arguments_of(["--shapes", "8b", "--rounds", "3", "--held", "6000"])
    >>> chosen.shapes, chosen.work.rounds, chosen.work.held, chosen.work.prompts
    (('8b',), 3, (6000,), (10,))
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--shapes", type=_names, default=("8b", "gqa1"), help=f"of {','.join(SHAPES)}; default 8b,gqa1")
    parser.add_argument("--ways", type=_names, help=f"default {','.join(DEFAULT)}; also own-packed-sync and the like")
    parser.add_argument("--phases", type=_names, default=("short", "chats", "long"), help="of short,chats,long")
    parser.add_argument("--suffixes", type=_numbers, help="new tokens behind a prefix; default 1,128,512,2048")
    parser.add_argument("--held", type=_numbers, help="a short and a long prefix, in tokens; default 6000,28000")
    parser.add_argument("--block", type=int, metavar="TOKENS", help="tokens of a block; default 16")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--alone", type=int, default=1, metavar="TIMES",
                        help="start each engine so many times; each time it has all rounds")  # fmt: skip
    parser.add_argument("--graphs", choices=tuple(GRAPHS), default="piecewise",
                        help="CUDA graphs: of all steps, as by vLLM's default, or of decoding only")  # fmt: skip
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="take no new round after so long")  # fmt: skip
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results, none for --smoke")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: shows that it runs, and no more")
    chosen = parser.parse_args(arguments)
    chosen.work = work_for(chosen, parser)
    if chosen.smoke:
        chosen.shapes = ("tiny",)
    chosen.ways = chosen.ways or (SMOKE_WAYS if chosen.smoke else DEFAULT)
    for names, known in ((chosen.shapes, SHAPES), (chosen.phases, {phase.name for phase in phases(FULL)})):
        if not set(names) <= set(known):
            parser.error(f"unknown {', '.join(sorted(set(names) - set(known)))}; expected some of {', '.join(known)}")
    try:
        for name in chosen.ways:
            way_of(name)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def work_for(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> Work:
    """Return the sizes of a run."""
    work = SMOKE if chosen.smoke else FULL
    changed = {name: getattr(chosen, name) for name in ("suffixes", "held", "rounds", "block") if getattr(chosen, name)}
    if len(changed.get("held", work.held)) > len(work.prompts):
        parser.error(f"--held takes at most {len(work.prompts)} lengths")
    work = replace(work, **changed)
    if work.suffix not in work.suffixes:
        work = replace(work, suffix=work.suffixes[-1])
    return replace(work, prompts=work.prompts[: len(work.held)])


def starts(chosen: argparse.Namespace, usable: Sequence[str]) -> list[tuple[str, str, int]]:
    """Return what is started, in order: the shape, the way, and the number of its first round.

    Another way is the first one each time.

    >>> chosen = arguments_of(["--shapes", "8b", "--ways", "own,kvplan", "--alone", "2", "--rounds", "3"])
    >>> for start in starts(chosen, chosen.ways):
    ...     print(*start)
    8b own 0
    8b kvplan 0
    8b kvplan 3
    8b own 3
    """
    return [(shape, usable[(place + time) % len(usable)], time * chosen.work.rounds)
            for shape in chosen.shapes for time in range(chosen.alone) for place in range(len(usable))]  # fmt: skip


def measure(run: Run, chosen: argparse.Namespace) -> None:
    """Start every way for every shape, and measure each for its share of the time."""
    missing = {name: f"not installed: {way_of(name).needs}" for name in chosen.ways if way_of(name).missing}
    run.failed |= missing
    todo, until = (
        starts(chosen, [name for name in chosen.ways if name not in missing]),
        time.monotonic() + chosen.budget,
    )
    for place, (shape, way, first_round) in enumerate(todo):
        left = until - time.monotonic()
        if left < 0:
            run.failed[f"{shape}: {way}"] = "not measured: the time is over"
            continue
        Visit(run, shape, way, first_round).measure(time.monotonic() + left / (len(todo) - place))


def link_times(run: Run) -> dict[str, float]:
    """Return, by shape, the milliseconds of a token's bytes on the link."""
    rates = {shape: facts.get("link", 0.0) for shape, facts in run.facts.items()}
    return {shape: 1e3 * SHAPES[shape].token_nbytes / rate for shape, rate in rates.items() if rate}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all ways ran and every hit was one, 1 otherwise, 2 for usage or no GPU."""
    chosen = arguments_of(arguments)
    device, about = "cpu" if chosen.smoke else "cuda", dict[str, Any]()
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device: these benchmarks need one, or --smoke", file=sys.stderr)
            return 2
        about = gpu()
    started = machine() | {"gpu": about}
    output = chosen.output
    if output is None and not chosen.smoke:
        output = default_path("engines/engines", about["name"], *chosen.shapes)

    def report() -> None:
        if output is not None:
            made = rows(run.samples, link_times(run))
            save(output, document(
                made, scale=chosen.work, started=started, packages=("vllm", "lmcache", *PACKAGES), failed=run.failed,
                faults=faults(run.samples), tokens=different_tokens(run.samples), graphs=chosen.graphs,
                alone=chosen.alone, facts=run.facts, samples=run.samples,
            ))  # fmt: skip

    run = Run(chosen.work, device, chosen.graphs, chosen.phases, report)
    try:
        measure(run, chosen)
    finally:
        report()
    return conclude(run)


def conclude(run: Run) -> int:
    """Print tables and what went wrong; return the exit code."""
    print(table(rows(run.samples, link_times(run))))
    wrong = [*faults(run.samples), *different_tokens(run.samples)]
    for text in wrong:
        print(text)
    for what, why in run.failed.items():
        print(f"not measured: {what}: {why}", file=sys.stderr)
    print(f"left out, while the CPU was slow: {steady(run.samples)[1]}", file=sys.stderr)
    return 1 if run.failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
