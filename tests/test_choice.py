"""How good choices are, on made-up measurements."""

from __future__ import annotations

import json

import pytest

from benchmarks import choice
from benchmarks.choice import Point, agreement, by_profile, findings, from_file, geometries, regret, to_json
from kvplan.tune.profile import DIRECTIONS, TERMS, default
from kvplan.tune.statistics import Pieces, Statistics
from kvplan.tune.workload import Geometry
from tests.simulated.executors import favouring

GPU = {"name": "made up"}


def point(runs: int, walls: tuple[float, ...], auto: float, taken: str = "kernel", run_nbytes: int = 2048) -> Point:
    """Milliseconds of the four paths in order, and of auto."""
    geometry = Geometry("load", "contiguous", run_nbytes, runs, 16)
    pieces = Pieces.of(runs, geometry.nbytes)
    plan = Statistics("load", geometry.nbytes, 1, runs, 16, pieces, runs // 16, runs, Pieces(), pieces, 16 * run_nbytes)
    named = dict(zip(TERMS, walls, strict=True)) | {"auto": auto}
    return Point(geometry, plan, {name: float(f"{ms}e-3") for name, ms in named.items()}, taken)


# Best of the paths: 1, 2 and 4 ms. Auto takes 1, 2.08 and 6.
POINTS = [
    point(16, (1, 2, 3, 4), 1.0),
    point(512, (8, 2, 4, 3), 2.08, "copy_engine"),
    point(4096, (5, 8, 4, 6), 6.0, "staged", run_nbytes=3072),
]


def test_the_best_is_that_of_a_single_path():
    assert [one.best for one in POINTS] == [0.001, 0.002, 0.004]
    assert point(16, (2, 2, 2, 2), auto=1.0).best == 0.002


def test_which_points_a_calibration_measures_itself():
    assert [one.calibrated for one in POINTS] == [True, True, False]
    other_blocks = POINTS[1]._replace(geometry=POINTS[1].geometry._replace(block_runs=32))
    assert not other_blocks.calibrated


def test_regret():
    found = regret(POINTS, {one.geometry: one.walls["auto"] for one in POINTS})
    assert (found.points, found.foreign) == (3, 1)
    assert (found.near, found.worst) == (pytest.approx(2 / 3), pytest.approx(1.5))  # 1, 1.04 and 1.5 times
    assert found.at == "load contiguous 3072 4096 16"
    none = regret(POINTS, {one.geometry: one.best for one in POINTS})
    assert (none.near, none.worst) == (1.0, 1.0)


def test_agreement_is_of_all():
    first, second, third = ({one.geometry: path for one, path in zip(POINTS, paths, strict=True)} for paths in
                            (("a", "b", "c"), ("a", "b", "d"), ("a", "x", "c")))  # fmt: skip
    assert (agreement([first]), agreement([first, first])) == (1.0, 1.0)
    assert agreement([first, second]) == pytest.approx(2 / 3)
    assert agreement([first, second, third]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("path", TERMS)
def test_what_the_model_takes(path):
    assert by_profile(POINTS, favouring(path)) == dict.fromkeys((one.geometry for one in POINTS), path)


def test_findings():
    found = findings(POINTS, [favouring("copy_engine"), favouring("copy_engine"), favouring("kernel")])
    assert list(found) == ["auto", "model", "always", "agreement", "prediction_error"]
    assert found["auto"]["worst"] == pytest.approx(1.5)
    assert [one["worst"] for one in found["model"]] == [pytest.approx(2), pytest.approx(2), pytest.approx(4)]
    assert {name: one["worst"] for name, one in found["always"].items()} == pytest.approx(
        {"kernel": 4, "copy_engine": 2, "copy_engine_2d": 3, "staged": 4}
    )
    assert (found["agreement"], found["model"][0]) == (0.0, found["always"]["copy_engine"])
    assert found["prediction_error"] > 0


def test_the_error_of_a_prediction_is_the_median_of_the_factors():
    profile = default()
    exact = {one.path: one.wall for one in choice.candidates(POINTS[0].plan, profile, choice.Policy())}
    factors = {"kernel": 1.0, "copy_engine": 1.1, "copy_engine_2d": 1 / 1.2, "staged": 2.0}
    walls = {path: wall * factors[path] for path, wall in exact.items()} | {"auto": 1.0}
    # Of 0, 10, 20 and 100 percent, the upper of the middle ones.
    assert findings([POINTS[0]._replace(walls=walls)], [profile])["prediction_error"] == pytest.approx(0.2)


def test_the_grid_fits_and_is_whole():
    every = list(geometries())
    assert len(every) == len(set(every))
    for one in every:
        one.check()
        assert one.nbytes <= choice.MOST_NBYTES
    assert {one.direction for one in every} == set(DIRECTIONS)
    made = [Point(one, POINTS[0].plan, {}, "") for one in every]
    assert sum(not one.calibrated for one in made) / len(made) > 0.5, "most of it is calibrated nowhere"


def test_what_was_measured_can_be_judged_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.gpu.environment.gpu", lambda: GPU)
    profiles = [favouring("copy_engine"), default()]
    runs = [{"seconds": 12.5, "gpu_mb": 300.0, "host_mb": 400.0}] * 2
    path = tmp_path / "choice.json"
    path.write_text(to_json(POINTS, profiles, runs))
    assert from_file(path) == (POINTS, profiles)
    document = json.loads(path.read_text())
    assert (document["schema"], document["version"], document["gpu"]) == ("kvplan.choice", 1, GPU)
    assert document["findings"] == json.loads(json.dumps(findings(POINTS, profiles)))
    assert choice.main(["--again", str(path), "--output", str(tmp_path / "again.json")]) == 1  # 1.5 times is too much
    out = capsys.readouterr().out
    assert "auto, measured" in out
    assert "1.50x  load contiguous 3072 4096 16" in out
    assert out.count("calibrated in 12.5 s, with 300 MB of the GPU, 400 MB of the host\n") == 2
    assert from_file(tmp_path / "again.json") == (POINTS, profiles)


def test_a_good_result_is_no_finding(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.environment.gpu", lambda: GPU)
    path = tmp_path / "choice.json"
    good = [one._replace(walls=dict(one.walls) | {"auto": one.best}) for one in POINTS]
    path.write_text(to_json(good, [default()], []))
    assert choice.main(["--again", str(path)]) == 0
