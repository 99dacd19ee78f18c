"""The thread that makes progress for NIXL: it looks for notes, moves packed transfers on, and naps."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from kvplan.agents.packed.pack_rows import ENDS, WAITS
from kvplan.base.latch import Wake, woken
from kvplan.base.short_naps import exact_naps
from kvplan.base.threads import Worker

SPIN_SECONDS = 5e-5  # after a look that moved a transfer on: the next ones follow without a nap
BUSY_NAP = 20e-6  # seconds between two looks while transfers are in flight
MOST_BUSY_NAP = 1e-4  # the same while their steps are far apart
FAR_SHARE, MOST_FAR_NAP = 1 / 32, 5e-4  # of a gap so long that its share is longer: large chunks, and slow wires
NEAR_GAP = MOST_BUSY_NAP / FAR_SHARE  # longer ones allow longer naps
LAPSE = 4  # times the longest gap: short naps for the last layer end when it takes longer
GAP_SHARE = 1 / 8  # of a nap while transfers are in flight: its share of the longest of the latest gaps between steps
QUIET_SHARE = 1 / 16  # its share of the time since the last step; it is never longer than this time
AHEAD_NAP = 2e-3  # longest nap while several chunks are on the way; requests and pushes of other peers wait, too
AHEAD_SHARE = 3 / 4  # its share of the time of the bytes that may move meanwhile
STEPS = 5e-4  # seconds of a thread's steps for a chunk: if a chunk may move in less, the thread takes no long naps
LEAST_AHEAD_NAP = 10e-6
LEAST_GAPS, GAPS = 4, 8  # the latest gaps; a transfer of one chunk has fewer, so QUIET_SHARE alone holds for it
RATED = 12  # chunks that have to come until it is known how fast; some come together, as their sender looks
RECENT_NAP = 30e-6  # seconds between two looks when nothing is in flight: the next transfer is likely to come soon
RECENT_SECONDS = 0.02  # since a transfer was in flight
RECENT_SHARE, SOON_SECONDS = 1 / 8, 1e-3  # a nap's share of this time behind its first part, up to IDLE_NAP
IDLE_NAP = 2e-4  # the same later: a peer's direct transfer over TCP moves on by these looks
REST_NAP = 2e-3  # the same after REST_SECONDS
REST_SECONDS = 10.0
REST_SHARE = 0.01  # a nap's share of the time without a transfer, where NIXL has a thread of its own for direct ones

log = logging.getLogger("kvplan.agents")


def nap_after(
    seconds: float, *, busy: bool, driven: bool = False, gap: float | None = None, ahead: float = 0.0
) -> float:  # fmt: skip
    """Return the seconds until the next look.

    Args:
        seconds: since the last look that moved something, if transfers are in flight; since one was, otherwise.
        busy: whether transfers are in flight.
        driven: whether NIXL moves direct transfers on by itself, so that a nap delays the next packed one only.
        gap: the longest of the latest times from the end of a look that moved something to the begin of the next one;
            None if the bytes of transfers in flight move by looks, so that a long nap would stop them.
        ahead: seconds for which enough bytes are on the way, so that a look after them delays none.

    >>> [nap_after(seconds, busy=True) for seconds in (1e-6, 1e-3)]
    [0.0, 2e-05]
    >>> [nap_after(seconds, busy=True, gap=0.0) for seconds in (1e-6, 1e-4, 1e-3, 1.0)]
    [0.0, 2e-05, 6.25e-05, 0.0001]
    >>> [nap_after(1e-4, busy=True, gap=gap) for gap in (1e-4, 4e-4, 1e-3)]
    [2e-05, 5e-05, 0.0001]
    >>> [round(nap_after(10.0, busy=True, gap=gap), 6) for gap in (1e-3, 3.2e-3, 6.4e-3, 1.0)]
    [0.0001, 0.0001, 0.0002, 0.0005]
    >>> [round(nap_after(1e-6, busy=True, gap=1e-3, ahead=ahead), 6) for ahead in (1e-5, 1e-4, 4e-4, 2e-2)]
    [0.0, 7.5e-05, 0.0003, 0.002]
    >>> [nap_after(seconds, busy=False) for seconds in (1e-3, 1.0, 60.0)]
    [3e-05, 0.0002, 0.002]
    >>> [nap_after(seconds, busy=False, driven=True) for seconds in (1e-3, 0.05, 1.0)]
    [3e-05, 0.0005, 0.002]
    """
    if busy:
        if gap is not None and ahead * AHEAD_SHARE > LEAST_AHEAD_NAP:
            return min(ahead * AHEAD_SHARE, AHEAD_NAP)
        if gap is not None:
            most = max(MOST_BUSY_NAP, min(gap * FAR_SHARE, MOST_FAR_NAP))
            nap = min(max(gap * GAP_SHARE, seconds * QUIET_SHARE), seconds, most)
            if nap > BUSY_NAP:
                return nap
        return 0.0 if seconds < SPIN_SECONDS else BUSY_NAP
    if seconds < RECENT_SECONDS:
        return max(RECENT_NAP, min((seconds - SOON_SECONDS) * RECENT_SHARE, IDLE_NAP))
    if driven:
        return min(seconds * REST_SHARE, REST_NAP)
    return IDLE_NAP if seconds < REST_SECONDS else REST_NAP


def prompt(stages: set[str]) -> bool:
    """Return whether somebody waits for the next step, and compute of either process decides when it comes.

    How far steps were apart says nothing then.

    Args:
        stages: those of all transfers in flight; see :meth:`kvplan.agents.packed.pack_jobs.Job.stage`.

    >>> from kvplan.agents.packed.pack_rows import MOVES
    >>> [prompt(stages) for stages in ({ENDS, MOVES}, {WAITS}, {WAITS, MOVES}, {MOVES}, set())]
    [True, True, False, False, False]
    """
    return ENDS in stages or stages == {WAITS}


def _no() -> bool:
    return False


def _none() -> int:
    return 0


def _nothing() -> tuple[int, int]:
    return 0, 0


class _Speed(NamedTuple):
    """How fast chunks have moved, at most.

    Attributes:
        rate: bytes a second; 0 if that is not known.
        seconds: of a chunk.
    """

    rate: float = 0.0
    seconds: float = 0.0


class Naps:
    """How long to nap after each look.

    Args:
        now: the time, in seconds.
        driven: whether NIXL has a thread of its own, too.

    Attributes:
        patient: whether bytes move without looks, so that naps of transfers in flight may be long.
        fast: returns whether that was seen of all transfers in flight.
        ahead: returns the bytes that may move before the next look, which delays none of them.
        moved: returns how many chunks have moved so far, and how many bytes.
        stages: returns the stages of all transfers in flight; see :func:`prompt`. They count until a wait is LAPSE
            times as long as any before.
        resting: returns whether all transfers in flight wait for compute of this process, so that no byte moves.
    """

    def __init__(self, now: float, *, driven: bool = False) -> None:
        self.patient = driven
        self.fast: Callable[[], bool] = _no
        self.ahead: Callable[[], float] = _none
        self.moved: Callable[[], tuple[int, int]] = _nothing
        self.stages: Callable[[], set[str]] = set
        self.resting: Callable[[], bool] = _no
        self._driven = driven
        self._moved_at = self._active_at = now
        self._gaps: deque[float] = deque(maxlen=GAPS)
        self._looks: deque[float] = deque(maxlen=GAPS)  # seconds of the looks behind these gaps
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=RATED + 1)  # a time, and what had moved then
        self._speed = self._before = _Speed()  # of the transfers in flight, and of those before
        self._busy = False

    def after(self, now: float, *, moved: bool, busy: bool, begun: float | None = None) -> float:
        """Return the seconds until the next look.

        Args:
            now: time at the end of a look.
            moved: whether it moved something.
            busy: whether transfers are in flight.
            begun: time at the begin of the look: what it takes itself is no time in which a nap could be.
        """
        if moved:
            begun = now if begun is None else begun
            if self._busy:
                self._gaps.append(begun - self._moved_at)
                self._looks.append(now - begun)
            self._moved_at = now
            self._mark(begun)
        elif busy and not self._busy:
            self._moved_at = now  # something has begun
        self._busy = busy
        if not busy:
            if self._speed.rate:
                self._before, self._speed = self._speed, _Speed()
            self._looks.clear()
            self._marks.clear()
            self._gaps.clear()  # the next transfer may be a short one
            return nap_after(now - self._active_at, busy=False, driven=self._driven)
        self._active_at = now
        seconds, longest = now - self._moved_at, max(self._gaps, default=0.0)
        if max(longest, seconds * QUIET_SHARE) <= LEAST_AHEAD_NAP:
            return nap_after(seconds, busy=True)  # no nap would be longer anyway
        if not (self.patient or self.fast()):  # looks may move the bytes
            return nap_after(seconds, busy=True, gap=0.0 if self.resting() else None)
        # A thread that works more than half of the time may be what a transfer waits for: it takes no long naps.
        ahead = self._ahead() - seconds if sum(self._gaps) >= sum(self._looks) else 0.0
        gap = longest if len(self._gaps) >= LEAST_GAPS else 0.0
        late = seconds > LAPSE * max(longest, NEAR_GAP)  # the compute is not as it was before: it may take for ever
        if (ahead > 0 or gap > NEAR_GAP) and not late:
            stages = self.stages()
            if prompt(stages):
                ahead = gap = 0.0  # steps follow one another closely behind the compute
            elif WAITS in stages:
                ahead = min(ahead, MOST_FAR_NAP / AHEAD_SHARE)
        return nap_after(seconds, busy=True, gap=gap, ahead=ahead)

    def _mark(self, at: float) -> None:
        """Note how many chunks had moved at a time, if it is another number than before."""
        marks, (chunks, nbytes) = self._marks, self.moved()
        if marks and chunks == marks[-1][1]:
            return
        marks.append((at, chunks, nbytes))
        for begun, some, before in reversed(marks):  # a longer time may hold a pause, or the begin of a transfer
            if chunks - some >= RATED and at > begun:
                made = _Speed((nbytes - before) / (at - begun), (at - begun) / (chunks - some))
                if made.rate > self._speed.rate:
                    self._speed = made
                break

    def _ahead(self) -> float:
        """Return the seconds that enough bytes take, at least; 0 if it is not known how fast they move, or too fast."""
        speed = self._speed if self._speed.rate else self._before
        if not speed.rate or speed.seconds < STEPS:
            return 0.0
        seconds = self.ahead() / speed.rate
        return seconds if self._speed.rate else seconds / 2  # another peer's transfer may have been slower

    def wake(self, now: float) -> None:
        """Note that there is something to do."""
        self._active_at = now


class NixlProgress:
    """A thread that calls a function again and again.

    NIXL's own thread for this takes a whole core, also when nothing moves. This one naps between two looks, unless a
    transfer has just moved on: its next step is likely to be due before a nap would end.

    Args:
        look: does what can be done now; returns whether anything was done.
        busy: returns whether transfers are in flight.
        inside: identifiers of the agent's own threads; this one is added.
        driven: whether NIXL has a thread of its own, too.

    Attributes:
        naps: how long it naps.
        looks: number of looks while transfers were in flight.
        waited: seconds between those looks, all together: as long as what arrived had to wait.
        longest: the longest of them.
    """

    def __init__(
        self, look: Callable[[], bool], busy: Callable[[], bool], inside: set[int], *, driven: bool = False
    ) -> None:
        self._look, self._busy = look, busy
        self.naps = Naps(time.monotonic(), driven=driven)
        self._wake: Wake = SimpleQueue()
        self._stopped = False
        self.looks, self.waited, self.longest = 0, 0.0, 0.0
        self.thread = Worker("kvplan-nixl", self._serve, "no thread makes progress for NIXL", inside, naps=True)

    @property
    def running(self) -> bool:
        """Whether the thread was started, and was not told to end."""
        return self.thread.started and not self._stopped

    def start(self) -> None:
        """Start the thread, if it does not run; raise TransferError if the system cannot."""
        if not self.thread.started and not self._stopped:
            self.thread.start()

    def wake(self) -> None:
        """Let the thread look now."""
        self._wake.put(None)

    def stop(self) -> None:
        """End the thread, and return at once."""
        self._stopped = True
        self._wake.put(None)

    def _serve(self) -> None:
        exact_naps()
        wake, now, naps = self._wake, time.monotonic, self.naps
        naps.wake(now())
        before: float | None = None  # end of the look before, if transfers were in flight then
        while not self._stopped:
            begun = now()
            if before is not None:
                self._count(begun - before)
            try:
                moved = self._look()
                busy = moved or self._busy()
                at = now()
                nap = naps.after(at, moved=moved, busy=busy, begun=begun)
            except Exception:
                log.exception("the thread that makes progress for NIXL met an error")
                at, busy, nap = now(), False, RECENT_NAP
            before = at if busy else None
            if not nap:
                os.sched_yield()  # lets the threads run that gather, scatter, or wait for the interpreter
                continue
            if woken(wake, nap):
                naps.wake(now())
                while not wake.empty():
                    wake.get()

    def _count(self, seconds: float) -> None:
        self.looks += 1
        self.waited += seconds
        self.longest = max(self.longest, seconds)
