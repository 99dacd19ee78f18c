"""The parent of the engines, with a child process that plays an engine: a whole run, and deaths."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from benchmarks.engines import turns
from benchmarks.engines.__main__ import main
from benchmarks.engines.shapes import SMOKE
from benchmarks.engines.turns import Run, Visit

pytestmark = pytest.mark.slow

CHILD = """
import json, sys

way = json.loads(sys.argv[1])["way"]

def say(**answer):
    print("@" + json.dumps(answer), flush=True)

if way == "simple":
    sys.exit("no such layout")
print("a line of a library")
say(started=1.0, connector="Connector")
for line in sys.stdin:
    request = json.loads(line)
    do, given = request["do"], request["with"]
    if do == "beside" and way == "own-sync":
        sys.exit("out of memory")
    hits, held = given.get("hits", 1), given.get("held")
    answer = {"ttft": [0.03] * hits, "cpus": [0.1 / hits] * hits, "cpu": 0.1, "seconds": 0.1, "rate": 5e10}
    more = {"alone": {"cached": [held], "local": [0], "tokens": [given.get("first")]}, "resident": {"local": [held]},
            "beside": {"itl": [0.005], "tokens": 9, "unserved": 0},
            "chats": {"cached": 9, "prompted": 10, "answered": 5}}
    say(**answer, **more.get(do, {}))
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A program that answers like an engine; some of its ways die, are silent or refuse."""
    path = tmp_path / "child.py"
    path.write_text(textwrap.dedent(CHILD))
    monkeypatch.setattr(turns, "COMMAND", (sys.executable, str(path)))
    monkeypatch.setattr(turns, "ANSWER_S", 10.0)
    monkeypatch.setattr(turns, "START_S", 10.0)


def test_engines_that_die_are_told_and_the_others_go_on(child):
    run = Run(SMOKE, "cpu", "decode", ("short", "chats", "long"), lambda: None)
    for way in ("simple", "own-sync", "kvplan"):
        Visit(run, "tiny", way).measure(float("inf"))
    assert "no such layout" in run.failed["tiny: simple"]
    assert "out of memory" in run.failed["tiny: own-sync"]
    assert {sample["way"] for sample in run.samples if sample["measure"] == "chats"} == {"kvplan"}


def test_a_smoke_run_prints_its_tables_and_saves(child, tmp_path, capsys):
    output = tmp_path / "out.json"
    assert main(["--smoke", "--ways", "kvplan,kvplan-layers", "--output", str(output)]) == 0
    printed, made = capsys.readouterr().out, json.loads(output.read_text())
    assert "chats: tokens/s, kvplan, by layer" in printed
    assert {row["group"] for row in made["rows"]} == {"tiny"}
    assert {sample["way"] for sample in made["samples"]} == {"kvplan", "kvplan-layers"}
