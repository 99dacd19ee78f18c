"""What a bench believes of what it is told, and what it shows: its rows, and its pictures."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.errors import KVPlanError
from kvplan.measure.bench import EQUAL_NBYTES
from kvplan.measure.rows import Ceilings, comparable, figures, pareto, row_of
from kvplan.measure.workload import DIRECTIONS, HOSTS
from tests.measure.bench_rows import BESIDE, LINK, row, rows


@given(st.floats(0.1, 200), st.floats(0.1, 100), st.sampled_from(DIRECTIONS))
def test_only_figures_within_the_ceiling_are_believed(gbps, ceiling, direction):
    found = figures(10**9, 1 / gbps, Ceilings(ceiling, ceiling), direction)
    if gbps > ceiling * 1.0301:
        assert (found["gbps"], found["share"]) == (None, None)
        assert f"{gbps:.1f} GB/s is faster than the link's {ceiling:.1f} GB/s" == found["broken"]
    elif gbps < ceiling * 1.0299:
        assert (found["gbps"], found["share"]) == pytest.approx((gbps, gbps / ceiling))
        assert found["broken"] == ""
    soft = Ceilings(ceiling, ceiling, "memcpy", hard=False)
    assert figures(10**9, 1 / gbps, soft, direction)["broken"] == ""


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=12))
def test_the_front_is_what_nothing_beats(points):
    made = [row("staged", float(gbps), beside="decode", slowdown=1 + slow / 10) for gbps, slow in points]

    def beaten(one):
        return any(
            other.gbps >= one.gbps and other.slowdown <= one.slowdown
            and (other.gbps, other.slowdown) != (one.gbps, one.slowdown) for other in made
        )  # fmt: skip

    kept = [(one.gbps, one.slowdown) for one in pareto(made)]
    assert set(kept) == {(one.gbps, one.slowdown) for one in made if not beaten(one)}
    assert kept == sorted(set(kept), key=lambda point: point[1])  # each once, the gentlest first


def test_equal_bytes_of_each_size():
    words, found = comparable([*rows(), row("auto", None, runs=8192), row("auto", 1.0, runs=1 << 20)])
    assert words == "moves 32 MiB"
    panels = {}
    for one in found:
        panels.setdefault((one.direction, one.host, one.path), []).append(one.run_nbytes)
    assert {panel[:2] for panel in panels} == set(itertools.product(DIRECTIONS, HOSTS))
    assert {one.nbytes for one in found} == {EQUAL_NBYTES}
    assert all(sizes == sorted({one.run_nbytes for one in rows()}) for sizes in panels.values())


def test_rows_are_json_and_back():
    for one in rows():
        assert row_of(json.loads(json.dumps(one.document(), allow_nan=False))) == one
    assert row_of({**rows()[0].document(), "of a later version": 1}) == rows()[0]
    with pytest.raises(KVPlanError, match=r"no row of a bench: .*run_nbytes"):
        row_of({"direction": "load", "host": "contiguous", "runs": 1, "block_runs": 2, "path": "kernel"})


# ---- pictures ----------------------------------------------------------------------------------------------------


BANDWIDTH = {
    *(f"{way}, {order} on the host" for way in DIRECTIONS for order in ("blocks contiguous", "runs scattered")),
    "512 B", "2 KiB", "8 KiB", "32 KiB", "128 KiB", "1 MiB", "GB/s", "bytes of a run",
}  # fmt: skip
FRONTIER = {*(f"{way} beside {kind}" for way, kind in BESIDE), "x1.00", "nothing beats these",
            "GB/s of 8,192 runs of 8 KiB against how much slower compute gets"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("figure", "words"), [("bandwidth", BANDWIDTH), ("frontier", FRONTIER)])
def test_pictures_say_what_they_show_and_are_the_same_each_time(figure, words, tmp_path):
    plots = pytest.importorskip("kvplan.measure.plots")
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in paths:
        plots.save(getattr(plots, figure)(rows(), LINK), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    found = ET.parse(paths[0]).getroot().iter("{http://www.w3.org/2000/svg}text")
    written = ["".join(one.itertext()).strip() for one in found]
    assert words <= set(written)
    assert written.count("link 55.1 GB/s") == written.count("link 55.2 GB/s") == 2
    assert {written.count(path) for path in {one.path for one in rows()} - {"auto"}} == {1}  # in the legend
    if figure == "frontier":
        assert [written.count(str(programs)) for programs in (1, 2, 4, 8)] == [2, 3, 3, 2]


def test_nothing_to_draw():
    plots = pytest.importorskip("kvplan.measure.plots")
    broken = [replace(one, gbps=None, slowdown=None, broken="no") for one in rows()]
    for draw, nothing in itertools.product((plots.bandwidth, plots.frontier), ([], broken)):
        with pytest.raises(KVPlanError, match=r"there is no (bandwidth|frontier) to draw"):
            draw(nothing, LINK)
