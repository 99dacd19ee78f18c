"""How cases are timed: in turns, as often and as long as asked."""

from __future__ import annotations

import gc

import pytest

import kvplan
from kvplan.measure.rig import Timing, timed


class Clock:
    """Time that passes when a transfer takes some."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """Begins transfers of some microseconds; of each, issuing takes one."""

    def __init__(self, clock: Clock, name: str, log: list[str], *, us: float = 10.0, queued: int = 0) -> None:
        self.clock, self.name, self.log, self.us, self.turns = clock, name, log, us, queued
        self.seconds = iter(range(1, 10_000))

    def __call__(self) -> Fake:
        assert not gc.isenabled(), "a collection may fall into what is timed"
        self.log.append(self.name)
        self.clock.now += 1e-6
        self.left = self.turns
        return self

    @property
    def queued(self) -> bool:
        self.left -= 1
        if self.left < 0:
            return False
        self.clock.now += 5e-6
        return True

    def synchronize(self) -> None:
        self.clock.now += self.us * 1e-6

    def result(self):
        return kvplan.TransferResult(1, next(self.seconds) * 1e-6, "kernel", 1, 1)


@pytest.mark.parametrize("warm_ups", [0, 2, 5])
def test_a_case_is_given_three_samples_however_long_they_take(warm_ups):
    clock, log = Clock(), []
    made = timed({"a": Fake(clock, "a", log, us=1e6)}, seconds=1e-9, warm_ups=warm_ups, clock=clock)
    assert len(log) == warm_ups + 3
    # The seconds of its transfers are 1, 2, 3 us; the warm-ups are not asked for theirs.
    assert made["a"] == Timing(pytest.approx(2e-6), pytest.approx(1 + 1e-6), pytest.approx(1e-6), 3)
    assert gc.isenabled()


def test_it_stops_at_the_most_samples_and_at_the_time():
    clock, log = Clock(), []
    cases = {"long": Fake(clock, "long", log, us=99), "short": Fake(clock, "short", log, us=9)}
    made = timed(cases, seconds=999.5e-6, most=20, warm_ups=0, clock=clock)
    assert {name: one.samples for name, one in made.items()} == {"long": 10, "short": 20}  # of 100 us, and of 10


def test_cases_take_turns():
    clock, log = Clock(), []
    cases = {name: Fake(clock, name, log) for name in "abc"}
    timed(cases, seconds=1.0, most=30, warm_ups=2, clock=clock)
    assert log[:6] == list("aabbcc")
    rounds = [tuple(log[k : k + 3]) for k in range(6, len(log), 3)]
    assert len(rounds) == 30
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len(set(rounds)) > 3, "none always comes behind the same one"
