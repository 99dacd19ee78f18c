"""Made-up rows as a bench on a GPU would find them."""

from __future__ import annotations

from kvplan.measure.bench import EQUAL_NBYTES
from kvplan.measure.rows import Ceilings, Row

LINK = Ceilings(55.1, 55.2)
NVLINK = Ceilings(push=395.0, pull=394.0)
SIZES = (512, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 1 << 20)
# GB/s by run size, loads of a host whose blocks are contiguous.
ALONE = {
    "auto": (33.0, 50.6, 54.1, 54.3, 54.6, 54.8),
    "copy_engine": (0.6, 2.1, 5.9, 32.0, 47.0, 54.0),
    "copy_engine_2d": (8.0, 20.0, 48.4, 51.0, 53.9, 54.6),
    "kernel": (33.0, 50.5, 50.8, 50.9, 50.9, 50.9),
    "staged": (31.0, 49.0, 54.0, 54.3, 54.5, 54.6),
    "cuMemcpyBatchAsync": (0.5, 2.0, 5.8, 31.0, 41.0, 53.0),
    "cuMemcpyAsync a run": (0.3, 1.1, 4.4, 15.0, 38.0, 52.0),
    "torch indexing": (9.0, 10.5, 12.3, 12.6, 12.8, 13.1),
}
# (GB/s, how much slower compute gets) beside decode and prefill.
BESIDE = {
    ("load", "decode"): {
        ("copy_engine", None): (5.8, 1.01), ("copy_engine_2d", None): (46.0, 1.02), ("kernel", 1): (16.0, 1.02),
        ("kernel", 2): (30.0, 1.06), ("kernel", 4): (41.0, 1.09), ("kernel", 8): (47.0, 1.12),
        ("staged", None): (52.5, 1.10), ("cuMemcpyBatchAsync", None): (5.5, 1.01),
        ("cuMemcpyAsync a run", None): (4.2, 1.01), ("torch indexing", None): (11.5, 1.03),
    },
    ("store", "decode"): {
        ("copy_engine", None): (16.0, 1.01), ("copy_engine_2d", None): (45.0, 1.01), ("kernel", 1): (16.0, 1.01),
        ("kernel", 2): (35.0, 1.04), ("kernel", 4): (49.0, 1.83), ("kernel", 8): (50.0, 1.91),
        ("staged", None): (47.0, 1.06), ("cuMemcpyBatchAsync", None): (15.5, 1.01),
        ("cuMemcpyAsync a run", None): (6.0, 1.00), ("torch indexing", None): (10.1, 1.02),
    },
    ("load", "prefill"): {
        ("copy_engine", None): (5.8, 1.00), ("copy_engine_2d", None): (48.0, 1.00), ("kernel", 4): (46.0, 1.13),
        ("staged", None): (48.6, 1.02), ("cuMemcpyBatchAsync", None): (5.7, 1.00),
        ("cuMemcpyAsync a run", None): (4.2, 1.00), ("torch indexing", None): (12.0, 1.01),
    },
    ("store", "prefill"): {
        ("copy_engine", None): (16.0, 1.00), ("copy_engine_2d", None): (47.0, 1.00), ("kernel", 2): (51.0, 1.21),
        ("staged", None): (46.3, 1.01), ("cuMemcpyBatchAsync", None): (15.8, 1.00),
        ("cuMemcpyAsync a run", None): (6.1, 1.00), ("torch indexing", None): (10.3, 1.02),
    },
}  # fmt: skip


def row(path, gbps, *, direction="load", host="contiguous", run_nbytes=8192, runs=1024, **more) -> Row:
    """One row; seconds follow from GB/s."""
    seconds = None if gbps is None else run_nbytes * runs / gbps / 1e9
    share = None if gbps is None else gbps / (LINK if direction in ("load", "store") else NVLINK).measured[direction]
    facts = {"seconds": seconds, "wall": seconds, "samples": 15, "gbps": gbps, "share": share}
    return Row(direction, host, run_nbytes, runs, 64, path, **(facts | more))


def rows() -> list[Row]:
    """All of them: two counts a size, both directions and hosts, and beside compute."""
    made = []
    for direction in ("load", "store"):
        for host in ("contiguous", "scattered"):
            for path, rates in ALONE.items():
                for run_nbytes, rate in zip(SIZES, rates, strict=True):
                    slower = 0.62 if (path, host) == ("staged", "scattered") and run_nbytes < 64 << 10 else 1.0
                    faster = min(2.4 * rate, 53.0) if direction == "store" and rate < 30 else rate * 0.985
                    gbps = (faster if direction == "store" else rate) * slower
                    where = {"direction": direction, "host": host, "run_nbytes": run_nbytes}
                    made += [
                        row(path, gbps * 0.8, runs=16, **where),
                        row(path, gbps, runs=EQUAL_NBYTES // run_nbytes, **where),
                    ]
    for (direction, kind), found in BESIDE.items():
        for (path, programs), (gbps, slowdown) in found.items():
            made.append(row(path, gbps, direction=direction, runs=8192, beside=kind, programs=programs,
                            slowdown=slowdown, samples=40))  # fmt: skip
    return made
