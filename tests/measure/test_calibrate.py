"""What calibration makes of samples, which transfers it asks for, and how they are timed; on made-up numbers."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVPlanError
from kvplan.cost.model import features, total
from kvplan.cost.policy import HOST_ROUTES
from kvplan.cost.profile import TERMS, default
from kvplan.cost.profile_file import from_json
from kvplan.cost.statistics import Pieces, Statistics, statistics_of
from kvplan.cuda.machine import Link, Machine
from kvplan.measure import calibrate as made_by
from kvplan.measure.calibrate import ONE_PROGRAM, Sample, ceilings_of, geometries, profile_of
from kvplan.measure.timing import Timing, timed
from kvplan.measure.workload import HOSTS, Buffers, Geometry, work

H100 = Machine("NVIDIA H100", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
CEILINGS = {"load": 50.0, "store": 40.0, "sm_load": 45.0, "sm_store": 32.0, "memory": 1500.0}
# Nanoseconds a term, as made up; a byte of large pieces costs what the ceiling says.
KNOWN = {
    "kernel": {"fixed": 12_000.0, "run": 3.0, "byte": 0.0},
    "copy_engine": {"fixed": 9000.0, "small_copy": 1100.0, "small_byte": 0.03, "large_copy": 420.0, "large_byte": 0.0},
    "copy_engine_2d": {"fixed": 21_000.0, "call": 2500.0, "row": 70.0, "byte": 0.0},
    "staged": {"fixed": 35_000.0, "run": 0.0, "small_extent": 1300.0, "small_byte": 0.04, "large_extent": 600.0,
               "large_byte": 0.0},
    ONE_PROGRAM: {"fixed": 14_000.0, "run": 5.0, "byte": 0.12},
}  # fmt: skip


def known(name: str, direction: str) -> dict[str, float]:
    terms, ceiling = KNOWN[name], f"sm_{direction}" if name == "kernel" else direction
    return terms if name == ONE_PROGRAM else terms | {list(terms)[-1]: 1 / CEILINGS[ceiling]}


def plan_of(one: Geometry) -> Statistics:
    """Its statistics, where a block that is contiguous on the host is one extent."""
    runs, block = Pieces.of(one.runs, one.nbytes), Pieces.of(one.blocks, one.nbytes)
    extents = block if one.host == "contiguous" else runs
    layers = one.block_runs // 2
    return Statistics(one.direction, one.nbytes, 1, one.runs, 16, runs, 2 * one.blocks if layers > 1 else 0, one.runs,
                      Pieces(), extents, one.run_nbytes * one.block_runs)  # fmt: skip


def samples(names=(*TERMS, ONE_PROGRAM), directions=HOST_ROUTES, count: int | None = None) -> list[Sample]:
    """What a GPU of the known costs would give: by the clock 60 us more, of which 25 are the CPU's."""
    made = []
    for name in names:
        path = "kernel" if name == ONE_PROGRAM else name
        for direction in directions:
            plans = [plan_of(one) for one in geometries() if one.direction == direction][:count]
            for plan in plans:
                seconds = total(features(path, plan), known(name, direction), TERMS[path])
                made.append(Sample(name, plan, Timing(seconds, seconds + 60e-6, 25e-6 + 1e-9 * plan.runs, 8)))
    return made


def profiled(some: list[Sample]):
    return profile_of(H100, some, CEILINGS, dict(default().beside), multiprocessors=132)


def test_known_costs_are_found():
    profile = profiled(samples())
    for direction in HOST_ROUTES:
        for path in TERMS:
            found, wanted = profile.costs[direction][path], known(path, direction)
            assert found.seconds == pytest.approx(wanted, rel=0.01)
            assert found.wall == pytest.approx(wanted | {"fixed": wanted["fixed"] + 60_000}, rel=0.01)
            assert found.cpu["fixed"] == pytest.approx(25_000, rel=0.01)
            assert set(found.cpu) == set(found.wall) == set(TERMS[path])
            assert found.program == (pytest.approx(known(ONE_PROGRAM, direction), rel=0.01) if path == "kernel" else {})
    assert profile.note == ""


