"""The streams of a lane, and the transfers in flight on them."""

from __future__ import annotations

from collections import deque

from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.resources import Resources

STREAMS = ("copy", "kernel", "other", "gate")
FOR_KERNELS = ("kernel", "other")  # those that the caller's stream replaces, if it lends one


class Flights:
    """Transfers in flight on one lane.

    Attributes:
        flying: the transfers, in the order in which they end.
        last: the last transfer issued, while it is in flight.
        calls: number of driver calls that issued them.
    """

    def __init__(self) -> None:
        self.flying: deque[DeviceTransfer] = deque()
        self.last: DeviceTransfer | None = None
        self.calls = 0

    def reap(self) -> int:
        """Remove ended transfers, and return how many are left. The executor's lock is held, and the device current."""
        for one in tuple(self.flying):  # a transfer may hold the events of an earlier one, so later ones end first
            if not one._retire():
                break
        while self.flying and self.flying[0]._settled:
            self.calls -= self.flying.popleft().launches
        last = self.last
        if last is not None and last._over:
            self.last = None
        return len(self.flying)


class Stream:
    """A stream of a lane: created at the first use, and from then on an attribute of the lane."""

    def __init__(self, *, urgent: bool | None) -> None:
        self._urgent = urgent
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Keep the name of the attribute. Python calls this when it makes the class."""
        self._name = name

    def __get__(self, lane: LaneStreams, owner: type | None = None) -> int:
        """Create the stream, set it as an attribute of the lane, and return it."""
        lane.make(self._name, urgent=self._urgent)
        return int(vars(lane)[self._name])


class LaneStreams(Flights):
    """The streams of one lane.

    Each stream is created at its first use: a GPU has few hardware queues, and streams of one queue delay each other.

    Args:
        resources: resources of the executor.
        name: name of the lane.
        urgent: whether the lane is for urgent transfers.

    Attributes:
        name: name of the lane.
        urgent: whether the lane is for urgent transfers; then all its streams except ``gate`` have highest priority.
        copy: the stream for the copy engine.
        kernel: the stream for kernels, with highest priority: its kernels are short, and other work waits for them.
        other: a second such stream, so that two chunks of a load can be ready at once. Some compute holds every SM
            until it ends. If a kernel becomes ready only after another kernel has ended, compute has taken the SMs
            again. Stores do not use this stream: two kernels that fill slots at once fill the first slot later.
        gate: a stream that only waits for events of other owners, and records the transfer's own events behind them.
        side: more copy streams, if a transfer has used several.
    """

    copy = Stream(urgent=None)
    kernel = Stream(urgent=True)
    other = Stream(urgent=True)
    gate = Stream(urgent=False)

    def __init__(self, resources: Resources, name: str, *, urgent: bool) -> None:
        super().__init__()
        self.name = name
        self.urgent = urgent
        self.side: list[int] = []
        self._resources = resources
        self._device = resources.device

    def make(self, name: str, *, urgent: bool | None) -> None:
        """Create a stream unless it exists; if ``urgent`` is None, with the priority of the lane's transfers."""
        if name in vars(self):
            return
        lent = self._resources.lent() if name in FOR_KERNELS else None
        if lent is None:
            lent = self._resources.handles.stream(urgent=self.urgent if urgent is None else urgent)
        vars(self)[name] = lent

    @property
    def streams(self) -> tuple[int, ...]:
        """Return all streams of the lane that exist, with the caller's."""
        made = vars(self)
        return (*dict.fromkeys(made[name] for name in STREAMS if name in made), *self.side)

    def sides(self, count: int) -> list[int]:
        """Return ``count`` more copy streams; missing ones are created."""
        while len(self.side) < count:
            self.side.append(self._resources.handles.stream(urgent=self.urgent))
        return self.side[:count]
