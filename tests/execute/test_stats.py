"""What an executor sums up."""

from __future__ import annotations

import pytest

from kvplan.execute.stats import Tally
from kvplan.execute.transfer import TransferResult


def result(path: str = "kernel", predicted: float | None = None, seconds: float = 2e-5) -> TransferResult:
    return TransferResult(4096, seconds, path, 8, 3, predicted)


@pytest.mark.parametrize(
    ("factors", "error"),
    [
        ((1.0,), 0.0),
        ((1.1,), 0.1),
        ((1 / 1.1,), 0.1),  # too little is as wrong as too much
        ((2.0, 0.5), 1.0),
        ((4.0, 1.0), 1.0),  # the mean of the logarithms
        ((1.0, 1.0, 8.0), 1.0),
    ],
)
def test_how_far_predictions_were_off(factors, error):
    tally = Tally()
    for factor in factors:
        tally.add(result(predicted=2e-5 * factor))
    assert tally.stats().prediction_error == pytest.approx(error, abs=1e-12)
    assert tally.stats().predicted == len(factors)
