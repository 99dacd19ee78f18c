"""The rig of all measurements of transfers: ways to move the same bytes take turns, and medians count.

A transfer has ``done()``, ``synchronize()``, and ``result()`` with its ``seconds``. It runs alone, or beside compute
without a pause, like an engine's: decode multiplies a batch of 64 by weights larger than any cache, and prefill is one
large product.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvplan.errors import PathError

LEAST, MOST = 3, 25  # samples
WARM_UPS = 2
SWITCH = 5e-5  # seconds after which Python switches threads; with the default of 5 ms, compute would run out of work
# Rows, features, weights and rounds of an iteration of compute, by kind. Products have hundreds of tiles: with few
# tiles, one SM less may cost a whole wave. Weights of 128 MiB exceed every cache.
DECODE_BATCH = 64
KINDS = {"decode": (DECODE_BATCH, 8192, 1, 4), "prefill": (8192, 4096, 1, 1)}
AHEAD = 40  # iterations in the queue, so that the GPU has work while the host submits a transfer
WARM, ALONE, TRANSFERS, SECONDS = 8, 12, 4, 0.012  # of a window
PATIENCE = 60.0  # seconds; if a transfer takes longer, the window raises an error

Progress = Callable[[float, str], None]  # called with the share that is done, and the step that begins
Begin = Callable[[], Any]  # starts a transfer


def in_a_line(error: Exception) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def silent(share: float, step: str) -> None:
    """Do nothing, as a progress function."""


class Moved(NamedTuple):
    """The result of a finished transfer: bytes, and seconds from start to end, by events if a GPU moves the bytes."""

    nbytes: int
    seconds: float


class Line:
    """Where a baseline issues its work: a new stream of a GPU, and one of its peer; or the CPU.

    Streams of torch come from a pool, so other code may use them.

    Args:
        name: ``"cuda:N"``, or ``"cpu"``.
        peer: another GPU, if work goes there too; or the same one.

    Attributes:
        far: the line of the other GPU, or None.

    Raises:
        PathError: one GPU cannot reach the memory of the other.
    """

    def __init__(self, name: str, peer: str | None = None) -> None:
        self.name = name
        self.far = None if peer is None or peer == name else Line(peer)
        if name == "cpu":
            return
        import torch

        from kvplan.cuda.device import Device

        torch.empty(1, device=name)  # torch must open the context first
        self.device = Device(int(name.removeprefix("cuda:")))
        with self.device.current():
            self.handle = self.device.stream()
        open_stream: Any = torch.cuda.ExternalStream
        self.stream = open_stream(self.handle, device=name)
        for near, far in ((self, self.far), (self.far, self)):
            why = near.device.enable_peer(far.device.ordinal) if near and far else ""
            if why:
                raise PathError(why)

    def start(self, nbytes: int, issue: Callable[[], object]) -> Any:
        """Start a transfer by calls on the streams, or on the CPU by a call that has moved all bytes at its end."""
        return AtOnce(nbytes, issue) if self.name == "cpu" else Enqueued(self, nbytes, issue)


def event(*, timed: bool = True) -> Any:
    """Return a new event of torch."""
    import torch

    make: Any = torch.cuda.Event
    return make(enable_timing=timed)


class Enqueued:
    """A transfer by calls on a line's streams, between two events that exist as long as this object.

    Work of the far GPU lies between the same two events: its stream waits for the first one, and the second one for it.
    """

    def __init__(self, line: Line, nbytes: int, issue: Callable[[], object]) -> None:
        self._nbytes = nbytes
        self._before, self._after, self._joined = event(), event(), event(timed=False)
        with line.device.current():
            self._before.record(line.stream)
            if line.far is not None:
                line.far.stream.wait_event(self._before)
            issue()
            if line.far is not None:
                self._joined.record(line.far.stream)
                line.stream.wait_event(self._joined)
            self._after.record(line.stream)

    def done(self) -> bool:
        """Return whether the transfer has ended."""
        return bool(self._after.query())

    def synchronize(self) -> None:
        """Wait for the end of the transfer."""
        self._after.synchronize()

    def result(self) -> Moved:
        """Wait for the end, and return bytes and seconds."""
        self.synchronize()
        return Moved(self._nbytes, self._before.elapsed_time(self._after) / 1e3)


class AtOnce:
    """A transfer by a call on the CPU that has moved all bytes when it returns."""

    def __init__(self, nbytes: int, move: Callable[[], object]) -> None:
        start = time.perf_counter()
        move()
        self._moved = Moved(nbytes, time.perf_counter() - start)

    def done(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def result(self) -> Moved:
        """Return bytes and seconds."""
        return self._moved


class Asked:
    """A transfer that another thread starts."""

    def __init__(self, call: Future[Any]) -> None:
        self._call = call

    def done(self) -> bool:
        """Return whether the transfer has ended."""
        return self._call.done() and bool(self._call.result().done())

    def synchronize(self) -> None:
        """Wait for the end of the transfer."""
        self._call.result().synchronize()


@contextmanager
def aside(begin: Begin) -> Iterator[Begin]:
    """Let a thread start transfers, so that a long call does not stop the thread that enqueues compute.

    >>> with aside(lambda: AtOnce(8, lambda: None)) as begin:
    ...     transfer = begin()
    ...     transfer.synchronize()
    >>> transfer.done()
    True
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        with ThreadPoolExecutor(1, "kvplan-baseline") as thread:
            yield lambda: Asked(thread.submit(begin))
    finally:
        sys.setswitchinterval(interval)


