"""The tables of packed transfers on a GPU in the documents, from recorded runs.

``python -m benchmarks.readme`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "wires"
WIRE, ALONE = RESULTS / "nvidia-h200-one-gpu.json", RESULTS / "staging-nvidia-h200.json"
# Shown once they are recorded.
TWO_GPUS, BESIDE = RESULTS / "nvidia-h200.json", RESULTS / "nvidia-h200-beside-decode.json"
PREFILL = RESULTS / "nvidia-h200-beside-prefill.json"
SMALLER = RESULTS / "nvidia-h200-1-gib.json"  # the same with --mib 1024 --packed-only
# By machine: two runs, one behind the other. All but TWO_GPUS have --packed-only, and each has its --slots.
LARGER = RESULTS / "nvidia-h200-slots-of-256-mib.json"
RINGS = {
    "two GPUs, NIXL": (TWO_GPUS, LARGER),
    "a second machine": (
        RESULTS / "nvidia-h200-24-slots-of-64-mib.json",
        RESULTS / "nvidia-h200-8-slots-of-256-mib.json",
    ),
}
SLOTS = "24 slots of 64 MiB", "8 of 256 MiB"
PAGE = ROOT / "docs" / "processes" / "packed.md"
MARKS = "<!-- packed on a GPU -->", "<!-- end of packed on a GPU -->"
COPY, SGLANG, EACH, ONE = "one contiguous copy", "SGLang's kernel", "a descriptor each", "one message"
ALONE_US = "NIXL alone"
WIRE_NAMES = {"cuda_ipc": "`cuda_ipc`", "cuda_ipc_50": "`cuda_ipc` at 50 GB/s", "cuda_tcp": "TCP"}


def pages() -> Iterator[tuple[Path, tuple[str, str], str]]:
    """Yield the page, the marks in it, and what stands between."""
    tables = [*alone(), "", *between(), *two_gpus(), *rings(), *one_block(), *beside(), *prefill()]
    yield PAGE, MARKS, "\n".join([MARKS[0], *tables, MARKS[1]])


def _rows(result: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["group"], row["what"]): row for row in json.loads(result.read_text())["rows"]}


def alone() -> Iterator[str]:
    """Yield the table of gather and scatter within one GPU.

    >>> next(alone())
    '| gather or scatter alone | kvplan, GB/s | of a contiguous copy | times SGLang 0.5.23 |'
    """
    yield "| gather or scatter alone | kvplan, GB/s | of a contiguous copy | times SGLang 0.5.23 |"
    yield "| --- | --- | --- | --- |"
    rows = _rows(ALONE)
    for (group, what), row in rows.items():
        if set(row["beside"]) == {COPY}:
            other = rows[group, f"{what}, times SGLang"]
            part = group.split(",")[0]
            yield (f"| {part}, {what} | {row['ours']:,.0f} | {row['ratios'][COPY]:.2f} | "
                   f"{other['ratios'][SGLANG]:.2f} |")  # fmt: skip


def between() -> Iterator[str]:
    """Yield the table of packed transfers between two processes of one GPU.

    >>> next(between())
    '| two processes, one GPU, NIXL; GB/s | packed | a descriptor each | times as fast | one message |'
    """
    yield "| two processes, one GPU, NIXL; GB/s | packed | a descriptor each | times as fast | one message |"
    yield "| --- | --- | --- | --- | --- |"
    for (group, what), row in _rows(WIRE).items():
        if EACH in row["beside"]:
            wire, beside = WIRE_NAMES[group.split(",")[0]], row["beside"]
            yield (f"| {wire}, {what} | {row['ours']:.3g} | {beside[EACH]:.2g} | {row['ratios'][EACH]:.3g} | "
                   f"{float(f'{beside[ONE]:.3g}'):,g} |")  # fmt: skip


def two_gpus() -> Iterator[str]:
    """Yield the table of packed transfers between two GPUs, of 4 GiB and of 1 GiB, if both were recorded."""
    if not (TWO_GPUS.exists() and SMALLER.exists()):
        return
    yield ""
    yield ("| two processes, two GPUs, NIXL; GB/s | 4 GiB packed | of one message | 1 GiB packed | of it "
           "| a descriptor each | times as fast |")  # fmt: skip
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    smaller = _rows(SMALLER)
    for (group, what), row in _rows(TWO_GPUS).items():
        if ONE not in row["beside"] or row["unit"] != "GB/s":
            continue
        wire, found, other = WIRE_NAMES[group.split(",")[0]], row["beside"], smaller.get((group, what))
        less = "- | -" if other is None else f"{other['ours']:.3g} | {other['ratios'][ONE]:.2f}"
        each = f"{found[EACH]:.2g} | {row['ratios'][EACH]:.0f}" if EACH in found else "- | -"
        yield f"| {wire}, {what} | {row['ours']:.3g} | {row['ratios'][ONE]:.2f} | {less} | {each} |"


def rings() -> Iterator[str]:
    """Yield the tables of two rings between two GPUs that were recorded: the speed, and the dearer side's CPU."""
    heads = [f"{name}, of one message | CPU, ms a GB" for name in SLOTS]
    for machine, files in RINGS.items():
        if not all(file.exists() for file in files):
            continue
        yield ""
        yield f"| {machine} | {' | '.join(heads)} |"
        yield f"| --- |{' --- | --- |' * len(heads)}"
        several = [_rows(file) for file in files]
        for (group, what), row in several[0].items():
            if row["unit"] != "GB/s" or not all((group, what) in rows for rows in several):
                continue
            work = what.replace("packed", "CPU ms per GB of a packed")
            cells = [f"{rows[group, what]['ratios'][ONE]:.2f} | {rows[group, work]['ours']:.2f}" for rows in several]
            yield f"| {WIRE_NAMES[group.split(',')[0]]}, {what} | {' | '.join(cells)} |"


