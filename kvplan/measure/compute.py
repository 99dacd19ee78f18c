"""Compute that runs without a pause during transfers, like the compute of an engine.

Decode multiplies a batch of 64 by weights larger than any cache; prefill is one large product.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvplan.measure.rig import Flight, Line

AHEAD = 40  # iterations in the queue, so that the GPU has work while the host submits a transfer
WARM, ALONE, TRANSFERS, SECONDS = 8, 12, 4, 0.012  # of a window
PATIENCE = 60.0  # seconds; if a transfer takes longer, the window raises an error


# Rows, features, weights and rounds of an iteration, by kind. Products have hundreds of tiles: with few tiles, one SM
# less may cost a whole wave. Weights of 128 MiB exceed every cache.
DECODE_BATCH = 64
KINDS = {"decode": (DECODE_BATCH, 8192, 1, 4), "prefill": (8192, 4096, 1, 1)}


class Compute:
    """Equal iterations of matrix products in bf16, each a CUDA graph, on a stream of their own.

    Args:
        device: name of the GPU, ``"cuda:N"``.
        rows: rows of the left matrix, which are tokens.
        features: rows and columns of each weight matrix.
        weights: number of weight matrices. If they are far larger than the GPU's cache, memory limits the products.
        rounds: multiplications by all weights per iteration.
    """

    def __init__(self, device: str, rows: int, features: int, weights: int = 1, rounds: int = 1) -> None:
        import torch

        like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        self.stream = Line(device).stream
        self._weights = [torch.randn(features, features, **like) for _ in range(weights)]
        self._left = torch.randn(rows, features, **like)
        self._out = torch.empty(rows, features, **like)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):  # libraries choose and load their kernels outside the capture
                self._products(1)
            torch.cuda.synchronize()
            # By default torch captures every graph on one stream, of the GPU that was current at the first capture.
            make: Any = torch.cuda.Stream
            capture = make(device)
            with torch.cuda.graph(self._graph, stream=capture, capture_error_mode="thread_local"):
                self._products(rounds)
            torch.cuda.synchronize()

    def _products(self, rounds: int) -> None:
        import torch

        for _ in range(rounds):
            for weight in self._weights:
                torch.mm(self._left, weight, out=self._out)

    def mark(self) -> Any:
        """Record an event behind all enqueued work."""
        import torch

        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(self.stream)
        return event

    def enqueue(self) -> None:
        """Enqueue one more iteration."""
        import torch

        with torch.cuda.stream(self.stream):
            self._graph.replay()

    def drain(self) -> None:
        """Wait until all enqueued work has run."""
        self.stream.synchronize()


class Window(NamedTuple):
    """The times of transfers beside compute, one after another.

    Attributes:
        transfers: seconds of each transfer, from before its call, by the host's clock.
        alone, beside: milliseconds of each iteration of compute without transfers, and during transfers.
        dry: whether the queue of compute ran empty; then the times mean nothing.
    """

    transfers: tuple[float, ...]
    alone: tuple[float, ...]
    beside: tuple[float, ...]
    dry: bool

    @property
    def slowdown(self) -> float:
        """Return the median time of an iteration beside transfers, divided by the median alone."""
        return statistics.median(self.beside) / statistics.median(self.alone)

    @property
    def mean_slowdown(self) -> float:
        """Return the mean time beside transfers, divided by the mean alone; it shows stalls that medians hide."""
        return statistics.fmean(self.beside) / statistics.fmean(self.alone)


class Feeder:
    """An object that keeps the GPU's queue of iterations full; its events exist as long as it does."""

    def __init__(self, compute: Compute, ahead: int = AHEAD) -> None:
        self.compute = compute
        self.ahead = ahead
        self.events = [compute.mark()]
        self.finished = 0  # iterations
        self.dry = False

    def top_up(self) -> None:
        """Count the iterations that have finished, and enqueue the same number again."""
        enqueued = len(self.events) - 1
        while self.finished < enqueued and self.events[self.finished + 1].query():
            self.finished += 1
        self.dry |= 0 < enqueued == self.finished
        for _ in range(self.ahead - (enqueued - self.finished)):
            self.compute.enqueue()
            self.events.append(self.compute.mark())

    def milliseconds(self, first: int, last: int) -> tuple[float, ...]:
        """Return the milliseconds of each iteration from ``first`` to before ``last``; all must have finished."""
        return tuple(self.events[k].elapsed_time(self.events[k + 1]) for k in range(first, last))


def window(
    compute: Compute,
    begin: Callable[[], Flight],
    *,
    warm: int = WARM,
    alone: int = ALONE,
    transfers: int = TRANSFERS,
    seconds: float = SECONDS,
) -> Window:
    """Measure iterations alone, then iterations beside one transfer after another, while compute runs without a pause.

    Args:
        compute: the compute, which runs all the time.
        begin: function that starts a transfer and returns at once.
        warm: number of iterations to warm up, which are not measured.
        alone: number of iterations to measure before the first transfer.
        transfers, seconds: least number of transfers, and least seconds of the window.

    Raises:
        RuntimeError: a transfer does not end within 60 seconds.
    """
    feeder = Feeder(compute)
    while feeder.finished < warm + alone:
        feeder.top_up()
        time.sleep(0)
    first = feeder.finished + 1  # the present iteration began before the first transfer
    kept: list[Flight] = []
    taken: list[float] = []
    opened = time.perf_counter()
    while len(taken) < transfers or time.perf_counter() - opened < seconds or feeder.finished <= first:
        start = time.perf_counter()
        kept.append(begin())
        while not kept[-1].done():
            feeder.top_up()
            time.sleep(0)  # other threads of the process may run: some paths have one
            if time.perf_counter() - start > PATIENCE:
                raise RuntimeError(f"a transfer beside compute has not ended within {PATIENCE:.0f} seconds")
        taken.append(time.perf_counter() - start)
        feeder.top_up()
    last = feeder.finished
    compute.drain()
    return Window(tuple(taken), feeder.milliseconds(warm, warm + alone), feeder.milliseconds(first, last), feeder.dry)
