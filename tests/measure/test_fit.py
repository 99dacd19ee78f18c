"""Costs from measurements: recovered, never negative, and none better by search; and what others published."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan.measure.fit import fit

COUNTS = st.integers(0, 1000)


@st.composite
def problems(draw, terms: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(features, costs): samples in which terms can be told apart, and what each costs, some of them nothing."""
    columns = terms or draw(st.integers(1, 6))
    rows = draw(st.integers(columns, columns + 8))
    made = draw(st.lists(st.lists(COUNTS, min_size=columns, max_size=columns), min_size=rows, max_size=rows))
    matrix = np.array(made, dtype=np.float64)
    norms = np.linalg.norm(matrix, axis=0)
    assume(norms.all())
    assume(np.linalg.cond(matrix / norms) < 1e4)
    cost = st.just(0.0) | st.floats(0.01, 1000)
    return matrix, np.array(draw(st.lists(cost, min_size=columns, max_size=columns)))


def weights_for(draw, rows: int) -> np.ndarray:
    return np.array(draw(st.lists(st.floats(0.1, 10), min_size=rows, max_size=rows)))


def missed(matrix: np.ndarray, seconds: np.ndarray, weights: np.ndarray, costs: np.ndarray) -> float:
    """Weighted squares."""
    return float((((matrix @ costs - seconds) * weights) ** 2).sum())


@given(problem=problems(), data=st.data())
def test_costs_that_are_known_come_back_from_exact_samples(problem, data):
    matrix, costs = problem
    found = fit(matrix, matrix @ costs, weights_for(data.draw, len(matrix)))
    np.testing.assert_allclose(found, costs, rtol=1e-6, atol=1e-6)
    assert all(type(cost) is float for cost in found)


@given(problem=problems(), data=st.data())
def test_no_cost_is_negative_and_none_of_zero_does_as_well(problem, data):
    matrix, costs = problem
    noise = np.array(data.draw(st.lists(st.floats(-5000, 5000), min_size=len(matrix), max_size=len(matrix))))
    seconds, weights = matrix @ costs + noise, weights_for(data.draw, len(matrix))
    found = np.array(fit(matrix, seconds, weights))
    assert (found >= 0).all()
    least = missed(matrix, seconds, weights, found)
    slack = 1e-9 * missed(matrix, seconds, weights, 0 * found)
    assert least <= missed(matrix, seconds, weights, 0 * found) + slack
    assert least <= missed(matrix, seconds, weights, costs) + slack
    # Where it ends, a step along no term that stays at zero or above makes it better.
    slope = 2 * (matrix * weights[:, None]).T @ ((matrix @ found - seconds) * weights)
    scale = np.linalg.norm(matrix * weights[:, None], axis=0) * np.linalg.norm(seconds * weights) + 1
    assert (slope >= -1e-6 * scale).all()
    assert (np.abs(slope[found > 0]) <= 1e-6 * scale[found > 0]).all()


@given(problem=problems(), data=st.data())
def test_costs_that_are_told_are_kept_and_the_others_found(problem, data):
    matrix, costs = problem
    told = data.draw(st.sets(st.sampled_from(range(len(costs)))))
    assume(len(told) < len(costs))
    known = {k: float(costs[k]) for k in told}
    found = fit(matrix, matrix @ costs, np.ones(len(matrix)), known)
    assert {k: found[k] for k in told} == known
    np.testing.assert_allclose(found, costs, rtol=1e-6, atol=1e-6)


def test_with_weights_of_one_over_the_time_relative_errors_count():
    # One cost for 1 us measured as 1 and 100 us measured as 120: by squares the large one wins, relatively neither.
    samples, seconds = [[1.0], [100.0]], [1.0, 120.0]
    assert fit(samples, seconds, [1, 1])[0] == pytest.approx((1 + 12_000) / 10_001)
    relative = fit(samples, seconds, [1, 1 / 120])[0]
    assert relative == pytest.approx((1 + 100 / 120) / (1 + (100 / 120) ** 2))
