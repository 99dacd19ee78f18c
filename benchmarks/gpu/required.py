"""Limits of each path as data, and rows that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.sizes import KIB
from benchmarks.record import Row

TOLERANCE = 1.03  # a figure further above the link was not measured right

# Shares of one large copy.
STAGED = {("large", "load"): 0.97, ("large", "store"): 0.95, ("medium", "load"): 0.96, ("medium", "store"): 0.95}
STAGED_BOTH = 0.95
PITCHED = {"load": 0.54, "store": 0.80}  # rows of 8 KiB

# Beside compute: shares of one large copy beside the same compute, and how much more it may slow the compute down.
STAGED_BESIDE = {
    ("decode", "load"): 0.95,
    ("decode", "store"): 0.92,
    ("prefill", "load"): 0.92,
    ("prefill", "store"): 0.90,
}
STAGED_SLOWER = {"decode": 0.04, "prefill": 0.03}
KERNEL_STORE_SLOWDOWN = 1.05  # beside decode

SUBMIT_KERNEL_US = 25.0
SUBMIT_STAGED_US, SUBMIT_STAGED_SHARE = 100.0, 0.03
SMALL_BLOCKS, SMALL_SHARE = 16, 1.08
LATENCY_BLOCKS, LATENCY_US = 1, 60.0


def kernel_share(run_nbytes: int, programs: int) -> float | None:
    """Share of the SM ceiling that a load must reach, or None.

    >>> kernel_share(8192, 2), kernel_share(2048, 4), kernel_share(512, 12), kernel_share(2048, 2)
    (0.97, 0.97, 0.9, None)
    """
    asked = {KIB // 2: (12, 0.90), KIB: (8, 0.97), 2 * KIB: (4, 0.97)}.get(run_nbytes, (2, 0.97))
    return asked[1] if run_nbytes >= KIB // 2 and programs == asked[0] else None


def staged_submit_us(seconds: float) -> float:
    """Microseconds that a staged submit may take whose transfer takes ``seconds``."""
    return SUBMIT_STAGED_US + SUBMIT_STAGED_SHARE * seconds * 1e6


def speed_row(
    group: str,
    what: str,
    gbps: float,
    beside: Mapping[str, float],
    *,
    link: float,
    share: float | None = None,
    rule: str = "",
    detail: Mapping[str, Any] | None = None,
) -> Row:
    """A row of GB/s, with a limit of ``share`` of its first baseline.

    Args:
        link: GB/s that nothing exceeds. Where ours or a baseline exceeds it by more than the tolerance, the row is
            marked and holds no limit.
    """
    kept = dict(detail or {})
    fastest = max(gbps, *beside.values(), 0.0)
    if fastest > TOLERANCE * link:
        kept["broken"] = f"{fastest:.1f} GB/s is above the link's {link:.1f}"
        return Row(group, f"{what} (BROKEN: above the link)", "GB/s", gbps, beside, detail=kept)
    if share is None:
        return Row(group, what, "GB/s", gbps, beside, rule=rule, more_is_better=True, detail=kept)
    name, first = next(iter(beside.items()))
    return Row(group, what, "GB/s", gbps, beside, share * first, rule or f"{share:g} x {name}",
               more_is_better=True, detail=kept)  # fmt: skip


def missed(row: Row) -> bool:
    """Whether a row misses its limit, or has an impossible figure."""
    return row.ok is False or "broken" in row.detail
