"""Transfers between processes, in the order in which they run: the agent's thread ends them, or callers do."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from kvplan.base.threads import Call

# To wake the thread costs a submit some 10 us, and the thread then competes with it for the interpreter. So it looks
# for ends by itself, and callers that ask for an end need no thread. After IDLE_LOOKS looks without a transfer it
# sleeps until the next submit.
LOOK_SECONDS, IDLE_LOOKS = 2e-3, 50


class Flying(Protocol):
    """A transfer of a line; see :class:`kvplan.agents.peer_transfer.PeerTransfer`."""

    until: float | None
    called: bool

    @property
    def quiet(self) -> bool:
        """Whether its end sends nothing."""

    def watch(self) -> None:
        """Let the end of its bytes wake the agent's thread, if it can."""

    def begin(self, wake: Call, inside: set[int]) -> None:
        """Submit it, if that was left to the agent's thread."""

    def bound(self) -> None:
        """Begin to count its default bound."""

    def expire(self) -> None:
        """Give it up, if its deadline has passed."""

    def moved(self) -> bool:
        """Return whether nothing of it moves any more."""

    def settle(self) -> None:
        """End it, now that nothing of it moves any more."""


class Line:
    """Transfers that run, and end, in the order of their submits.

    Args:
        lines: all lines of the agent.

    Attributes:
        lock: held while a transfer is ended.
        wake: wakes the agent's thread.
    """

    def __init__(self, lines: Lines) -> None:
        self.lock, self.wake = threading.RLock(), lines.wake
        self._lines = lines
        self._flying: deque[Flying] = deque()

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return bool(self._flying)

    def add(self, transfer: Flying) -> None:
        """Add a transfer that was submitted, or that the agent's thread will submit."""
        if not transfer.quiet:
            transfer.watch()
        self._flying.append(transfer)
        if self._lines.asleep or transfer.until is not None:
            self.wake()

    def end(self, *, quietly: bool = False) -> None:
        """End the first transfers, as far as nothing of them moves any more; if ``quietly``, up to the first note."""
        with self.lock:
            while self._flying and (self._flying[0].quiet or not quietly) and self._flying[0].moved():
                self._flying[0].settle()
                self._flying.popleft()

    def serve(self, inside: set[int]) -> None:
        """End and begin what can be, and give up what is late; in the agent's thread."""
        self.end()
        with self.lock:
            if self._flying:
                self._flying[0].begin(self.wake, inside)
                self._flying[0].bound()
            for transfer in tuple(self._flying):
                transfer.expire()
        self.end()

    def due(self, now: float) -> float | None:
        """Return when it must be served next, or None."""
        flying = tuple(self._flying)
        times = [at for one in flying if (at := one.until) is not None]
        if flying and not flying[0].called:
            times.append(now + LOOK_SECONDS)
        return min(times, default=None)


class Lines:
    """The lines of an agent: one for each order in which transfers run. The agent's thread serves them.

    Args:
        wake: wakes the thread.
        inside: identifiers of the agent's own threads.

    Attributes:
        asleep: whether a submit must wake the thread.
    """

    def __init__(self, wake: Call, inside: set[int]) -> None:
        self.wake, self.asleep = wake, True
        self._inside = inside
        self._lines: dict[tuple[object, ...], Line] = {}
        self._idle = 0

    def line(self, key: tuple[object, ...]) -> Line:
        """Return the line of a key."""
        return self._lines.get(key) or self._lines.setdefault(key, Line(self))

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return any(line.busy for line in list(self._lines.values()))

    # The agent's thread calls these methods.

    def files(self) -> dict[int, int]:
        """Return nothing to wait for."""
        return {}

    def due(self) -> float | None:
        """Return when to look for ends again."""
        self.asleep = self._idle >= IDLE_LOOKS  # before the look: a submit that comes later wakes the thread
        now = time.monotonic()
        times = [at for line in list(self._lines.values()) if (at := line.due(now)) is not None]
        self._idle = 0 if times else self._idle + 1
        return min(times, default=None if self.asleep else now + LOOK_SECONDS)

    def serve(self) -> None:
        """Serve each line."""
        for line in list(self._lines.values()):
            line.serve(self._inside)
