"""What kvplan must reach in whole engines, and whether a result does.

python -m benchmarks.engines.required RESULT.json [...]  # prints the table; 1 if a limit or a hit fails
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.columns import Key, Spread, different_tokens, faults, summary
from benchmarks.engines.rows import MORE_IS_BETTER, Figures
from benchmarks.engines.shapes import FULL, SHAPES
from benchmarks.engines.ways import Way, way_of
from benchmarks.record import Row, table

GROUP = "must reach"


class Limits(NamedTuple):
    """Limits of one shape; shares are of the best of vLLM's ways of the same batch.

    Attributes:
        alone: share of TTFT, alone.
        long_ms: ms that a long hit may take beyond its bytes / link.
        long_compute_ms: ms that a long hit may take beyond the compute alone instead, or None.
        beside_sync: share of TTFT beside decoding, of the best whose steps wait for loads.
        beside_async: the same, of the best whose steps do not.
        itl_p99: share of the time between tokens of other requests, asynchronous loads.
        itl_p90: the same by layer, of the best whose steps wait for loads.
        chats: share of tokens/s.
        cpu: share of CPU time.
        spread: share of the spread of TTFT alone over the rounds, of the best of vLLM's ways.
    """

    alone: float
    long_ms: float
    long_compute_ms: float | None
    beside_sync: float
    beside_async: float
    itl_p99: float
    itl_p90: float
    chats: float
    cpu: float = 1.0
    spread: float = 1.10


LIMITS = {
    "8b": Limits(0.75, 15.0, None, 0.80, 0.55, 1.05, 0.85, 1.10),
    "gqa1": Limits(0.92, 25.0, 10.0, 0.92, 0.80, 1.05, 0.92, 1.03),
}
Choice = Callable[[Way], bool]


class Limit(NamedTuple):
    """One limit that is a share of another way's figure in the same batch."""

    words: str
    measure: str
    column: str
    ours: Choice
    theirs: Choice
    of: str  # the other ways in words
    share: float


def _kvplan(way: Way) -> bool:
    return way.base == "kvplan"  # and not kvplan's copies under another connector


def _by_layer(way: Way) -> bool:
    return way.by_layer


def _asynchronous(way: Way) -> bool:
    return _kvplan(way) and not way.by_layer


def _own_sync(way: Way) -> bool:
    return way.sync


def _own_async(way: Way) -> bool:
    return way.vllms and not way.sync


def _own(way: Way) -> bool:
    return way.vllms


def shares(limits: Limits) -> list[Limit]:
    """Return the limits of a shape that are shares."""
    layer, best = "by layer", "the best of vLLM's ways"
    return [
        Limit(f"TTFT alone p50, {layer}", "alone", "ttft_p50", _by_layer, _own, best, limits.alone),
        Limit(f"TTFT beside decoding p50, {layer}", "beside", "ttft_p50", _by_layer, _own_sync, "vLLM's best sync",
              limits.beside_sync),
        Limit(f"TTFT beside decoding p50, {layer}", "beside", "ttft_p50", _by_layer, _own_async, "vLLM's best async",
              limits.beside_async),
        Limit("ITL of others p99, async", "beside", "itl_p99", _asynchronous, _own, best, limits.itl_p99),
        Limit(f"ITL of others p90, {layer}", "beside", "itl_p90", _by_layer, _own_sync, "vLLM's best sync",
              limits.itl_p90),
        Limit("chats", "chats", "tokens_s", _kvplan, _own, best, limits.chats),
        Limit(f"CPU time per hit, alone, {layer}", "alone", "cpu", _by_layer, _own, best, limits.cpu),
        Limit("CPU time of chats", "chats", "cpu_s", _kvplan, _own, best, limits.cpu),
    ]  # fmt: skip


