"""The benchmarks run and measure what they say; nothing here is timed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import footprint, hostcopy, numpy_baselines, planning, problems, record
from benchmarks.__main__ import GROUPS, main
from benchmarks.call_costs import interleaved, peak_nbytes
from benchmarks.problems import SMOKE

pytestmark = [pytest.mark.slow, pytest.mark.slow]

PROBLEMS = (problems.layer_first_to_page_first, problems.layer_first_to_layer_first)


def moves(src, dst, size):
    """Every 8 bytes moved, as (source, destination) pairs in order."""
    words = [np.repeat(start, size // 8) for start in (src, dst)]
    step = np.concatenate([np.arange(n // 8) * 8 for n in size.tolist()])
    pairs = np.stack([word + step for word in words], axis=1)
    return pairs[np.lexsort(pairs.T)]


@pytest.mark.parametrize("make", PROBLEMS)
@pytest.mark.parametrize("baseline", [numpy_baselines.plan_broadcast, numpy_baselines.plan_by_layer])
@pytest.mark.parametrize("ids", [problems.scattered(6, 8), problems.consecutive(5)], ids=["scattered", "consecutive"])
def test_the_numpy_planner_moves_the_same_bytes(make, baseline, ids):
    problem = make(2, 8)
    theirs = baseline(problem.stepped, *ids, 8)
    ours = problem.program.plan(*ids).descriptors()
    assert np.array_equal(moves(*theirs), moves(*ours))


@pytest.mark.parametrize("baseline", [numpy_baselines.plan_broadcast, numpy_baselines.plan_by_layer])
def test_the_numpy_planner_checks_ids_too(baseline):
    stepped = problems.layer_first_to_page_first(1, 8).stepped
    good = np.array([0, 1])
    for src, dst, error in ((np.array([0, 8]), good, IndexError), (good, np.array([-1, 0]), IndexError),
                            (good, np.array([3, 3]), ValueError)):  # fmt: skip
        with pytest.raises(error):
            baseline(stepped, src, dst, 8)


@pytest.mark.parametrize("floor", [numpy_baselines.floor, numpy_baselines.compiled_floor])
def test_a_floor_is_three_int64_arrays(floor):
    columns = floor(7)
    assert [(column.dtype, column.size) for column in columns] == [(np.dtype(np.int64), 7)] * 3
    assert [np.unique(column).tolist() for column in columns] == [[1], [2], [3]]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_ceiling_copies_everything(threads):
    memcpy = numpy_baselines.Memcpy(threads)
    src, dst = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    memcpy.copy(dst, src)
    memcpy.close()
    assert np.array_equal(dst, src)


def test_host_copies_are_verified():
    pools = hostcopy.Pools.of(layers=2, blocks=3, run_nbytes=512)
    with pytest.raises(RuntimeError, match="did not arrive"):
        hostcopy.verify(pools)


def test_calls_take_turns():
    called = []
    calls = {name: (lambda name=name: called.append(name)) for name in "ab"}
    seconds = interleaved(calls, small=3, large=3)
    assert set(seconds) == {"a", "b"}
    assert all(value >= 0 for value in seconds.values())
    assert called[:2] == ["a", "b"]
    assert called[-1] == "b"


def test_peak_memory_sees_what_is_freed_again():
    assert peak_nbytes(lambda: np.empty(1 << 20, np.uint8).size) >= 1 << 20


def test_every_group_holds_rows_with_limits():
    for name, run in {"flat": planning.flat, "factored": planning.factored, "compile": planning.compiling,
                      "import": footprint.importing, "memory": footprint.memory,
                      "hostcopy": hostcopy.copying}.items():  # fmt: skip
        assert GROUPS[name] is run
        rows = run(SMOKE)
        assert any(row.limit is not None for row in rows), name
        assert len({row.group for row in rows}) == 1
        assert len({row.what for row in rows}) == len(rows)


def test_one_run_prints_tables_and_saves_json(tmp_path, capsys):
    path = tmp_path / "made" / "result.json"
    assert main(["flat", "import", "--smoke", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "ours/it" in printed
    made = json.loads(path.read_text())
    assert (made["schema"], made["version"]) == (record.SCHEMA, record.SCHEMA_VERSION)
    assert {"cpu", "cores", "load", "load_after", "system"} <= set(made["machine"])
    assert {"python", "numpy", "numba", "kvplan"} <= set(made["versions"])
    assert made["scale"]["layers"] == SMOKE.layers
    keys = {"group", "what", "unit", "ours", "beside", "limit", "rule", "more_is_better", "detail", "ratios", "ok"}
    for row in made["rows"]:
        assert set(row) == keys
        assert set(row["ratios"]) <= set(row["beside"])
        assert row["ok"] is None or isinstance(row["ok"], bool)


def test_an_unknown_group_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as left:
        main(["nothing"])
    assert left.value.code == 2
    assert "groups are flat" in capsys.readouterr().err


def test_importing_loads_nothing_heavy():
    *_, heavy = footprint.importing(SMOKE)
    assert heavy.detail == {"loaded": []}


def test_a_table_shows_ours_the_limit_and_the_verdict():
    rows = [record.Row("flat", "1 block", "us", 9.0, {"floor": 1.5}, 10.0, "10 us"),
            record.Row("flat", "2 blocks", "us", 12.0, {"floor": 1.5}, 10.0, "10 us"),
            record.Row("flat", "lists", "us", 12.0)]  # fmt: skip
    assert record.table(rows).splitlines() == [
        "flat         ours    limit           floor  ours/it  ok?",
        "1 block   9.00 us  10.0 us  10 us  1.50 us     6.00  yes",
        "2 blocks  12.0 us  10.0 us  10 us  1.50 us     8.00   NO",
        "lists     12.0 us",
    ]


def test_more_is_better_turns_the_limit_round():
    assert record.Row("copy", "a", "GB/s", 9.0, {}, 8.0, more_is_better=True).ok
    assert not record.Row("copy", "a", "GB/s", 9.0, {}, 8.0).ok
