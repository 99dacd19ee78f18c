"""Rows of the benchmarks between two processes, made of what the two commands have measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.sizes import KIB
from benchmarks.record import Row
from kvplan.base.numbers import rounded

Document = Mapping[str, Any]
TWO, ONE, BETTER = "two processes", "one process", "the better of NIXL READ and NIXL WRITE"
COPY, NIXL, WITH_NIXL = "one large copy", "NIXL", "with NIXL's agents in both processes"
BETWEEN, BESIDE, BLOCK, MEETING, INTERFACE = "between", "beside NIXL", "one block", "meeting", "NIXL's interface"
HOST, LAYERED = "host pools", "by layer"
OF_ONE_PROCESS, OF_HOST_PATH, OF_COPY = 0.97, 0.9, 0.85
OF_NIXL = {8 * KIB: 50, 64 * KIB: 15, 1024 * KIB: 2.5}  # times the better of NIXL's READ and WRITE, by bytes of a run
SEEN_US, SUBMIT_US, POST_US, MEET_MS = 150.0, 40.0, 1000.0, 50.0


@dataclass(frozen=True)
class Scale:
    """How large a run is; the two commands have these sizes by default.

    Attributes:
        nbytes: most bytes per transfer.
        rows, row_nbytes: of a transfer through NIXL's interface.
    """

    nbytes: int = 320 << 20
    rows: int = 40960
    row_nbytes: int = 8192


def rows_of(
    alone: Document, beside: Document | None, interface: Document | None, host: Document | None = None,
    layered: Document | None = None,
) -> list[Row]:  # fmt: skip
    """The rows of a run.

    Args:
        alone: what ``kvplan bench --peer process --output`` writes, without NIXL in the processes.
        beside: the same with NIXL's agents in both processes; None where NIXL is not installed.
        interface: what ``benchmarks.gpu.peer.nixl_interface --json`` writes; None where NIXL is not installed.
        host: what ``kvplan bench --peer process --device cpu --output`` writes.
        layered: what ``benchmarks.gpu.peer.layered --json`` writes.
    """
    rates = _by_case(beside or alone)
    found = [*_rates(BETWEEN, OF_ONE_PROCESS, rates), *_gains(rates), *_one_block(alone, beside), *_meetings(alone)]
    if interface is not None:
        found += _interface(interface)
    if layered is not None:
        found.append(_last_layer(layered))
    return found if host is None else [*found, *_rates(HOST, OF_HOST_PATH, _by_case(host))]


Cases = dict[tuple[str, int], dict[str, float]]  # GB/s by direction and bytes of a run, and by way


def _by_case(made: Document) -> Cases:
    found: Cases = {}
    for row in made["rows"]:
        if row["gbps"] is not None and not row["broken"]:
            found.setdefault((row["direction"], row["run_nbytes"]), {})[row["path"]] = row["gbps"]
    return found


def _rates(group: str, share: float, found: Cases) -> Iterator[Row]:
    for (direction, nbytes), ways in found.items():
        others = {name: ways[name] for name in (ONE, *sorted(ways)) if name in ways and name != TWO}
        yield Row(group, f"{direction}, {rounded(nbytes)}", "GB/s", ways[TWO], others,
                  share * ways[ONE], f"{share:g} x {ONE}", more_is_better=True)  # fmt: skip


def _gains(found: Cases) -> Iterator[Row]:
    for (direction, nbytes), ways in found.items():
        nixl = [gbps for (_, size), others in found.items() if size == nbytes
                for name, gbps in others.items() if name.startswith(NIXL)]  # fmt: skip
        if nixl and nbytes in OF_NIXL:
            times = OF_NIXL[nbytes]
            yield Row(BESIDE, f"{direction}, {rounded(nbytes)}", "GB/s", ways[TWO], {BETTER: max(nixl)},
                      times * max(nixl), f"{times:g} x NIXL", more_is_better=True)  # fmt: skip


def _one_block(alone: Document, beside: Document | None) -> Iterator[Row]:
    for made, words in ((alone, ""), (beside, f", {WITH_NIXL}")):
        if made is None:
            continue
        for what, key, limit in (("submit to seen", "seen", SEEN_US), ("submit", "submit", SUBMIT_US)):
            taken = made["processes"][key]
            least = None if words else limit
            yield Row(BLOCK, what + words, "us", taken["median"] * 1e6, {}, least, "" if words else f"{limit:g} us",
                      detail={name: taken[name] * 1e6 for name in ("tenth", "hundredth")})  # fmt: skip


def _meetings(alone: Document) -> Iterator[Row]:
    taken = sorted(alone["processes"]["meet"])
    yield Row(MEETING, "one allocation", "ms", taken[len(taken) // 2] * 1e3, {}, MEET_MS, f"{MEET_MS:g} ms",
              detail={"longest": taken[-1] * 1e3})  # fmt: skip


def _last_layer(made: Document) -> Row:
    alone = "one layer alone"
    what = f"last of {made['layers']} layers of {made['layer_nbytes'] / 1e6:.3g} MB, from its compute to seen"
    return Row(LAYERED, what, "us", made["tail_us"], {alone: made["alone_us"]}, made["alone_us"], alone)


def _interface(made: Document) -> Iterator[Row]:
    copy = made["large_copy_gbps"]
    for operation, ours in made["kvplan"].items():
        its = made.get("nixl", {}).get(operation)

        def beside(key: str, its: Document | None = its) -> dict[str, float]:
            return {} if its is None else {NIXL: its[key]}

        yield Row(INTERFACE, f"{operation}, 4 in flight", "GB/s", ours["gbps_in_flight"], {COPY: copy},
                  OF_COPY * copy, f"{OF_COPY:g} x {COPY}", more_is_better=True)  # fmt: skip
        if "gbps_after_make" in ours:
            yield Row(INTERFACE, f"{operation}, after the make", "GB/s", ours["gbps_after_make"], {COPY: copy},
                      OF_COPY * copy, f"{OF_COPY:g} x {COPY}", more_is_better=True)  # fmt: skip
        if "gbps_to_last_byte" in ours:
            yield Row(INTERFACE, f"{operation}, to the last byte", "GB/s", ours["gbps_to_last_byte"], {COPY: copy},
                      OF_COPY * copy, f"{OF_COPY:g} x {COPY}", more_is_better=True)  # fmt: skip
        yield Row(INTERFACE, f"{operation}, one at a time", "GB/s", ours["gbps"], beside("gbps") | {COPY: copy})
        yield Row(INTERFACE, f"{operation}: post", "us", ours["post_us"], beside("post_us"), POST_US, "1 ms")
        yield Row(INTERFACE, f"{operation}: make", "us", ours["make_us"], beside("make_us"))
