"""Rows of what was measured over one wire, with their limits."""

from __future__ import annotations

from math import ceil
from typing import Any

from benchmarks.record import Row
from benchmarks.wires.limits import BYTES_A_MESSAGE, CPU_MS, LATENCIES, LATENCY_MORE_US, Wire
from kvplan.base.numbers import binary

Found = dict[str, Any]
WAYS = ("packed pull", "packed push")


def rows_of(wire: Wire, found: Found) -> list[Row]:
    """Return the rows of one wire."""
    group = f"{wire.name}, {wire.memory} memory"
    whole = max(found["one message"].values())
    rows: list[Row] = []
    for text, one in found["rows"].items():
        rows += _transfers(group, wire, int(text), one, whole, found["NIXL as it comes"][text])
    rows.append(Row(group, "a note there and back", "us", found["note"]["us"]))
    latency = found["note"]["us"] / 2
    limit = LATENCIES * latency + LATENCY_MORE_US if wire.memory == "gpu" else None
    rule = f"{LATENCIES} notes + {LATENCY_MORE_US:.0f} us" if limit else ""
    for name in WAYS:
        beside = {"a note": latency, "direct pull": found["one block"]["direct pull"]}
        rows.append(Row(group, f"one block, {name}", "us", found["one block"][name], beside, limit, rule))
    return rows


def _transfers(group: str, wire: Wire, row: int, one: Found, whole: float, plain: dict[str, float]) -> list[Row]:
    gbps = one["GB/s"]
    posted = {name: value for name, value in gbps.items() if name not in WAYS}
    best = max(plain, key=lambda name: plain[name])
    threadless = max(posted.values())
    made = []
    for name in WAYS:
        limits = []
        if row in wire.of_descriptors:
            factor = wire.of_descriptors[row]
            limits.append((factor * plain[best], f"{factor:g} x a descriptor each"))
        if row in wire.of_one_message:
            share = wire.of_one_message[row]
            limits.append((share * whole, f"{share:g} of one message"))
        limit, rule = max(limits, default=(None, ""))
        beside = {"a descriptor each": plain[best], "one each, no thread": threadless, "one message": whole}
        detail = {
            "NIXL as it comes": plain, "NIXL without its thread": posted, "nbytes": one["nbytes"],
            "descriptors": one["descriptors"],
        }  # fmt: skip
        made.append(
            Row(
                group,
                f"rows of {binary(row)}, {name}",
                "GB/s",
                gbps[name],
                beside,
                limit,
                rule,
                more_is_better=True,
                detail=detail,
            )
        )
    bound = wire.memory == "gpu"
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
