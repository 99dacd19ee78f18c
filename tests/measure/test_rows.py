"""What a bench believes of what it is told, and what it shows."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import KVPlanError
from kvplan.measure.grid import EQUAL_NBYTES
from kvplan.measure.rows import Ceilings, comparable, figures, pareto, row_of
from kvplan.measure.workload import DIRECTIONS, HOSTS
from tests.measure.bench_rows import row, rows


@given(st.floats(0.1, 200), st.floats(0.1, 100), st.sampled_from(DIRECTIONS))
def test_only_figures_within_the_ceiling_are_believed(gbps, ceiling, direction):
    hard = Ceilings(ceiling, ceiling)
    found = figures(10**9, 1 / gbps, hard, direction)
    if gbps > ceiling * 1.0301:
        assert (found["gbps"], found["share"]) == (None, None)
        assert f"{gbps:.1f} GB/s is faster than the link's {ceiling:.1f} GB/s" == found["broken"]
    elif gbps < ceiling * 1.0299:
        assert found["broken"] == ""
        assert found["gbps"] == pytest.approx(gbps)
        assert found["share"] == pytest.approx(gbps / ceiling)
    soft = Ceilings(ceiling, ceiling, "memcpy", hard=False)
    assert figures(10**9, 1 / gbps, soft, direction)["broken"] == ""


POINTS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=12)


@given(POINTS)
def test_the_front_is_what_nothing_beats(points):
    made = [row("staged", float(gbps), beside="decode", slowdown=1 + slow / 10) for gbps, slow in points]

    def beaten(one):
        return any(
            other.gbps >= one.gbps and other.slowdown <= one.slowdown
            and (other.gbps, other.slowdown) != (one.gbps, one.slowdown) for other in made
        )  # fmt: skip

    front = pareto(made)
    kept = [(one.gbps, one.slowdown) for one in front]
    assert set(kept) == {(one.gbps, one.slowdown) for one in made if not beaten(one)}
    assert kept == sorted(set(kept), key=lambda point: point[1])  # each once, the gentlest first


def test_equal_bytes_of_each_size():
    words, found = comparable([*rows(), row("auto", None, runs=8192), row("auto", 1.0, runs=1 << 20)])
    assert words == "moves 32 MiB"
    panels = {(one.direction, one.host, one.path): [] for one in found}
    for one in found:
        panels[one.direction, one.host, one.path].append(one)
    assert {panel[:2] for panel in panels} == set(itertools.product(DIRECTIONS, HOSTS))
    for some in panels.values():
        assert [one.run_nbytes for one in some] == sorted({one.run_nbytes for one in rows()})
        assert {one.nbytes for one in some} == {EQUAL_NBYTES}


def test_rows_are_json_and_back():
    for one in rows():
        text = json.dumps(one.document(), allow_nan=False)
        assert row_of(json.loads(text)) == one
    assert row_of({**rows()[0].document(), "of a later version": 1}) == rows()[0]
    with pytest.raises(KVPlanError, match=r"no row of a bench: .*run_nbytes"):
        row_of({"direction": "load", "host": "contiguous", "runs": 1, "block_runs": 2, "path": "kernel"})
