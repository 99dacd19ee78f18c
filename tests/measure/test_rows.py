"""What a bench asks for, in which order, and what it believes of what it is told."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import KVPlanError
from kvplan.measure.grid import EQUAL_NBYTES, KINDS, Bench, block_runs_of, tasks
from kvplan.measure.rows import Ceilings, comparable, figures, pareto, row_of
from kvplan.measure.workload import DIRECTIONS, HOSTS, Geometry
from tests.measure.bench_rows import LINK, row, rows

GPU = "cuda:0"


# What is asked.


SUBSETS = {
    "sizes": st.lists(st.sampled_from((512, 4096, 65536, 1 << 20)), min_size=1, unique=True),
    "counts": st.lists(st.sampled_from((16, 1024, 65536)), min_size=1, unique=True),
    "directions": st.lists(st.sampled_from(DIRECTIONS), min_size=1, unique=True),
    "hosts": st.lists(st.sampled_from(HOSTS), min_size=1, unique=True),
    "beside": st.lists(st.sampled_from(KINDS), unique=True),
}


@given(st.fixed_dictionaries(SUBSETS))
def test_every_beginning_has_something_of_everything(chosen):
    most = 64 << 20
    asked = {name: tuple(some) for name, some in chosen.items()}
    if not any(size * count <= most for size in asked["sizes"] for count in asked["counts"]):
        with pytest.raises(KVPlanError, match="nothing fits"):
            Bench(GPU, most_nbytes=most, **asked)
        return
    made = tasks(Bench(GPU, most_nbytes=most, **asked))
    idle = [task.geometry for task in made if task.beside == "idle"]
    assert len(set(idle)) == len(idle)
    assert set(idle) == {
        Geometry(direction, host, size, count, block_runs_of(count))
        for direction in asked["directions"] for host in asked["hosts"]
        for size in asked["sizes"] for count in asked["counts"] if size * count <= most
    }  # fmt: skip
    beside = [(task.beside, task.geometry.direction) for task in made if task.beside != "idle"]
    assert beside == list(itertools.product(asked["beside"], asked["directions"]))
    for task in made:
        task.geometry.check()
    lines = {(d, h): 0 for d in asked["directions"] for h in asked["hosts"]}
    taken = []
    for k, task in enumerate(made):
        if task.beside == "idle":
            lines[task.geometry.direction, task.geometry.host] += 1
            assert max(lines.values()) - min(lines.values()) <= 1
            taken.append(task.geometry)
        else:
            assert k < len(beside) * (len(lines) + 1)
    fitting = [size for size in asked["sizes"] if size * min(asked["counts"]) <= most]
    first = taken[: len(fitting) * len(lines)]  # each size once, at its largest count, before any other count
    assert {geometry.run_nbytes for geometry in first} == set(fitting)


# What is believed.


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


def test_no_time_is_broken():
    assert figures(1, 0.0, LINK, "load")["broken"] == "it took no time"


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


def test_of_other_counts_the_one_of_most_sizes_is_compared():
    words, found = comparable([row("host", 5.0, run_nbytes=size, runs=1024) for size in (512, 4096, 65536)])
    assert (words, [one.run_nbytes for one in found]) == ("has 1,024 runs", [512, 4096, 65536])


def test_rows_are_json_and_back():
    for one in rows():
        text = json.dumps(one.document(), allow_nan=False)
        assert row_of(json.loads(text)) == one
    assert row_of({**rows()[0].document(), "of a later version": 1}) == rows()[0]
    with pytest.raises(KVPlanError, match=r"no row of a bench: .*run_nbytes"):
        row_of({"direction": "load", "host": "contiguous", "runs": 1, "block_runs": 2, "path": "kernel"})
