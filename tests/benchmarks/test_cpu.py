"""The benchmarks run and measure what they say; nothing here is timed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import numpy_baselines, problems, record
from benchmarks.__main__ import main
from benchmarks.problems import SMOKE

pytestmark = pytest.mark.slow

PROBLEMS = (problems.layer_first_to_page_first, problems.layer_first_to_layer_first)


def moves(src, dst, size):
    """Every 8 bytes moved, as (source, destination) pairs in order."""
    words = [np.repeat(start, size // 8) for start in (src, dst)]
    step = np.concatenate([np.arange(n // 8) * 8 for n in size.tolist()])
    pairs = np.stack([word + step for word in words], axis=1)
    return pairs[np.lexsort(pairs.T)]


@pytest.mark.parametrize("make", PROBLEMS)
@pytest.mark.parametrize("ids", [problems.scattered(6, 8), problems.consecutive(5)], ids=["scattered", "consecutive"])
def test_the_numpy_planner_moves_the_same_bytes(make, ids):
    problem = make(2, 8)
    theirs = numpy_baselines.plan_broadcast(problem.stepped, *ids, 8)
    ours = problem.program.plan(*ids).descriptors()
    assert np.array_equal(moves(*theirs), moves(*ours))


def test_one_run_prints_tables_and_saves_json(tmp_path, capsys):
    path = tmp_path / "made" / "result.json"
    assert main(["flat", "import", "hostcopy", "--smoke", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "ours/it" in printed
    made = json.loads(path.read_text())
    assert (made["schema"], made["version"]) == (record.SCHEMA, record.SCHEMA_VERSION)
    assert {"cpu", "cores", "load", "load_after", "system"} <= set(made["machine"])
    assert {"python", "numpy", "numba", "kvplan"} <= set(made["versions"])
    assert made["scale"]["layers"] == SMOKE.layers
    keys = {"group", "what", "unit", "ours", "beside", "more_is_better", "detail", "ratios"}
    for row in made["rows"]:
        assert set(row) == keys
        assert set(row["ratios"]) <= set(row["beside"])
