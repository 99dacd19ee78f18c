"""Rows of what was measured over one wire."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from benchmarks.record import Row, speed_row
from benchmarks.wires.beside import ROW
from benchmarks.wires.sizes import Wire
from kvplan.base.numbers import binary

Found = Mapping[str, Any]


def rows_of(wire: Wire, found: Found, posted: Mapping[str, Found]) -> Iterator[Row]:
    """Return the rows of one wire.

    Args:
        wire: the wire.
        found: what was measured of packed transfers.
        posted: what was measured of a descriptor for each row, by the kind of agent; or nothing.
    """
    group, whole = f"{wire.name}, {wire.memory} memory", found["one message"]
    for row, ours in found["rows"].items():
        detail = {"nbytes": ours["nbytes"], "descriptors": ours["descriptors"]}
        beside = {}
        if posted:
            rates = {kind: theirs["rows"][row]["GB/s"] for kind, theirs in posted.items()}
            beside = {"a descriptor each": max(rate for kind in rates.values() for rate in kind.values())}
            detail |= rates | {"posted rows": next(iter(posted.values()))["rows"][row]["rows"]}
        words = f"rows of {binary(row)}"
        for name, gbps in ours["GB/s"].items():
            yield speed_row(group, f"{words}, {name}", gbps, beside | {"one message": whole}, detail=detail)
        for name, counts in ours["messages"].items():
            yield Row(group, f"{words}, messages of a {name}", "x", float(max(counts.values())), detail=counts)
            near, far = ours["CPU ms per GB"][name]
            yield Row(group, f"{words}, CPU ms per GB of a {name}", "ms", max(near, far),
                      detail={"here": near, "there": far})  # fmt: skip
    yield Row(group, "a note there and back", "us", found["note"]["us"])
    one, alone = found["one block"], [theirs["one block"] for theirs in posted.values()]
    for name, operation in (("pull", "READ"), ("push", "WRITE")):
        beside = {"a note": found["note"]["us"] / 2, "packed": one[f"packed {name}"]}
        if alone:
            beside["NIXL alone"] = min(us for kind in alone for way, us in kind.items() if way.startswith(operation))
        detail = {way: taken for way, taken in one.items() if way.endswith(name)}
        yield Row(group, f"one block, {name}", "us", one[f"auto {name}"], beside, detail=detail)


def beside_rows(wire: Wire, found: Found) -> Iterator[Row]:
    """Return the rows of transfers beside decode."""
    group, beside = f"{wire.name}, {wire.memory} memory, beside decode", found["beside"]
    what, gbps = f"rows of {binary(ROW)}, packed push", beside["GB/s"]
    detail = {"nbytes": beside["nbytes"], "transfers": beside["transfers"]}
    yield speed_row(group, what, gbps, {"one message": found["one message"]}, detail=detail)
    for side in ("sender", "receiver"):
        detail = {name: [window[name] for window in beside[side]] for name in beside[side][0]}
        if any(detail["dry"]):
            detail["broken"] = "the queue of compute ran empty"
        yield Row(group, f"{what}: compute of the {side} slower", "x", median(detail["slowdown"]), detail=detail)
