"""How long planning takes: block ids to flat descriptors, to a factored plan, and layouts to a program."""

from __future__ import annotations

from functools import partial

from benchmarks import numpy_baselines
from benchmarks.call_costs import allocator, interleaved
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

LARGE = 10_000  # descriptors from which on a plan is large, and held to the floor
FLOOR, COMPILED, BROADCAST, BY_LAYER = "numpy fill", "compiled fill", "numpy, one broadcast", "numpy, layer by layer"


def flat(scale: Scale) -> list[Row]:
    """Block ids to three int64 arrays, ids checked, on one thread.

    Large plans twice: into memory that was in use before, and into new pages, where the system's zeroing outweighs all.
    """
    apart, alike = (make(scale.layers, scale.pool) for make in (layer_first_to_page_first, layer_first_to_layer_first))
    rows = []
    for memory in ("reused", "new"):
        counts = [count for count in scale.blocks if memory == "reused" or scale.layers * 2 * count >= LARGE]
        with allocator(memory):
            for count in counts:
                ids = scattered(count, scale.pool)
                rows += [_flat(scale, problem, ids, "random", memory) for problem in (apart, alike)]
                rows.append(_flat(scale, alike, consecutive(count), "consecutive", memory))
                rows.append(_flat(scale, apart, ids, "random", memory, lists=True))
    return sorted(rows, key=lambda row: (row.detail["ids"], row.detail["layouts"], row.detail["order"]), reverse=True)


def _flat(scale: Scale, problem: Problem, ids: Ids, order: str, memory: str, *, lists: bool = False) -> Row:
    program, count = problem.program, ids[0].size
    given = [column.tolist() for column in ids] if lists else ids
    arguments = (problem.stepped, *ids, scale.pool)
    runs = scale.layers * 2 * count
    seconds = interleaved(
        {
            "ours": lambda: program.plan(*given).descriptors(),
            FLOOR: partial(numpy_baselines.floor, runs),
            COMPILED: partial(numpy_baselines.compiled_floor, runs),
            BROADCAST: partial(numpy_baselines.plan_broadcast, *arguments),
            BY_LAYER: partial(numpy_baselines.plan_by_layer, *arguments),
        },
        small=scale.small,
        large=scale.large,
    )
    micros = {name: value * 1e6 for name, value in seconds.items()}
    ours = micros.pop("ours")
    limit, rule = None, ""
    if not lists and order == "random":
        if runs >= LARGE:
            limit, rule = 2 * micros[FLOOR], "2 x fill"
        elif count == 1:
            limit, rule = 10.0, "10 us"
    made = program.plan(*given).descriptors().size.size
    what = f"{problem.name} x {count} {order}{' lists' if lists else ''}{', new memory' if memory == 'new' else ''}"
    return Row("flat plan", what, "us", ours, micros, limit, rule, detail={
        "layouts": problem.name, "blocks": count, "ids": "list" if lists else "numpy", "order": order,
        "memory": memory, "runs": runs, "descriptors": made, "ns_a_run": ours * 1e3 / runs,
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
            held = name == "int64 arrays"
            limit, rule = (5 + 3e-3 * count, "5 us + 3 ns a block") if held else (None, "")
            rows.append(Row("factored plan", f"{count} block{'s' * (count > 1)}, {name}", "us", seconds["ours"] * 1e6,
                            {"numpy": seconds["numpy"] * 1e6}, limit, rule, detail={"blocks": count}))  # fmt: skip
    return rows


def compiling(scale: Scale) -> list[Row]:
    """Two layouts to a program of 32 runs for each (layer, part), nothing cached; and its first plan."""
    src, dst = head_first_to_token_first(scale.layers, min(scale.pool, 64))
    src_geometry, dst_geometry = src.geometry, dst.geometry
    ids = scattered(4, 8)

    def first_program() -> CopyProgram:
        compile_geometry.cache_clear()
        return CopyProgram(src, dst)

    def first_descriptors() -> object:
        return first_program().plan(*ids).descriptors()

    listing = "listing the runs in Python"
    seconds = interleaved(
        {
            "compile": lambda: passes(src_geometry, dst_geometry).program,
            "program": first_program,
            "descriptors": first_descriptors,
            listing: partial(numpy_baselines.list_runs, scale.layers * 2, TOKENS * HEADS),
        },
        small=scale.small,
        large=scale.large,
    )
    millis = {name: value * 1e3 for name, value in seconds.items()}
    beside = {listing: millis[listing]}
    runs = f"{TOKENS * HEADS} runs each"
    return [
        Row("compile", f"{runs}: passes", "ms", millis["compile"], beside, 50.0, "50 ms"),
        Row("compile", f"{runs}: first compile()", "ms", millis["program"], beside, 50.0, "50 ms"),
        Row("compile", f"{runs}: to the first descriptors", "ms", millis["descriptors"], beside),
    ]
