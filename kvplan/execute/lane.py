"""A lane: the streams of one direction, on which transfers end in the order of their submits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvplan.execute.cuda import Device
from kvplan.execute.latch import Wake
from kvplan.execute.line import Line
from kvplan.execute.threads import Standby, Worker, aside

if TYPE_CHECKING:
    from kvplan.execute.flight import DeviceTransfer

# Its streams, and whether one is of the highest priority; None: as its transfers are.
STREAMS: dict[str, bool | None] = {"copy": None, "kernel": True, "other": True, "gate": False}


class Lane:
    """Streams, and what was last put on them.

    Each stream is made when first used: a GPU has few hardware queues, and streams that share one wait for each other.

    Args:
        device: whose streams they are.
        name: of the lane and its thread.
        beside: the lane of the same direction whose order this one's urgent transfers need not keep.

    Attributes:
        urgent: whether it is for urgent transfers: all its streams are of the highest priority.
        copy: the stream of the copy engine.
        kernel: the stream of kernels, of the highest priority: short ones that others wait for.
        other: another such, so that two chunks of a load are due at once. Where compute holds every SM to its end, a
            kernel that becomes due only when another has ended finds the SMs taken again. Stores lose by it: two
            kernels that fill slots at once fill the first one later.
        gate: a stream that only waits, for events that a later issue is to wait for.
        side: more copy streams, where there are several.
        last: the last transfer issued, while it is in flight.
        flying: transfers in flight, in the order in which they end.
        calls: of the driver, that issued those.
        issuing: the transfer that a submit is putting on the streams now.
        pending: transfers that its thread has not issued, in the order of their submits.
        waiting: the one whose turn its thread waits for on the CPU.
        lock: held by whoever submits; the same for both lanes of a direction.
        thread: issues what is pending.
        standby: waits for what is not CUDA's, in that thread's place.
    """

    copy: int
    kernel: int
    other: int
    gate: int

    def __init__(self, device: Device, name: str, inside: set[int], beside: Lane | None = None) -> None:
        self.name = name
        self.urgent = beside is not None
        self._device = device
        self.side: list[int] = []
        self.last: DeviceTransfer | None = None
        self.flying: deque[DeviceTransfer] = deque()
        self.calls = 0
        self.issuing: DeviceTransfer | None = None
        self.pending: Line[DeviceTransfer] = Line()
        self.waiting: DeviceTransfer | None = None
        self.lock: Any = beside.lock if beside is not None else threading.RLock()  # Any: it is asked whose it is
        self.wake: Wake = SimpleQueue()
        self.stir: Callable[[], object] = partial(self.wake.put, None)
        self.thread = Worker(f"kvplan-{name}", self._serve, "no thread issues transfers", inside)
        self.standby = Standby(inside)

    def __getattr__(self, name: str) -> int:
        """Make a stream when it is first asked for."""
        if name not in STREAMS:
            raise AttributeError(f"a lane has no {name!r}")
        aside(partial(self._make, name))
        return int(vars(self)[name])

    def _make(self, name: str) -> None:
        if name not in vars(self):
            urgent = STREAMS[name]
            with self._device.current():
                vars(self)[name] = self._device.stream(urgent=self.urgent if urgent is None else urgent)

    @property
    def streams(self) -> tuple[int, ...]:
        """All its streams that were made."""
        made = vars(self)
        return (*(made[name] for name in STREAMS if name in made), *self.side)

    def sides(self, count: int) -> list[int]:
        """Copy streams beside the first; made when first asked for."""
        if len(self.side) < count:
            aside(partial(self._make_sides, count))
        return self.side[:count]

    def _make_sides(self, count: int) -> None:
        with self._device.current():
            while len(self.side) < count:
                self.side.append(self._device.stream(urgent=self.urgent))

    @property
    def busy(self) -> bool:
        """Whether its own thread has something to issue, so that what comes now must queue behind it."""
        return self.pending.first() is not None

    @property
    def queued(self) -> int:
        """Transfers that its thread has not issued."""
        return sum(not one._over for one in self.pending.entries())

    def stop(self) -> None:
        """End the thread behind what it has to issue."""
        self.pending.close(self.stir)

    def _serve(self) -> None:
        while (transfer := self._next()) is not None:
            transfer._issue_now()
            self.pending.take()
            transfer._is_issued()
            del transfer
        self.standby.dismiss()

    def _next(self) -> DeviceTransfer | None:
        """The transfer to issue next; None where there will be no more."""
        while True:
            for _ in range(self.wake.qsize()):  # what they tell is looked at now
                self.wake.get()
            transfer = self.pending.first()
            if transfer is not None or self.pending.ended():
                return transfer
            self.wake.get()


class Fork:
    """What stands for a lane in the capture of a graph: one stream of its own."""

    def __init__(self, stream: int) -> None:
        self.kernel = stream
