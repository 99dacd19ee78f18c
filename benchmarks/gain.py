"""The README's table of gains and its chart, from recorded runs; ``python -m benchmarks.readme`` writes both.

A row compares kvplan with the best baseline of the same run, and with the speed of the link in that run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import NamedTuple

from benchmarks.engines.shapes import SHAPES
from benchmarks.readme import ROOT, number

PICTURE = ROOT / "docs" / "pictures" / "gain.svg"
MARKS = "<!-- gain -->", "<!-- end of gain -->"
RESULTS = ROOT / "benchmarks" / "results"
ENGINE, HOST, PEER, PROCESSES = (
    RESULTS / f"{name}.json"
    for name in ("engines/engines-nvidia-h200-8b-alone", "gpu-nvidia-h200", "gpu-nvidia-h200-peer",
                 "gpu-nvidia-h200-processes")
)  # fmt: skip
LINK, BETTER = "one large copy", "the better of push and pull"
HELD, TOKENS = "6,000 held", 6000
OWN = (LINK, "SM ceiling", "one process", "kernel", "copy_engine_2d")  # ceilings, and kvplan's other paths
VLLM = "vLLM 0.33's best, layout BLHNC"
OURS = "kvplan, by layer, chunks of 5 blocks"  # vLLM's OffloadingConnector has these chunks, too
SHOWN = (  # words, result, group, row, and words for the baseline instead of its name in the result
    ("vLLM: a cached prompt of 6,000 tokens, first token", ENGINE, "8b",
     f"alone, 6,000 held + 512 new: TTFT p50, {OURS}", VLLM),
    ("vLLM: the same beside 16 decoding requests", ENGINE, "8b",
     f"beside decoding, 6,000 held + 512 new: TTFT p50, {OURS}", VLLM),
    ("vLLM: chats of several turns, first token", ENGINE, "8b", f"chats: TTFT p50, {OURS}", VLLM),
    ("host to GPU, runs of 8 KiB", HOST, "staged", "load, 336 MB", ""),
    ("GPU to GPU, NVLink, runs of 8 KiB", PEER, "between", "the better of push and pull, 8 KiB", ""),
    ("process to process, NVLink, runs of 8 KiB", PROCESSES, "between", "pull, 8 KiB", ""),
)  # fmt: skip
NAMES = {"12 programs, 8-byte words": "a copy kernel of 12 programs", "NIXL READ": "NIXL 1.5.1"}
BAR, LEFT, SPAN, WIDTH = 14, 24, 560, 860  # pixels
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1b1b1b}"
    ".head{font-weight:600}.small{font-size:11px;fill:#4d4d4d}.page{fill:#fff}.ours{fill:#009e73}.other{fill:#b8c0ca}"
    ".link{stroke:#d55e00;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f0f0}.small{fill:#bdbdbd}.page{fill:#161616}.other{fill:#6b7480}}"
)


class Gain(NamedTuple):
    """A row: words, unit, kvplan's value, the best baseline's name and value, and the link's if known."""

    words: str
    unit: str
    ours: float
    name: str
    best: float
    link: float | None

    @property
    def times(self) -> float:
        """Factor by which kvplan is faster."""
        return self.best / self.ours if self.unit == "ms" else self.ours / self.best


@cache
def gains() -> tuple[Gain, ...]:
    """The rows of the README, from the recorded runs."""
    return tuple(_gains())


def _gains() -> Iterator[Gain]:
    for words, result, group, what, named in SHOWN:
        record = json.loads(result.read_text())
        rows = {(row["group"], row["what"]): row for row in record["rows"]}
        row = rows[group, what]
        beside = dict(row["beside"])
        if BETTER in what:  # the baselines are measured with each route
            for route in ("push", "pull"):
                for name, value in rows[group, what.replace(BETTER, route)]["beside"].items():
                    beside[name] = max(value, beside.get(name, 0.0))
        others = {name: value for name, value in beside.items() if name not in OWN}
        name = (min if row["unit"] == "ms" else max)(others, key=lambda one, others=others: others[one])
        link = beside.get(LINK)
        if row["unit"] == "ms" and HELD in what:
            link = 1e3 * TOKENS * SHAPES[group].token_nbytes / record["facts"][group]["link"]
        yield Gain(words, row["unit"], row["ours"], named or NAMES.get(name, name), others[name], link)


