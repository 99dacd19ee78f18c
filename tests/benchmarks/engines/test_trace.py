"""Traces of hits and their picture, without an engine and without a GPU."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import pytest

from benchmarks.engines import pages, picture, trace
from benchmarks.engines.trace import Hook, aligned, cut, joined, timed
from kvplan.draw.svg import MARGIN, WIDTH
from tests.benchmarks.engines.recorded import TRACES, alone

SVG = "{http://www.w3.org/2000/svg}"


class Engine:
    """An object whose calls are timed."""

    def step(self):
        return self.inner()

    def inner(self):
        raise ValueError("full")


def test_calls_are_timed_even_if_they_fail_and_functions_are_put_back():
    engine = Engine()
    hooks = (Hook("core", "step", "step"), Hook("core", "inner", "inner"), Hook("core", "absent", "absent"))
    with timed({"core": engine}, hooks) as spans, pytest.raises(ValueError, match="full"):
        engine.step()
    assert [name for name, *_ in spans] == ["inner", "step"]
    assert vars(engine) == {}


def test_a_class_is_found_by_its_module():
    place = "tests.benchmarks.engines.test_trace:Engine"
    before = Engine.inner
    hooks = [Hook(place, "inner", "inner"), Hook("no.such.module:Engine", "inner", "inner")]
    with timed({}, hooks) as spans, pytest.raises(ValueError, match="full"):
        Engine().step()
    assert [name for name, *_ in spans] in (["inner"], [])  # the module may be imported under another name
    assert Engine.inner is before


def test_a_profile_without_the_mark_is_left_out():
    assert aligned([{"cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 1.0}], 0.0) == []


def test_a_hit_is_cut_out_of_its_run():
    spans = [("schedule", 9.0, 0.1), ("forward", 10.001, 0.01), ("layer wait", 10.002, 1e-6), ("schedule", 10.5, 0.1)]
    events = [{"kind": "copies in", "start": 10.0, "seconds": 0.004},
              {"kind": "copies in", "start": 10.003, "seconds": 0.004},
              {"kind": "compute", "start": 10.2, "seconds": 1.0}]  # fmt: skip
    found = cut(spans, events, 10.0, 0.02)
    assert found["spans"] == [["forward", 1.0, 10.0]]
    assert found["totals"]["layer wait"] == [1, 0.001]
    assert found["gpu"] == {"copies in": [[0.0, 7.0]]}
    assert found["busy_ms"] == {"copies in": 7.0}


def test_busy_times_that_nearly_touch_are_one():
    assert list(joined([(0.0, 1.0), (1.005, 2.0), (2.1, 3.0)])) == [[0.0, 2.0], [2.1, 0.9]]
    assert list(joined([])) == []


def test_every_span_but_the_outermost_has_a_colour():
    coloured = {name for kind in picture.THREAD for name in kind.spans}
    assert {hook.span for hook in trace.HOOKS} - coloured == {"step", "execute model", "layer store"}


def test_the_picture_parses_and_stays_on_the_page():
    root = ET.fromstring(picture.engine_svg(TRACES))
    height = float(root.get("viewBox").split()[3])
    for shape in root.iter(f"{SVG}rect"):
        if shape.get("class") != "page":
            left, width = float(shape.get("x")), float(shape.get("width"))
            assert left >= MARGIN - 0.1
            assert left + width <= WIDTH - MARGIN + 0.1
            assert 0 <= float(shape.get("y")) < height
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "kvplan, by layer: first token after 25.0 ms" in texts
    assert texts.count("bytes to the GPU") == 3  # the legend, and a lane per way


def test_both_ways_have_one_scale():
    """A millisecond is as wide in the lanes of one way as in those of the other."""
    text = picture.engine_svg(TRACES)
    found = {
        ms: float(width)
        for width, ms in re.findall(r'width="([\d.]+)" height="24" fill="[^"]+"><title>forward: ([\d.]+)', text)
    }
    assert found == {
        "13.00": pytest.approx(13.0 * (WIDTH - 2 * MARGIN - picture.NAMES) / (35.0 * picture.PICTURE_MS), abs=0.1)
    }


def test_pictures_of_several_prompts_are_refused():
    with pytest.raises(ValueError, match="one shape and one prompt"):
        picture.engine_svg([TRACES[0], {**TRACES[1], "held": 28000}])
    with pytest.raises(ValueError, match="no trace"):
        picture.engine_svg([])


def test_drawing_a_result(tmp_path, capsys):
    result, out = tmp_path / "result.json", tmp_path / "picture.svg"
    result.write_text(json.dumps({"traces": TRACES}))
    assert picture.main([str(result), "kvplan-layers", "--out", str(out)]) == 0
    assert "own" not in out.read_text()
    assert picture.main([str(result), "simple", "--out", str(out)]) == 2
    assert "no trace of simple" in capsys.readouterr().err


def test_the_page_shows_a_recorded_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    result, drawn = tmp_path / "trace.json", tmp_path / "engine-hit.svg"
    assert pages.trace(result, drawn) == "\n".join(pages.PICTURE_MARKS)
    totals = [{"forward": [1, 13.0]}, {"forward": [1, 13.5], "layer wait": [32, 0.8]}]
    traces = [{**one, "totals": total} for one, total in zip(TRACES, totals, strict=True)]
    result.write_text(json.dumps({"traces": traces}))
    drawn.write_text(picture.engine_svg(traces))
    lines = pages.trace(result, drawn).splitlines()
    assert "| layer wait |  | 0.80 (32) |" in lines
    assert lines[1] == "![A hit, millisecond by millisecond](../pictures/engine-hit.svg)"


def test_the_page_shows_recorded_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert pages.numbers([]) == "\n".join(pages.MARKS)
    gpu = {"name": "a GPU", "driver": "580", "cuda": "13.0"}
    record = {
        "machine": {"gpu": gpu},
        "versions": {"vllm": "0.33.0"},
        "scale": {"rounds": 5},
        "samples": alone("own", 40.0, 40.0),
        "facts": {},
    }
    (tmp_path / "result.json").write_text(json.dumps(record))
    made = pages.numbers([tmp_path / "result.json"])
    assert "a GPU, driver 580, CUDA 13.0; vllm 0.33.0. Medians of 2 rounds" in made
    assert "| vLLM's OffloadingConnector | 40.0 (40.0 to 40.0) |" in made
    record |= {"alone": True, "samples": [*alone("own", 40.0, 40.0), *alone("kvplan", 30.0)]}
    (tmp_path / "result.json").write_text(json.dumps(record))
    made = pages.numbers([tmp_path / "result.json"])
    assert "vllm 0.33.0. Each engine was alone on the GPU. Medians of 1 to 2 rounds" in made


@pytest.mark.skipif(not pages.TRACE.exists(), reason="no trace is recorded yet")
def test_the_picture_of_the_documentation_is_what_is_drawn():
    assert picture.OUT.read_text() == picture.engine_svg(json.loads(pages.TRACE.read_text())["traces"])