def test_noise_of_a_tenth_leaves_predictions_within_a_tenth():
    noise, noisy = np.random.default_rng(0), []
    for path, plan, timing in samples():
        factors = noise.uniform(0.9, 1.1, 3)
        noisy.append(Sample(path, plan, Timing(*(value * f for value, f in zip(timing, factors, strict=False)), 8)))
    profile = profiled(noisy)
    for path, plan, timing in samples(TERMS):
        costs = profile.costs[plan.route][path]
        assert total(features(path, plan), costs.wall, TERMS[path]) == pytest.approx(timing.wall, rel=0.1)


def test_runs_of_the_staged_path_are_not_charged_for_what_small_extents_cost():
    profile = profiled(samples())
    for direction in HOST_ROUTES:
        costs = profile.costs[direction]["staged"]
        assert (costs.seconds["run"], costs.wall["run"]) == (0.0, 0.0)
        assert costs.seconds["small_extent"] == pytest.approx(1300.0, rel=0.01)


def test_what_a_profile_is_of():
    profile = profiled(samples())
    assert (profile.gpu, profile.driver, profile.link, profile.how) == (
        "NVIDIA H100",
        "580.1",
        "PCIe 5 x16",
        "calibrated",
    )
    assert profile.made.startswith(f"kvplan {kvplan.__version__}, 2")
    assert profile.made.endswith(f", {len(samples())} samples")
    assert (profile.ceilings, profile.multiprocessors, profile.beside) == (CEILINGS, 132, default().beside)
    assert (profile.calibrations, from_json(profile.to_json()).gpu) == (1, "NVIDIA H100")
    assert profile.programs == from_json(profile.to_json()).programs == {"load": 8, "store": 8}


def test_too_few_samples_of_a_path_leave_the_guess_and_say_so():
    few = [one for one in samples() if (one.path, one.plan.route) not in {("staged", "load"), ("copy_engine", "store")}]
    few += samples(("staged",), ("load",), made_by.LEAST_SAMPLES - 1)
    profile = profiled(few)
    assert profile.note == "guessed, for want of samples: load staged; store copy_engine"
    for direction, path in (("load", "staged"), ("store", "copy_engine")):
        assert profile.costs[direction][path] == default().costs[direction][path]
    assert profile.costs["store"]["staged"].seconds == pytest.approx(known("staged", "store"), rel=0.01)


def test_without_samples_of_one_program_only_that_is_a_guess():
    profile = profiled(samples(TERMS))
    assert profile.costs["load"]["kernel"].program == default().costs["load"]["kernel"].program
    assert profile.costs["load"]["kernel"].seconds == pytest.approx(known("kernel", "load"), rel=0.01)


@pytest.mark.parametrize("some", [[], samples(count=5), samples((ONE_PROGRAM,))], ids=["none", "few", "one program's"])
def test_nothing_at_all_is_an_error(some):
    with pytest.raises(KVPlanError, match=r"nothing could be measured within 16 seconds; is the GPU busy"):
        profiled(some)


def test_ceilings_are_what_was_found_or_exceeded():
    found = {"load": 50.0, "store": 40.0, "memory": 1500.0}
    assert ceilings_of([], found) == found | {"sm_load": 0.0, "sm_store": 0.0}
    plan = plan_of(Geometry("load", "contiguous", 1 << 10, 1000, 10))  # 1,024,000 bytes
    rates = {"kernel": 60e9, "copy_engine": 51.2e9, "staged": 20e9, ONE_PROGRAM: 90e9}
    some = [Sample(path, plan, Timing(1_024_000 / rate, 1.0, 1.0, 8)) for path, rate in rates.items()]
    some += [Sample("staged", replace(plan, route="store"), Timing(1_024_000 / 30e9, 1.0, 1.0, 8)),
             Sample("kernel", plan, Timing(0.0, 1.0, 1.0, 8))]  # fmt: skip
    assert ceilings_of(some, found) == pytest.approx(
        {"load": 51.2, "store": 40.0, "memory": 1500.0, "sm_load": 60.0, "sm_store": 0.0}
    )
    assert found == {"load": 50.0, "store": 40.0, "memory": 1500.0}


