"""The pictures of a bench: they say what they show, cover nothing, and are the same each time."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from kvplan.errors import KVPlanError
from tests.measure.bench_rows import BESIDE, LINK, rows

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
