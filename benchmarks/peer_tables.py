"""The tables of transfers from GPU memory to GPU memory, in the documents, written from a recorded run.

``python -m benchmarks.readme`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.readme import PEER_RESULT, ROOT, SPEED, Shown, number, table_of

PAGE = ROOT / "docs" / "guides" / "gpu-to-gpu.md"
PEER_MARKS = "<!-- peer numbers -->", "<!-- end of peer numbers -->"
ROUTES_MARKS = "<!-- route numbers -->", "<!-- end of route numbers -->"
PEER_WORK = (
    "80 layers of K and V, random blocks, 671 MB unless said otherwise; by default policy, in one process. "
    "`python -m benchmarks.gpu.peer` makes the whole table."
)
_COPY, _BATCH = "one large copy", "cuMemcpyBatchAsync"
_NCCL, _INDEXING, _BETTER = "NCCL send/recv", "torch indexing", "the better of push and pull"
PEER_SHOWN: Shown = (
    *((f"within one GPU, runs of {size}", "within", f"device, {size}", _COPY)
      for size in ("512 B", "2 KiB", "8 KiB", "64 KiB")),
    ("within one GPU, runs of 8 KiB", "within", "device, 8 KiB", _BATCH),
    ("within one GPU, runs of 8 KiB", "within", "device, 8 KiB", _INDEXING),
    *((f"{route}, runs of {size}", "between", f"{route}, {size}", baseline)
      for size in ("2 KiB", "8 KiB", "64 KiB") for route in ("push", "pull")
      for baseline in (_COPY, *((_NCCL, _BATCH, _INDEXING) if size == "8 KiB" else ()))),
    ("pull, runs of 8 KiB, 16 programs", "between", "pull, 8 KiB, 16 programs", _COPY),
    ("NHD to HND, TP 2 to TP 1, runs of 256 B", "layouts", f"NHD -> HND, TP 2 -> TP 1, 256 B, {_BETTER}", _COPY),
    ("two source ranks in one submission", "resharding", f"two ranks, both on one GPU, {_BETTER}", _COPY),
    ("beside decode on the GPU that copies, which slows down by 1.08 or less", "beside",
     'overlap="decode", decode on the GPU of the transfers, at x1.08 or less', ""),
    ("beside decode on the other GPU, which slows down by 1.08 or less", "beside",
     'overlap="decode", decode on the other GPU, at x1.08 or less', ""),
    ("push of 1 block, 1.3 MB, until the host sees its end", "few", "push, 1 block, 1.3 MB: submit to seen",
     ""),
)  # fmt: skip


def pages() -> Iterator[tuple[Path, tuple[str, str], str]]:
    """The pages, the marks in them, and what stands between."""
    yield SPEED, PEER_MARKS, peer_table()
    yield PAGE, ROUTES_MARKS, routes_table()


def peer_table(result: Path = PEER_RESULT) -> str:
    """Markdown of transfers from GPU memory to GPU memory; marks alone before a run is recorded."""
    if not result.exists():
        return "\n".join(PEER_MARKS)
    rows = {(row["group"], row["what"]): row for row in json.loads(result.read_text())["rows"]}
    # A baseline that the machine lacks, such as NCCL, has no line.
    shown = [one for one in PEER_SHOWN if not one[3] or one[3] in rows[one[1], one[2]]["beside"]]
    return table_of(result, gpus, PEER_WORK, shown, PEER_MARKS)


def routes_table(result: Path = PEER_RESULT) -> str:
    """Markdown of pushes and pulls, alone and beside decode; "" before a run is recorded."""
    if not result.exists():
        return ""
    record = json.loads(result.read_text())
    rows = {(row["group"], row["what"]): row for row in record["rows"]}
    name = result.relative_to(ROOT)
    routes = ("push", "pull")

    def alone(size: str, baseline: str) -> list[str]:
        found = [rows["between", f"{route}, {size}"]["beside"].get(baseline) for route in routes]
        return ["not measured" if gbps is None else f"{number(gbps)} GB/s" for gbps in found]

    def ratio(group: str, what: str) -> list[str]:
        return [f"{rows[group, what.format(route)]['ratios'][_COPY]:.2f}" for route in routes]

    def beside(where: str, way: str) -> list[str]:
        whats = [f"{route} beside decode on {where}, {way}" for route in routes]
        return [f"{number(rows['beside', what]['ours'])} GB/s, slow-down "
                f"{rows['beside', f'{what}: compute slower']['ours']:.2f}" for what in whats]  # fmt: skip

    few, overlap = "kernel, 16 programs", 'kernel, overlap="decode"'
    own, other = "the GPU of the transfers", "the other GPU"
    lines = [
        ("no compute", *routes),
        (_COPY, *alone("8 KiB", _COPY)),
        *((f"default policy, runs of {size}, over that copy", *ratio("between", f"{{}}, {size}"))
          for size in ("512 B", "2 KiB", "8 KiB", "64 KiB")),
        (f"`{few}`, over that copy", *ratio("between", "{}, 8 KiB, 16 programs")),
        ("NHD to HND, TP 2 to TP 1, runs of 256 B, over that copy",
         *ratio("layouts", "NHD -> HND, TP 2 -> TP 1, 256 B, {}")),
        *((f"`{baseline}`" if baseline == "copy_engine_2d" else baseline, *alone("8 KiB", baseline))
          for baseline in (_NCCL, _INDEXING, _BATCH, "copy_engine_2d")),
        ("decode beside it", *routes),
        ('on the GPU that runs the kernel, `overlap="decode"`', *beside(own, overlap)),
        (f"on that GPU, {_COPY}", *beside(own, _COPY)),
        (f"on the other GPU, `{few}`", *beside(other, few)),
        (f"on the other GPU, {_COPY}", *beside(other, _COPY)),
    ]  # fmt: skip
    made = [f"From [{name}](../../{name}): {gpus(record['machine'])}.", ""]
    for words, *cells in lines:
        head = cells == list(routes)
        made += [""] * (head and words != "no compute") + [f"| {words} | {' | '.join(cells)} |"]
        made += ["| --- | --- | --- |"] * head
    return "\n".join([ROUTES_MARKS[0], *made, ROUTES_MARKS[1]])


def gpus(machine: dict[str, Any]) -> str:
    gpu = machine["gpu"]
    return f"{gpu['devices']} x {gpu['name']}, {gpu['link']}, driver {gpu['driver']}, CUDA {gpu['cuda']}"