def test_what_is_moved_is_whole_and_fits():
    every = list(geometries())
    assert len(every) == len(set(every))
    for one in every:
        one.check()
        assert one.blocks * one.block_runs == one.runs
        assert one.nbytes <= made_by.DEVICE_NBYTES <= made_by.HOST_NBYTES
        assert one.run_nbytes * one.block_runs * one.blocks <= made_by.HOST_NBYTES
    assert {one.block_runs for one in every} == set(made_by.ROUNDS)


def test_each_can_be_laid_over_the_buffers_and_has_the_runs_that_it_says():
    buffers = Buffers.__new__(Buffers)  # as they are in a calibration, but for the random bytes
    buffers.nbytes, buffers.device = made_by.DEVICE_NBYTES, "cpu"
    buffers.host, buffers.other = (
        torch.empty(nbytes, dtype=torch.uint8) for nbytes in (made_by.HOST_NBYTES, made_by.DEVICE_NBYTES)
    )
    wrong = []
    for one in geometries():
        plan = statistics_of(work(buffers, one).plan)
        assert plan.nbytes == one.nbytes
        if plan.runs != one.runs:
            wrong.append(one)
    assert wrong == []


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
def test_however_early_it_is_cut_there_is_some_of_every_kind(share):
    every = list(geometries())
    some = every[: int(len(every) * share)]
    for direction in HOST_ROUTES:
        for host in HOSTS:
            kind = [one for one in some if (one.direction, one.host) == (direction, host)]
            assert len(kind) >= made_by.LEAST_SAMPLES
            assert {one.run_nbytes < 28 << 10 for one in kind} == {True, False}
            assert len({one.runs for one in kind}) >= 3
    ways = [one.direction for one in some]
    assert abs(ways.count("load") - ways.count("store")) <= len(HOSTS)


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


def test_issuing_ends_when_the_executor_s_thread_has_issued():
    clock, log = Clock(), []
    made = timed({"a": Fake(clock, "a", log, queued=4)}, seconds=1e-9, warm_ups=0, clock=clock)
    assert (made["a"].cpu, made["a"].wall) == (pytest.approx(21e-6), pytest.approx(31e-6))


def test_medians_are_of_each_number():
    clock = Clock()

    class Uneven(Fake):
        times = iter([50.0, 10.0, 30.0])

        def synchronize(self) -> None:
            clock.now += next(self.times) * 1e-6

    made = timed({"a": Uneven(clock, "a", [])}, seconds=1e-9, warm_ups=0, clock=clock)["a"]
    assert (made.seconds, made.wall) == (pytest.approx(2e-6), pytest.approx(31e-6))


def test_a_collection_is_let_happen_again_after_an_error():
    class Failing(Fake):
        def synchronize(self) -> None:
            raise KVPlanError("no")

    with pytest.raises(KVPlanError):
        timed({"a": Failing(Clock(), "a", [])}, seconds=1.0)
    assert gc.isenabled()


def test_a_path_that_cannot_serve_has_no_sample():
    moved = work(Buffers(1 << 16, "cpu"), Geometry("load", "contiguous", 512, 64, 16))

    class Refusing:
        def submit(self, plan):
            raise kvplan.PathError("no")

    with kvplan.Executor() as executor:
        made = made_by.measure(moved, {"a": Refusing(), "b": executor}, verify=True, seconds=1e-9)
    assert [(one.path, one.plan.nbytes, one.timing.samples) for one in made] == [("b", 32_768, 3)]
