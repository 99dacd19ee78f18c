"""What a profile makes of samples, on made-up numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvplan import KVPlanError
from kvplan.cost.model import features, predict, total
from kvplan.cost.policy import HOST_ROUTES, PEER_ROUTES, Policy
from kvplan.cost.profile import GPU_ROUTES, TERMS, Beside, default, default_pair, route_paths
from kvplan.cost.profile_file import from_json
from kvplan.measure.calibration.profile_fit import (
    FEW_PROGRAMS,
    LARGE_NBYTES,
    LEAST_SAMPLES,
    ONE_PROGRAM,
    Sample,
    ceilings_of,
    profile_of,
)
from kvplan.measure.timing import Timing
from kvplan.measure.workload import Geometry
from tests.measure.known_costs import (
    BETWEEN,
    CEILINGS,
    H100,
    PAIR_CEILINGS,
    known,
    plan_of,
    program,
    samples,
)


def profiled(some: list[Sample], **pair):
    if pair:
        return profile_of(H100, some, PAIR_CEILINGS, dict(default_pair().beside), multiprocessors=132, **pair)
    return profile_of(H100, some, CEILINGS, dict(default().beside), multiprocessors=132)


ASKED = pytest.mark.parametrize(("routes", "pair"), [(GPU_ROUTES, {}), (PEER_ROUTES, BETWEEN)], ids=["gpu", "pair"])


@ASKED
def test_known_costs_are_found(routes, pair):
    profile = profiled(samples(routes=routes), **pair)
    assert tuple(profile.costs) == profile.routes == routes
    for route in routes:
        assert tuple(profile.costs[route]) == route_paths(route)
        for path, found in profile.costs[route].items():
            wanted = known(path, route)
            assert found.seconds == pytest.approx(wanted, rel=0.01)
            assert found.wall == pytest.approx(wanted | {"fixed": wanted["fixed"] + 60_000}, rel=0.01)
            assert found.cpu["fixed"] == pytest.approx(25_000, rel=0.01)
            assert set(found.cpu) == set(found.wall) == set(TERMS[path])
            assert found.program == (pytest.approx(program(route), rel=0.01) if path == "kernel" else {})
    assert (profile.note, profile.guessed) == ("", ())


@ASKED
def test_noise_of_a_tenth_leaves_predictions_within_a_tenth(routes, pair):
    noise, noisy = np.random.default_rng(0), []
    for path, plan, timing in samples(routes=routes):
        factors = noise.uniform(0.9, 1.1, 3)
        noisy.append(Sample(path, plan, Timing(*(value * f for value, f in zip(timing, factors, strict=False)), 8)))
    profile = profiled(noisy, **pair)
    for path, plan, timing in samples(TERMS, routes):
        costs = profile.costs[plan.route][path]
        assert total(features(path, plan), costs.wall, TERMS[path]) == pytest.approx(timing.wall, rel=0.1)


@ASKED
def test_what_is_predicted_beside_compute_is_what_few_programs_took(routes, pair):
    """Without effects of compute, it takes as long as in the calibration."""
    nothing = {kind: {route: dict.fromkeys(paths, Beside(1.0, 1.0)) for route, paths in of.items()}
               for kind, of in (default_pair() if pair else default()).beside.items()}  # fmt: skip
    profile = replace(profiled(samples(routes=routes), **pair), beside=nothing)
    for _, plan, timing in samples((FEW_PROGRAMS,), routes):
        made = predict("kernel", plan, profile, Policy(overlap="decode"))
        assert made.seconds == pytest.approx(timing.seconds, rel=0.01)


def test_what_a_profile_is_of():
    profile = profiled(samples())
    assert (profile.kind, profile.driver, profile.link, profile.how) == (
        "NVIDIA H100",
        "580.1",
        "PCIe 5 x16",
        "calibrated",
    )
    assert profile.made.startswith(f"kvplan {kvplan.__version__}, 2")
    assert profile.made.endswith(f", {len(samples())} samples")
    assert (profile.ceilings, profile.multiprocessors, profile.beside) == (CEILINGS, 132, default().beside)
    assert from_json(profile.to_json()).gpu == "NVIDIA H100"
    assert profile.programs == from_json(profile.to_json()).programs == {"load": 8, "store": 8, "device": 1056}


def test_too_few_samples_of_a_path_leave_the_guess_and_say_so():
    lacking = {("staged", "load"), ("copy_engine", "store"), ("kernel", "device")}
    few = [one for one in samples() if (one.path, one.plan.route) not in lacking]
    few += samples(("staged",), ("load",), LEAST_SAMPLES - 1)
    profile = profiled(few)
    assert profile.note == "guessed, for want of samples: load staged; store copy_engine; device kernel"
    for path, route in lacking:
        assert profile.costs[route][path] == default().costs[route][path]
    assert profile.costs["store"]["staged"].seconds == pytest.approx(known("staged", "store"), rel=0.01)


def test_if_time_ran_out_before_a_route_its_costs_and_ceilings_are_guesses():
    short = {name: rate for name, rate in CEILINGS.items() if "device" not in name}
    profile = profile_of(H100, samples(routes=HOST_ROUTES), short, {}, multiprocessors=132)
    assert profile.costs["device"] == default().costs["device"]
    assert (profile.ceilings["device"], profile.ceilings["sm_device"]) == (1850.0, 1750.0)
    assert "device kernel" in profile.guessed
    assert from_json(profile.to_json()).guessed == profile.guessed


@pytest.mark.parametrize("some", [[], samples(count=5), samples((ONE_PROGRAM,))], ids=["none", "few", "one program's"])
def test_nothing_at_all_is_an_error(some):
    with pytest.raises(KVPlanError, match=r"too little could be measured in time; is the GPU busy"):
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


def test_between_gpu_memories_only_large_transfers_without_their_launch_show_a_ceiling():
    tiny, small, large = (plan_of(Geometry("device", "contiguous", 8 << 10, runs, 16)) for runs in (16, 8192, 65_536))
    some = [Sample("kernel", tiny, Timing(15e-6, 1.0, 1.0, 8)),
            Sample("kernel", small, Timing(15e-6 + small.nbytes / 5000e9, 1.0, 1.0, 8)),  # from the GPU's cache
            Sample("kernel", large, Timing(15e-6 + large.nbytes / 1900e9, 1.0, 1.0, 8)),
            Sample("copy_engine", large, Timing(large.nbytes / 2100e9, 1.0, 1.0, 8)),
            Sample("kernel", replace(small, route="push"), Timing(small.nbytes / 350e9, 1.0, 1.0, 8))]  # fmt: skip
    found = ceilings_of(some, {"device": 2000.0, "push": 390.0})
    assert found == pytest.approx({"device": 2100.0, "sm_device": 1900.0, "push": 390.0, "sm_push": 0.0})


def test_if_time_ran_out_before_the_large_transfers_the_kernel_s_costs_are_guesses():
    short = [one for one in samples() if one.plan.route != "device" or one.plan.nbytes < LARGE_NBYTES]
    found = ceilings_of(short, {"load": 50.0, "store": 40.0, "device": 2000.0, "memory": 4000.0})
    profile = profile_of(H100, short, found, dict(default().beside), multiprocessors=132)
    assert profile.guessed == ("device kernel",)
    assert profile.costs["device"]["kernel"] == default().costs["device"]["kernel"]
    assert profile.ceilings["sm_device"] == default().ceilings["sm_device"]
