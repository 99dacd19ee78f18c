"""How long transfers take: cases in turns, medians."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from kvplan.execute.transfer import Transfer

LEAST, MOST = 3, 25  # samples
WARM_UPS = 2


class Timing(NamedTuple):
    """Medians of one case.

    Attributes:
        seconds: from the first to the last event on the GPU; on the CPU, from the start of the copying to its end.
        wall: from the call of submit until the caller knows that all has arrived.
        cpu: from the call of submit until everything is issued, by whichever thread.
        samples: how many.
    """

    seconds: float
    wall: float
    cpu: float
    samples: int


class Begin(Protocol):
    """Starts one transfer, and returns at once."""

    def __call__(self) -> Transfer:
        """Submit it."""
        ...


def timed(
    cases: Mapping[str, Begin],
    *,
    seconds: float,
    most: int = MOST,
    warm_ups: int = WARM_UPS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time cases in turns, sample by sample, since a shared machine drifts; each alone.

    Args:
        cases: by name.
        seconds: a case is given no more turns once its own have taken so long; it has 3 at least.
        most: samples of a case at most.
        warm_ups: transfers of each case before the first that counts.
        clock: for tests.
    """
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    with _no_collection():
        for begin in cases.values():
            for _ in range(warm_ups):
                begin().synchronize()
        left = dict(cases)
        turns = random.Random(0)  # noqa: S311  # what comes behind a long case is slower: none always does
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
def _no_collection() -> Iterator[None]:
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
