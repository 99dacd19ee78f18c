"""The time of a forward pass by its number of tokens, measured without a wait, and the pace that follows from it."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

LATEST = 0.25  # weight of the latest step among those before it
MEASURED = 4  # most steps whose end has not been seen; further steps are not measured
# The first steps are all measured, then one of seven on average: events, two for each wait for a load, keep launches
# waiting. The gaps differ. With one gap, of prompts of so many steps the same part would be measured each time.
ALL_MEASURED, GAPS = 32, range(4, 11)


class Pace(NamedTuple):
    """The speed of a worker: of its model, and of its loads.

    Attributes:
        step_seconds: seconds of a forward pass with new tokens, without its tokens.
        token_seconds: further seconds for each token of a step.
        bytes_per_second: rate of loads.

    >>> round(Pace(0.004, 1e-5, 5e10).seconds(512), 5)
    0.00912
    """

    step_seconds: float
    token_seconds: float
    bytes_per_second: float

    def seconds(self, tokens: int) -> float:
        """Return the expected seconds of a forward pass."""
        return self.step_seconds + self.token_seconds * tokens

    def least(self, other: Pace) -> Pace:
        """Return the pace by which two ranks surely hide a load: the shorter passes, and the slower loads."""
        return Pace(*(min(pair) for pair in zip(self, other, strict=True)))


class StepLine:
    """A line through the last steps: seconds over tokens. Older steps count less and less.

    If all steps have about as many tokens, the line goes through the origin. So the time of a much smaller step is
    rather too small, and a load rather asynchronous.

    >>> line = StepLine()
    >>> for tokens in (100, 500, 1500):
    ...     line.add(tokens, 0.005 + tokens * 1e-5)
    >>> [round(number, 6) for number in line.terms()]
    [0.005, 1e-05]
    """

    def __init__(self) -> None:
        self._sums: tuple[float, ...] | None = None  # means of tokens, seconds, tokens², tokens · seconds

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measured step."""
        new = (float(tokens), seconds, float(tokens) ** 2, tokens * seconds)
        if self._sums is None:
            self._sums = new
        else:
            self._sums = tuple(old + LATEST * (one - old) for old, one in zip(self._sums, new, strict=True))

    @property
    def known(self) -> bool:
        """Whether a step was added."""
        return self._sums is not None

    def terms(self) -> tuple[float, float]:
        """Return the seconds of a step without tokens, and of each token; at least one step was added."""
        if self._sums is None:
            raise ValueError("no step was added; add one before terms()")
        tokens, seconds, squares, products = self._sums
        spread = squares - tokens**2
        if spread < (0.1 * tokens) ** 2:
            return 0.0, seconds / tokens
        slope = max((products - tokens * seconds) / spread, 0.0)
        base = seconds - slope * tokens
        return (base, slope) if base > 0 else (0.0, seconds / tokens)


class _Pass(NamedTuple):
    """A measured forward pass: events around it, and around the times at which the stream waited for loads.

    ``host`` is the CPU's clock at the beginning, and from the end on the seconds in which the CPU launched the pass.
    """

    tokens: int
    host: float
    whole: tuple[Any, Any]
    stalls: list[tuple[Any, Any]]


class StepClock:
    """Measures forward passes on a device by events on torch's current stream; on the CPU, by its clock.

    The time for which the stream waits for loads does not count. So the compute of a step that loads is known, too.
    But a pass takes at least as long as the CPU launches it: if the stream waits meanwhile, the load is hidden. Of
    many steps, some are measured, the same ones on all ranks.

    Args:
        device: ``"cuda:0"``, or ``"cpu"``.
        event: makes an event with ``record()``, ``query()`` and ``elapsed_time(end)`` in milliseconds; by default
            torch's event with timing.

    Attributes:
        chosen: whether the step is one of those that are measured. Ranks tell in it what they have measured so far.
    """

    def __init__(self, device: str, event: Callable[[], Any] | None = None) -> None:
        self.chosen = False
        self._event = event or (_Moment if device == "cpu" else _torch_event)
        self._spare: list[tuple[Any, Any]] = []
        self._now: _Pass | None = None
        self._waited = 0.0  # seconds of this pass's calls of stall: in some, the CPU waits until copies are issued
        self._ended: deque[_Pass] = deque()
        self._steps, self._next = 0, 1
        self._gap = random.Random(0)  # noqa: S311  # not secret, and the same on all ranks

    def begin(self, tokens: int) -> None:
        """Begin to measure a step of some tokens, if it is one of those that are measured; 0 for one that is not."""
        self._now, self.chosen = None, False
        if not tokens:
            return
        self._steps += 1
        if self._steps < self._next:
            return
        self.chosen = True
        self._next += 1 if self._steps < ALL_MEASURED else self._gap.choice(GAPS)
        if len(self._ended) < MEASURED:
            self._now, self._waited = _Pass(tokens, time.perf_counter(), self._began(), []), 0.0

    def stall(self, wait: Callable[[], object]) -> None:
        """Call a function that lets the stream wait for a load."""
        step = self._now
        if step is None:
            wait()
            return
        step.stalls.append(self._began())
        began = time.perf_counter()
        try:
            wait()
        finally:
            self._waited += time.perf_counter() - began
            step.stalls[-1][1].record()

    def end(self) -> None:
        """End the measured step, if there is one."""
        if self._now is not None:
            self._now.whole[1].record()
            host = time.perf_counter() - self._now.host - self._waited
            self._ended.append(self._now._replace(host=host))
            self._now = None

    def measured(self) -> list[tuple[int, float]]:
        """Return tokens and seconds of the steps whose end has passed since the last call; this does not wait."""
        found = []
        while self._ended and self._ended[0].whole[1].query():
            tokens, host, whole, stalls = self._ended.popleft()
            found.append((tokens, max(_seconds(whole) - sum(map(_seconds, stalls)), host)))
            self._spare += [whole, *stalls]
        return found

    def _began(self) -> tuple[Any, Any]:
        """Return two events, of which the first is recorded."""
        pair = self._spare.pop() if self._spare else (self._event(), self._event())
        pair[0].record()
        return pair


class StepPace:
    """The pace of a worker, from the steps that its clock has measured.

    Ranks see the end of a step at different times. They measure the same steps, and tell their paces in these, so that
    the scheduler gets those of all ranks together. Otherwise it would take that of one rank.

    Args:
        clock: the clock.
        bytes_per_second: rate of loads.
    """

    def __init__(self, clock: StepClock, bytes_per_second: float) -> None:
        self._clock, self._rate, self._line = clock, bytes_per_second, StepLine()

    def take(self) -> Pace | None:
        """Take what has been measured; return the pace in a step that is measured itself, and None in all others."""
        for tokens, seconds in self._clock.measured():
            self._line.add(tokens, seconds)
        if not self._clock.chosen or not self._line.known:
            return None
        return Pace(*self._line.terms(), self._rate)


def _seconds(pair: tuple[Any, Any]) -> float:
    begin, end = pair
    return float(begin.elapsed_time(end)) * 1e-3


class _Moment:
    """An event of the CPU, which has no streams."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Moment) -> float:
        return (end.at - self.at) * 1e3


def _torch_event() -> Any:
    return sys.modules["torch"].cuda.Event(enable_timing=True)
