"""What an executor has done so far, summed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from kvplan.execute.forks import generation
from kvplan.execute.transfer import TransferResult


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
class ExecutorStats(PathStats):
    """Sums of an executor, of transfers that are known to have ended.

    Attributes:
        failed: transfers that did not end well.
        paths: the sums of each path that was taken.
        predicted: transfers whose time was predicted: those of ``auto``.
        prediction_error: how far predictions were off: 0.1 is a tenth, too much or too little, by the mean of the
            factors' logarithms. None where none was made.
        cancelled: transfers that were taken back before they began.
    """

    failed: int = 0
    paths: Mapping[str, PathStats] | None = None
    predicted: int = 0
    prediction_error: float | None = None
    cancelled: int = 0


PENDING = 256  # results that are not yet added up: an append is all that a transfer's end is to cost


class Tally:
    """Adds up results; from any thread."""

    def __init__(self) -> None:
        self._made_in = generation()
        self._lock = threading.Lock()
        self._pending: deque[TransferResult] = deque()
        self._sums: dict[str, list[float]] = {}
        self._failures: deque[int] = deque()
        self._cancelled: deque[int] = deque()
        self._predicted = 0
        self._off = 0.0

    def add(self, result: TransferResult) -> None:
        """One more transfer that ended well."""
        self._pending.append(result)
        if len(self._pending) > PENDING:
            self._add_up()

    def _add_up(self) -> None:
        if self._made_in != generation():  # a fork's child: whoever held the lock is not here
            self._made_in, self._lock = generation(), threading.Lock()
        with self._lock:
            while self._pending:  # only here are they taken out
                result = self._pending.popleft()
                sums = self._sums.get(result.path)
                if sums is None:
                    sums = self._sums[result.path] = [0, 0, 0.0, 0, 0]
                sums[0] += 1
                sums[1] += result.nbytes
                sums[2] += result.seconds
                sums[3] += result.descriptors
                sums[4] += result.launches
                if result.predicted and result.seconds > 0:
                    self._predicted += 1
                    self._off += abs(math.log(result.predicted / result.seconds))

    def fail(self) -> None:
        """One more that did not."""
        self._failures.append(1)

    def cancel(self) -> None:
        """One more that never began."""
        self._cancelled.append(1)

    def stats(self) -> ExecutorStats:
        """The sums so far.

        >>> tally = Tally()
        >>> tally.add(TransferResult(4096, 1e-5, "kernel", 2, 1, 1.1e-5))
        >>> tally.stats().nbytes, tally.stats().paths["kernel"].descriptors, round(tally.stats().prediction_error, 3)
        (4096, 2, 0.1)
        """
        self._add_up()
        with self._lock:
            paths = {
                path: PathStats(int(sums[0]), int(sums[1]), sums[2], int(sums[3]), int(sums[4]))
                for path, sums in self._sums.items()
            }
            failed, predicted, off = len(self._failures), self._predicted, self._off
        every = paths.values()
        return ExecutorStats(
            sum(one.transfers for one in every),
            sum(one.nbytes for one in every),
            sum(one.seconds for one in every),
            sum(one.descriptors for one in every),
            sum(one.launches for one in every),
            failed,
            paths,
            predicted,
            math.expm1(off / predicted) if predicted else None,
            len(self._cancelled),
        )
