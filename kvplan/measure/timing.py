"""The timing loop of all benchmarks of transfers: ways take turns, sample by sample, and medians count."""

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
    """A progress that shows nothing."""


class Timing(NamedTuple):
    """Medians of one case.

    Attributes:
        seconds: from the first to the last event on the GPU; on the CPU, from the start of the copying to its end.
        wall: from the call of submit until the caller knows that all has arrived.
        cpu: from the call of submit until everything is issued, by whichever thread.
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
    """Time cases in turns, sample by sample, since a shared machine drifts. One transfer runs at a time.

    Args:
        cases: by name.
        seconds: a case gets no more turns once its own have taken this long; it gets 3 at least.
        most: samples of a case at most.
        warm_ups: transfers of each case before the first that counts.
        clock: for tests.
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
                while getattr(transfer, "queued", False):
                    time.sleep(0)  # the executor's own thread issues it, and needs the interpreter
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
    """Collect no garbage within a ``with``: a collection takes longer than a submit."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
