"""Transfers of baselines: calls on a stream between two events, calls that block, and calls by another thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, Self

SWITCH = 5e-5  # seconds after which Python switches threads; with the default of 5 ms, compute would run out of work


class InFlight(Protocol):
    """A transfer that tells whether it has ended."""

    def done(self) -> bool:
        """Return whether the transfer has ended."""
        ...


class Flight(InFlight, Protocol):
    """A transfer of kvplan, or of this module."""

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
    """A GPU and a new stream on it. Streams of torch come from a pool, so other code may use them.

    Args:
        name: name of the GPU, ``"cuda:N"``.
    """

    def __init__(self, name: str) -> None:
        import torch

        from kvplan.cuda.device import Device

        torch.empty(1, device=name)  # torch must open the context first
        self.name = name
        self.device = Device(int(name.removeprefix("cuda:")))
        with self.device.current():
            self.handle = self.device.stream()
        open_stream: Any = torch.cuda.ExternalStream
        self.stream = open_stream(self.handle, device=name)
        self._staging: tuple[Any, Any] | None = None

    def staging(self, nbytes: int) -> tuple[Any, Any]:
        """Return int64 tensors in pinned host memory and on the GPU. All callers share them: one transfer at a time."""
        import torch

        words = nbytes // 8
        if self._staging is None or self._staging[0].numel() < words:
            self._staging = None  # free the old tensors first
            self._staging = (
                torch.empty(words, dtype=torch.int64, pin_memory=True),
                torch.empty(words, dtype=torch.int64, device=self.name),
            )
        host, device = self._staging
        return host[:words], device[:words]


class Enqueued:
    """A transfer by calls on a stream, between two events that exist as long as this object.

    Args:
        line: the GPU and its stream.
        nbytes: bytes that the calls move.
        issue: function that makes the calls.
        far: another GPU and its stream, if calls go there too. Its work lies between the same two events, both of the
            first GPU: its stream waits for the first event, and the second event waits for its stream.
    """

    def __init__(self, line: Line, nbytes: int, issue: Callable[[], object], far: Line | None = None) -> None:
        import torch

        make: Any = torch.cuda.Event
        self._nbytes = nbytes
        self._before, self._after = make(enable_timing=True), make(enable_timing=True)
        with line.device.current():
            self._before.record(line.stream)
            if far is not None:
                far.stream.wait_event(self._before)
            issue()
            if far is not None:
                self._joined = make()
                self._joined.record(far.stream)
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
        """See :class:`Flight`."""
        return self._call.done() and self._call.result().done()

    def synchronize(self) -> None:
        """See :class:`Flight`."""
        self._call.result().synchronize()

    def result(self) -> Any:
        """See :class:`Flight`."""
        return self._call.result().result()
