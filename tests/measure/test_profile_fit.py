"""What a profile makes of samples, on made-up numbers."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVPlanError
from kvplan.cost.model import total
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES
from kvplan.cost.profile import GPU_ROUTES, TERMS, default, from_json, route_paths
from kvplan.measure.fit import (
    LEAST_SAMPLES,
    ONE_PROGRAM,
    Point,
    guess_beside,
    profile_of,
)
from kvplan.measure.rig import Timing
from tests.measure.known_costs import (
    BETWEEN,
    CEILINGS,
    H100,
    PAIR_CEILINGS,
    WAIT,
    beside,
    known,
    program,
    samples,
)


def profiled(some: list[Point], **pair):
    if pair:
        return profile_of(H100, some, PAIR_CEILINGS, multiprocessors=132, **pair)
    return profile_of(H100, some, CEILINGS, multiprocessors=132)


ASKED = pytest.mark.parametrize(("routes", "pair"), [(GPU_ROUTES, {}), (PEER_ROUTES, BETWEEN)], ids=["gpu", "pair"])


@ASKED
def test_known_costs_are_found(routes, pair):
    profile = profiled(samples(routes=routes) + beside(routes), **pair)
    assert tuple(profile.costs) == routes
    for route in routes:
        assert tuple(profile.costs[route]) == route_paths(route)
        for path, found in profile.costs[route].items():
            wanted = known(path, route)
            assert found.seconds == pytest.approx(wanted, rel=0.01)
            assert found.wall == pytest.approx(wanted | {"fixed": wanted["fixed"] + 60_000}, rel=0.01)
            for kind in OVERLAPS[1:]:
                apart = profile.beside[kind][route][path]
                assert apart.wall == pytest.approx(
                    wanted | {"fixed": wanted["fixed"] + 60_000 + WAIT}, rel=0.02, abs=0.1
                )
                assert apart.slower == pytest.approx(1.25, rel=0.01)
            assert found.program == (pytest.approx(program(route), rel=0.01) if path == "kernel" else {})
    assert (profile.note, profile.guessed) == ("", ())


@ASKED
def test_noise_of_a_tenth_leaves_predictions_within_a_tenth(routes, pair):
    noise, noisy = np.random.default_rng(0), []
    for one in samples(routes=routes) + beside(routes):
        factors = noise.uniform(0.9, 1.1, 3)
        timing = Timing(*(value * f for value, f in zip(one.timing, factors, strict=False)), 8)
        noisy.append(one._replace(timing=timing))
    profile = profiled(noisy, **pair)
    for one in samples(TERMS, routes):
        costs = profile.costs[one.route][one.path]
        assert total(one.terms, costs.wall, TERMS[one.path]) == pytest.approx(one.timing.wall, rel=0.1)


def test_too_few_samples_of_a_path_leave_the_guess_and_say_so():
    lacking = {("staged", "load"), ("copy_engine", "store"), ("kernel", "device")}
    few = [one for one in samples() if (one.path, one.route) not in lacking]
    few += samples(("staged",), ("load",), LEAST_SAMPLES - 1)
    profile = profiled(few + [one for one in beside() if one.path != "staged"])
    assert set(profile.guessed) == {
        "load staged", "store copy_engine", "device kernel",
        *(f"{kind} {route} staged" for kind in OVERLAPS[1:] for route in HOST_ROUTES),
    }  # fmt: skip
    for path, route in lacking:
        assert profile.costs[route][path] == default().costs[route][path]
    guess = guess_beside(
        profile.costs["store"]["staged"],
        default().costs["store"]["staged"],
        default().beside["decode"]["store"]["staged"],
    )
    assert profile.beside["decode"]["store"]["staged"] == guess
    assert profile.costs["store"]["staged"].seconds == pytest.approx(known("staged", "store"), rel=0.01)


def test_if_time_ran_out_before_a_route_its_costs_and_ceilings_are_guesses():
    short = {name: rate for name, rate in CEILINGS.items() if "device" not in name}
    profile = profile_of(H100, samples(routes=HOST_ROUTES), short, multiprocessors=132)
    assert profile.costs["device"] == default().costs["device"]
    assert (profile.ceilings["device"], profile.ceilings["sm_device"]) == (1850.0, 1750.0)
    assert "device kernel" in profile.guessed
    assert from_json(profile.to_json()).guessed == profile.guessed


@pytest.mark.parametrize("some", [[], samples(count=5), samples((ONE_PROGRAM,))], ids=["none", "few", "one program's"])
def test_nothing_at_all_is_an_error(some):
    with pytest.raises(KVPlanError, match=r"too little could be measured in time; is the GPU busy"):
        profiled(some)
