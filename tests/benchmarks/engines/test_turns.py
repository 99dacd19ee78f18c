"""The parent of the engines, with a child process that plays an engine: turns, deaths, silence and the time limit."""

from __future__ import annotations

import json
import sys
import textwrap
import time

import pytest

from benchmarks.engines import turns
from benchmarks.engines.__main__ import arguments_of, main
from benchmarks.engines.shapes import FULL, SMOKE
from benchmarks.engines.turns import Ask, Batch, Run, phases

pytestmark = pytest.mark.slow

CHILD = """
import json, subprocess, sys, time

way = json.loads(sys.argv[1])["way"]

def say(**answer):
    print("@" + json.dumps(answer), flush=True)

if way == "simple":
    sys.exit("no such layout")
if way == "lmcache":  # a helper process inherits stdout and outlives the engine
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sys.exit("no room")
print("a line of a library")
say(started=1.0, connector="Connector")
for line in sys.stdin:
    request = json.loads(line)
    do, given = request["do"], request["with"]
    if do == "beside" and way == "own-sync":
        sys.exit("out of memory")
    if do == "resident" and way == "own-packed":
        time.sleep(60)
    if do == "chats" and way == "own":
        say(error="ValueError: no room")
        continue
    hits = given.get("hits", 1)
    answer = {"ttft": [0.03] * hits, "cpus": [0.1 / hits] * hits, "cpu": 0.1, "seconds": 0.1, "rate": 5e10,
              "answers": [[1, -0.5]]}  # fmt: skip
    if do == "alone":
        answer |= {"cached": [given["held"]], "local": [0], "tokens": [given["first"]]}
    if do == "resident":
        answer |= {"local": [given["held"]]}
    if do == "beside":
        answer |= {"itl": [0.005], "quiet": [0.004], "tokens": 9, "unserved": 0}
    if do == "chats":
        answer |= {"cached": 9, "prompted": 10, "answered": 5, "steps": [[3, 1, 0.02], [1, 1, 0.01]]}
    say(**answer)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A program that answers like an engine; some of its ways die, are silent or refuse."""
    path = tmp_path / "child.py"
    path.write_text(textwrap.dedent(CHILD))
    monkeypatch.setattr(turns, "COMMAND", (sys.executable, str(path)))
    monkeypatch.setattr(turns, "ANSWER_S", 10.0)
    monkeypatch.setattr(turns, "START_S", 10.0)


def batch_of(*ways, budget=float("inf")):
    reports = []
    run = Run(budget, lambda run: reports.append(len(run.samples)))
    batch = Batch(run, "tiny", 0, ways, SMOKE, "cpu", "decode")
    batch.measure(("short", "chats", "long"), budget)
    batch.close()
    return run, reports


def test_every_way_has_every_measure_in_every_round(child):
    run, reports = batch_of("kvplan", "kvplan-layers")
    assert run.failed == {}
    asks = sum(len(phase.asks) for phase in phases(SMOKE))
    assert len(run.samples) == 2 * SMOKE.rounds * asks == reports[-1]
    assert run.facts["tiny"]["link"] == 5e10
    assert set(run.facts["tiny"]["answers"]) == {"640", "1280"}


def test_engines_that_are_alone_have_their_rounds_each_time_and_are_compared(child, tmp_path):
    made = tmp_path / "made.json"
    given = ["--smoke", "--ways", "kvplan,kvplan-layers", "--alone", "2", "--phases", "short", "--out", str(made)]
    assert main(given) == 0
    result = json.loads(made.read_text())
    assert result["alone"] is True
    samples = [one for one in result["samples"] if one["measure"] == "beside"]
    assert [(one["way"], one["round"], one["batch"]) for one in samples] == [
        ("kvplan", 0, 0), ("kvplan", 1, 0), ("kvplan-layers", 0, 0), ("kvplan-layers", 1, 0),
        ("kvplan-layers", 2, 0), ("kvplan-layers", 3, 0), ("kvplan", 2, 0), ("kvplan", 3, 0),
    ]  # fmt: skip