def judged(samples: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[Row]:
    """Return a row for every limit, with the figure that it holds. What was not measured has no row.

    Args:
        samples: the samples of a result.
        facts: the facts of a result: by shape, ``link`` in bytes per second.
    """
    figures = summary(samples)
    found: list[Row] = []
    for shape, limits in LIMITS.items():
        mine = {key: value for key, value in figures.items() if key.shape == shape}
        for limit in shares(limits):
            found += _share(shape, limit, mine)
        found += _spread(shape, limits, mine)
        found += _long(shape, limits, mine, float(facts.get(shape, {}).get("link", 0.0)))
    return found


def unmeasured(samples: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[str]:
    """Return the limits of a result's shapes for which it has no figures."""
    figures, missing = summary(samples), list[str]()
    for shape in (shape for shape in LIMITS if any(key.shape == shape for key in figures)):
        mine = {key: value for key, value in figures.items() if key.shape == shape}
        missing += [
            f"{shape}: {limit.words}, against {limit.of}"
            for limit in shares(LIMITS[shape])
            if not any(_share(shape, limit, mine))
        ]
        if not any(_long(shape, LIMITS[shape], mine, float(facts.get(shape, {}).get("link", 0.0)))):
            missing.append(f"{shape}: TTFT alone p50, by layer, of a long prefix")
    return missing


def _measured(figures: Figures, measure: str, column: str, choice: Choice) -> dict[int, dict[Key, Spread]]:
    """Return figures by batch: those of the first length of ``held``, with the suffix of most hits."""
    found: dict[int, dict[Key, Spread]] = {}
    for key, columns in figures.items():
        fits = key.measure == measure and key.held in (0, FULL.held[0]) and key.suffix in (0, FULL.suffix)
        if fits and column in columns and choice(way_of(key.way)):
            found.setdefault(key.batch, {})[key] = columns[column]
    return found


def _best(values: Mapping[Key, Spread], column: str) -> tuple[Key, Spread]:
    sign = -1 if column in MORE_IS_BETTER else 1
    return min(values.items(), key=lambda item: sign * item[1].median)


def _share(shape: str, limit: Limit, figures: Figures) -> Iterator[Row]:
    """Yield the row of the batch in which the limit holds by least."""
    ours = _measured(figures, limit.measure, limit.column, limit.ours)
    theirs = _measured(figures, limit.measure, limit.column, limit.theirs)
    more, found = limit.column in MORE_IS_BETTER, []
    for batch in sorted(ours.keys() & theirs.keys()):
        (mine, value), (other, best) = _best(ours[batch], limit.column), _best(theirs[batch], limit.column)
        detail = {"way": mine.way, "least": value.least, "most": value.most, "rounds": value.rounds, "batch": batch}
        unit = {"tokens_s": "tokens/s", "cpu_s": "s"}.get(limit.column, "ms")
        found.append(
            Row(GROUP, f"{shape}: {limit.words}", unit, value.median, {way_of(other.way).title: best.median},
                limit.share * best.median, f"{limit.share:g} x {limit.of}", more, detail)
        )  # fmt: skip
    if found:
        yield max(found, key=lambda row: (row.limit or 1) / row.ours if more else row.ours / (row.limit or 1))


def _spread(shape: str, limits: Limits, figures: Figures) -> Iterator[Row]:
    """Yield rows of the spread of TTFT alone over the rounds."""
    ours = _measured(figures, "alone", "ttft_p50", _by_layer)
    theirs = _measured(figures, "alone", "ttft_p50", _own)
    for batch in sorted(ours.keys() & theirs.keys()):
        (mine, value), (other, best) = _best(ours[batch], "ttft_p50"), _best(theirs[batch], "ttft_p50")
        width = best.most - best.least
        yield Row(
            GROUP, f"{shape}: spread of TTFT alone p50, by layer{_in_batch(batch)}", "ms", value.most - value.least,
            {way_of(other.way).title: width}, limits.spread * width, f"{limits.spread:g} x the best of vLLM's ways",
            detail={"way": mine.way, "batch": batch, "rounds": value.rounds},
        )  # fmt: skip


def _long(shape: str, limits: Limits, figures: Figures, link: float) -> Iterator[Row]:
    """Yield rows of the long prefix: beyond its bytes / link, or beyond the compute alone."""
    for key, columns in figures.items():
        long = key.measure == "alone" and key.held != FULL.held[0] and "ttft_p50" in columns
        if not long or not way_of(key.way).by_layer or not link:
            continue
        copied, value = 1e3 * key.held * SHAPES[shape].token_nbytes / link, columns["ttft_p50"]
        beside, limit, rule = {"bytes / link": copied}, copied + limits.long_ms, f"bytes / link + {limits.long_ms:g} ms"
        compute = figures.get(key._replace(measure="resident"))
        if compute is not None and "ttft_p50" in compute:
            beside["compute alone"] = compute["ttft_p50"].median
            if limits.long_compute_ms is not None and beside["compute alone"] + limits.long_compute_ms > limit:
                limit = beside["compute alone"] + limits.long_compute_ms
                rule = f"compute alone + {limits.long_compute_ms:g} ms"
        what = f"{shape}: TTFT alone p50, by layer, {key.held:,} held + {key.suffix} new{_in_batch(key.batch)}"
        detail = {"way": key.way, "least": value.least, "most": value.most, "rounds": value.rounds}
        yield Row(GROUP, what, "ms", value.median, beside, limit, rule, detail=detail)


def _in_batch(batch: int) -> str:
    return f", batch {batch + 1}" if batch else ""


def main(paths: Sequence[str]) -> int:
    """Judge result files; 0 where every measured limit holds and no hit was wrong, 1 otherwise, 2 without a file."""
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    found: list[Row] = []
    wrong: list[str] = []
    for path in paths:
        result = json.loads(Path(path).read_text())
        found += judged(result["samples"], result["facts"])
        wrong += [*faults(result["samples"]), *different_tokens(result["samples"])]
        for what in unmeasured(result["samples"], result["facts"]):
            print(f"not measured: {what}", file=sys.stderr)
    if found:
        print(table(found))
    for text in wrong:
        print(text)
    return 1 if wrong or any(row.ok is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
