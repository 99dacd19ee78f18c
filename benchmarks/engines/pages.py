"""The tables of whole engines in the documents, from recorded runs; ``python -m benchmarks.readme`` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.engines import limits_page
from benchmarks.engines.columns import steady, summary
from benchmarks.engines.picture import OUT as PICTURE
from benchmarks.engines.rows import tables

ROOT = Path(__file__).parents[2]
LIMITS_PAGE = ROOT / "benchmarks" / "engines" / "README.md"
PAGE = ROOT / "docs" / "evidence" / "first-token.md"
MARKS = "<!-- engine numbers -->", "<!-- end of engine numbers -->"
PICTURE_MARKS = "<!-- engine trace -->", "<!-- end of engine trace -->"
RESULTS = tuple(
    ROOT / "benchmarks" / "results" / "engines" / f"engines-nvidia-h200-{run}.json"
    for run in (
        "8b-alone",
        "8b-short-ends",
        "8b-long-one-stream",
        "8b-two-gpus",
        "8b-blocks-of-64",
        "8b-blocks-of-64-again",
        "8b-alone-async",
        "8b",
        "8b-simple",
        "gqa1-told",
        "gqa1-told-again",
        "gqa1-suffixes",
        "gqa1-steady",
        "gqa1-rare-looks",
        "gqa1-both-layouts",
        "gqa1-two-gpus",
        "gqa1-alone",
        "gqa1",
        "mla",
    )
)
FIRST_CALL = (
    "In this run, loads of a step began at `handle_preemptions`. vLLM's model runner for GPUs calls it just before "
    "`start_load_kv`, where they begin today."
)
TWO_GPUS = "The other shape ran at the same time on another GPU of this machine, which has 32 cores."
EVEN = "Long loads had up to 32 groups of layers of the same size."
TWO_PACES = (
    "The CPU changed between two paces every few seconds, and only times of one request are sorted by its pace. All "
    "other figures of this run tell more about the CPU than about the ways."
)
TOLD = "vLLM's worker tells the executor how long its step computes from this run on."
EARLIER = {  # what else a reader must know of a result
    "engines-nvidia-h200-8b-alone": f"{FIRST_CALL} {EVEN}",
    "engines-nvidia-h200-8b-short-ends": "The groups at both ends of a load are short from this run on.",
    "engines-nvidia-h200-8b-long-one-stream": (
        "A load by layers has one stream of kernels from this run on. The machine's CPU was slow: of the requests that "
        "are counted, few are left."
    ),
    "engines-nvidia-h200-8b-blocks-of-64": f"{FIRST_CALL} {EVEN}",
    "engines-nvidia-h200-8b-alone-async": "This run is older than the first one: loads had 8 groups of layers at most.",
    "engines-nvidia-h200-8b-two-gpus": TWO_GPUS,
    "engines-nvidia-h200-gqa1-alone": (
        "The machine's CPU changed its pace during this run: within one way and one round, first tokens took from 24 "
        "to 46 ms. With 80 layers, the launches bind the time, so the ways cannot be told apart. Loads had 8 groups of "
        "layers of the same size."
    ),
    "engines-nvidia-h200-gqa1-two-gpus": TWO_GPUS,
    "engines-nvidia-h200-mla": (
        "Of the chats, only one way has a round at the CPU's quick pace, so they compare nothing."
    ),
    "engines-nvidia-h200-8b-blocks-of-64-again": (
        "The machine of `gqa1-told-again`, and its CPU was slow still. A load by layers has one stream of kernels."
    ),
    "engines-nvidia-h200-gqa1-told": (
        f"{TOLD} The machine's CPU was at its quick pace for the first third of the run, and then mostly at its slow "
        "one. No round of kvplan's chats is left."
    ),
    "engines-nvidia-h200-gqa1-told-again": (
        "The same machine, three minutes after the run before. Its CPU was slow most of the time, so of the requests "
        "that are counted few are left, and within one way they differ by half."
    ),
    "engines-nvidia-h200-gqa1-suffixes": (
        "The same machine between the two runs before, on a CPU that was mostly slow. In the first round of each way, "
        "some requests with 2,048 new tokens found 800 held tokens in place of 6,000."
    ),
    "engines-nvidia-h200-gqa1-rare-looks": (
        f"{TWO_PACES} From this run on, the executor's thread looks every 0.1 s, and one step of seven is measured."
    ),
    "engines-nvidia-h200-gqa1-both-layouts": (
        f"{TWO_PACES} The executor's thread looked every 0.1 s already; one of eight steps that load was measured."
    ),
}
TRACE = ROOT / "benchmarks" / "results" / "engines" / "traces" / "engines-nvidia-h200-trace.json"


def recorded() -> list[Path]:
    """Return the results that are there."""
    return [result for result in RESULTS if result.exists()]


def pages() -> Iterator[tuple[Path, tuple[str, str], str]]:
    """Yield the pages, the marks in them, and what stands between."""
    yield PAGE, MARKS, numbers()
    yield PAGE, PICTURE_MARKS, trace()
    yield LIMITS_PAGE, limits_page.MARKS, limits_page.limits(recorded())


def source_of(result: Path, gpu: Mapping[str, str], versions: Mapping[str, str]) -> str:
    """Return the sentence that says what made a result, with a link from a page of the docs."""
    name, made = result.relative_to(ROOT), ", ".join(f"{package} {number}" for package, number in versions.items())
    return f"From [{name}](../../{name}): {gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}; {made}."


def numbers(results: Sequence[Path] | None = None) -> str:
    """Return markdown of all measures of all recorded runs; marks alone before a run is recorded."""
    lines = [MARKS[0]]
    for result in recorded() if results is None else results:
        record = json.loads(result.read_text())
        rounds = {value.rounds for columns in summary(record["samples"]).values() for value in columns.values()}
        first = (
            f"{source_of(result, record['machine']['gpu'], record['versions'])} "
            f"{'Each engine was alone on the GPU. ' if record.get('alone') else ''}"
            f"Medians of {' to '.join(map(str, sorted({min(rounds), max(rounds)})))} rounds; in brackets the least and "
            "the most. A round has fewer than 100 first tokens, so the p99 of TTFT is the slowest one."
        )
        fewer = [f"{what}: {why}." for what, why in record.get("failed", {}).items()]
        kept = steady(record["samples"])
        if kept.of_requests:
            first += f" {kept} are left out: the CPU was slower by a tenth or more while they ran."
        known = [EARLIER[result.stem]] if result.stem in EARLIER else []
        lines += [" ".join([first, *known, *fewer]), "", tables(record["samples"], record["facts"])]
    return "\n".join([*lines, MARKS[1]])


def trace(result: Path = TRACE, picture: Path = PICTURE) -> str:
    """Return markdown of the picture and of the time by span; marks alone before a trace is recorded."""
    if not result.exists() or not picture.exists():
        return "\n".join(PICTURE_MARKS)
    from benchmarks.engines.ways import way_of

    record = json.loads(result.read_text())
    found = record["traces"]
    names = list(dict.fromkeys(name for one in found for name in one["totals"]))
    lines = [PICTURE_MARKS[0], f"![A hit, millisecond by millisecond](../pictures/{picture.name})", "",
             f"| ms of the engine's thread (calls) | {' | '.join(way_of(one['way']).title for one in found)} |",
             "| --- |" + " --- |" * len(found)]  # fmt: skip
    for name in names:
        cells = [_total(one["totals"].get(name)) for one in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "A span contains the spans within it.", PICTURE_MARKS[1]])


def _total(total: Sequence[float] | None) -> str:
    return f"{total[1]:.2f} ({total[0]:.0f})" if total else ""
