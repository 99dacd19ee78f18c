"""How good choices are, on made-up measurements."""

from __future__ import annotations

import json

import pytest

import kvplan
from benchmarks import choice, choice_pairs
from benchmarks.choice_findings import Point, agreement, by_profile, findings, from_file, regret, to_json
from benchmarks.choice_pairs import BLOCKS, PAIRS, RUN_NBYTES, Case, Memory, cases, work
from kvplan.cost.model import candidates
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, default
from kvplan.cost.statistics import Pieces, Statistics
from kvplan.measure.workload import DIRECTIONS
from tests.simulated.executors import favouring

pytestmark = [pytest.mark.slow, pytest.mark.slow]

GPU = {"name": "made up"}


def point(blocks: int, walls: tuple[float, ...], auto: float, taken: str = "kernel", run_nbytes: int = 2048) -> Point:
    """Milliseconds of the four paths in order, and of auto; on the GPU a tenth of that."""
    case = Case("planes to pages", "load", run_nbytes, blocks)
    runs = case.nbytes // run_nbytes
    pieces = Pieces.of(runs, case.nbytes)
    plan = Statistics("load", case.nbytes, 1, runs, 16, pieces, blocks, runs, Pieces(), pieces, 16 * run_nbytes)
    named = dict(zip(TERMS, walls, strict=True)) | {"auto": auto}
    times = [{name: float(f"{ms}e{power}") for name, ms in named.items()} for power in (-3, -4)]
    return Point(case, plan, *times, taken)


# Best of the paths: 1, 2 and 4 ms. Auto takes 1, 2.08 and 6.
POINTS = [
    point(16, (1, 2, 3, 4), 1.0),
    point(512, (8, 2, 4, 3), 2.08, "copy_engine"),
    point(4096, (5, 8, 4, 6), 6.0, "staged", run_nbytes=3072),
]


def test_the_best_is_that_of_a_single_path():
    assert [one.best for one in POINTS] == [0.001, 0.002, 0.004]
    assert point(16, (2, 2, 2, 2), auto=1.0).best == 0.002


def test_regret():
    found = regret(POINTS, {one.case: one.walls["auto"] for one in POINTS})
    assert found.points == 3
    assert (found.near, found.worst) == (pytest.approx(2 / 3), pytest.approx(1.5))  # 1, 1.04 and 1.5 times
    assert found.at == "planes to pages, load, 3072, 4096"
    none = regret(POINTS, {one.case: one.best for one in POINTS})
    assert (none.near, none.worst) == (1.0, 1.0)
    without = regret(POINTS, {one.case: one.best for one in POINTS[1:]})
    assert (without.near, without.worst) == (pytest.approx(2 / 3), 1.0), "a path too slow to be measured is not near"


