"""How long planning takes: block ids to descriptors, to a factored plan, layouts to a program; and the import."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import kvplan
from benchmarks import numpy_baselines
from benchmarks.calls import interleaved, reused_memory
from benchmarks.problems import (
    HEADS,
    TOKENS,
    Ids,
    Problem,
    Scale,
    consecutive,
    head_first_to_token_first,
    layer_first_to_layer_first,
    layer_first_to_page_first,
    scattered,
)
from benchmarks.record import Row
from kvplan import CopyProgram
from kvplan.program.passes import compile_geometry, passes

FLOOR, BROADCAST = "numpy fill", "numpy, one broadcast"
HEAVY = ("torch", "triton", "numba", "llvmlite", "cuda")
_IMPORT = f"""
import json, sys, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import kvplan
end = time.perf_counter()
print(json.dumps([middle - start, end - middle, [name for name in {HEAVY} if name in sys.modules]]))
"""


def flat(scale: Scale) -> list[Row]:
    """Block ids to three int64 arrays, ids checked, on one thread, in memory that was in use before."""
    apart, alike = (make(scale.layers, scale.pool) for make in (layer_first_to_page_first, layer_first_to_layer_first))
    rows = []
    with reused_memory():
        for count in scale.blocks:
            ids = scattered(count, scale.pool)
            rows += [_flat(scale, problem, ids, "random") for problem in (apart, alike)]
            rows.append(_flat(scale, alike, consecutive(count), "consecutive"))
            rows.append(_flat(scale, apart, ids, "random", lists=True))
    return sorted(rows, key=lambda row: (row.detail["ids"], row.detail["layouts"], row.detail["order"]), reverse=True)


def _flat(scale: Scale, problem: Problem, ids: Ids, order: str, *, lists: bool = False) -> Row:
    program, count = problem.program, ids[0].size
    given = [column.tolist() for column in ids] if lists else ids
    runs = scale.layers * 2 * count
    seconds = interleaved(
        {
            "ours": lambda: program.plan(*given).descriptors(),
            FLOOR: partial(numpy_baselines.floor, runs),
            BROADCAST: partial(numpy_baselines.plan_broadcast, problem.stepped, *ids, scale.pool),
        },
        small=scale.small,
        large=scale.large,
    )
    micros = {name: value * 1e6 for name, value in seconds.items()}
    ours = micros.pop("ours")
    what = f"{problem.name} x {count} {order}{' lists' if lists else ''}"
    return Row("flat plan", what, "us", ours, micros, detail={
        "layouts": problem.name, "blocks": count, "ids": "list" if lists else "numpy", "order": order, "runs": runs,
        "descriptors": program.plan(*given).descriptors().size.size, "ns_a_run": ours * 1e3 / runs,
    })  # fmt: skip


def factored(scale: Scale) -> list[Row]:
    """Block ids, checked, to unit addresses: ``plan()`` alone."""
    problem = layer_first_to_page_first(scale.layers, scale.pool)
    rows = []
    for count in scale.blocks:
        ids = scattered(count, scale.pool)
        for name, given in (("int64 arrays", ids), ("lists", tuple(column.tolist() for column in ids))):
            seconds = interleaved(
                {
                    "ours": partial(problem.program.plan, *given),
                    "numpy": partial(numpy_baselines.address, problem.stepped, *ids, scale.pool),
                },
                small=scale.small,
                large=scale.large,
            )
            what = f"{count} block{'s' * (count > 1)}, {name}"
            rows.append(Row("factored plan", what, "us", seconds["ours"] * 1e6, {"numpy": seconds["numpy"] * 1e6}))
    return rows


def compiling(scale: Scale) -> list[Row]:
    """Two layouts to a program of 32 runs for each (layer, part), nothing cached; and its first plan."""
    src, dst = head_first_to_token_first(scale.layers, min(scale.pool, 64))
    src_geometry, dst_geometry = src.geometry, dst.geometry
    ids = scattered(4, 8)

    def first_program() -> CopyProgram:
        compile_geometry.cache_clear()
        return CopyProgram(src, dst)

    calls = {
        "passes": lambda: passes(src_geometry, dst_geometry).program,
        "first compile()": first_program,
        "to the first descriptors": lambda: first_program().plan(*ids).descriptors(),
    }
    seconds = interleaved(calls, small=scale.small, large=scale.large)
    return [Row("compile", f"{TOKENS * HEADS} runs each: {name}", "ms", seconds[name] * 1e3) for name in calls]


def importing(scale: Scale) -> list[Row]:
    """``import kvplan`` after ``import numpy``, each in an interpreter of its own; it loads nothing heavy."""
    root = str(Path(kvplan.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _IMPORT]
    numpy_seconds, own_seconds, loaded = [], [], set()
    for attempt in range(scale.imports + 1):
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        if attempt:  # the first one writes bytecode
            numpy_took, own_took, heavy = json.loads(output)
            numpy_seconds.append(numpy_took)
            own_seconds.append(own_took)
            loaded.update(heavy)
    beside = {"import numpy": statistics.median(numpy_seconds) * 1e3}
    return [Row("import", "import kvplan, beyond numpy", "ms", statistics.median(own_seconds) * 1e3, beside,
                detail={"loaded": sorted(loaded)})]  # fmt: skip
