"""Compute that keeps running while transfers come and go, as the compute of an engine does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvplan.measure.flights import InFlight, Line

DECODE_BATCH = 64
AHEAD = 40  # iterations enqueued behind the one that runs: the GPU has work while the host submits a transfer
PATIENCE = 60.0  # seconds; a transfer that takes longer counts as hanging


class Event(Protocol):
    """An event of CUDA, or the double of a test."""

    def query(self) -> bool:
        """Whether the event has passed."""
        ...

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from this event to a later one."""
        ...


class Compute(Protocol):
    """Iterations of one kind on a stream of their own."""

    def mark(self) -> Event:
        """Record an event behind all enqueued work."""
        ...

    def enqueue(self) -> None:
        """Enqueue one more iteration."""
        ...

    def drain(self) -> None:
        """Wait until all enqueued work has run."""
        ...


class ComputeSizes(NamedTuple):
    """Sizes of the two kinds of compute.

    Attributes:
        decode_features, decode_weights: the square weights that a batch of 64 tokens is multiplied by.
        decode_rounds: times over all of them.
        prefill_features, prefill_tokens: the one product of an iteration of prefill.
    """

    # Products of hundreds of tiles: of few, one SM less may cost a whole wave. No cache holds weights of 128 MiB.
    decode_features: int = 8192
    decode_weights: int = 1
    decode_rounds: int = 4
    prefill_features: int = 4096
    prefill_tokens: int = 8192


SIZES = ComputeSizes()


def compute_of(device: str, kind: str, sizes: ComputeSizes = SIZES) -> Products:
    """Compute on a stream of its own.

    Args:
        device: ``"cuda:N"``.
        kind: ``"decode"``: a batch of 64 over weights that no cache holds; ``"prefill"``: one large product.
        sizes: of both.
    """
    if kind == "decode":
        rows, features, weights, rounds = DECODE_BATCH, *sizes[:3]
    else:
        rows, features, weights, rounds = sizes.prefill_tokens, sizes.prefill_features, 1, 1
    return Products(device, Line(device).stream, rows=rows, features=features, weights=weights, rounds=rounds)


class Window(NamedTuple):
    """Transfers beside compute, one after another.

    Attributes:
        transfers: seconds of each by the host's clock, from before its call.
        alone, beside: milliseconds of the iterations of compute that ran without, and wholly within, transfers.
        dry: whether the queue of compute ran empty; then the numbers mean nothing.
    """

    transfers: tuple[float, ...]
    alone: tuple[float, ...]
    beside: tuple[float, ...]
    dry: bool

    @property
    def slowdown(self) -> float:
        """The median time of an iteration beside transfers over the median alone."""
        return statistics.median(self.beside) / statistics.median(self.alone)

    @property
    def mean_slowdown(self) -> float:
        """The mean over the mean, which shows stalls that medians do not."""
        return statistics.fmean(self.beside) / statistics.fmean(self.alone)


class Feeder:
    """Keep the GPU's queue of iterations full; its events live as long as this object."""

    def __init__(self, compute: Compute, ahead: int = AHEAD) -> None:
        self.compute = compute
        self.ahead = ahead
        self.events = [compute.mark()]
        self.finished = 0  # iterations
        self.dry = False

    def top_up(self) -> None:
        """Count the iterations that have finished, and enqueue as many again."""
        enqueued = len(self.events) - 1
        while self.finished < enqueued and self.events[self.finished + 1].query():
            self.finished += 1
        self.dry |= 0 < enqueued == self.finished
        for _ in range(self.ahead - (enqueued - self.finished)):
            self.compute.enqueue()
            self.events.append(self.compute.mark())

    def milliseconds(self, first: int, last: int) -> tuple[float, ...]:
        """Milliseconds of each iteration from ``first`` to before ``last``; all have finished."""
        return tuple(self.events[k].elapsed_time(self.events[k + 1]) for k in range(first, last))


def window(
    compute: Compute,
    begin: Callable[[], InFlight],
    *,
    warm: int,
    alone: int,
    transfers: int,
    seconds: float,
) -> Window:
    """Measure iterations alone, then transfers one after another beside them, in one stretch of warm compute.

    Args:
        compute: runs all the time.
        begin: starts a transfer and returns at once.
        warm: iterations before the first that counts.
        alone: iterations that count, before the first transfer.
        transfers, seconds: the window has at least this many transfers, and lasts at least this long.

    Raises:
        RuntimeError: a transfer does not end.
    """
    feeder = Feeder(compute)
    while feeder.finished < warm + alone:
        feeder.top_up()
        time.sleep(0)
    first = feeder.finished + 1  # the iteration that runs now began before the first transfer
    kept: list[InFlight] = []
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


class Products:
    """Matrix products in bf16; a CUDA graph holds one iteration of them.

    Args:
        device, stream: of torch; nothing else runs on the stream.
        rows: rows of the left matrix, which are tokens.
        features: rows and columns of each weight matrix.
        weights: number of weight matrices. Memory bounds the products where they are far larger than the GPU's cache.
        rounds: how often an iteration multiplies by all weights.
    """

    def __init__(self, device: Any, stream: Any, *, rows: int, features: int, weights: int, rounds: int) -> None:
        import torch

        like = {"dtype": torch.bfloat16, "device": device}
        self.stream = stream
        self._weights = [torch.randn(features, features, **like) for _ in range(weights)]
        self._left = torch.randn(rows, features, **like)
        self._out = torch.empty(rows, features, **like)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):  # libraries choose and load their kernels outside the capture
            self._products(1)
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
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
