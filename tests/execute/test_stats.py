"""What an executor sums up."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvplan
from kvplan.execute.stats import BUCKETS, ExecutorStats, PathStats, Tally
from kvplan.execute.transfer import TransferResult
from tests.contract.gpu.caches import both_ways, way
from tests.contract.gpu.machines import Simulated
from tests.simulated.drawn import PATHS


def result(path: str = "kernel", predicted: float | None = None, seconds: float = 2e-5) -> TransferResult:
    return TransferResult(4096, seconds, path, 8, 3, predicted)


def test_sums_in_all_and_by_path():
    tally = Tally()
    tally.add(TransferResult(100, 0.5, "kernel", 4, 1))
    tally.add(TransferResult(50, 0.25, "staged", 2, 7))
    tally.add(TransferResult(1, 0.125, "kernel", 1, 2))
    assert tally.stats() == ExecutorStats(
        3,
        151,
        0.875,
        7,
        10,
        0,
        {"kernel": PathStats(2, 101, 0.625, 5, 3), "staged": PathStats(1, 50, 0.25, 2, 7)},
        0,
        None,
    )


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


def test_what_nobody_predicted_is_no_error():
    tally = Tally()
    for some in (result(), result(predicted=0.0), result(predicted=1e-5, seconds=0.0), result(predicted=4e-5)):
        tally.add(some)
    assert (tally.stats().transfers, tally.stats().predicted) == (4, 1)
    assert tally.stats().prediction_error == pytest.approx(1.0)


def test_many_threads_lose_nothing():
    tally, start = Tally(), threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for k in range(1000):
            tally.add(result("kernel" if number % 2 else "staged", predicted=2e-5))
            if k % 100 == 0:
                tally.fail()
                assert tally.stats().transfers <= 8000

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    made = tally.stats()
    assert (made.transfers, made.failed, made.predicted) == (8000, 80, 8000)
    assert {path: one.transfers for path, one in made.paths.items()} == {"kernel": 4000, "staged": 4000}
    assert made.prediction_error == 0


def test_an_executor_of_the_cpu():
    src, dst = np.ones((4, 8, 64), np.int8), np.zeros((8, 4, 64), np.int8)
    layouts = [kvplan.KVLayout.from_tensors(*one) for one in (("layer block dim", src), ("block layer dim", dst))]
    program = kvplan.compile(*layouts)
    with kvplan.Executor() as executor:
        results = [executor.submit(program.plan([k], [k])).result() for k in range(3)]
        executor.submit(program.plan([], [])).synchronize()
        made = executor.stats()
    assert (made.transfers, made.nbytes, made.failed, list(made.paths)) == (4, 3 * 256, 0, ["host"])
    assert made.descriptors == sum(one.descriptors for one in results)
    assert made.seconds >= sum(one.seconds for one in results)
    assert (made.predicted, made.prediction_error, results[0].predicted) == (0, None, None)


@both_ways
def test_of_auto_predictions_are_counted(route):
    with Simulated() as gpu:
        executor, pair = gpu.executor(), way(gpu, route)
        predicted = [executor.submit(pair.plan()).result().predicted for _ in range(3)]
        made = executor.stats()
    assert made.predicted == 3
    # The simulated driver says that everything takes a microsecond.
    assert made.prediction_error == pytest.approx(math.expm1(abs(math.log(predicted[0] / 1e-6))))
    assert made.seconds == pytest.approx(3e-6)


@pytest.mark.parametrize("path", PATHS)
@both_ways
def test_of_a_path_that_was_named_predictions_are_made_and_not_counted(path, route):
    with Simulated() as gpu:
        executor, pair = gpu.executor(path), way(gpu, route)
        assert executor.submit(pair.plan()).result().predicted > 0
        assert (executor.stats().predicted, executor.stats().prediction_error) == (0, None)


def test_transfers_are_counted_by_the_bucket_that_their_seconds_fit_into():
    tally = Tally()
    for seconds in (0.0, BUCKETS[0], BUCKETS[0] * 1.01, BUCKETS[1], BUCKETS[-1], BUCKETS[-1] * 1.01, 1e9):
        tally.add(result(seconds=seconds))
    within = tally.stats().flows["kernel", "host"].within
    assert len(within) == len(BUCKETS) + 1
    assert within[:3] == (2, 2, 0)
    assert within[-2:] == (1, 2)
    assert sum(within) == 7
