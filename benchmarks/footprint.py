"""The footprint of kvplan: time of its import, and peak memory of a plan."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import kvplan
from benchmarks.call_costs import peak_nbytes, resident_peak_nbytes
from benchmarks.problems import (
    Ids,
    Problem,
    Scale,
    consecutive,
    layer_first_to_layer_first,
    layer_first_to_page_first,
    scattered,
)
from benchmarks.record import Row

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


def importing(scale: Scale) -> list[Row]:
    """``import kvplan`` after ``import numpy``, each in an interpreter of its own; it loads nothing heavy."""
    root = str(Path(kvplan.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _IMPORT]
    numpy_seconds, own_seconds, loaded = [], [], set()
    for attempt in range(scale.imports + 1):
        output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout  # noqa: S603
        if attempt:  # the first one writes bytecode
            numpy_took, own_took, heavy = json.loads(output)
            numpy_seconds.append(numpy_took)
            own_seconds.append(own_took)
            loaded.update(heavy)
    detail = {"loaded": sorted(loaded)}
    beside = {"import numpy": statistics.median(numpy_seconds) * 1e3}
    return [
        Row("import", "import kvplan, beyond numpy", "ms", statistics.median(own_seconds) * 1e3, beside, 40.0, "40 ms",
            detail=detail),
        Row("import", f"of {', '.join(HEAVY)}: loaded", "", len(loaded), {}, 0.0, "none", detail=detail),
    ]  # fmt: skip


def memory(scale: Scale) -> list[Row]:
    """Peak memory of ``descriptors()`` over the three arrays, which hold a row for every run of the plan."""
    apart, alike = (make(scale.layers, scale.pool) for make in (layer_first_to_page_first, layer_first_to_layer_first))
    rows = []
    for count in scale.blocks[1:]:
        rows.append(_memory(apart, scattered(count, scale.pool), "random"))
        rows.append(_memory(alike, scattered(count, scale.pool), "random"))
        rows.append(_memory(alike, consecutive(count), "consecutive"))
    return rows


def _memory(problem: Problem, ids: Ids, order: str) -> Row:
    plan = problem.program.plan(*ids)
    made = plan.descriptors()  # compiled and loaded from here on
    runs = problem.program.runs * plan.units
    arrays, returned = 24 * runs, sum(column.nbytes for column in made)
    resident = resident_peak_nbytes(plan.descriptors)
    # Small plans: what a call costs in objects, whatever it returns.
    limit = 1.1 * arrays + 16384
    what = f"{problem.name} x {plan.units} {order}"
    return Row("peak memory", what, "KB", peak_nbytes(plan.descriptors) / 1e3,
               {"a row a run": arrays / 1e3, "returned": returned / 1e3}, limit / 1e3, "1.1 x + 16 KB",
               detail={"descriptors": made.size.size, "resident_kb": None if resident is None else resident / 1e3},
    )  # fmt: skip
