"""``python -m benchmarks.engines``: whole vLLM engines, ways of offloading in turn; prints tables and saves JSON."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engines.columns import different_tokens, faults, steady, summary
from benchmarks.engines.engine import GRAPHS
from benchmarks.engines.rows import rows, save, tables
from benchmarks.engines.shapes import FULL, SHAPES, SMOKE, Work
from benchmarks.engines.turns import Batch, Run, note, phases
from benchmarks.engines.ways import DEFAULT, batches, way_of
from benchmarks.gpu.environment import gpu, versions
from benchmarks.record import document, machine

SMOKE_WAYS = ("none", "kvplan", "kvplan-sync", "kvplan-layers")  # vLLM's own worker refuses the CPU
RESULTS = Path(__file__).parents[1] / "results" / "engines"
PACKAGES = ("vllm", "torch", "triton", "lmcache")


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
    parser.add_argument(
        "--suffixes", type=_numbers, help="numbers of new tokens behind a prefix; default 1,128,512,2048"
    )
    parser.add_argument("--held", type=_numbers, help="a short and a long prefix, in tokens; default 6000,28000")
    parser.add_argument("--block", type=int, metavar="TOKENS", help="tokens of a block; default 16")
    parser.add_argument("--rounds", type=int, help="default 5")
    parser.add_argument("--at-once", type=int, help="engines side by side; by default, what fits 139 GiB")
    parser.add_argument(
        "--alone", type=int, default=0, metavar="TIMES",
        help="start each engine so many times, alone on the GPU; each time it has all rounds",
    )  # fmt: skip
    parser.add_argument(
        "--graphs", choices=tuple(GRAPHS), default="piecewise",
        help="CUDA graphs: of all steps, as by vLLM's default, or of decoding only; default piecewise",
    )  # fmt: skip
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="take no new round after so long"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file; by default benchmarks/results/engines-<gpu>.json, none for --smoke"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model on the CPU: shows that it runs, and nothing else"
    )
    chosen = parser.parse_args(arguments)
    if chosen.alone < 0:
        parser.error(f"--alone is {chosen.alone}; give how often each engine is started, or 0 for engines side by side")
    chosen.work = work_of(chosen, parser)
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


def work_of(chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> Work:
    """Return the sizes of a run."""
    work = SMOKE if chosen.smoke else FULL
    given = {name: getattr(chosen, name) for name in ("suffixes", "held", "rounds", "block") if getattr(chosen, name)}
    if len(given.get("held", work.held)) > len(work.prompts):
        parser.error(f"--held takes at most {len(work.prompts)} lengths")
    work = replace(work, **given)
    if work.suffix not in work.suffixes:
        work = replace(work, suffix=work.suffixes[-1])
    return replace(work, prompts=work.prompts[: len(work.held)])


def about(device: str) -> dict[str, Any]:
    """Return facts of the GPU, from a run's beginning."""
    return {} if device == "cpu" else gpu()


def default_path(name: str, shapes: Sequence[str]) -> Path:
    """Return the file of a result. A run of some shapes has a file of its own.

    >>> default_path("NVIDIA H200", ("8b", "gqa1")).name, default_path("NVIDIA H200", ("mla",)).name
    ('engines-nvidia-h200.json', 'engines-nvidia-h200-mla.json')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    some = () if tuple(shapes) == ("8b", "gqa1") else shapes
    return RESULTS / f"{'-'.join(['engines', slug, *some])}.json"


def starts(chosen: argparse.Namespace, usable: Sequence[str]) -> list[tuple[str, int, list[str], int]]:
    """Return what is started, in order: the shape, the batch's number, its ways, and the number of its first round.

    Engines that are alone are one batch, whose ways are started in turn; another way is the first one each time.

    >>> chosen = arguments_of(["--shapes", "8b", "--ways", "own,kvplan", "--alone", "2", "--rounds", "3"])
    >>> for start in starts(chosen, chosen.ways):
    ...     print(*start)
    8b 0 ['own'] 0
    8b 0 ['kvplan'] 0
    8b 0 ['kvplan'] 3
    8b 0 ['own'] 3
    """
    if chosen.alone:
        return [(shape, 0, [usable[(place + time) % len(usable)]], time * chosen.work.rounds)
                for shape in chosen.shapes for time in range(chosen.alone) for place in range(len(usable))]  # fmt: skip
    return [(shape, number, ways, 0) for shape in chosen.shapes
            for number, ways in enumerate(batches(usable, chosen.at_once or SHAPES[shape].at_once))]  # fmt: skip


def measure(run: Run, chosen: argparse.Namespace, device: str) -> None:
    """Start the batches of every shape one after another, and measure each for its share of the time."""
    usable = []
    for name in chosen.ways:
        if way_of(name).missing:
            run.failed[name] = f"not installed: {way_of(name).needs}"
        else:
            usable.append(name)
    todo = starts(chosen, usable)
    for place, (shape, number, ways, first_round) in enumerate(todo):
        ends = run.left() / (len(todo) - place)
        began = run.left()
        if began < 0:
            run.failed[f"{shape}: batch {number + 1}"] = "not measured: the time is over"
            continue
        batch = Batch(run, shape, number, ways, chosen.work, device, chosen.graphs, first_round)
        try:
            batch.measure(chosen.phases, ends - (began - run.left()))
        finally:
            batch.close()


def made_of(run: Run, chosen: argparse.Namespace, started: dict[str, Any], gpu: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON document of a run."""
    made = document(rows(summary(run.samples)), scale=chosen.work, started=started)
    made["machine"]["gpu"] = gpu
    made["versions"] |= versions(PACKAGES)
    return {**made, "failed": run.failed, "faults": faults(run.samples), "tokens": different_tokens(run.samples),
            "graphs": chosen.graphs, "alone": bool(chosen.alone), "facts": run.facts,
            "samples": run.samples}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all ways ran and every hit was one, 1 otherwise, 2 for usage or no GPU."""
    chosen = arguments_of(arguments)
    device = "cpu" if chosen.smoke else "cuda"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device: these benchmarks need one, or --smoke", file=sys.stderr)
            return 2
    started, gpu = machine(), about(device)
    output = chosen.out
    if output is None and not chosen.smoke:
        output = default_path(gpu["name"], chosen.shapes)

    def report(run: Run) -> None:
        if output is not None:
            save(output, made_of(run, chosen, started, gpu))

    run = Run(chosen.budget, report)
    try:
        measure(run, chosen, device)
    finally:
        report(run)
    return conclude(run, output)


def conclude(run: Run, output: Path | None) -> int:
    """Print tables and what went wrong; return the exit code."""
    print(tables(run.samples, run.facts))
    wrong = [*faults(run.samples), *different_tokens(run.samples)]
    for text in wrong:
        print(text)
    for what, why in run.failed.items():
        print(f"not measured: {what}: {why}", file=sys.stderr)
    print(f"left out: {steady(run.samples)}, while the CPU was slow", file=sys.stderr)
    if output is not None:
        note(f"saved {output}")
    return 1 if run.failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
