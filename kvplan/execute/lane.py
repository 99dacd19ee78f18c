"""A lane: the streams of one direction, on which transfers end in the order of their submits."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvplan.cached_property import cached_property
from kvplan.execute.cuda import Device

if TYPE_CHECKING:
    from kvplan.execute.flight import DeviceTransfer

Job = Callable[[], None]


class Lane:
    """Streams, and what was last put on them.

    Each stream is made when first used: a GPU has few hardware queues, and streams that share one wait for each other.

    Args:
        device: whose streams they are.
        name: of the lane and its thread.
        beside: the lane of the same direction whose order this one's urgent transfers need not keep.

    Attributes:
        urgent: whether it is for urgent transfers: all its streams are of the highest priority.
        side: more copy streams, where there are several.
        last: the last transfer issued, while it is in flight.
        flying: transfers in flight, in the order in which they end.
        calls: of the driver, that issued those.
        pending: transfers that its thread has not issued, in the order of their submits.
        waiting: the one whose turn its thread waits for on the CPU.
        lock: held by whoever submits; the same for both lanes of a direction.
    """

    def __init__(self, device: Device, name: str, beside: Lane | None = None) -> None:
        self.name = name
        self.urgent = beside is not None
        self._device = device
        self.side: list[int] = []
        self.last: DeviceTransfer | None = None
        self.flying: deque[DeviceTransfer] = deque()
        self.calls = 0
        self.pending: deque[DeviceTransfer] = deque()
        self.waiting: DeviceTransfer | None = None
        self.lock: AbstractContextManager[Any] = beside.lock if beside is not None else threading.RLock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._count = threading.Lock()

    @cached_property
    def copy(self) -> int:
        """The stream of the copy engine."""
        return self._device.stream(urgent=self.urgent)

    @cached_property
    def kernel(self) -> int:
        """The stream of kernels, of the highest priority: short ones that others wait for."""
        return self._device.stream(urgent=True)

    @cached_property
    def other(self) -> int:
        """Another such, so that two chunks of a load are due at once.

        Where compute holds every SM to its end, a kernel that becomes due only when another has ended finds the SMs
        taken again. Stores lose by it: two kernels that fill slots at once fill the first one later.
        """
        return self._device.stream(urgent=True)

    @cached_property
    def gate(self) -> int:
        """A stream that only waits, for events that a later issue is to wait for."""
        return self._device.stream()

    @property
    def streams(self) -> tuple[int, ...]:
        """All its streams that were made."""
        made = vars(self)
        return (*(made[name] for name in ("copy", "kernel", "other", "gate") if name in made), *self.side)

    def sides(self, count: int) -> list[int]:
        """Copy streams beside the first; made when first asked for."""
        while len(self.side) < count:
            self.side.append(self._device.stream(urgent=self.urgent))
        return self.side[:count]

    @property
    def busy(self) -> bool:
        """Whether its own thread has something to issue, so that what comes now must queue behind it."""
        return self._waiting > 0

    def later(self, job: Job) -> None:
        """Let the lane's own thread issue something; jobs run in order.

        Raises:
            RuntimeError: there is no thread for it.
        """
        with self._count:
            if self._thread is None:
                thread = self._new_thread()
                thread.start()
                self._thread = thread
            self._waiting += 1
        self._jobs.put(job)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._serve, name=f"kvplan-{self.name}", daemon=True)

    def relieve(self) -> None:
        """Another thread in place of the one that waits for what nobody needs any more; that one ends with its wait.

        The runtime's lock is held, so that its wait cannot end meanwhile.
        """
        self.waiting = None
        with self._count:  # nobody joins a thread that has not been started
            old, self._thread = self._thread, self._new_thread()
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: then the old one goes on after its wait
                self._thread = old
            else:
                self._waiting -= 1

    def stop(self) -> None:
        """End the thread behind what it has to issue."""
        if self._thread is not None:
            self._jobs.put(None)

    def here(self) -> bool:
        """Whether the caller is the lane's own thread."""
        return self._thread is threading.current_thread()

    @property
    def queued(self) -> int:
        """Transfers that its thread has not issued."""
        return self._waiting

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        with self._count:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        with self._count:
            return thread is self._thread and not thread.is_alive()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            if not self.here():  # relieved
                return
            with self._count:
                self._waiting -= 1
            del job


class Fork:
    """What stands for a lane in the capture of a graph: one stream of its own."""

    def __init__(self, stream: int) -> None:
        self.kernel = stream
