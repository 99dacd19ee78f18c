"""Sums over the transfers that an executor has made so far."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvplan.execute.transfer import TransferResult
from kvplan.plan.plan import Plan

log = logging.getLogger("kvplan.execute")


@dataclass(frozen=True)
class PathStats:
    """Sums of one path.

    Attributes:
        transfers: transfers that succeeded.
        nbytes: bytes moved.
        seconds: time of copying, summed over transfers, also over transfers that ran at the same time.
        descriptors: contiguous copies issued.
        launches: calls that issued these copies.
    """

    transfers: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    descriptors: int = 0
    launches: int = 0


@dataclass(frozen=True)
class FlowStats(PathStats):
    """Sums of one path in one direction.

    Attributes:
        within: number of transfers in each of :data:`BUCKETS`, by their seconds; each transfer is in one bucket. The
            last number counts transfers above all bounds.
    """

    within: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExecutorStats(PathStats):
    """Sums of an executor, over transfers that are known to have ended.

    Attributes:
        failed: transfers that failed.
        paths: sums of each path that was taken.
        predicted: transfers whose time was predicted, because ``auto`` chose their path.
        prediction_error: mean error of the predictions: 0.1 means a tenth too high or too low. It is the mean of the
            logarithms of the ratios. None without predictions.
        cancelled: transfers that were cancelled before they began.
        in_flight: transfers that were submitted and have not ended.
        flows: sums by path and direction.
        gpu_nbytes, pinned_nbytes: bytes of GPU memory and of pinned memory that the executor holds.
    """

    failed: int = 0
    paths: Mapping[str, PathStats] | None = None
    predicted: int = 0
    prediction_error: float | None = None
    cancelled: int = 0
    in_flight: int = 0
    flows: Mapping[tuple[str, str], FlowStats] = field(default_factory=dict, compare=False)
    gpu_nbytes: int = field(default=0, compare=False)
    pinned_nbytes: int = field(default=0, compare=False)


# Upper bounds in seconds, from transfers of a few blocks to the transfer of a whole cache.
BUCKETS = (
    1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
QUIET_SECONDS = 10.0  # after a logged failure, during which further failures are only counted


class Tally:
    """Sums over the results of transfers, which any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may end a transfer, too
        self._flows: dict[tuple[str, str], list[Any]] = {}  # the fields of PathStats, then the buckets
        self._failed = self._cancelled = self._predicted = self._unsaid = 0
        self._off = self._quiet_until = 0.0

    def add(self, result: TransferResult, direction: str = "host", *, chosen: bool = True) -> None:
        """Count a transfer that succeeded, and its prediction if its path was ``chosen`` by that."""
        nbytes, seconds, path, descriptors, launches = result
        with self._lock:
            row = self._flows.setdefault((path, direction), [0, 0, 0.0, 0, 0, *[0] * (len(BUCKETS) + 1)])
            row[:5] = row[0] + 1, row[1] + nbytes, row[2] + seconds, row[3] + descriptors, row[4] + launches
            row[5 + bisect_left(BUCKETS, seconds)] += 1
            if chosen and result.predicted and seconds > 0:
                self._predicted += 1
                self._off += abs(math.log(result.predicted / seconds))

    def cancel(self) -> None:
        """Count a transfer that was cancelled."""
        with self._lock:
            self._cancelled += 1

    def fail(self, plan: Plan, path: str, error: BaseException | None) -> None:
        """Count a transfer that failed, and log a warning, at most one per :data:`QUIET_SECONDS`."""
        with self._lock:
            self._failed += 1
            now = time.monotonic()
            if now < self._quiet_until:
                self._unsaid += 1
                return
            self._quiet_until, unsaid, self._unsaid = now + QUIET_SECONDS, self._unsaid, 0
        more = f" ({unsaid} more since the last warning)" if unsaid else ""
        with suppress(Exception):  # a user's filter may raise one
            facts = {"path": path, "direction": plan.direction, "nbytes": plan.nbytes, "units": plan.units}
            extra = {f"kvplan_{name}": value for name, value in {**facts, "unsaid": unsaid}.items()}
            log.warning("%s by path %s failed: %s%s", plan, path, error, more, extra=extra)

    def stats(self) -> ExecutorStats:
        """Return the sums so far. It takes no lock: in a forked child, another thread of the parent might hold it.

        >>> tally = Tally()
        >>> tally.add(TransferResult(4096, 1e-5, "kernel", 2, 1, 1.1e-5))
        >>> tally.stats().nbytes, tally.stats().paths["kernel"].descriptors, round(tally.stats().prediction_error, 3)
        (4096, 2, 0.1)
        """
        rows = {flow: tuple(row) for flow, row in self._flows.copy().items()}
        return ExecutorStats(
            **_sums(rows.values()),
            failed=self._failed,
            cancelled=self._cancelled,
            paths={path: PathStats(**_sums(row for (its, _), row in rows.items() if its == path)) for path, _ in rows},
            predicted=self._predicted,
            prediction_error=math.expm1(self._off / self._predicted) if self._predicted else None,
            flows={flow: FlowStats(**_sums([row]), within=row[5:]) for flow, row in rows.items()},
        )


def _sums(rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    return dict(zip(PathStats.__dataclass_fields__, map(sum, zip(*rows, strict=True)), strict=False))
