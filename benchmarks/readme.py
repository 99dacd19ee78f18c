"""The tables of numbers in the README and the docs, and the README's chart, written from recorded runs.

The README and the docs compare kvplan with baselines. Whether our own limits hold stands in benchmarks/README.md.

python -m benchmarks.readme    # rewrites the tables between their marks
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.pages import recorded as engine_results
from benchmarks.gpu.vllm_rows import best_baseline, packed

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planning-amd-epyc.json"
WORK = (
    "80 layers of K and V; `make bench` makes the whole table. Ids are int64 arrays unless said otherwise; converting "
    "a list costs 25 ns an id. One numpy broadcast merges nothing and knows no other layout; it writes large plans "
    "faster."
)
MARKS = "<!-- numbers -->", "<!-- end of numbers -->"
GPU_RESULT = ROOT / "benchmarks" / "results" / "gpu-nvidia-h200.json"
GPU_MARKS = "<!-- gpu numbers -->", "<!-- end of gpu numbers -->"
CHOICE_RESULT = ROOT / "benchmarks" / "results" / "choice-nvidia-h200.json"
CHOICE_MARKS = "<!-- choice numbers -->", "<!-- end of choice numbers -->"
COST_MODEL, GPU_PAGE, RANKS, ENGINES, SPEED = (
    ROOT / "docs" / name
    for name in ("ideas/cost-model.md", "guides/gpu.md", "guides/ranks.md", "evidence/engines.md", "evidence/speed.md")
)
BATCH_RESULT = ROOT / "benchmarks" / "results" / "batch-bytes-nvidia-h100-80gb-hbm3.json"
BATCH_MARKS = "<!-- batch numbers -->", "<!-- end of batch numbers -->"
RANKS_RESULT = ROOT / "benchmarks" / "results" / "gpu-nvidia-h200-ranks.json"
RANKS_MARKS = "<!-- ranks numbers -->", "<!-- end of ranks numbers -->"
RANKS_WORK = (
    "80 layers of K and V, 8 heads of 128, 256 blocks of 16 tokens in one shared pool; each rank's rate while the "
    "other works. `python -m benchmarks.gpu.ranks` makes it."
)
PROCESSES_RESULT = ROOT / "benchmarks" / "results" / "gpu-nvidia-h200-processes.json"
PEER_RESULT = ROOT / "benchmarks" / "results" / "gpu-nvidia-h200-peer.json"
VLLM_RESULT = ROOT / "benchmarks" / "results" / "gpu-nvidia-h200-vllm-worker.json"
VLLM_MARKS = "<!-- vllm numbers -->", "<!-- end of vllm numbers -->"
VLLM_WORK = (
    "Whole jobs, from submit until they are reported. vLLM 0.33.0 is its own Python; the operator that its batch path "
    "ends in is our call of the same driver function. `python -m benchmarks.gpu.vllm_worker` makes the whole table."
)
BLHNC_WORK = (
    " BLHNC is vLLM's layout `VLLM_KV_CACHE_LAYOUT=BLHNC`, where all layers of a block lie in one piece. The baseline "
    "is the best of vLLM's layouts."
)
OFFLOAD_RESULT = ROOT / "benchmarks" / "results" / "offload-nvidia-h100-80gb-hbm3.json"
OFFLOAD_MARKS = "<!-- offload numbers -->", "<!-- end of offload numbers -->"
OFFLOAD_WAYS = {
    "plenty": "room for all",
    "kvplan": "kvplan's offloading",
    "transformers": "its own offloading",
    "recompute": "recomputed",
}
VLLM_SHOWN = tuple(
    (f"{model}: {what}", model, what, "vLLM 0.33.0")
    for model, sizes in (
        ("gpt-oss-120B TP 8", ("16 x 4 KiB, 2.4 MB", "2,048 x 4 KiB, 302 MB")),
        ("Llama-70B TP 8", ("16 x 8 KiB, 10 MB", "1,024 x 8 KiB, 671 MB")),
        ("Llama-70B TP 4", ("1,024 x 16 KiB, 1.3 GB",)),
        ("Llama-8B", ("512 x 64 KiB, 1.1 GB",)),
        ("DeepSeek MLA", ("256 x 72 KiB, 1.2 GB",)),
    )
    for size in sizes
    for what in (
        f"load, {size}",
        f"store, {size}",
        *((f"load, {size}: CPU", f"store, {size}: CPU") if "8 KiB" in size else ()),
        *((f"load beside decode, {size}",) if size == sizes[-1] else ()),
    )
)
RANKS_SHOWN = tuple(
    (f"{step}, rank {rank}", "ranks", f"{step}, rank {rank}", "own pool, alone")
    for step, ranks in (("store, TP 2", 2), ("load, TP 1", 1), ("load, PP 2", 2))
    for rank in range(ranks)
)

GPU_WORK = (
    "80 layers of K and V, runs of 8 KiB unless said otherwise, random blocks; one large copy is what the link gave in "
    "the same run. `python -m benchmarks.gpu` makes the whole table."
)

# In words, then the row: group, what, and the baseline that it is compared with.
Shown = Sequence[tuple[str, str, str, str]]
_FILL, _BROADCAST, _MEMCPY = "numpy fill", "numpy, one broadcast", "numpy memcpy"
SHOWN: Shown = (
    ("plan 1 block, 160 copies", "flat plan", "layer to page x 1 random", _BROADCAST),
    ("plan 256 blocks, 40,960 copies", "flat plan", "layer to page x 256 random", _FILL),
    ("plan 4,096 blocks, 655,360 copies", "flat plan", "layer to page x 4096 random", _FILL),
    ("the same", "flat plan", "layer to page x 4096 random", _BROADCAST),
    ("the same, ids in lists", "flat plan", "layer to page x 4096 random lists", _FILL),
    ("the same, where random blocks may touch", "flat plan", "layer to layer x 4096 random", _FILL),
    ("the same, consecutive blocks", "flat plan", "layer to layer x 4096 consecutive", _FILL),
    ("`plan()` alone, 1 block", "factored plan", "1 block, int64 arrays", "numpy"),
    ("`plan()` alone, 4,096 blocks", "factored plan", "4096 blocks, int64 arrays", "numpy"),
    ("the same, ids in lists", "factored plan", "4096 blocks, lists", "numpy"),
    ("first `compile()`, 32 runs for each layer and part", "compile", "32 runs each: first compile()", ""),
    ("`import kvplan`, after numpy", "import", "import kvplan, beyond numpy", "import numpy"),
    ("copy on the host, runs of 8 KiB, 1 thread", "host copy", "runs of 8 KiB, 1 thread", _MEMCPY),
    ("copy on the host, runs of 8 KiB, 2 threads", "host copy", "runs of 8 KiB, 2 threads", _MEMCPY),
)

_COPY, _BATCH, _SM = "one large copy", "cuMemcpyBatchAsync", "SM ceiling"
_PROGRAMS = "12 programs, 8-byte words"
GPU_SHOWN: Shown = (
    ("`staged`, load 1.3 GB", "staged", "load, 1.3 GB", _COPY),
    ("`staged`, store 1.3 GB", "staged", "store, 1.3 GB", _COPY),
    ("`staged`, load 1.3 GB", "staged", "load, 1.3 GB", _BATCH),
    ("`staged`, store 1.3 GB", "staged", "store, 1.3 GB", _BATCH),
    ("`staged`, load 336 MB", "staged", "load, 336 MB", "torch indexing"),
    ("`staged`, load and store 1.3 GB at once", "staged", "both at once, 1.3 GB each", "two large copies at once"),
    ("`kernel`, load, runs of 512 B", "kernel", "load, 512 B, default", _SM),
    ("`kernel`, load, runs of 512 B", "kernel", "load, 512 B, default", _COPY),
    ("`kernel`, store, runs of 512 B", "kernel", "store, 512 B, default", _SM),
    ("`kernel`, store, runs of 512 B", "kernel", "store, 512 B, default", _COPY),
    ("`kernel`, store, runs of 4 KiB", "kernel", "store, 4 KiB, default", _COPY),
    ("`kernel` with 4 programs, load, runs of 2 KiB", "kernel", "load, 2 KiB, 4 programs", _PROGRAMS),
    ("`copy_engine_2d`, load", "copy_engine_2d", "load, rows of 8 KiB", _COPY),
    ("`copy_engine_2d`, store", "copy_engine_2d", "store, rows of 8 KiB", _COPY),
    ("`staged`, load beside decode", "beside", "load beside decode, staged", _COPY),
    (
        "a decode step beside that load",
        "beside",
        "load beside decode, staged: compute slower",
        _COPY,
    ),
    ("`staged`, store beside decode", "beside", "store beside decode, staged", _COPY),
    (
        "a step of decode beside that store, over one alone",
        "beside",
        "store beside decode, staged: compute slower",
        _COPY,
    ),
    ("`staged`, load beside prefill", "beside", "load beside prefill, staged", _COPY),
    ("`staged`, store beside prefill", "beside", "store beside prefill, staged", _COPY),
    ("`submit()` by `kernel`, load 1 block", "submit", "kernel, load, 1 block, 1.3 MB", _BATCH),
    ("`submit()` by `staged`, load 1,024 blocks", "submit", "staged, load, 1,024 blocks, 1.3 GB", _BATCH),
    ("`auto`, load 16 blocks, 21 MB, on the GPU", "small", "load, 21 MB, auto: GPU", f"bytes / {_COPY}"),
    (
        "`auto`, load 1 block, as the host sees it",
        "small",
        "load, 1.3 MB, auto: seen by the host",
        f"bytes / {_COPY}",
    ),
    ("the same by `kernel`", "small", "load, 1.3 MB, kernel: seen by the host", "the driver's calls alone"),
)

LIMITS_MARKS = "<!-- limits -->", "<!-- end of limits -->"
_HELD = {
    "Planning, on a CPU": RESULT,
    "One GPU": GPU_RESULT,
    "Two ranks through one pool": RANKS_RESULT,
    "vLLM's offloading worker": VLLM_RESULT,
    "GPU to GPU": PEER_RESULT,
    "Between two processes": PROCESSES_RESULT,
    "Gather and scatter alone": ROOT / "benchmarks" / "results" / "wires" / "staging-nvidia-h200.json",
    "Packed transfers in host memory": ROOT / "benchmarks" / "results" / "wires" / "amd-epyc.json",
    "Packed transfers between two processes of one GPU": ROOT
    / "benchmarks"
    / "results"
    / "wires"
    / "nvidia-h200-one-gpu.json",
    "Packed transfers between two GPUs": ROOT / "benchmarks" / "results" / "wires" / "nvidia-h200.json",
    "Packed transfers beside decode": ROOT / "benchmarks" / "results" / "wires" / "nvidia-h200-beside-decode.json",
}
_HELD |= {f"Whole vLLM engines, {path.stem}": path for path in engine_results()}
LIMITED = {
    title: result
    for title, result in _HELD.items()
    if result.exists() and any(row["limit"] is not None for row in json.loads(result.read_text())["rows"])
}


def gpu_table(result: Path = GPU_RESULT) -> str:
    """Markdown of the rows of one GPU, and what made them."""
    return table_of(result, _gpu, GPU_WORK, GPU_SHOWN, GPU_MARKS)


def table(result: Path = RESULT) -> str:
    """Markdown of the rows of a CPU, and what made them."""
    return table_of(result, _cpu, WORK, SHOWN, MARKS)


def ranks_table(result: Path = RANKS_RESULT) -> str:
    """Markdown of what ranks of two GPUs reach beside one another."""
    return table_of(result, _gpu, RANKS_WORK, RANKS_SHOWN, RANKS_MARKS)


def vllm_table(result: Path = VLLM_RESULT) -> str:
    """Markdown of kvplan's worker of vLLM's offloading against vLLM's own, in the layout that is best for vLLM."""
    rows = {(row["group"], row["what"]) for row in json.loads(result.read_text())["rows"]}
    shown: list[tuple[str, str, str, str]] = []
    for words, group, what, baseline in VLLM_SHOWN:
        head, colon, rest = what.partition(":")
        also = f"{packed(head)}{colon}{rest}"
        shown.append((words, group, what, baseline))
        if (group, also) in rows:
            shown.append((words.replace(what, also), group, also, baseline))
    work = VLLM_WORK + BLHNC_WORK if len(shown) > len(VLLM_SHOWN) else VLLM_WORK
    return table_of(result, _gpu, work, shown, VLLM_MARKS)


