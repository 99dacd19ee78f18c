"""The measured times of forward passes, and the pace of a worker that follows from them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from kvplan.engines.vllm.step_time import Pace, StepClock, StepLine, StepPace


class Moment:
    """An event that has passed when the test says so."""

    now = 0.0
    passed = False

    def record(self):
        self.at = Moment.now

    def query(self):
        return Moment.passed

    def elapsed_time(self, end):
        return end.at - self.at


def test_steps_are_measured_without_a_wait():
    Moment.now, Moment.passed = 0.0, False
    clock = StepClock("cuda:0", Moment)
    for step in range(6):
        clock.begin(100 + step)
        Moment.now += 10
        clock.end()
        clock.end()  # told twice
    assert clock.measured() == []
    Moment.passed = True
    assert clock.measured() == [(100 + step, pytest.approx(0.01)) for step in range(4)]  # the others were not measured
    assert clock.measured() == []
    clock.begin(7)
    clock.begin(8)  # a step that did not end
    clock.end()
    assert [tokens for tokens, _ in clock.measured()] == [8]


def test_the_time_for_which_a_step_waits_for_loads_does_not_count():
    """Otherwise a step that loads would seem to hide more loads than it does, and the next one would load more."""
    Moment.now, Moment.passed = 0.0, True
    clock = StepClock("cuda:0", Moment)

    def wait(milliseconds):
        Moment.now += milliseconds

    def broken():
        Moment.now += 3
        raise ValueError("the link is gone")

    clock.stall(lambda: wait(100))  # no step is measured
    clock.begin(512)
    Moment.now += 10
    clock.stall(lambda: wait(7))
    Moment.now += 10
    clock.stall(lambda: wait(0))
    with pytest.raises(ValueError, match="the link is gone"):
        clock.stall(broken)
    clock.end()
    assert clock.measured() == [(512, pytest.approx(0.020))]
    clock.begin(7)
    Moment.now += 1
    clock.end()
    assert clock.measured() == [(7, pytest.approx(0.001))]


def test_a_step_takes_as_long_as_the_cpu_launches_it(monkeypatch):
    """The stream waits while the CPU still launches: that much of the load is hidden. A wait of the CPU does not count.

    The CPU waits for 2 ms until copies are issued, and launches for 18 ms.
    """
    Moment.now, Moment.passed, host = 0.0, True, iter((5.0, 5.004, 5.006, 5.020))
    monkeypatch.setattr("kvplan.engines.vllm.step_time.time.perf_counter", lambda: next(host))
    clock = StepClock("cuda:0", Moment)
    clock.begin(512)
    Moment.now += 8

    def wait():
        Moment.now += 12

    clock.stall(wait)
    clock.end()
    assert clock.measured() == [(512, pytest.approx(0.018))]


def chosen_steps(steps):
    Moment.now, Moment.passed = 0.0, True
    clock, found = StepClock("cuda:0", Moment), []
    for step in range(steps):
        clock.begin(0)  # decodes only
        assert not clock.chosen
        clock.begin(100)
        clock.stall(lambda: None)
        clock.end()
        found += [step] * len(clock.measured())
        assert (found[-1:] == [step]) == clock.chosen
    return found


def test_after_the_first_steps_one_of_seven_is_measured():
    """Two events for a step, and for each wait, cost the engine's thread a tenth of a millisecond and more."""
    found = chosen_steps(1000)
    assert found[:32] == [*range(32)]
    assert all(4 <= b - a <= 10 for a, b in pairwise(found[31:]))
    assert 110 < len(found[32:]) < 170
    assert found == chosen_steps(1000), "all ranks measure the same steps"


def test_ranks_tell_their_paces_in_the_same_steps():
    """One rank sees each end a step later than the other."""
    Moment.now = 0.0
    ranks = [StepClock("cuda:0", Moment) for _ in range(2)]
    paces = [StepPace(clock, 5e10) for clock in ranks]
    told = [[], []]
    for step in range(200):
        for rank, (clock, pace) in enumerate(zip(ranks, paces, strict=True)):
            for part, tokens in enumerate((100 + step % 3, 0)):  # the late rank sees the end in a step that decodes
                clock.begin(tokens)
                Moment.now += 10
                clock.end()
                Moment.passed = not rank or not tokens
                found = pace.take()
                if found is not None:
                    assert found.seconds(101) == pytest.approx(0.010, rel=0.05)
                    told[rank].append((step, part))
    early, late = told
    assert early[1:] == late
    assert len(late) > 40


class Measured:
    """A clock whose steps are told."""

    chosen = True

    def __init__(self):
        self.steps = []

    def measured(self):
        found, self.steps = self.steps, []
        return found


def expected_after(steps, tokens):
    clock = Measured()
    pace = StepPace(clock, 5e10)
    clock.steps = steps
    pace.take()
    return pace.expected(tokens)


@pytest.mark.parametrize(("steps", "expected"), [
    ([], None),
    ([(512, 0.018)] * 2, None),
    ([(512, 0.018)] * 3, 0.018),
    ([(512, 1.5), (512, 0.018), (510, 0.019), (500, 0.031)], 0.018),  # the first step compiles, and the CPU is slow
    ([(8, 0.014)] * 16, None),  # a line through the origin would promise 0.9 s
    ([(2048, 0.060)] * 16, None),
    ([(256, 0.015)] * 3, 0.015),
    ([(255, 0.015)] * 3, None),
    ([(513, 0.018)] * 3, None),  # a step of 512 tokens may take less
    ([(512, 0.018)] * 3 + [(8, 0.014)] * 14, None),  # only the latest 16 steps count
    ([(512, 0.018)] * 3 + [(8, 0.014)] * 13, 0.018),
])  # fmt: skip
def test_a_step_takes_at_least_the_shortest_of_the_latest_steps_of_its_size(steps, expected):
    assert expected_after(steps, 512) == expected


def test_a_step_without_new_tokens_is_expected_to_take_nothing_known():
    assert expected_after([(1, 0.005)] * 5, 0) is None


@pytest.mark.parametrize("period", range(2, 15))
def test_every_part_of_a_long_prompt_is_measured(period):
    """A prompt is computed in steps of the most tokens, and a short last one; the line needs both."""
    parts = Counter(step % period for step in chosen_steps(400 * period))
    assert min(parts[part] for part in range(period)) >= 20


def test_a_step_of_the_cpu_is_measured():
    clock = StepClock("cpu")
    clock.begin(5)
    clock.end()
    ((tokens, seconds),) = clock.measured()
    assert tokens == 5
    assert 0 <= seconds < 60


def test_the_line_follows_the_steps():
    line = StepLine()
    with pytest.raises(ValueError, match="no step was added"):
        line.terms()
    for _ in range(3):
        line.add(500, 0.01)
    assert line.terms() == pytest.approx((0.0, 2e-5))  # one size: through the origin
    for _ in range(40):
        line.add(100, 0.006)
        line.add(1000, 0.015)
    assert line.terms() == pytest.approx((0.005, 1e-5), rel=0.01)
    falling = StepLine()
    falling.add(100, 0.01)
    falling.add(1000, 0.001)
    assert min(falling.terms()) == 0


def test_the_pace_of_several_ranks_is_the_most_careful():
    assert Pace(0.004, 2e-5, 5e10).least(Pace(0.005, 1e-5, 4e10)) == (0.004, 1e-5, 4e10)
