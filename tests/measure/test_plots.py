"""The pictures of a bench: they say what they show, cover nothing, and are the same each time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from kvplan.errors import KVPlanError
from kvplan.measure.grid import EQUAL_NBYTES, paths_of
from kvplan.measure.rows import Ceilings, pareto
from tests.commands import python
from tests.measure.bench_rows import BESIDE, LINK, NVLINK, row, rows

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
    # Each point once, each path in the legend once more.
    assert written.count("staged") == len(BESIDE) + 1
    assert [written.count(f"kernel, {programs}") for programs in (1, 2, 4, 8)] == [2, 3, 3, 2]
    assert {"x1.00", "nothing beats these", "link 55.1 GB/s"} <= set(written)
    assert "GB/s of 8,192 runs of 8 KiB against how much slower compute gets" in written


def test_the_front_is_drawn():
    figure = plots.frontier(rows(), LINK)
    panel = next(axes for axes in figure.axes if axes.get_title(loc="left") == "store beside decode")
    front = pareto(one for one in rows() if (one.direction, one.beside) == ("store", "decode"))
    drawn = [line for line in panel.lines if line.get_drawstyle() == "steps-post"]
    assert len(drawn) == 1
    assert drawn[0].get_xydata().tolist() == [[one.slowdown, one.gbps] for one in front]


def test_labels_cover_neither_each_other_nor_points():
    figure = plots.frontier(rows(), LINK)
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    for axes in figure.axes:
        within = axes.get_window_extent(renderer)
        boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
        for a, b in itertools.combinations(boxes, 2):
            assert plots._shared(a.extents, b.extents) < 1
        for box in boxes:
            assert plots._shared(box.extents, within.extents) > 0.99 * box.width * box.height
        for line in axes.lines:
            if line.get_marker() != "None":
                x, y = axes.transData.transform(line.get_xydata()[0])
                assert not any(box.contains(x, y) for box in boxes)


def test_colours_and_markers_differ():
    for device, peer in (("cpu", None), ("cuda:0", None), ("cuda:0", "cuda:1")):
        looks = [plots.LOOKS[path] for path in paths_of(device, peer)]
        assert len({look.colour for look in looks}) == len({look.marker for look in looks}) == len(looks)


def test_pictures_between_gpus(tmp_path):
    alone = [row(path, gbps, direction=way, host=host, run_nbytes=size, runs=160)
             for path, gbps in (("kernel", 360.0), ("one large copy", 390.0), ("NCCL send/recv", 120.0))
             for way in ("push", "pull") for host in ("contiguous", "scattered") for size in (2048, 8192)]  # fmt: skip
    plots.save(plots.bandwidth(alone, NVLINK), tmp_path / "made.svg")
    written = texts(tmp_path / "made.svg")
    assert {"push, blocks contiguous on the peer", "pull, runs scattered on the peer", "link 395.0 GB/s"} <= set(
        written
    )
    beside = [row("kernel", gbps, direction=way, beside="decode", beside_on=on, programs=programs, slowdown=1.1)
              for way in ("push", "pull") for on in ("device", "peer")
              for programs, gbps in ((None, 178.0), (16, 305.0))]  # fmt: skip
    figure = plots.frontier(beside, NVLINK)
    assert len(figure.axes) == 4
    plots.save(figure, tmp_path / "made.svg")
    written = texts(tmp_path / "made.svg")
    assert {"push beside decode", "pull beside decode on the peer"} <= set(written)
    assert written.count("kernel, 16") == 4


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


def test_one_path_and_one_panel(tmp_path):
    soft = Ceilings(9.0, 9.0, "memcpy", hard=False)
    plots.save(plots.bandwidth([row("host", 12.5), row("a new one", 3.0)], soft), tmp_path / "made.svg")
    written = texts(tmp_path / "made.svg")
    assert {"memcpy 9.0 GB/s", "host", "a new one"} <= set(written)
    assert len(plots.frontier([row("staged", 40.0, beside="decode", slowdown=1.0)], LINK).axes) == 1


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_to_draw(name):
    broken = [replace(one, gbps=None, slowdown=None, broken="no") for one in rows()]
    for nothing in ([], broken):
        with pytest.raises(KVPlanError, match=r"there is no (bandwidth|frontier) to draw"):
            DRAWN[name](nothing, LINK)


@pytest.mark.parametrize("name", ["made.pdf", "made", "made.svgz"])
def test_a_suffix_that_is_none(tmp_path, name):
    with pytest.raises(KVPlanError, match=r"a plot is \.png or \.svg, not "):
        plots.save(plots.bandwidth(rows(), LINK), tmp_path / name)


def test_a_place_that_is_none(tmp_path):
    with pytest.raises(KVPlanError, match=r"the plot cannot be written to .*nowhere"):
        plots.save(plots.bandwidth(rows(), LINK), tmp_path / "nowhere" / "made.svg")


def test_no_state_is_left_behind():
    code = (
        "import sys, tempfile, matplotlib\n"
        "from pathlib import Path\n"
        "from kvplan.measure import plots\n"
        "from tests.measure.bench_rows import LINK, rows\n"
        "def parameters():  # to ask for the backend would choose one\n"
        "    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != 'backend'}\n"
        "before = parameters()\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    plots.save(plots.frontier(rows(), LINK), Path(folder) / 'made.svg')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert parameters() == before\n"
    )
    done = python("-W", "error", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_of_a_plot_is_clipped():
    for figure in (plots.bandwidth(rows(), LINK), plots.frontier(rows(), LINK)):
        figure.draw_without_rendering()
        renderer = figure.canvas.get_renderer()
        page = figure.bbox
        drawn = [text for axes in figure.axes for text in axes.texts]
        for axes in figure.axes:  # ticks outside the limits are made, but not drawn
            (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
            drawn += [one for one in axes.get_xticklabels() if left <= one.get_position()[0] <= right]
            drawn += [one for one in axes.get_yticklabels() if low <= one.get_position()[1] <= high]
        drawn += [axes.title for axes in figure.axes] + [figure.legends[0], figure._suptitle]
        for one in drawn:
            if one.get_visible():
                box = one.get_window_extent(renderer)
                assert page.x0 - 1 <= box.x0
                assert box.x1 <= page.x1 + 1
                assert page.y0 - 1 <= box.y0
                assert box.y1 <= page.y1 + 1
        for axes in figure.axes:
            low, high = axes.get_ylim()
            assert all(low <= y <= high for line in axes.lines[:-1] for y in line.get_ydata())


def test_a_memcpy_with_a_line_of_its_own_has_no_other():
    made = [row(path, gbps, run_nbytes=size, runs=EQUAL_NBYTES // size)
            for size in (512, 8192) for path, gbps in (("host", 9.0), ("numpy memcpy", 11.0))]  # fmt: skip
    soft = Ceilings(3.0, 3.0, "memcpy", hard=False)
    (panel,) = plots.bandwidth(made, soft).axes
    assert sorted(tuple(line.get_ydata()) for line in panel.lines) == [(9.0, 9.0), (11.0, 11.0)]
    (panel,) = plots.bandwidth([one for one in made if one.path == "host"], soft).axes
    assert [tuple(line.get_ydata()) for line in panel.lines] == [(9.0, 9.0), (3.0, 3.0)]