def offload_table(result: Path = OFFLOAD_RESULT) -> str:
    """Markdown of continuous batching of transformers with too little room."""
    record = json.loads(result.read_text())
    name, made = result.relative_to(ROOT), f"torch {record['torch']}, transformers {record['transformers']}"
    sizes = record["sizes"]
    first = (
        f"From [{name}](../../{name}): {record['gpu']}, driver {record['driver']}, {made}, kvplan {record['kvplan']}. "
        f"{sizes['requests']} requests of {sizes['prompt'] // 2:,} to {sizes['prompt']:,} tokens and {sizes['new']} "
        f"new ones, Llama-8B's shape, random weights, bf16, pages of {sizes['page']} tokens, room for {sizes['room']} "
        "of them. A move is from the call until the compute stream goes on. `python examples/transformers_offload.py "
        "--model llama-8b` makes it."
    )
    rows = [
        "| | tokens/s | first token, median | moved | while moving | a move, median |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        moved = [f"{row['moved_gb']:.2f} GB", f"{row['gb_per_second']:.1f} GB/s", f"{row['move_median_ms']:.1f} ms"] \
            if "moved_gb" in row else ["", "", ""]  # fmt: skip
        shown = [
            OFFLOAD_WAYS[row["way"]],
            f"{row['tokens_per_second']:.0f}",
            f"{row['first_token_median_s']:.2f} s",
            *moved,
        ]
        rows.append(f"| {' | '.join(shown)} |")
    same = next(row["as_kvplan"] for row in record["rows"] if "as_kvplan" in row)
    last = f"In {same} requests kvplan's tokens are those of its own offloading; batches of other ways round otherwise."
    return "\n".join([OFFLOAD_MARKS[0], first, "", *rows, "", last, OFFLOAD_MARKS[1]])


def batch_table(result: Path = BATCH_RESULT) -> str:
    """Markdown of which batches of the driver kept their bytes."""
    rows = ["| one process each | wrong transfers | wrong copies in one |", "| --- | --- | --- |"]
    for row in json.loads(result.read_text())["rows"]:
        if "died" in row:
            rows.append(f"| {row['case']} | the process died: {_death(row['died'])} | |")
        else:
            copies = f"{row['most_wrong']} of {row['descriptors']:,}" if row["wrong"] else ""
            rows.append(f"| {row['case']} | {row['wrong']} of {row['transfers']} | {copies} |")
    return "\n".join([BATCH_MARKS[0], *rows, BATCH_MARKS[1]])


def _death(told: str) -> str:
    signal, launch = "exit -11", "returned 719"
    return "segmentation fault" if told == signal else "unspecified launch failure" if launch in told else told


def choice_table(result: Path = CHOICE_RESULT) -> str:
    """Markdown of how good choices are, and what made them."""
    record = json.loads(result.read_text())
    found, gpu, runs = record["findings"], record["gpu"], record["calibrations"]
    made = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    rows = [("`auto`, measured beside the paths", found["auto"]),
            *((f"`auto`, {part}", one) for part, one in found.get("parts", {}).items()),
            *((f"the model, calibration {k + 1}", one) for k, one in enumerate(found["model"])),
            *((f"always `{path}`", one) for path, one in found["always"].items())]  # fmt: skip
    name, auto = result.relative_to(ROOT), found["auto"]
    taken = sorted(run["seconds"] for run in runs)
    first = (
        f"From [{name}](../../{name}): {gpu['name']}, driver {gpu['driver']}, {made}; {auto['points']} transfers. "
        f"Seconds from submit to the known end."
    )
    last = (
        f"{len(runs)} calibrations in a row take the same path on {found['agreement']:.1%} of the transfers; each took "
        f"{taken[0]:.0f} to {taken[-1]:.0f} s. The median error of a prediction of the whole time is "
        f"{found['prediction_error']:.0%}."
    )
    header = ["| | within 5 % of the best single path | at worst |", "| --- | --- | --- |"]
    table = [f"| {what} | {one['near']:.1%} | x{one['worst']:.2f} |" for what, one in rows]
    said = [f"Of this run: {record['note']}.", ""] if record.get("note") else []
    return "\n".join([CHOICE_MARKS[0], first, "", *said, *header, *table, "", last, CHOICE_MARKS[1]])


def _gpu(machine: dict[str, Any]) -> str:
    gpu = machine["gpu"]
    link = f"PCIe generation {gpu['pcie_generation']} x{gpu['pcie_width']}"
    return f"{gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}, {link}"


def _cpu(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} shared cores, no GPU"


def limits_tables() -> str:
    """Markdown of every row that holds a limit: what kvplan reached, and whether the limit holds."""
    lines = [LIMITS_MARKS[0]]
    for title, result in LIMITED.items():
        rows = [row for row in json.loads(result.read_text())["rows"] if row["limit"] is not None]
        name = result.relative_to(ROOT / "benchmarks")
        held = sum(row["ok"] for row in rows)
        lines += [f"**{title}** ([{name}]({name})): {held} of {len(rows)} limits hold.", "",
                  "| | kvplan | limit | made of | holds |", "| --- | --- | --- | --- | --- |"]  # fmt: skip
        lines += [f"| {row['group']}: {row['what']} | {number(row['ours'])} {row['unit']} | {number(row['limit'])} "
                  f"{row['unit']} | {row['rule']} | {'yes' if row['ok'] else 'no'} |" for row in rows]  # fmt: skip
        lines.append("")
    return "\n".join([*lines[:-1], LIMITS_MARKS[1]])


def table_of(
    result: Path,
    machine: Callable[[dict[str, Any]], str],
    work: str,
    shown: Shown,
    marks: tuple[str, str],
    up: str = "../../",
) -> str:
    record = json.loads(result.read_text())
    rows = {(row["group"], row["what"]): row for row in record["rows"]}
    name = result.relative_to(ROOT)
    made = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    lines = [
        marks[0],
        f"From [{name}]({up}{name}): {machine(record['machine'])}; {made}. {work}",
        "",
        "| | kvplan | baseline | times as fast |",
        "| --- | --- | --- | --- |",
        *(_line(words, rows[group, what], baseline) for words, group, what, baseline in shown),
        marks[1],
    ]
    return "\n".join(lines)


def _line(words: str, row: dict[str, Any], baseline: str) -> str:
    unit, (baseline, value) = row["unit"], best_baseline(row, baseline)
    other = f"{baseline}: {number(value)} {unit}" if baseline else ""
    faster = {"GB/s": row["ours"] / value, "x": None}.get(unit, value / row["ours"]) if baseline else None
    return f"| {words} | {number(row['ours'])} {unit} | {other} | {'' if faster is None else f'{faster:.2f}'} |"


def number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the tables into their pages."""
    from benchmarks import gain, peer_tables, process_tables, stream_wait_table, whole_engines
    from benchmarks.engines import pages as engine_pages
    from benchmarks.wires import wire_pages

    for page, marks, made in (
        *peer_tables.pages(),
        *process_tables.pages(),
        *engine_pages.pages(),
        *whole_engines.pages(),
        *wire_pages.pages(),
        *stream_wait_table.pages(),
        (ROOT / "README.md", gain.MARKS, gain.table()),
        (SPEED, MARKS, table()),
        (SPEED, GPU_MARKS, gpu_table()),
        (COST_MODEL, CHOICE_MARKS, choice_table()),
        (GPU_PAGE, BATCH_MARKS, batch_table()),
        (RANKS, RANKS_MARKS, ranks_table()),
        (ENGINES, VLLM_MARKS, vllm_table()),
        (ENGINES, OFFLOAD_MARKS, offload_table()),
        (ROOT / "benchmarks" / "README.md", LIMITS_MARKS, limits_tables()),
    ):
        if not made:  # no run is recorded yet: the page keeps its text
            continue
        between = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
        page.write_text(re.sub(between, lambda _, made=made: made, page.read_text(), flags=re.DOTALL))
    gain.PICTURE.write_text(gain.drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