class Timing(NamedTuple):
    """Medians of one way.

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
    ways: Mapping[str, Begin],
    *,
    seconds: float,
    most: int = MOST,
    warm_ups: int = WARM_UPS,
    rehearsed: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time ways in turn, sample by sample, since a shared machine drifts. One transfer runs at a time.

    Args:
        ways: functions that start a transfer, by name.
        seconds: seconds of samples after which a way ends; it has at least 3 samples.
        most: most samples of a way.
        warm_ups: transfers of each way before its first sample.
        rehearsed: whether a transfer that is not timed comes right before each sample: the CPU's caches then hold
            what a transfer of the same way has left there, and not what another way has.
        clock: function that returns seconds; tests replace it.
    """
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    with no_collection():
        for begin in ways.values():
            for _ in range(warm_ups):
                begin().synchronize()
        left = dict(ways)
        turns = random.Random(0)  # a way behind a long one is slower; no way always is
        while left:
            for name, begin in turns.sample(list(left.items()), len(left)):
                if rehearsed:
                    begin().synchronize()
                taken[name].append(_sample(begin, clock))
                count, spent = len(taken[name]), sum(wall for _, wall, _ in taken[name])
                if count >= most or (count >= LEAST and spent >= seconds):
                    del left[name]
    return {name: _medians(rows) for name, rows in taken.items()}


def _medians(rows: list[tuple[float, float, float]]) -> Timing:
    seconds, wall, cpu = map(statistics.median, zip(*rows, strict=True))
    return Timing(seconds, wall, cpu, len(rows))


def _sample(begin: Begin, clock: Callable[[], float]) -> tuple[float, float, float]:
    start = clock()
    transfer = begin()
    while getattr(transfer, "queued", False) or getattr(transfer, "unplayed", False):
        time.sleep(0)  # a thread of the executor makes its calls
    cpu = clock() - start
    transfer.synchronize()
    wall = clock() - start
    return transfer.result().seconds, wall, cpu


@contextmanager
def no_collection() -> Iterator[None]:
    """Stop garbage collection within a ``with``, because a collection takes longer than a submit."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
            with torch.cuda.graph(self._graph, stream=make(device), capture_error_mode="thread_local"):
                self._products(rounds)
            torch.cuda.synchronize()

    def _products(self, rounds: int) -> None:
        import torch

        for _ in range(rounds):
            for weight in self._weights:
                torch.mm(self._left, weight, out=self._out)

    def mark(self) -> Any:
        """Record an event behind all enqueued work."""
        mark = event()
        mark.record(self.stream)
        return mark

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
        self.compute, self.ahead = compute, ahead
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
    begin: Begin,
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
    feeder, kept, taken = Feeder(compute), list[Any](), list[float]()
    while feeder.finished < warm + alone:
        feeder.top_up()
        time.sleep(0)
    first = feeder.finished + 1  # the present iteration began before the first transfer
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
