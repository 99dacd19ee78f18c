"""What transfers and executors say of themselves: results, sums, predicted times; and what `prepare` spares."""

from __future__ import annotations

import pytest

import kvplan
from tests.contract.gpu.caches import GPU_PATHS, ROUTES, SERVED, Ids, both_ways, every_path, way
from tests.contract.gpu.machines import PATIENCE, Machine

PATHS = {"copy_engine", "copy_engine_2d", "kernel", "staged"}


@every_path
@both_ways
def test_a_result_says_what_was_done(gpu: Machine, path: str, route: str) -> None:
    executor, pair = gpu.executor(path), way(gpu, route)
    plan = pair.plan()
    transfer = executor.submit(plan)
    result = transfer.result()
    nbytes, seconds, taken, descriptors, launches = result
    assert transfer.done()
    assert nbytes == plan.nbytes == result.nbytes
    assert taken == path if path != "auto" else taken in PATHS
    assert seconds >= 0
    assert descriptors > 0
    assert launches > 0
    assert transfer.result() == result
    assert transfer.plan is plan
    pair.check()


@every_path
@both_ways
def test_sums_are_those_of_all_transfers(gpu: Machine, path: str, route: str) -> None:
    executor, pair = gpu.executor(path), way(gpu, route)
    assert executor.stats().transfers == executor.stats().in_flight == 0
    results = [executor.submit(pair.plan(Ids([k], [8 - k]))).result() for k in range(5)]
    stats = executor.stats()
    assert (stats.transfers, stats.failed, stats.cancelled, stats.in_flight) == (5, 0, 0, 0)
    for name in ("nbytes", "descriptors", "launches"):
        assert getattr(stats, name) == sum(getattr(one, name) for one in results)
        assert getattr(stats, name) == sum(getattr(one, name) for one in stats.paths.values())
    assert stats.seconds == pytest.approx(sum(one.seconds for one in results))
    assert {way for _, way in stats.flows} == {route}
    pair.check()


def test_in_flight_counts_what_has_not_ended(gpu: Machine) -> None:
    executor, pair, stream = gpu.executor("kernel"), way(gpu, "load"), gpu.stream()
    pair.warm(executor)
    with gpu.hold(stream) as gate:
        flying = [executor.submit(pair.plan(Ids([k], [k])), after=stream) for k in range(3)]
        assert executor.stats().in_flight == 3
        gate.open()
        for transfer in flying:
            transfer.synchronize(PATIENCE)
    assert executor.stats().in_flight == 0
    pair.check()


@pytest.mark.parametrize("route", [route for route in SERVED["auto"] if "pageable" not in route])
@pytest.mark.parametrize("by_layer", [False, True])
def test_auto_takes_its_first_candidate(gpu: Machine, route: str, by_layer: bool) -> None:
    if "cuda:1" in ROUTES[route] and gpu.count < 2:
        pytest.skip("there is one GPU")
    executor, pair = gpu.executor(), way(gpu, route)
    plan = pair.plan()
    every = executor.candidates(plan, by_layer=by_layer)
    assert {one.path for one in every} == PATHS
    serving = [one for one in every if not one.refused]
    assert [bool(one.refused) for one in every] == sorted(bool(one.refused) for one in every)  # refused ones last
    assert {one.path for one in serving} == {path for path in PATHS if route in SERVED[path]}
    result = executor.submit(plan, by_layer=by_layer).result()
    assert result.path == every[0].path
    assert result.predicted == every[0].seconds > 0
    assert executor.stats().predicted == 1
    assert executor.stats().prediction_error >= 0
    pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("by_layer", [False, True])
def test_prepare_moves_nothing_and_the_first_transfer_is_as_any_other(
    gpu: Machine, path: str, route: str, by_layer: bool
) -> None:  # fmt: skip
    executor, pair = gpu.executor(path), way(gpu, route)
    executor.prepare()
    executor.prepare(pair.program.plan([0], [0]), by_layer=by_layer)
    assert executor.stats().transfers == 0
    pair.check()
    executor.submit(pair.plan(), by_layer=by_layer).synchronize(PATIENCE)
    pair.check()


@pytest.mark.parametrize("path", [path for path in GPU_PATHS if path != "auto"])
def test_prepare_refuses_what_submit_would(gpu: Machine, path: str) -> None:
    executor, pair = gpu.executor(path), way(gpu, "device")
    with pytest.raises(kvplan.KVPlanError, match="plan is a str"):
        executor.prepare("plan")
    if path == "staged":
        with pytest.raises(kvplan.PathError):
            executor.prepare(pair.program.plan([0], [0]))
    pair.check()
