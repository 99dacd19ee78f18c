"""Packed transfers beside decode: each process computes on its own GPU, alone first, and then during transfers."""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.wires.sizes import KIB
from kvplan.measure.rig import DECODE_BATCH, SWITCH, Compute, Feeder

if TYPE_CHECKING:
    from benchmarks.wires.near import Case

ROW = 8 * KIB
# An iteration reads 8 GiB of weights: 2 to 3 ms, as long as several chunks of 32 MiB at 50 GB/s. A median of shorter
# ones would be that of iterations beside which nothing is gathered.
SIZES = DECODE_BATCH, 8192, 1, 64
AHEAD, NAP = 12, 1e-4  # iterations in the queue; seconds between two looks at it
PATIENCE = 60.0
Found = dict[str, Any]


class Load:
    """Compute of one process: iterations without a pause, alone and during transfers.

    Args:
        device: a GPU, or ``"cpu"`` for a stand-in.
        warm, alone: iterations that are not measured, and those that are measured before transfers.
    """

    def __init__(self, device: str, warm: int = 20, alone: int = 60) -> None:
        self._device, self._warm, self._alone = device, warm, alone
        self._compute: Any = None
        self._log: list[tuple[float, int]] = []  # when it was seen how many iterations had finished

    def begin(self) -> None:
        """Begin, and go on until the iterations alone have been measured."""
        if self._compute is None:
            self._compute = StandIn() if self._device == "cpu" else Compute(self._device, *SIZES)
        sys.setswitchinterval(SWITCH)
        self._feeder, self._log = Feeder(self._compute, AHEAD), []
        self.run(lambda: self._feeder.finished >= self._warm + self._alone)

    def run(self, over: Callable[[], bool]) -> None:
        """Compute until a function says that it is over."""
        feeder = self._feeder
        while not over():
            before = feeder.finished
            feeder.top_up()
            if feeder.finished != before:
                self._log.append((time.perf_counter(), feeder.finished))
            time.sleep(NAP)

    def end(self, begun: float, ended: float) -> Found:
        """Wait for the end, and return how much slower the iterations between two times were than those alone."""
        assert self._compute is not None
        self._compute.drain()
        # One may have finished that was not seen yet, and the next one began before the transfers did.
        first, last = self._finished(begun) + 2, self._finished(ended)
        if last <= first:
            raise RuntimeError("no iteration of compute lay wholly beside transfers; measure for more seconds")
        alone = self._feeder.milliseconds(self._warm, self._warm + self._alone)
        beside = self._feeder.milliseconds(first, last)
        return {
            "slowdown": median(beside) / median(alone), "mean slowdown": fmean(beside) / fmean(alone),
            "iteration ms": median(alone), "iterations": len(beside), "dry": self._feeder.dry,
        }  # fmt: skip

    def _finished(self, at: float) -> int:
        k = bisect_right(self._log, at, key=lambda seen: seen[0])
        return self._log[k - 1][1] if k else 0


class StandIn:
    """Compute of a CPU, in a thread: it shows that all of this runs, and its figures mean nothing."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "decode")

    def mark(self) -> _Mark:
        """See :class:`kvplan.measure.rig.Compute`."""
        return _Mark(self._thread.submit(time.perf_counter))

    def enqueue(self) -> None:
        """See :class:`kvplan.measure.rig.Compute`."""
        self._thread.submit(partial(time.sleep, 2e-4))

    def drain(self) -> None:
        """See :class:`kvplan.measure.rig.Compute`."""
        self._thread.submit(int).result()


class _Mark:
    def __init__(self, at: Future[float]) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at.done()

    def synchronize(self) -> None:
        self.at.result()

    def elapsed_time(self, later: _Mark) -> float:
        return (later.at.result() - self.at.result()) * 1e3


def beside_decode(case: Case) -> Found:
    """Push one transfer after another while both processes compute; return the rate, and what compute lost."""
    scale = case.side.scale
    load, store, there, here = case.plans(ROW)
    case.check(ROW, load, store, there, here)
    compute, rounds = Load(case.side.device), []
    for _ in range(scale.rounds):
        case.ask("decode")
        compute.begin()
        taken, begun = [], time.perf_counter()
        while len(taken) < 2 or time.perf_counter() < begun + scale.seconds:
            start = time.perf_counter()
            transfer = case.peer.submit(store, way="packed")
            compute.run(transfer.done)
            transfer.result()
            taken.append(time.perf_counter() - start)
            if taken[-1] > PATIENCE:
                raise RuntimeError(f"a transfer beside decode took {taken[-1]:.0f} seconds")
        ended = time.perf_counter()
        far = case.ask("decoded", begun, ended)
        rounds.append((median(taken), len(taken), compute.end(begun, ended), far))
    seconds = median(one[0] for one in rounds)
    return {
        "nbytes": store.nbytes, "GB/s": store.nbytes / seconds / 1e9, "transfers": sum(one[1] for one in rounds),
        "sender": [one[2] for one in rounds], "receiver": [one[3] for one in rounds],
    }  # fmt: skip
