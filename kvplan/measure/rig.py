"""The rig of all measurements of transfers: ways to move the same bytes take turns, and medians count."""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Self

from kvplan.errors import PathError

LEAST, MOST = 3, 25  # samples
WARM_UPS = 2
SWITCH = 5e-5  # seconds after which Python switches threads; with the default of 5 ms, compute would run out of work

Progress = Callable[[float, str], None]  # called with the share that is done, and the step that begins


def silent(share: float, step: str) -> None:
    """Do nothing, as a progress function."""


class Flight(Protocol):
    """A transfer of kvplan, or of a baseline."""

    def done(self) -> bool:
        """Return whether the transfer has ended."""
        ...

    def synchronize(self) -> None:
        """Wait for the end of the transfer."""
        ...

    def result(self) -> Any:
        """Wait for the end of the transfer, and return an object with ``seconds``."""
        ...


Begin = Callable[[], Flight]


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
        import torch

        self.name = name
        self.far = Line(peer) if peer not in (None, name) else None  # type: ignore[arg-type]
        self._staging: dict[str, Any] = {}
        if name == "cpu":
            return
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

    def staging(self, where: str, nbytes: int) -> Any:
        """Return int64 words of a device; those of the host are pinned. All callers share them: one at a time."""
        import torch

        words = nbytes // 8
        if where not in self._staging or self._staging[where].numel() < words:
            self._staging.pop(where, None)  # free the old tensor first
            pinned = where == "cpu" and self.name != "cpu"
            self._staging[where] = torch.empty(words, dtype=torch.int64, device=where, pin_memory=pinned)
        return self._staging[where][:words]

    def start(self, nbytes: int, issue: Callable[[], object]) -> Flight:
        """Start a transfer by calls on the streams, or on the CPU by a call that has moved all bytes at its end."""
        return AtOnce(nbytes, issue) if self.name == "cpu" else Enqueued(self, nbytes, issue)


class Enqueued:
    """A transfer by calls on a line's streams, between two events that exist as long as this object.

    Work of the far GPU lies between the same two events: its stream waits for the first one, and the second one for it.
    """

    def __init__(self, line: Line, nbytes: int, issue: Callable[[], object]) -> None:
        import torch

        make: Any = torch.cuda.Event
        self._nbytes = nbytes
        self._before, self._after, self._joined = make(enable_timing=True), make(enable_timing=True), make()
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
        """See :class:`Flight`."""
        return bool(self._after.query())

    def synchronize(self) -> None:
        """See :class:`Flight`."""
        self._after.synchronize()

    def result(self) -> Moved:
        """See :class:`Flight`."""
        self.synchronize()
        return Moved(self._nbytes, self._before.elapsed_time(self._after) / 1e3)


class AtOnce:
    """A transfer by a call on the CPU that has moved all bytes when it returns."""

    def __init__(self, nbytes: int, move: Callable[[], object]) -> None:
        start = time.perf_counter()
        move()
        self._moved = Moved(nbytes, time.perf_counter() - start)

    def done(self) -> bool:
        """See :class:`Flight`."""
        return True

    def synchronize(self) -> None:
        """See :class:`Flight`."""

    def result(self) -> Moved:
        """See :class:`Flight`."""
        return self._moved


class Aside:
    """A thread that starts transfers, so that a long call does not stop the thread that enqueues compute.

    >>> with Aside() as aside:
    ...     flight = aside.begin(lambda: AtOnce(8, lambda: None))
    ...     flight.synchronize()
    >>> flight.done(), flight.result().nbytes
    (True, 8)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvplan-baseline")
        self._interval = sys.getswitchinterval()

    def begin(self, begin: Begin) -> Flight:
        """Start a transfer in that thread, and return at once."""
        return _Asked(self._thread.submit(begin))

    def __enter__(self) -> Self:
        sys.setswitchinterval(SWITCH)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        sys.setswitchinterval(self._interval)


class _Asked:
    """A transfer that another thread starts."""

    def __init__(self, call: Future[Flight]) -> None:
        self._call = call

    def done(self) -> bool:
        return self._call.done() and self._call.result().done()

    def synchronize(self) -> None:
        self._call.result().synchronize()

    def result(self) -> Any:
        return self._call.result().result()


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
                count, spent = len(taken[name]), sum(row[1] for row in taken[name])
                if count >= most or (count >= LEAST and spent >= seconds):
                    del left[name]
    return {name: _medians(rows) for name, rows in taken.items()}


def _medians(rows: Sequence[tuple[float, float, float]]) -> Timing:
    seconds, wall, cpu = (statistics.median(row[k] for row in rows) for k in range(3))
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
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
