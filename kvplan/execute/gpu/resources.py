"""What all parts of one GPU's executor share: its lock, memory, events, streams, tables and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvplan.cost.policy import Policy
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.issuer import Issuer
from kvplan.cuda.reach import Reach
from kvplan.execute.backend import Backend
from kvplan.execute.gpu.memory import Arena, Handles
from kvplan.execute.gpu.tables import Tables


class Resources(Backend):
    """The parts of an executor that its lanes, paths and transfers use.

    Args:
        device: the GPU.
        policy: the caller's policy.
        lent: returns the handle of the caller's stream for all kernels, or None; called at the first kernel of a lane.

    Attributes:
        lock: guards everything but the arenas and the tables.
        handles, slots, memory, tables: its events and streams, pinned memory, GPU memory, run tables and kernels.
        reach: tells which memory the GPU reaches.
        issuers: by direction, the thread that makes the calls of long transfers.
    """

    def __init__(self, device: Device, policy: Policy, lent: Callable[[], int | None]) -> None:
        super().__init__("kvplan-reaper", "no thread keeps what a GPU executor has in flight")
        self.device, self.policy, self.lent = device, policy, lent
        self.handles = Handles(device)
        self.slots = Arena(device.allocate_host, device.free_host, visible=True)
        self.memory = Arena(device.allocate, device.free, visible=False)
        self.tables = Tables(device, self.handles, self.slots, self.memory)
        self.reach = Reach(device)
        self.issuers: dict[str, Issuer] = {}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Hold the lock within a ``with``. The device is current, and calls that a capture forbids are allowed."""
        with self.device.current(), Uncaptured(self.device), self.lock:
            yield

    def issuer(self, direction: str) -> Issuer:
        """Return the thread that makes the calls of long transfers of a direction; the first call starts it."""
        if direction not in self.issuers:
            paces = [self.handles.event() for _ in range(4)]
            self.issuers[direction] = Issuer(self.device, f"kvplan-issue-{direction}", paces)
        return self.issuers[direction]
