"""The timing loop of all benchmarks of transfers: cases alternate, sample by sample, and medians count."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvplan.measure.flights import Begin

LEAST, MOST = 3, 25  # samples
WARM_UPS = 2


Progress = Callable[[float, str], None]  # called with the share that is done, and the step that begins


def silent(share: float, step: str) -> None:
    """Do nothing, as a progress function."""


class Timing(NamedTuple):
    """Medians of one case.

    Attributes:
        seconds: seconds from the first to the last event on the GPU; on the CPU, of the copying.
        wall: seconds from the call of submit until the caller knows that all bytes have arrived.
        cpu: seconds from the call of submit until a thread has issued all work.
        samples: number of transfers.
    """

    seconds: float
    wall: float
    cpu: float
    samples: int


def timed(
    cases: Mapping[str, Begin],
    *,
    seconds: float,
    most: int = MOST,
    warm_ups: int = WARM_UPS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time cases alternately, sample by sample, since a shared machine drifts. One transfer runs at a time.

    Args:
        cases: functions that start a transfer, by name.
        seconds: seconds of samples after which a case ends; it has at least 3 samples.
        most: most samples per case.
        warm_ups: transfers of each case before its first sample.
        clock: function that returns seconds; tests replace it.
    """
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    with no_collection():
        for begin in cases.values():
            for _ in range(warm_ups):
                begin().synchronize()
        left = dict(cases)
        turns = random.Random(0)  # noqa: S311  # a case behind a long one is slower; no case always is
        while left:
            for name, begin in turns.sample(list(left.items()), len(left)):
                start = clock()
                transfer = begin()
                while getattr(transfer, "queued", False) or getattr(transfer, "unplayed", False):
                    time.sleep(0)  # a thread of the executor makes its calls
                cpu = clock() - start
                transfer.synchronize()
                wall = clock() - start
                taken[name].append((transfer.result().seconds, wall, cpu))
                count, spent = len(taken[name]), sum(row[1] for row in taken[name])
                if count >= most or (count >= LEAST and spent >= seconds):
                    del left[name]
    return {name: _median(rows) for name, rows in taken.items()}


def _median(rows: Sequence[tuple[float, float, float]]) -> Timing:
    seconds, wall, cpu = (statistics.median(row[k] for row in rows) for k in range(3))
    return Timing(seconds, wall, cpu, len(rows))


@contextmanager
def no_collection() -> Iterator[None]:
    """Stop garbage collection within a ``with``, because a collection takes longer than a submit."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
