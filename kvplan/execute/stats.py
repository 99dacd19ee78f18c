"""What an executor has done so far, summed."""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvplan.base.process import generation
from kvplan.execute.transfer import TransferResult
from kvplan.plan.plan import Plan

log = logging.getLogger("kvplan.execute")


@dataclass(frozen=True)
class PathStats:
    """Sums of one path.

    Attributes:
        transfers: that ended well.
        nbytes: moved.
        seconds: of copying, transfers that ran at once counted each.
        descriptors: contiguous copies.
        launches: calls that issued them.
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
        within: transfers by their seconds: as many as each of :data:`BUCKETS` holds and the one before does not, and at
            the end those that took longer.
    """

    within: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExecutorStats(PathStats):
    """Sums of an executor, of transfers that are known to have ended.

    Attributes:
        failed: transfers that did not end well.
        paths: the sums of each path that was taken.
        predicted: transfers whose time was predicted: those of ``auto``.
        prediction_error: how far predictions were off: 0.1 is a tenth, too much or too little, by the mean of the
            factors' logarithms. None where none was made.
        cancelled: transfers that were taken back before they began.
        in_flight: transfers that were submitted and have not ended.
        flows: by path and direction, in more detail.
    """

    failed: int = 0
    paths: Mapping[str, PathStats] | None = None
    predicted: int = 0
    prediction_error: float | None = None
    cancelled: int = 0
    in_flight: int = 0
    flows: Mapping[tuple[str, str], FlowStats] = field(default_factory=dict, compare=False)


# Seconds, from a few blocks to a whole cache.
BUCKETS = (
    1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
QUIET_SECONDS = 10.0  # after a failure that was logged, in which others are only counted
PENDING = 256  # ends that are not yet added up: an append is all that a transfer's end is to cost


class Tally:
    """Adds up results; from any thread.

    Attributes:
        ends: transfers that ended and are not yet added up: (result, direction), "failed" or "cancelled". To append to
            it is all that an end has to do: one call, which no signal comes into.
    """

    def __init__(self) -> None:
        self._made_in = generation()
        self._lock = threading.RLock()  # a finalizer or a signal's handler, in the same thread, may ask as well
        self.ends: deque[tuple[TransferResult, str] | str] = deque()
        self._sums: dict[tuple[str, str], list[float]] = {}
        self._within: dict[tuple[str, str], list[int]] = {}
        self._quiet_until = 0.0
        self._unsaid = 0
        self._counts = {"failed": 0, "cancelled": 0}
        self._predicted = 0
        self._off = 0.0

    def add(self, result: TransferResult, direction: str = "host") -> None:
        """One more transfer that ended well."""
        self.ends.append((result, direction))

    def settle(self) -> None:
        """Add up what has ended, once there is much of it; for the executor's own threads, which hold no lock then."""
        if len(self.ends) > PENDING and self._made_in == generation():
            self._add_up()

    def _add_up(self) -> None:
        if self._made_in != generation():  # a fork's child: whoever held the lock is not here
            self._made_in, self._lock = generation(), threading.RLock()
        with self._lock:
            while ends := self.ends.copy():  # a handler, at the jump back, may add them up as well
                for end in ends:
                    self._add(end)

    def _add(self, end: tuple[TransferResult, str] | str) -> None:
        """Add the first of the ends, and take it out; all changes at the end, where nothing comes between them."""
        ends = self.ends
        if isinstance(end, str):
            if ends and ends[0] is end:
                self._counts[end] += 1
                ends.popleft()
            return
        result, direction = end
        flow = result.path, direction
        sums = self._sums.setdefault(flow, [0, 0, 0.0, 0, 0])
        within = self._within.setdefault(flow, [0] * (len(BUCKETS) + 1))
        bucket = bisect_left(BUCKETS, result.seconds)
        predicted = bool(result.predicted) and result.seconds > 0
        off = abs(math.log(result.predicted / result.seconds)) if result.predicted and predicted else 0.0
        if ends and ends[0] is end:  # else whoever came between has added it
            within[bucket] += 1
            sums[0] += 1
            sums[1] += result.nbytes
            sums[2] += result.seconds
            sums[3] += result.descriptors
            sums[4] += result.launches
            self._predicted += predicted
            self._off += off
            ends.popleft()

    def fail(self, plan: Plan | None = None, path: str = "", error: BaseException | None = None) -> None:
        """One more that did not; a warning is logged, at most one every :data:`QUIET_SECONDS`."""
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
        """The sums so far.

        >>> tally = Tally()
        >>> tally.add(TransferResult(4096, 1e-5, "kernel", 2, 1, 1.1e-5))
        >>> tally.stats().nbytes, tally.stats().paths["kernel"].descriptors, round(tally.stats().prediction_error, 3)
        (4096, 2, 0.1)
        """
        self._add_up()
        with self._lock:
            flows = {
                flow: FlowStats(
                    int(sums[0]), int(sums[1]), sums[2], int(sums[3]), int(sums[4]), tuple(self._within[flow])
                )
                for flow, sums in list(self._sums.items())
            }
            ended, predicted, off = dict(self._counts), self._predicted, self._off
        every = flows.values()
        paths: dict[str, PathStats] = {}
        for (path, _), flow in flows.items():
            paths[path] = _sum(paths.get(path, PathStats()), flow)
        return ExecutorStats(
            sum(one.transfers for one in every),
            sum(one.nbytes for one in every),
            sum(one.seconds for one in every),
            sum(one.descriptors for one in every),
            sum(one.launches for one in every),
            ended["failed"],
            paths,
            predicted,
            math.expm1(off / predicted) if predicted else None,
            ended["cancelled"],
            flows=flows,
        )


def _sum(one: PathStats, other: PathStats) -> PathStats:
    return PathStats(*(getattr(one, name) + getattr(other, name) for name in PathStats.__dataclass_fields__))
