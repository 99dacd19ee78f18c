"""A lane: the streams of one direction, on which transfers end in the order of their submits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Wake
from kvplan.base.line import Line
from kvplan.base.threads import Standby, Worker, aside
from kvplan.cuda.device import Device

if TYPE_CHECKING:
    from kvplan.execute.gpu.device_transfer import DeviceTransfer

STREAMS = ("copy", "kernel", "other", "gate")


class Stream:
    """A stream of a lane, made when it is first asked for, and from then on an attribute of the lane."""

    def __init__(self, *, urgent: bool | None) -> None:
        self._urgent = urgent
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """The class tells its name."""
        self._name = name

    def __get__(self, lane: Lane, owner: type | None = None) -> int:
        """Make it, where no signal comes between its making and its place."""
        aside(partial(lane.make, self._name, urgent=self._urgent))
        return int(vars(lane)[self._name])


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
        owned: whether the calling thread holds it.
        thread: issues what is pending.
        standby: waits for what is not CUDA's, in that thread's place.
    """

    copy = Stream(urgent=None)
    kernel = Stream(urgent=True)
    other = Stream(urgent=True)
    gate = Stream(urgent=False)

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
        self.lock: Any = None
        self.lock = threading.RLock() if beside is None else beside.lock
        self.owned: Callable[[], bool] = getattr(self.lock, "_is_owned")  # noqa: B009  # the stubs lack it
        self.wake: Wake = SimpleQueue()
        self.stir: Callable[[], object] = partial(self.wake.put, None)
        self.thread = Worker(f"kvplan-{name}", self._serve, "no thread issues transfers", inside)
        self.standby = Standby(inside)

    def make(self, name: str, *, urgent: bool | None) -> None:
        """Make a stream, where there is none of that name; one of transfers' own priority where ``urgent`` is None."""
        if name not in vars(self):
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
        return bool(self.pending.line) and self.pending.first() is not None

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