def one_block() -> Iterator[str]:
    """Yield the table of one block by the way that kvplan chooses, if all runs between two GPUs were recorded."""
    runs = {"first run": TWO_GPUS, "second run": LARGER, "third run": SMALLER}
    if not all(file.exists() for file in runs.values()):
        return
    yield ""
    yield "| two GPUs, `cuda_ipc`, 16 pieces; us | kvplan | NIXL alone, its lists ready | two notes and 50 us |"
    yield "| --- | --- | --- | --- |"
    for name, file in runs.items():
        for (group, what), row in _rows(file).items():
            if ALONE_US in row["beside"] and group.split(",")[0] == "cuda_ipc":
                yield f"| {what}, {name} | {row['ours']:.0f} | {row['beside'][ALONE_US]:.0f} | {row['limit']:.0f} |"


def beside() -> Iterator[str]:
    """Yield the table of compute beside packed transfers, if it was recorded."""
    if not BESIDE.exists():
        return
    yield ""
    yield "| packed transfers beside decode | GB/s | compute of the sender slower | of the receiver |"
    yield "| --- | --- | --- | --- |"
    rows = _rows(BESIDE)
    for (group, what), row in rows.items():
        if row["unit"] == "GB/s":
            slower = [rows[group, f"{what}: compute of the {side} slower"]["ours"] for side in ("sender", "receiver")]
            wire = WIRE_NAMES[group.split(",")[0]]
            yield f"| {wire}, {what} | {row['ours']:.3g} | x {slower[0]:.3f} | x {slower[1]:.3f} |"


def prefill() -> Iterator[str]:
    """Yield the table of a push by layer beside prefill, if it was recorded."""
    if not PREFILL.exists():
        return
    yield ""
    yield (
        "| last layer of a prefill, two GPUs; us | from its compute to the receiver | its bytes and a note | alone |"
    )
    yield "| --- | --- | --- | --- |"
    for (group, _), row in _rows(PREFILL).items():
        wire, alone = WIRE_NAMES[group.split(",")[0]], row["beside"]["this layer alone"]
        nbytes = row["detail"]["layer nbytes"] >> 20
        yield f"| {wire}, {nbytes} MiB | {row['ours']:,.0f} | {row['limit']:,.0f} | {alone:,.0f} |"
