"""Python of the documents runs, links lead somewhere, and figures of the README are those of its files."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import pytest

from tests.docs.fenced import DOCUMENTS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURE = (ROOT / "docs" / "pictures" / "gain.svg").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
BETTER = "the better of push and pull"


class Figure(NamedTuple):
    """Where a row of the README's table of gains comes from: a file, the row's group and name, and the baseline."""

    file: str
    group: str
    what: str
    baseline: str


ENGINE = "engines/engines-nvidia-h200-8b-alone.json"
CHATS = "vLLM's OffloadingConnector, BLHNC, chunks of 5 blocks"
SYNC = CHATS.replace("chunks", "sync, chunks")


def engine(what: str, baseline: str) -> Figure:
    return Figure(ENGINE, "8b", f"{what}: TTFT p50, kvplan, by layer, chunks of 5 blocks", baseline)


def between(file: str, what: str, baseline: str) -> Figure:
    return Figure(f"gpu-nvidia-h200-{file}.json", "between", what, baseline)


FIGURES = {
    "vLLM: a cached prompt of 6,000 tokens, first token": engine("alone, 6,000 held + 512 new", SYNC),
    "vLLM: the same beside 16 decoding requests": engine("beside decoding, 6,000 held + 512 new", SYNC),
    "vLLM: chats of several turns, first token": engine("chats", CHATS),
    "host to GPU, runs of 8 KiB": Figure("gpu-nvidia-h200.json", "staged", "load, 336 MB", "12 programs, 8-byte words"),
    "GPU to GPU, NVLink, runs of 8 KiB": between("peer", f"{BETTER}, 8 KiB", "torch indexing"),
    "process to process, NVLink, runs of 8 KiB": between("processes", "pull, 8 KiB", "cuMemcpyBatchAsync"),
}
NO_BASELINES = (
    "one large copy",
    "SM ceiling",
    "one process",
    "kernel",
    "copy_engine_2d",
)  # ceilings; kvplan's own paths


def recorded(figure: Figure) -> tuple[float, dict[str, float]]:
    """kvplan's value and those beside it, without ceilings; those beside the better route are of both routes."""
    rows = {(row["group"], row["what"]): row for row in json.loads((RESULTS / figure.file).read_text())["rows"]}
    row = rows[figure.group, figure.what]
    beside = dict(row["beside"])
    if BETTER in figure.what:
        for route in ("push", "pull"):
            for name, value in rows[figure.group, figure.what.replace(BETTER, route)]["beside"].items():
                beside[name] = max(value, beside.get(name, 0.0))
    return row["ours"], {name: value for name, value in beside.items() if name not in NO_BASELINES}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_python_in_a_document_runs(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_figures_of_the_readme_are_those_of_its_files():
    table = re.findall(
        r"^\| (.+?) \| ([\d.,]+) (ms|GB/s) \| ([\d.,]+) \3: (.+?) \| x([\d.]+) \|$", README, re.MULTILINE
    )
    assert [words for words, *_ in table] == list(FIGURES)
    for words, ours, unit, best, name, times in table:
        figure = FIGURES[words]
        value, beside = recorded(figure)
        assert beside[figure.baseline] == (min if unit == "ms" else max)(beside.values()), "the best baseline is shown"
        gain = beside[figure.baseline] / value if unit == "ms" else value / beside[figure.baseline]
        assert (ours, best, times) == (number(value), number(beside[figure.baseline]), number(gain)), words
        assert f">{ours} {unit}: kvplan<" in PICTURE
        assert f">{best} {unit}: {name}<" in PICTURE.replace("&#x27;", "'")
        assert f"(benchmarks/results/{figure.file})" in README


def test_the_other_figures_of_the_readme_are_those_of_its_files():
    rows = {row["what"]: row for row in json.loads((RESULTS / ENGINE).read_text())["rows"]}
    rate = rows["chats: tokens/s, kvplan, by layer, chunks of 5 blocks"]
    assert f"x{number(rate['ours'] / max(rate['beside'].values()))} the tokens per second" in README
    second = between("processes-second-machine", "pull, 8 KiB", "cuMemcpyBatchAsync")
    ours, beside = recorded(second)
    best = beside[second.baseline]
    assert f"{second.file}) had {number(best)} GB/s, so x{number(ours / best)}." in README
