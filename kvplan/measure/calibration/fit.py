"""A fit of the constants of a linear cost to measurements, by non-negative least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]


def fit(
    features: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    known: Mapping[int, float] | None = None,
) -> list[float]:
    """Return the costs, at least 0, for which ``features @ costs`` is nearest to ``seconds`` by weighted errors.

    Args:
        features: (n, terms) counts of each term in each sample.
        seconds: (n,) measured times.
        weights: (n,) factors of the errors; with 1 / seconds, equal relative errors count the same.
        known: costs of some terms, by position, which are not fitted.

    >>> [round(cost, 6) for cost in fit([[1, 10], [1, 20], [1, 40]], [12.0, 22.0, 42.0], [1, 1, 1])]
    [2.0, 1.0]
    """
    matrix, target, scale = (np.asarray(given, dtype=np.float64) for given in (features, seconds, weights))
    known = known or {}
    free = [k for k in range(matrix.shape[1]) if k not in known]
    costs = np.zeros(matrix.shape[1])
    costs[list(known)] = list(known.values())
    left = target - matrix @ costs
    costs[free] = _non_negative(matrix[:, free] * scale[:, None], left * scale)
    return [float(cost) for cost in costs]


def _non_negative(matrix: Float64Array, target: Float64Array) -> Float64Array:
    """Return the best least-squares solution without a negative number, over all subsets of columns."""
    columns = matrix.shape[1]
    norms = np.sqrt((matrix**2).sum(axis=0))
    used = [k for k in range(columns) if norms[k] > 0]
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, len(used) + 1):
        for chosen in combinations(used, size):
            some = matrix[:, chosen] / norms[list(chosen)]
            found = np.linalg.lstsq(some, target, rcond=None)[0]
            if (found < 0).any():
                continue
            missed = some @ found - target
            error = float(missed @ missed)
            if error < least:
                least, best = error, np.zeros(columns)
                best[list(chosen)] = found / norms[list(chosen)]
    return best
