"""The naps of the thread that makes progress, by a clock of the test."""

from __future__ import annotations

from itertools import accumulate
from queue import Empty
from types import SimpleNamespace

import pytest

from kvplan.agents.by_nixl import nixl_progress
from kvplan.agents.by_nixl.nixl_progress import NixlProgress, nap_after
from kvplan.base import short_naps
from tests.patience import PATIENCE, until

LOOK = 1e-5  # seconds that a look takes


class Run:
    """The thread's work, in this thread: each look takes 10 us, and each nap as long as it should.

    Args:
        looks: for each look, whether it moves something and whether transfers are in flight; then the thread ends.
        wakes: numbers of naps that a submit ends at once.
    """

    def __init__(self, monkeypatch, looks, wakes=(), **options):
        self.time, self.naps, self.yields, self.left = 1.0, [], 0, list(looks)
        self.state, self.wakes = (False, False), set(wakes)
        monkeypatch.setattr(nixl_progress, "time", SimpleNamespace(monotonic=lambda: self.time))
        monkeypatch.setattr(nixl_progress, "os", SimpleNamespace(sched_yield=self.let_run))
        monkeypatch.setattr(nixl_progress, "exact_naps", bool)
        self.progress = NixlProgress(self.look, lambda: self.state[1], set(), **options)
        self.progress._wake = self
        self.progress._serve()

    def look(self):
        self.time += LOOK
        self.state = self.left.pop(0)
        if not self.left:
            self.progress.stop()
        return self.state[0]

    def let_run(self):
        self.yields += 1

    def get(self, block, timeout):
        if not block:
            raise Empty
        self.naps.append(timeout)
        if len(self.naps) - 1 not in self.wakes:
            self.time += timeout
            raise Empty

    def put(self, _):
        pass

    def empty(self):
        return True


MOVED, STILL, IDLE = (True, True), (False, True), (False, False)


def test_no_nap_comes_between_the_steps_of_a_transfer(monkeypatch):
    """A step that moves is followed by looks without a nap, and only then by naps."""
    run = Run(monkeypatch, [MOVED, MOVED, STILL, STILL, MOVED, STILL, STILL, STILL, STILL])
    assert run.naps == []
    assert run.yields == 9  # other threads run between any two looks
    run = Run(monkeypatch, [MOVED, *[STILL] * 20, MOVED, STILL, MOVED])
    assert set(run.naps) == {nixl_progress.BUSY_NAP}
    assert len(run.naps) == 24 - run.yields


def test_naps_become_longer_after_the_last_transfer(monkeypatch):
    run = Run(monkeypatch, [MOVED, *[IDLE] * 60_000])
    short, long = nixl_progress.RECENT_NAP, nixl_progress.IDLE_NAP
    assert run.naps == sorted(run.naps)
    assert run.naps.count(short) * short <= nixl_progress.RECENT_SECONDS + short
    assert run.naps.count(long) * long <= nixl_progress.REST_SECONDS + long
    assert run.naps[-1] == nixl_progress.REST_NAP


def test_naps_become_long_at_once_where_nixl_has_a_thread(monkeypatch):
    """In the first 10 s, there are 5,200 looks instead of 48,000. A nap takes 1 % of the time before it."""
    run = Run(monkeypatch, [MOVED, *[IDLE] * 20_000], driven=True)
    ends = list(accumulate(nap + LOOK for nap in run.naps))
    assert run.naps == sorted(run.naps)
    assert all(nap <= max(end * 0.01, nixl_progress.IDLE_NAP) for nap, end in zip(run.naps, ends, strict=True))
    assert sum(end < nixl_progress.REST_SECONDS for end in ends) == pytest.approx(5_200, rel=0.02)


def test_naps_are_short_in_the_first_millisecond_behind_a_transfer(monkeypatch):
    """The next one is likely to come then. Later, a nap takes an eighth of the time behind this millisecond at most."""
    run = Run(monkeypatch, [MOVED, *[IDLE] * 200])
    begins = [0.0, *accumulate(nap + LOOK for nap in run.naps)]
    assert all(nap == nixl_progress.RECENT_NAP for nap, at in zip(run.naps, begins, strict=False) if at < 1e-3)
    assert all(nap <= max(3e-5, (at - 1e-3 + 2 * LOOK) / 8) for nap, at in zip(run.naps, begins, strict=False))
    assert sum(at < nixl_progress.RECENT_SECONDS for at in begins) == pytest.approx(130, rel=0.05)  # 500 of 30 us


def test_a_submit_ends_a_nap_and_the_next_ones_are_short(monkeypatch):
    rest = len(Run(monkeypatch, [MOVED, *[IDLE] * 60_000]).naps) - 10
    run = Run(monkeypatch, [MOVED, *[IDLE] * 60_000], wakes=[rest])
    assert run.naps[rest : rest + 2] == [nixl_progress.REST_NAP, nixl_progress.RECENT_NAP]


def test_an_idle_thread_looks_rarely():
    """With 20 us for each look, it takes a third of a core for 20 ms, a tenth for 10 s, and then a hundredth."""
    shares = [20e-6 / (20e-6 + nap_after(seconds, busy=False)) for seconds in (0.01, 1.0, 100.0)]
    assert [share < most for share, most in zip(shares, (0.41, 0.1, 0.01), strict=True)] == [True] * 3


def test_exact_naps_elsewhere(monkeypatch):
    """Other systems have no such setting, and neither may a libc."""
    monkeypatch.setattr(short_naps.sys, "platform", "darwin")
    assert not short_naps.exact_naps()
    monkeypatch.setattr(short_naps.sys, "platform", "linux")
    monkeypatch.setattr(short_naps.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert not short_naps.exact_naps()


def test_the_thread_runs_and_ends():
    looks = []
    progress = NixlProgress(lambda: bool(looks.append(1)), lambda: False, set())
    progress.start()
    until(lambda: len(looks) > 2)
    progress.stop()
    assert progress.thread.join(PATIENCE)