def test_agreement_is_of_all():
    first, second, third = ({one.case: path for one, path in zip(POINTS, paths, strict=True)} for paths in
                            (("a", "b", "c"), ("a", "b", "d"), ("a", "x", "c")))  # fmt: skip
    assert (agreement([first]), agreement([first, first])) == (1.0, 1.0)
    assert agreement([first, second]) == pytest.approx(2 / 3)
    assert agreement([first, second, third]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("path", TERMS)
def test_what_the_model_takes(path):
    assert by_profile(POINTS, favouring(path)) == dict.fromkeys((one.case for one in POINTS), path)


def test_findings():
    found = findings(POINTS, [favouring("copy_engine"), favouring("copy_engine"), favouring("kernel")])
    assert list(found) == ["auto", "parts", "model", "always", "agreement", "prediction_error"]
    assert found["auto"]["worst"] == pytest.approx(1.5)
    assert found["parts"] == {"planes to pages, load": found["auto"]}
    assert [one["worst"] for one in found["model"]] == [pytest.approx(2), pytest.approx(2), pytest.approx(4)]
    assert {name: one["worst"] for name, one in found["always"].items()} == pytest.approx(
        {"kernel": 4, "copy_engine": 2, "copy_engine_2d": 3, "staged": 4}
    )
    assert (found["agreement"], found["model"][0]) == (0.0, found["always"]["copy_engine"])
    assert found["prediction_error"] > 0


def test_the_error_of_a_prediction_is_the_median_of_the_factors():
    profile = default()
    exact = {one.path: one.wall for one in candidates(POINTS[0].plan, profile, Policy())}
    factors = {"kernel": 1.0, "copy_engine": 1.1, "copy_engine_2d": 1 / 1.2, "staged": 2.0}
    walls = {path: wall * factors[path] for path, wall in exact.items()} | {"auto": 1.0}
    # Of 0, 10, 20 and 100 percent, the upper of the middle ones.
    assert findings([POINTS[0]._replace(walls=walls)], [profile])["prediction_error"] == pytest.approx(0.2)


def test_the_grid_is_whole():
    every = list(cases())
    assert len(every) == len(set(every))
    assert max(one.nbytes for one in every) <= choice_pairs.MOST_NBYTES
    for name, of in (("pair", PAIRS), ("direction", DIRECTIONS), ("run_nbytes", RUN_NBYTES), ("blocks", BLOCKS)):
        assert {getattr(one, name) for one in every} == set(of)
    assert (RUN_NBYTES[0], RUN_NBYTES[-1], BLOCKS[0], BLOCKS[-1]) == (128, 1 << 20, 1, 4096)


@pytest.fixture
def memory(monkeypatch) -> Memory:
    monkeypatch.setattr(choice_pairs, "POOL_NBYTES", 1 << 18)
    return Memory("cpu", 1 << 21)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_case_has_the_runs_that_it_names_and_moves_every_byte(pair, direction, memory):
    with kvplan.Executor() as executor:
        for run_nbytes, blocks in ((128, 3), (1024, 4)):
            case = Case(pair, direction, run_nbytes, blocks)
            moved = work(memory, case)
            assert (moved.plan.nbytes, moved.plan.units) == (case.nbytes, blocks)
            assert moved.program.run_nbytes == (run_nbytes, run_nbytes)
            moved.verify("host", lambda moved=moved: executor.submit(moved.plan).synchronize())


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("pair", PAIRS)
def test_one_wrong_byte_is_seen(pair, at, memory):
    with kvplan.Executor() as executor:
        moved = work(memory, Case(pair, "store", 256, 2))

        def broken() -> None:
            executor.submit(moved.plan).synchronize()
            moved.dst.flat[at] += 1

        with pytest.raises(kvplan.TransferError, match="other: 1 bytes of the destination are wrong after Case"):
            moved.verify("other", broken)


def test_what_was_measured_can_be_judged_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.gpu.environment.gpu", lambda: GPU)
    profiles = [favouring("copy_engine"), default()]
    runs = [{"seconds": 12.5, "gpu_mb": 300.0, "host_mb": 400.0}] * 2
    path = tmp_path / "choice.json"
    path.write_text(to_json(POINTS, profiles, runs))
    assert from_file(path) == (POINTS, profiles)
    document = json.loads(path.read_text())
    assert (document["schema"], document["version"], document["gpu"]) == ("kvplan.choice", 2, GPU)
    assert document["findings"] == json.loads(json.dumps(findings(POINTS, profiles)))
    assert choice.main(["--again", str(path), "--output", str(tmp_path / "again.json")]) == 1  # 1.5 times is too much
    out = capsys.readouterr().out
    assert "auto, measured" in out
    assert "1.50x  planes to pages, load, 3072, 4096" in out
    assert out.count("calibrated in 12.5 s, with 300 MB of the GPU, 400 MB of the host\n") == 2
    assert from_file(tmp_path / "again.json") == (POINTS, profiles)


def test_a_good_result_is_no_finding(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.environment.gpu", lambda: GPU)
    path = tmp_path / "choice.json"
    good = [one._replace(walls=dict(one.walls) | {"auto": one.best}) for one in POINTS]
    path.write_text(to_json(good, [default()], []))
    assert choice.main(["--again", str(path)]) == 0
