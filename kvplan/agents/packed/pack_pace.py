"""The pace of a wire, as its ends see it: bytes that come faster than a CPU thread moves them are moved by hardware."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

FAST = 10e9  # bytes a second: sockets, and copies of GPU memory by the CPU, stay below 3e9
LEAST_CHUNKS, CHUNKS = 4, 16  # chunks that have to come so fast: some of the latest


class Pace:
    """Whether hardware moves the bytes between two ends, by the time that chunks take.

    The bytes of the latest chunks have all moved since the first of them could begin. So their number over this time is
    at most the speed of the wire, however many chunks moved at once, and however late a process has looked. A wire that
    was fast once stays so, since the wire to a peer does not change.

    Args:
        now: clock, in seconds.

    Attributes:
        fast: whether so many chunks came so fast.

    >>> time = 0.0
    >>> pace = Pace(lambda: time)
    >>> for _ in range(4):
    ...     begun = pace.begin()
    ...     time += 1e-3
    ...     pace.end(begun, 1 << 20)
    >>> pace.fast
    False
    >>> for _ in range(4):
    ...     begun = pace.begin()
    ...     time += 1e-3
    ...     pace.end(begun, 32 << 20)
    >>> pace.fast
    True
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.fast = False
        self._now = now
        self._latest: deque[tuple[float, int]] = deque(maxlen=CHUNKS)  # of each, the latest first: its begin and bytes

    def begin(self) -> float:
        """Return the time at which a chunk may begin to move, for :meth:`end`; any number once the wire is fast."""
        return 0.0 if self.fast else self._now()

    def end(self, begun: float, nbytes: int) -> None:
        """Note that a chunk has come."""
        if self.fast:
            return
        self._latest.appendleft((begun, nbytes))
        since = now = self._now()
        moved = 0
        for count, (begin, some) in enumerate(self._latest, 1):
            since, moved = min(since, begin), moved + some
            if count >= LEAST_CHUNKS and moved > FAST * (now - since):
                self.fast = True
                return