def _served() -> float:
    """Return the tokens per second of the chats as a share of vLLM's best."""
    rows = {row["what"]: row for row in json.loads(ENGINE.read_text())["rows"]}
    row = rows[f"chats: tokens/s, {OURS}"]
    return float(row["ours"]) / max(row["beside"].values())


def table() -> str:
    """Return markdown of the gains, and of the runs that they are from."""
    lines = [MARKS[0], "| | kvplan | the best without kvplan | gain |", "| --- | --- | --- | --- |"]
    for one in gains():
        best = f"{number(one.best)} {one.unit}: {one.name}"
        lines.append(f"| {one.words} | {number(one.ours)} {one.unit} | {best} | x{number(one.times)} |")
    first = json.loads(ENGINE.read_text())
    gpu, results = first["machine"]["gpu"], dict.fromkeys(result for _, result, *_ in SHOWN)
    named = ", ".join(f"[{result.stem}]({result.relative_to(ROOT)})" for result in results)
    made = (f"Medians of recorded runs on {gpu['name']}, driver {gpu['driver']}; the results name all versions: "
            f"{named}. The vLLM rows are of Llama-8B's shape, 512 new tokens, in chunks of 5 blocks; kvplan loads by "
            f"layer. In the chats it serves x{_served():.2f} the tokens per second.")  # fmt: skip
    return "\n".join([*lines, "", made, MARKS[1]])


def drawn() -> str:
    """Return the chart as SVG: for each row a bar of kvplan, a bar of the best baseline, and the link."""
    rows = gains()
    heads = {0: "Time to the first token in whole vLLM engines: shorter is better",
             sum(one.unit == "ms" for one in rows): "Speed of scattered copies: longer is better"}  # fmt: skip
    parts, top = [], 20
    for k, one in enumerate(rows):
        if k in heads:
            parts.append(f'<text class="head" x="{LEFT}" y="{top + 8}">{heads[k]}</text>')
            top += 34
        alike = [row for row in rows if row.unit == one.unit == "ms"] or [one]  # times share a scale
        most = max(max(row.ours, row.best, row.link or 0.0) for row in alike)
        parts.append(f'<text x="{LEFT}" y="{top}">{escape(one.words)}</text>')
        bars = (("ours", one.ours, f"{number(one.ours)} {one.unit}: kvplan"),
                ("other", one.best, f"{number(one.best)} {one.unit}: {one.name}"))  # fmt: skip
        for kind, value, words in bars:
            top += BAR + 4
            wide = max(2.0, SPAN * value / most)
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{top - BAR}" width="{wide:.1f}" height="{BAR}"/>')
            line = SPAN * one.link / most if one.link else 0.0
            right = line if wide <= line < wide + 120 else wide  # the words stand beside the link's line, not on it
            parts.append(f'<text class="small" x="{LEFT + right + 6:.1f}" y="{top - 3}">{escape(words)}</text>')
        if one.link:
            at = LEFT + SPAN * one.link / most
            parts.append(f'<path class="link" d="M{at:.1f} {top - 2 * BAR - 6}V{top + 2}"/>')
        top += 28
    parts.append(f'<path class="link" d="M{LEFT} {top - 8}v12"/>')
    parts.append(f'<text class="small" x="{LEFT + 8}" y="{top + 2}">the bytes at the speed of the link, measured in '
                 "the same run</text>")  # fmt: skip
    height = top + 18
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img" aria-label="kvplan beside the best baseline and the link">'
            f'<style>{STYLE}</style><rect class="page" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
            )  # fmt: skip
