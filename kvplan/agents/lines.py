"""Transfers between processes, in the order in which they run: the agent's thread ends them, or callers do."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any, Protocol

from kvplan.agents.loop import Watcher
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
    def awaited(self) -> bool:
        """Whether its end sends something, so that it does not wait for a caller who asks for it."""

    def watch(self) -> None:
        """Let the end of its bytes wake the agent's thread, if it can."""

    def begin(self) -> None:
        """Submit it, if that was left to the agent's thread."""

    def bound(self) -> None:
        """Begin to count its default bound."""

    def expire(self) -> None:
        """Give it up, if its deadline has passed."""

    def moved(self) -> bool:
        """Return whether nothing of it moves any more."""

    def settle(self) -> None:
        """End it, now that nothing of it moves any more."""

    def announce(self) -> None:
        """Wake those that wait for its end."""


class Line:
    """Transfers that run, and end, in the order of their submits.

    Args:
        lines: all lines of the agent.

    Attributes:
        lock: held while a transfer is ended, and not while others hear of it.
        wake: wakes the agent's thread.
        ended: transfers that have ended, and of which nobody has heard.
        noting: the last transfer with a note.
    """

    def __init__(self, lines: Lines) -> None:
        self.lock, self.wake = threading.RLock(), lines.wake
        self.ended: deque[Flying] = deque()
        self.noting: Any = None
        self._lines = lines
        self._flying: deque[Flying] = deque()

    def add(self, transfer: Flying, *, deferred: bool = False) -> None:
        """Add a transfer that was submitted; or, if ``deferred``, that the agent's thread will submit."""
        if transfer.awaited:
            transfer.watch()
        self._flying.append(transfer)
        self._lines.serve_soon(self)
        if self._lines.asleep or deferred or transfer.until is not None:
            self.wake()

    def end(self) -> None:
        """End the first transfers, as far as nothing of them moves any more; any thread may call it."""
        with self.lock:
            while self._flying and (head := self._flying[0]).moved():
                head.settle()
                if self._flying and self._flying[0] is head:  # otherwise a signal handler has asked for an end, too
                    self._flying.popleft()
        self.announce()

    def announce(self) -> None:
        """Wake those that wait for transfers that have ended. The lock is not held: they may ask for other ends."""
        while self.ended:
            try:
                self.ended.popleft().announce()
            except IndexError:  # another thread was faster
                return

    def serve(self) -> float | None:
        """End and begin what can be, and give up what is late, in the agent's thread; return when to look again."""
        self.end()
        with self.lock:
            if self._flying:
                self._flying[0].begin()
                self._flying[0].bound()
            for transfer in tuple(self._flying):
                transfer.expire()
        self.end()
        flying = tuple(self._flying)
        times = [at for one in flying if (at := one.until) is not None]
        if flying and not flying[0].called:
            times.append(time.monotonic() + LOOK_SECONDS)
        return min(times, default=None)

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return bool(self._flying)


class Lines(Watcher):
    """The lines of an agent: one for each order in which transfers run. The agent's thread serves them.

    Args:
        wake: wakes the thread.

    Attributes:
        asleep: whether a submit must wake the thread.
    """

    def __init__(self, wake: Call) -> None:
        self.wake, self.asleep = wake, True
        self._lines: dict[tuple[object, ...], Line] = {}
        self._busy: dict[int, Line] = {}
        self._due: float | None = None
        self._fresh = False  # whether a submit has come since the last look
        self._idle = 0  # looks at nothing that needs another one
        self._stopped, self._serving = False, threading.Lock()

    def line(self, key: tuple[object, ...]) -> Line:
        """Return the line of a key."""
        return self._lines.get(key) or self._lines.setdefault(key, Line(self))

    def serve_soon(self, line: Line) -> None:
        """Serve a line that has a transfer."""
        self._busy[id(line)] = line
        self._fresh = True

    @property
    def busy(self) -> bool:
        """Whether something of a transfer may still move."""
        return any(line.busy for line in list(self._busy.values()))

    def stop(self) -> None:
        """Let the thread ask for no end any more, from now on: the interpreter ends."""
        self._stopped = True
        with self._serving:
            pass

    # The agent's thread calls these methods.

    def due(self) -> float | None:
        """Return when to look for ends again."""
        if self._due is None:
            self.asleep = self._idle >= IDLE_LOOKS  # before the look: a submit that comes later wakes the thread
            if self._fresh or not self.asleep:
                self._due = time.monotonic() + LOOK_SECONDS
        return self._due

    def serve(self) -> None:
        """Serve each line that has transfers."""
        self._fresh, times = False, list[float]()
        for number, line in list(self._busy.items()):
            with self._serving:
                at = None if self._stopped else line.serve()
            if at is not None:
                times.append(at)
            if not line.busy:
                self._busy.pop(number, None)
                if line.busy:  # a submit came meanwhile
                    self.serve_soon(line)
        self._idle = 0 if times else self._idle + 1
        self._due = min(times, default=None)