def test_engines_are_alone_as_often_as_is_said(capsys):
    with pytest.raises(SystemExit):
        arguments_of(["--alone", "-1"])
    assert "--alone is -1; give how often each engine is started" in capsys.readouterr().err


def test_a_child_of_a_dead_engine_holds_nothing_up(child):
    began = time.monotonic()
    batch = Batch(Run(9.0, lambda run: None), "tiny", 0, ["lmcache"], SMOKE, "cpu", "decode")
    batch.checked(batch.engines[0], batch.engines[0].hear(0.2))
    assert time.monotonic() - began < 30
    assert "no answer" in batch.run.failed["tiny: lmcache"]


def test_ways_take_turns_and_begin_in_turn(child):
    run, _ = batch_of("kvplan", "kvplan-layers")
    first = [one["way"] for one in run.samples if one["measure"] == "beside"]
    assert first == ["kvplan", "kvplan-layers", "kvplan-layers", "kvplan"]


def test_the_same_hit_has_the_same_number_in_every_way_and_is_never_repeated(child):
    run, _ = batch_of("kvplan", "kvplan-layers")
    numbers = {way: [one["tokens"][0] for one in run.samples if one["way"] == way and one["measure"] == "alone"]
               for way in ("kvplan", "kvplan-layers")}  # fmt: skip
    assert sorted(numbers["kvplan"]) == sorted(numbers["kvplan-layers"])
    held = [one["held"] for one in run.samples if one["way"] == "kvplan" and one["measure"] == "alone"]
    assert len(set(zip(held, numbers["kvplan"], strict=True))) == len(held)


def test_engines_that_die_are_told_and_the_others_go_on(child):
    run, _ = batch_of("simple", "own-sync", "kvplan")
    assert "no such layout" in run.failed["tiny: simple"]
    assert "out of memory" in run.failed["tiny: own-sync"]
    assert {one["way"] for one in run.samples if one["measure"] == "chats"} == {"kvplan"}


def test_a_silent_engine_is_ended(child, monkeypatch):
    monkeypatch.setattr(turns, "ANSWER_S", 0.5)
    run, _ = batch_of("own-packed", "kvplan")
    assert "no answer for 0.5 s" in run.failed["tiny: own-packed"]
    assert {one["way"] for one in run.samples if one["measure"] == "beside"} == {"kvplan"}


def test_an_error_of_one_measure_leaves_the_others(child):
    run, _ = batch_of("own")
    assert run.failed == {"tiny: own": "ValueError: no room"}
    assert {one["measure"] for one in run.samples} == {"alone", "resident", "beside"}


def test_the_time_limit_leaves_one_round(child):
    run, _ = batch_of("kvplan", budget=0.0)
    assert {one["round"] for one in run.samples} == {0}
    assert "cut short after 1 of 2 rounds" in run.failed["tiny: short, batch 1"]


def test_without_offloading_few_rounds_and_hits_are_taken():
    ask = Ask("alone", 640, 64, 12)
    assert ask.arguments("none", 0)["hits"] == turns.SLOW_HITS
    assert ask.arguments("own", 0)["hits"] == 12


def test_the_measures_of_a_round_are_those_asked_for():
    short, chats, long = phases(FULL)
    assert [ask.suffix for ask in short.asks if ask.measure == "alone"] == [1, 128, 512, 2048]
    assert [ask.measure for ask in chats.asks] == ["chats"]
    assert {ask.held for ask in long.asks} == {28000}


@pytest.mark.parametrize(
    "wrong",
    [["--shapes", "9b"], ["--ways", "own-fast"], ["--phases", "last"], ["--held", "1,2,3"]],
    ids=lambda it: it[0],
)
def test_wrong_arguments_are_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        arguments_of(wrong)
    assert wrong[1].partition(",")[0] in capsys.readouterr().err or "--held" in wrong


def test_a_smoke_run_prints_its_tables_and_saves(child, tmp_path, capsys):
    output = tmp_path / "out.json"
    assert main(["--smoke", "--ways", "kvplan,kvplan-layers", "--out", str(output)]) == 0
    assert "| kvplan, by layer |" in capsys.readouterr().out
    assert '"kvplan.benchmark"' in output.read_text()
