"""A calibration: which transfers it asks for; costs from made-up samples; and what others published."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.cost.model import features, total
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES
from kvplan.cost.profile import GPU_ROUTES, TERMS, default, from_json, route_paths
from kvplan.cost.statistics import counted
from kvplan.measure import calibrate as made_by
from kvplan.measure.calibrate import LEAST_SAMPLES, ONE_PROGRAM, fit, geometries, profile_of
from kvplan.measure.rig import Timing
from kvplan.measure.workload import Buffers, work
from tests.measure import known_costs as costs_of
from tests.measure.known_costs import CEILINGS, GRIDS, H100, beside, known, samples


@pytest.mark.parametrize("routes", GRIDS.values(), ids=GRIDS)
def test_each_transfer_fits_the_buffers_and_has_the_runs_that_it_says(routes):
    pool = cache = made_by.WITHIN_NBYTES if routes == ("device",) else made_by.PAIR_NBYTES
    if routes == HOST_ROUTES:
        pool, cache = made_by.HOST_NBYTES, made_by.DEVICE_NBYTES
    buffers = Buffers.__new__(Buffers)  # as they are in a calibration, but for the random bytes
    buffers.nbytes, buffers.device, buffers.peer = cache, "cpu", None
    buffers.host, buffers.other = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in (pool, cache))
    every = list(geometries(*routes))
    assert len(every) == len(set(every))
    assert {one.block_runs for one in every} == set(made_by.ROUNDS)
    assert {one.direction for one in every} == set(routes)
    for one in every:
        plan = work(buffers, one).plan
        assert plan.nbytes == one.nbytes
        assert features("kernel", counted(plan)) == (1, one.runs, one.nbytes), one


# ---- least squares -----------------------------------------------------------------------------------------------


@st.composite
def problems(draw):
    """(features, costs, weights): samples in which terms can be told apart, and what each costs, or nothing."""
    columns = draw(st.integers(1, 6))
    rows = draw(st.integers(columns, columns + 8))
    count = st.lists(st.integers(0, 1000), min_size=columns, max_size=columns)
    matrix = np.array(draw(st.lists(count, min_size=rows, max_size=rows)), dtype=np.float64)
    norms = np.linalg.norm(matrix, axis=0)
    assume(norms.all())
    assume(np.linalg.cond(matrix / norms) < 1e4)
    cost = st.just(0.0) | st.floats(0.01, 1000)
    weights = draw(st.lists(st.floats(0.1, 10), min_size=rows, max_size=rows))
    return matrix, np.array(draw(st.lists(cost, min_size=columns, max_size=columns))), np.array(weights)


@given(problem=problems(), data=st.data())
def test_costs_come_back_from_exact_samples_and_those_that_are_told_are_kept(problem, data):
    matrix, costs, weights = problem
    told = data.draw(st.sets(st.sampled_from(range(len(costs)))))
    assume(len(told) < len(costs))
    found = fit(matrix, matrix @ costs, weights, {k: float(costs[k]) for k in told})
    assert {k: found[k] for k in told} == {k: costs[k] for k in told}
    np.testing.assert_allclose(found, costs, rtol=1e-6, atol=1e-6)
    assert all(type(cost) is float for cost in found)


@given(problem=problems(), data=st.data())
def test_no_cost_is_negative_and_none_of_zero_does_as_well(problem, data):
    matrix, costs, weights = problem
    noise = data.draw(st.lists(st.floats(-5000, 5000), min_size=len(matrix), max_size=len(matrix)))
    seconds = matrix @ costs + np.array(noise)
    found = np.array(fit(matrix, seconds, weights))
    assert (found >= 0).all()
    least, nothing, exact = ((((matrix @ some - seconds) * weights) ** 2).sum() for some in (found, 0 * found, costs))
    assert least <= min(nothing, exact) + 1e-9 * nothing
    # Where it ends, a step along no term that stays at zero or above makes it better.
    slope = 2 * (matrix * weights[:, None]).T @ ((matrix @ found - seconds) * weights)
    scale = np.linalg.norm(matrix * weights[:, None], axis=0) * np.linalg.norm(seconds * weights) + 1
    assert (slope >= -1e-6 * scale).all()
    assert (np.abs(slope[found > 0]) <= 1e-6 * scale[found > 0]).all()


# ---- the profile -------------------------------------------------------------------------------------------------


def profiled(points, **pair):
    return profile_of(H100, points, costs_of.PAIR_CEILINGS if pair else CEILINGS, multiprocessors=132, **pair)


ASKED = pytest.mark.parametrize(
    ("routes", "pair"), [(GPU_ROUTES, {}), (PEER_ROUTES, costs_of.BETWEEN)], ids=["gpu", "pair"]
)


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
                apart, late = profile.beside[kind][route][path], wanted["fixed"] + 60_000 + costs_of.WAIT
                assert apart.wall == pytest.approx(wanted | {"fixed": late}, rel=0.02, abs=0.1)
                assert apart.slower == pytest.approx(1.25, rel=0.01)
            assert found.program == (pytest.approx(costs_of.program(route), rel=0.01) if path == "kernel" else {})
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
    lacking, guess = {("staged", "load"), ("copy_engine", "store"), ("kernel", "device")}, default()
    few = [one for one in samples() if (one.path, one.route) not in lacking]
    few += samples(("staged",), ("load",), LEAST_SAMPLES - 1)
    points, ceilings = few + [one for one in beside() if one.path != "staged"], dict(CEILINGS)
    del ceilings["sm_device"]
    profile = profile_of(H100, points, ceilings, multiprocessors=132)
    assert profile.ceilings["sm_device"] == guess.ceilings["sm_device"]
    assert from_json(profile.to_json()).guessed == profile.guessed
    assert set(profile.guessed) == {
        "load staged", "store copy_engine", "device kernel",
        *(f"{kind} {route} staged" for kind in OVERLAPS[1:] for route in HOST_ROUTES),
    }  # fmt: skip
    for path, route in lacking:
        assert profile.costs[route][path] == guess.costs[route][path]
    staged = profile.costs["store"]["staged"]
    assert staged.seconds == pytest.approx(known("staged", "store"), rel=0.01)
    moved = made_by.guess_beside(staged, guess.costs["store"]["staged"], guess.beside["decode"]["store"]["staged"])
    assert profile.beside["decode"]["store"]["staged"] == moved


@pytest.mark.parametrize("some", [[], samples(count=5), samples((ONE_PROGRAM,))], ids=["none", "few", "one program's"])
def test_nothing_at_all_is_an_error(some):
    with pytest.raises(KVPlanError, match=r"too little could be measured in time; is the GPU busy"):
        profiled(some)
