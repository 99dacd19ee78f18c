"""The pictures of a bench: they say what they show, cover nothing, and are the same each time."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from kvplan.errors import KVPlanError
from kvplan.measure.grid import EQUAL_NBYTES
from kvplan.measure.rows import pareto
from tests.measure.bench_rows import BESIDE, LINK, row, rows

mpl = pytest.importorskip("matplotlib")
plots = pytest.importorskip("kvplan.measure.plots")

pytestmark = pytest.mark.slow

PNG = b"\x89PNG\r\n\x1a\n"
DRAWN = {"bandwidth": plots.bandwidth, "frontier": plots.frontier}


def texts(path):
    """All that is written in an SVG."""
    root = ET.parse(path).getroot()
    assert root.tag.endswith("svg")
    return ["".join(one.itertext()).strip() for one in root.iter("{http://www.w3.org/2000/svg}text")]


def test_bandwidth_says_what_it_shows(tmp_path):
    plots.save(plots.bandwidth(rows(), LINK), tmp_path / "made.svg")
    written = texts(tmp_path / "made.svg")
    for way in ("load", "store"):
        assert f"{way}, blocks contiguous on the host" in written
        assert f"{way}, runs scattered on the host" in written
    assert {"512 B", "2 KiB", "8 KiB", "32 KiB", "128 KiB", "1 MiB", "GB/s", "bytes of a run"} <= set(written)
    assert written.count("link 55.1 GB/s") == written.count("link 55.2 GB/s") == 2
    for path in dict.fromkeys(one.path for one in rows()):
        assert written.count(path) == 1  # in the legend


def test_bandwidth_draws_transfers_of_equal_bytes():
    figure = plots.bandwidth(rows(), LINK)
    lines = {tuple(line.get_ydata()) for line in figure.axes[0].lines}
    kernel = [one.gbps for one in rows() if (one.path, one.direction, one.host, one.nbytes, one.beside) == (
        "kernel", "load", "contiguous", EQUAL_NBYTES, "idle")]  # fmt: skip
    assert tuple(kernel) in lines
    ours = {tuple(line.get_xdata()) for line in figure.axes[0].lines[:-1]}
    assert ours == {(512, 2048, 8192, 32768, 131072, 1048576)}
    assert figure.axes[0].get_xscale() == "log"


def test_the_frontier_says_what_it_shows(tmp_path):
    plots.save(plots.frontier(rows(), LINK), tmp_path / "made.svg")
    written = texts(tmp_path / "made.svg")
    for way, kind in BESIDE:
        assert f"{way} beside {kind}" in written
    for path in dict.fromkeys(path for points in BESIDE.values() for path, _ in points):
        assert written.count(path) == 1  # in the legend
    assert [written.count(str(programs)) for programs in (1, 2, 4, 8)] == [2, 3, 3, 2]
    assert {"x1.00", "nothing beats these", "link 55.1 GB/s"} <= set(written)
    assert "GB/s of 8,192 runs of 8 KiB against how much slower compute gets" in written


def test_the_front_is_drawn():
    figure = plots.frontier(rows(), LINK)
    panel = next(axes for axes in figure.axes if axes.get_title(loc="left") == "store beside decode")
    front = pareto(one for one in rows() if (one.direction, one.beside) == ("store", "decode"))
    drawn = [line for line in panel.lines if line.get_drawstyle() == "steps-post"]
    assert len(drawn) == 1
    assert drawn[0].get_xydata().tolist() == [[one.slowdown, one.gbps] for one in front]


@pytest.mark.parametrize("name", DRAWN)
def test_the_same_figure_is_the_same_bytes(tmp_path, name):
    for suffix in ("svg", "png"):
        for copy in "ab":
            plots.save(DRAWN[name](rows(), LINK), tmp_path / f"{copy}.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    raw = (tmp_path / "a.png").read_bytes()
    assert raw.startswith(PNG)
    assert tuple(int.from_bytes(raw[at : at + 4]) for at in (16, 20)) == (1500, 900)
    assert "dc:date" not in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_to_draw(name):
    broken = [replace(one, gbps=None, slowdown=None, broken="no") for one in rows()]
    for nothing in ([], broken):
        with pytest.raises(KVPlanError, match=r"there is no (bandwidth|frontier) to draw"):
            DRAWN[name](nothing, LINK)


@pytest.mark.parametrize("name", DRAWN)
def test_no_point_is_above_its_axis(name):
    """The first panel has far larger figures than the last one."""
    kinds = {"bandwidth": {"run_nbytes": 512, "runs": 64}, "frontier": {"beside": "decode", "slowdown": 1.1}}[name]
    some = [row("kernel", 400.0, **kinds), row("kernel", 3.0, direction="store", **kinds)]
    figure = DRAWN[name](some, replace(LINK, load=30.0, store=5.0))
    for axes in figure.axes:
        low, top = axes.get_ylim()
        for line in axes.lines:
            assert all(low <= y <= top for y in line.get_ydata())
