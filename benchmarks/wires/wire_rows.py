"""Rows of what was measured over one wire, with their limits."""

from __future__ import annotations

from math import ceil
from statistics import median
from typing import Any

from benchmarks.record import Row
from benchmarks.wires.beside import ROW
from benchmarks.wires.limits import (
    BYTES_A_MESSAGE,
    CPU_MS,
    LATENCIES,
    LATENCY_MORE_US,
    SLOWER_BESIDE_DECODE,
    Wire,
)
from kvplan.base.numbers import binary

Found = dict[str, Any]
WAYS = ("packed pull", "packed push")


def rows_of(wire: Wire, found: Found) -> list[Row]:
    """Return the rows of one wire."""
    group = f"{wire.name}, {wire.memory} memory"
    whole = max(found["one message"].values())
    rows: list[Row] = []
    for row, one in found["rows"].items():
        plain = found.get("NIXL as it comes", {}).get(row)
        rows += _speeds(group, wire, row, one, whole, plain)
        rows += _costs(group, wire, row, one)
    rows.append(Row(group, "a note there and back", "us", found["note"]["us"]))
    latency = found["note"]["us"] / 2
    limit = LATENCIES * latency + LATENCY_MORE_US if wire.memory == "gpu" else None
    rule = f"{LATENCIES} notes + {LATENCY_MORE_US:.0f} us" if limit else ""
    one = found["one block"]
    for name, operation in (("pull", "READ"), ("push", "WRITE")):
        alone = min(taken for what, taken in one.items() if what.startswith(operation))
        beside = {"a note": latency, "NIXL alone": alone, "packed": one[f"packed {name}"]}
        detail = {way: taken for way, taken in one.items() if way.endswith(name) or way.startswith(operation)}
        rows.append(Row(group, f"one block, {name}", "us", one[f"auto {name}"], beside, limit, rule, detail=detail))
    return rows


def _speeds(group: str, wire: Wire, row: int, one: Found, whole: float, plain: Found | None) -> list[Row]:
    """Return the rows of GB/s; without ``plain``, no descriptor for each row was measured."""
    posted = {name: value for name, value in one["GB/s"].items() if name not in WAYS}
    limits, beside = [], {}
    detail = {"nbytes": one["nbytes"], "descriptors": one["descriptors"]}
    if plain is not None:
        best = max(plain["GB/s"].values())
        beside = {"a descriptor each": best, "one each, no thread": max(posted.values())}
        detail |= {"NIXL as it comes": plain["GB/s"], "NIXL without its thread": posted, "posted rows": plain["rows"]}
        if row in wire.of_descriptors:
            factor = wire.of_descriptors[row]
            limits.append((factor * best, f"{factor:g} x a descriptor each"))
    if row in wire.of_one_message:
        share = wire.of_one_message[row]
        limits.append((share * whole, f"{share:g} of one message"))
    limit, rule = max(limits, default=(None, ""))
    beside["one message"] = whole
    return [
        Row(group, f"rows of {binary(row)}, {name}", "GB/s", one["GB/s"][name], beside, limit, rule,
            more_is_better=True, detail=detail)
        for name in WAYS
    ]  # fmt: skip


def _costs(group: str, wire: Wire, row: int, one: Found) -> list[Row]:
    """Return the rows of messages and of CPU time."""
    made, bound = [], wire.memory == "gpu"
    for name in WAYS:
        counts = one["messages"][name]
        least = float(ceil(one["nbytes"] / BYTES_A_MESSAGE) + 1)
        made.append(
            Row(group, f"rows of {binary(row)}, messages of a {name}", "x", float(max(counts.values())), {},
                least if bound else None, "one for 8 MiB, and one" if bound else "", detail=counts)
        )  # fmt: skip
        near, far = one["CPU ms per GB"][name]
        made.append(
            Row(group, f"rows of {binary(row)}, CPU ms per GB of a {name}", "ms", max(near, far), {},
                CPU_MS if bound else None, "on either side" if bound else "", detail={"here": near, "there": far})
        )  # fmt: skip
    return made


def beside_rows(wire: Wire, found: Found) -> list[Row]:
    """Return the rows of transfers beside decode. A stand-in for compute, and a queue that ran dry, have no limit."""
    group, one = f"{wire.name}, {wire.memory} memory, beside decode", found["beside"]
    what = f"rows of {binary(ROW)}, packed push"
    detail = {"nbytes": one["nbytes"], "transfers": one["transfers"]}
    rows = [
        Row(group, what, "GB/s", one["GB/s"], {"one message": max(found["one message"].values())},
            more_is_better=True, detail=detail)
    ]  # fmt: skip
    for side in ("sender", "receiver"):
        rounds = one[side]
        told = {name: [window[name] for window in rounds] for name in rounds[0]}
        broken = {"broken": "the queue of compute ran empty"} if any(told["dry"]) else {}
        held = wire.memory == "gpu" and not broken
        rows.append(
            Row(group, f"{what}: compute of the {side} slower", "x", median(told["slowdown"]), {},
                SLOWER_BESIDE_DECODE if held else None, f"x{SLOWER_BESIDE_DECODE}" if held else "",
                detail=told | broken | {"GB/s": one["GB/s"]})
        )  # fmt: skip
    return rows
