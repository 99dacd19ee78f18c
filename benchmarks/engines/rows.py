"""A run's figures as markdown tables, as rows of :mod:`benchmarks.record`, and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.columns import UNITS, Key, Spread, summary
from benchmarks.engines.shapes import SHAPES
from benchmarks.engines.ways import way_of
from benchmarks.record import Row

Figures = Mapping[Key, Mapping[str, Spread]]
MORE_IS_BETTER = ("tokens_s",)
_WORDS = {
    "ttft_p50": "TTFT p50", "ttft_p99": "TTFT p99", "itl_p50": "ITL p50", "itl_p90": "ITL p90", "itl_p99": "ITL p99",
    "quiet_p50": "ITL without a hit, p50", "quiet_p99": "ITL without a hit, p99", "cpu": "CPU time per hit",
    "tokens_s": "tokens/s", "cpu_s": "CPU time",
}  # fmt: skip


class Column(NamedTuple):
    """A column of a table: its heading, what was measured, and which figure of it."""

    heading: str
    key: Key
    column: str


def title(key: Key) -> str:
    """Return what a figure is of, in words.

    >>> title(Key("8b", "beside", 6000, 512, 0, "own")), title(Key("8b", "chats", 0, 0, 0, "own"))
    ('beside decoding, 6,000 held + 512 new', 'chats')
    """
    words = {"beside": "beside decoding", "resident": "prefix on the GPU"}.get(key.measure, key.measure)
    return f"{words}, {key.held:,} held + {key.suffix} new" if key.held else words


def rows(figures: Figures) -> list[Row]:
    """Return a row for every column and every way of kvplan, beside the other ways of its batch."""
    found = []
    for key, columns in figures.items():
        if not way_of(key.way).ours:
            continue
        others = {other.way: kept for other, kept in figures.items()
                  if other[:-1] == key[:-1] and not way_of(other.way).ours}  # fmt: skip
        for column, value in columns.items():
            beside = {way_of(way).title: kept[column].median for way, kept in others.items() if column in kept}
            words = way_of(key.way).title
            what = f"{title(key)}: {_WORDS[column]}, {words}" + (f", batch {key.batch + 1}" if key.batch else "")
            found.append(
                Row(key.shape, what, UNITS[column], value.median, beside, more_is_better=column in MORE_IS_BETTER,
                    detail={"least": value.least, "most": value.most, "rounds": value.rounds})
            )  # fmt: skip
    return found


def tables(samples: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """Return markdown: for each shape a table per kind of measure; ways are rows.

    Args:
        samples: the samples of a result.
        facts: the facts of a result: by shape, ``link`` in bytes per second.
    """
    figures = summary(samples)
    lines: list[str] = []
    for shape in dict.fromkeys(key.shape for key in figures):
        mine = {key: value for key, value in figures.items() if key.shape == shape}
        for words, columns in _tables(mine):
            if columns:
                lines += [f"**{SHAPES[shape].title}. {words}**", "", *table(mine, columns)]
                link = facts.get(shape, {}).get("link", 0.0)
                if link and columns[0].column == "ttft_p50" and columns[0].key.measure == "alone":
                    lines.append(link_row(columns, SHAPES[shape].token_nbytes, link))
                lines.append("")
    return "\n".join(lines)


def _tables(figures: Figures) -> Iterator[tuple[str, list[Column]]]:
    """Yield the heading of each table, and its columns."""
    alone = [key for key in kinds(figures) if key.measure == "alone"]
    resident = [key for key in kinds(figures) if key.measure == "resident"]
    yield (
        "Time to first token alone, p50, ms, by tokens held + new",
        [
            *(Column(f"{key.held:,} + {key.suffix}", key, "ttft_p50") for key in alone),
            *(Column(f"{key.held:,} on the GPU + {key.suffix}", key, "ttft_p50") for key in resident),
        ],
    )
    yield (
        "CPU time per hit alone, ms, all threads",
        [Column(f"{key.held:,} + {key.suffix}", key, "cpu") for key in alone],
    )
    for key in kinds(figures):
        if key.measure in ("beside", "chats"):
            heading = title(key)[0].upper() + title(key)[1:]
            yield heading, [Column(_headed(column), key, column) for column in UNITS if _has(figures, key, column)]


def _headed(column: str) -> str:
    return _WORDS[column] + ("" if UNITS[column] in _WORDS[column] else f", {UNITS[column]}")


def _has(figures: Figures, key: Key, column: str) -> bool:
    return any(column in kept for one, kept in figures.items() if one[:4] == key[:4])


def link_row(columns: Sequence[Column], token_nbytes: int, link: float) -> str:
    """Return the row of the bytes' own time on the link."""
    cells = [number(1e3 * one.key.held * token_nbytes / link) if one.key.measure == "alone" else "" for one in columns]
    return f"| *the bytes at the link's {link / 1e9:.1f} GB/s* | {' | '.join(cells)} |"


def kinds(figures: Figures) -> list[Key]:
    """Return what was measured, without the way and the batch."""
    return list(dict.fromkeys(key._replace(batch=0, way="") for key in figures))


def table(figures: Figures, columns: Sequence[Column]) -> Iterator[str]:
    """Yield the lines of one table: the median of the rounds, and in brackets the least and the most."""
    yield f"| | {' | '.join(column.heading for column in columns)} |"
    yield "| --- |" + " --- |" * len(columns)
    several = len({key.batch for key in figures}) > 1
    for batch, way in dict.fromkeys((key.batch, key.way) for key in figures):
        found = [figures.get(one.key._replace(batch=batch, way=way), {}).get(one.column) for one in columns]
        if not any(found):
            continue
        cells = [cell(value) for value in found]
        yield f"| {way_of(way).title}{f' (batch {batch + 1})' if several else ''} | {' | '.join(cells)} |"


def cell(value: Spread | None) -> str:
    """Return a cell of a table.

    >>> cell(Spread(35.52, 34.9, 36.21, 5)), cell(Spread(1234.0, 1200.4, 1300.0, 5)), cell(None)
    ('35.5 (34.9 to 36.2)', '1,234 (1,200 to 1,300)', '')
    """
    if value is None:
        return ""
    return f"{number(value.median)} ({number(value.least)} to {number(value.most)})"


def number(value: float) -> str:
    """Return three digits, without an exponent.

    >>> number(0.7534), number(35.52), number(1234.5)
    ('0.753', '35.5', '1,234')
    """
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def save(path: Path, made: Mapping[str, Any]) -> None:
    """Write a document, with one line per sample."""
    long = {name: made[name] for name in ("samples",) if name in made}
    text = json.dumps({**made, **{name: f"the {name}" for name in long}}, indent=1)
    for name, items in long.items():
        lines = ",\n".join(f"  {json.dumps(item)}" for item in items)
        text = text.replace(json.dumps(f"the {name}"), f"[\n{lines}\n ]" if items else "[]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
