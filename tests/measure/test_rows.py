"""What a bench asks for, in which order, and what it believes of what it is told."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import KVPlanError
from kvplan.measure.grid import EQUAL_NBYTES, KINDS, Bench, block_runs_of, paths_of, spread, tasks, usual
from kvplan.measure.rows import Ceilings, Missing, Row, at_equal_bytes, figures, grouped, judged, pareto, row_of
from kvplan.measure.workload import DIRECTIONS, HOSTS, Geometry
from tests.measure.bench_rows import LINK, row, rows

GPU = "cuda:0"


# What is asked.


@given(st.lists(st.integers(0, 99), unique=True))
def test_spread_is_another_order_from_both_ends(items):
    given_ = spread(items)
    assert sorted(given_) == sorted(items)
    assert given_[:2] == list(dict.fromkeys([*items[:1], *items[-1:]]))


@given(st.integers(1, 10**6).map(lambda half: 2 * half))
def test_blocks_are_whole(runs):
    block = block_runs_of(runs)
    assert block % 2 == 0
    assert runs % block == 0
    assert 2 <= block <= 64


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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sizes": (100,)}, "runs of 100 bytes; give a multiple of 8"),
        ({"counts": (15,)}, "15 runs; give an even number"),
        ({"sizes": ()}, "sizes is empty"),
        ({"directions": ()}, "directions is empty"),
        ({"directions": ("up",)}, "unknown direction 'up'; expected one of load, store"),
        ({"hosts": ("here",)}, "unknown host 'here'; expected one of contiguous, scattered"),
        ({"paths": ("kernel",)}, "unknown path on cpu 'kernel'; expected one of host, host on 1 thread, numpy memcpy"),
        ({"beside": ("decode",)}, "only a GPU is measured"),
        ({"seconds": 0.0}, "seconds is 0.0; give a number above 0"),
        ({"seconds": float("nan")}, "seconds is nan; give a number above 0"),
        ({"most_nbytes": 1024, "sizes": (512,)}, "nothing fits into 1 KiB; the smallest transfer asked for has 8 KiB"),
    ],
)
def test_what_cannot_be_asked(wrong, said):
    with pytest.raises(KVPlanError, match=said):
        Bench("cpu", **wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"directions": ("load",)}, "unknown direction 'load'; expected one of push, pull"),
        ({"peer": GPU, "directions": ("push",)}, "unknown direction 'push'; expected one of device"),
        ({"paths": ("staged",)}, "unknown path on cuda:0 'staged'; expected one of auto, copy_engine, copy_engine_2d"),
        ({"peer": GPU, "directions": ("device",), "beside_on": ("peer",)}, "unknown GPU of compute 'peer'"),
        ({"beside_on": ()}, "beside_on is empty"),
        ({"peer": "cpu"}, "device 'cuda:0', peer 'cpu'; expected two GPUs"),
        ({"sizes": (1 << 20,), "counts": (0,), "most_nbytes": 64 << 20},
         "nothing fits into 64 MiB; the smallest transfer asked for has 160 MiB"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_of_two_gpus(wrong, said):
    with pytest.raises(KVPlanError, match=said):
        Bench(GPU, **(usual(GPU, "cuda:1") | wrong))


def test_the_largest_transfers_between_gpus_fill_the_memory():
    asked = Bench(GPU, **usual(GPU, "cuda:1"))
    made = [task.geometry for task in tasks(asked) if task.beside == "idle"]
    assert {geometry.block_runs for geometry in made} == {160}
    assert {geometry.run_nbytes for geometry in made} == {512, 2048, 8192, 65536, 1 << 20}
    assert {geometry.runs for geometry in made if geometry.nbytes < 600_000_000} == {160}
    for size in asked.sizes:
        assert max(one.nbytes for one in made if one.run_nbytes == size) > 1_000_000_000
    beside = [task for task in tasks(asked) if task.beside != "idle"]
    assert {(task.geometry.run_nbytes, task.geometry.runs) for task in beside} == {(8192, 81_920)}
    assert len({(task.geometry.direction, task.beside, task.on) for task in beside}) == len(beside) == 8
    assert beside[-1].name == "pull, contiguous, 8 KiB x 81,920, beside prefill on the peer"


def test_a_count_that_fills_the_memory_may_be_asked_of_a_host_too():
    asked = Bench(GPU, sizes=(512, 4096), counts=(0, 16), most_nbytes=128 << 10)
    assert (asked.fitting(512), asked.fitting(4096), asked.too_large()) == ([256, 16], [16], [(4096, 64)])


def test_paths_are_asked_in_one_order():
    assert Bench(GPU, paths=("torch indexing", "kernel", "auto")).asked == ("auto", "kernel", "torch indexing")
    assert Bench(GPU).asked == paths_of(GPU)


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
    assert judged(gbps, soft, direction) == ""


def test_ceilings_of_routes_that_were_not_measured():
    assert Ceilings(push=395.0, pull=394.0).document() == {
        "load": None, "store": None, "what": "link", "hard": True, "push": 395.0, "pull": 394.0,
    }  # fmt: skip
    with pytest.raises(KVPlanError, match="no ceiling of 'load' was measured; measured are device"):
        Ceilings(device=2060.0).of("load")


def test_no_time_and_no_number_are_broken():
    assert figures(1, 0.0, LINK, "load")["broken"] == "it took no time"
    assert judged(float("nan"), LINK, "load") != ""


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


def test_the_front_passes_over_what_has_no_figure():
    there = row("staged", 1.0, beside="decode", slowdown=1.1)
    assert pareto([row("kernel", None, beside="decode", slowdown=1.0), row("kernel", 5.0), there]) == [there]


def test_equal_bytes_of_each_size():
    nbytes, found = at_equal_bytes([*rows(), row("auto", None, runs=8192), row("auto", 1.0, runs=1 << 20)])
    assert nbytes == EQUAL_NBYTES
    assert set(found) == set(itertools.product(DIRECTIONS, HOSTS))
    for paths in found.values():
        for some in paths.values():
            assert [one.run_nbytes for one in some] == sorted({one.run_nbytes for one in rows()})
            assert {one.nbytes for one in some} == {EQUAL_NBYTES}


def test_whole_blocks_move_nearly_equal_bytes():
    peers = Bench("cuda:0", sizes=(512, 8192, 1 << 20), counts=(160, 0), directions=("push",), peer="cuda:1",
                  most_nbytes=1 << 30)  # fmt: skip
    made = [row("kernel", 1.0, run_nbytes=size, runs=runs) for size in peers.sizes for runs in peers.fitting(size)]
    _, found = at_equal_bytes(made)
    assert [one.nbytes for one in found["load", "contiguous"]["kernel"]] == [max(
        size * runs for runs in peers.fitting(size)) for size in peers.sizes]  # fmt: skip


def test_a_plot_has_a_transfer_of_equal_bytes_for_each_size():
    bench = Bench("cpu", equal_nbytes=EQUAL_NBYTES)
    for size in bench.sizes:
        assert EQUAL_NBYTES // size in bench.fitting(size)
    geometries = [task.geometry for task in tasks(bench)]
    assert sum(one.run_nbytes * one.runs == EQUAL_NBYTES for one in geometries) == 4 * len(bench.sizes)
    small = Bench("cpu", most_nbytes=1 << 20, equal_nbytes=EQUAL_NBYTES)
    assert all(size * runs <= 1 << 20 for size in small.sizes for runs in small.fitting(size))


def test_rows_are_json_and_back():
    for one in rows():
        text = json.dumps(one.document(), allow_nan=False)
        assert row_of(json.loads(text)) == one
    assert row_of({**rows()[0].document(), "of a later version": 1}) == rows()[0]
    with pytest.raises(KVPlanError, match=r"no row of a bench: .*run_nbytes"):
        row_of({"direction": "load", "host": "contiguous", "runs": 1, "block_runs": 2, "path": "kernel"})


def test_what_is_missing_by_reason():
    assert grouped([Missing("a", "x"), Missing("b", "y"), Missing("c", "x")]) == {"x": ["a", "c"], "y": ["b"]}


def test_a_label_names_programs_that_somebody_chose():
    assert Row("load", "contiguous", 8, 2, 2, "kernel", programs=4).label == "kernel"
    assert Row("load", "contiguous", 8, 2, 2, "kernel", "decode", programs=4).label == "kernel, 4"
    assert Row("load", "contiguous", 8, 2, 2, "staged", "decode").label == "staged"
