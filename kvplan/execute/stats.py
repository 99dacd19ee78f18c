"""Sums over the transfers that an executor has made so far."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from kvplan.base.process import generation
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
PENDING = 256  # most ends that are not yet added up; the end of a transfer should cost only an append


class Tally:
    """Sums over the results of transfers, which any thread may add.

    Attributes:
        ends: transfers that ended and are not yet added up: (result, direction), "failed" or "cancelled". Ending a
            transfer only appends to it.
    """

    def __init__(self) -> None:
        self._generation = generation()
        self._lock = threading.RLock()
        self.ends: deque[tuple[TransferResult, str] | str] = deque()
        self._flows: dict[tuple[str, str], tuple[list[Any], list[int]]] = {}  # fields of PathStats, and of the buckets
        self._quiet_until = 0.0
        self._unsaid = 0
        self._counts = {"failed": 0, "cancelled": 0}
        self._predicted = 0
        self._off = 0.0

    def add(self, result: TransferResult, direction: str = "host") -> None:
        """Count a transfer that succeeded."""
        self.ends.append((result, direction))

    def settle(self) -> None:
        """Add up ends once there are many. The calling thread holds no lock."""
        if len(self.ends) > PENDING and self._generation == generation():
            self._add_up()

    def _add_up(self) -> None:
        if self._generation != generation():  # a forked child: the thread that held the lock does not exist here
            self._generation, self._lock = generation(), threading.RLock()
        with self._lock:
            while self.ends:
                self._add(self.ends.popleft())

    def _add(self, end: tuple[TransferResult, str] | str) -> None:
        if isinstance(end, str):
            self._counts[end] += 1
            return
        result, direction = end
        sums, within = self._flows.setdefault((result.path, direction), ([0, 0, 0.0, 0, 0], [0] * (len(BUCKETS) + 1)))
        for k, value in enumerate((1, result.nbytes, result.seconds, result.descriptors, result.launches)):
            sums[k] += value
        within[bisect_left(BUCKETS, result.seconds)] += 1
        if result.predicted and result.seconds > 0:
            self._predicted += 1
            self._off += abs(math.log(result.predicted / result.seconds))

    def fail(self, plan: Plan | None = None, path: str = "", error: BaseException | None = None) -> None:
        """Count a transfer that failed, and log a warning, at most one per :data:`QUIET_SECONDS`."""
        self.ends.append("failed")
        now = time.monotonic()
        if error is None or plan is None:
            return
        if now < self._quiet_until:
            self._unsaid += 1
            return
        self._quiet_until, unsaid, self._unsaid = now + QUIET_SECONDS, self._unsaid, 0
        more = f" ({unsaid} more since the last warning)" if unsaid else ""
        log.warning(
            "%s by path %s failed: %s%s", plan, path, error, more,
            extra={
                "kvplan_path": path, "kvplan_direction": plan.direction, "kvplan_nbytes": plan.nbytes,
                "kvplan_units": plan.units, "kvplan_unsaid": unsaid,
            },
        )  # fmt: skip

    def stats(self) -> ExecutorStats:
        """Return the sums so far.

        >>> tally = Tally()
        >>> tally.add(TransferResult(4096, 1e-5, "kernel", 2, 1, 1.1e-5))
        >>> tally.stats().nbytes, tally.stats().paths["kernel"].descriptors, round(tally.stats().prediction_error, 3)
        (4096, 2, 0.1)
        """
        self._add_up()
        with self._lock:
            flows = {flow: FlowStats(*(*sums, tuple(within))) for flow, (sums, within) in self._flows.items()}
            counts, predicted, off = dict(self._counts), self._predicted, self._off
        paths: dict[str, PathStats] = {}
        for (path, _), flow in flows.items():
            paths[path] = _sum(paths.get(path, PathStats()), flow)
        return ExecutorStats(
            **vars(reduce(_sum, paths.values(), PathStats())),
            **counts,
            paths=paths,
            predicted=predicted,
            prediction_error=math.expm1(off / predicted) if predicted else None,
            flows=flows,
        )


def _sum(one: PathStats, other: PathStats) -> PathStats:
    return PathStats(*(getattr(one, name) + getattr(other, name) for name in PathStats.__dataclass_fields__))
