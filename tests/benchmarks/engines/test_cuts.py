"""Groups of layers that are compared in turn: the cuts and paths of the kinds, and the ratios within turns."""

from __future__ import annotations

import json

import pytest

from benchmarks.engines import cuts
from benchmarks.engines.cuts import CUTS, DEFAULT, Hit, Ratio, changing, ratio, summary
from benchmarks.engines.pages import ROOT
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Paged
from tests.simulated import Device
from tests.simulated.executors import MOVE, OnDevice, executor_on, pair_on

RECORD = ROOT / "benchmarks" / "results" / "engines" / "cuts-nvidia-h200-gqa1.json"


def test_each_kind_has_its_groups_and_its_path():
    device = Device()
    pair = pair_on(device, "load", OnDevice("layer: block kv token head dim", layer=16),
                   Paged("block layer kv token head dim", layer=16))  # fmt: skip
    plan, found = pair.plan(MOVE), {}
    with executor_on(device, limits=Limits(layer_group_nbytes=1)) as executor:
        usual = executor.submit(plan, by_layer=True).result().path
        with changing() as now_is:
            for kind in DEFAULT:
                now_is[0] = kind
                transfer = executor.submit(plan, by_layer=True, compute_seconds=1)
                transfer.synchronize()
                found[kind] = [len(layers) for layers in transfer.layer_groups], transfer.result().path
                pair.check()
        last = executor.submit(plan, by_layer=True, compute_seconds=1)
        last.synchronize()
        assert [len(layers) for layers in last.layer_groups] == [2] * 8, "a unit has too few bytes of two layers"
    assert {kind: sizes for kind, (sizes, _) in found.items()} == {
        "equal": [2] * 8, "doubling": [2, 4, 8, 2], "whole": [16], "equal-kernel": [2] * 8,
        "doubling-kernel": [2, 4, 8, 2],
    }  # fmt: skip
    assert [path for _, path in found.values()] == [usual, usual, usual, "kernel", "kernel"]


def hits(pace, **ttft):
    return [Hit(kind, ms * pace, ms, ms, pace, pace) for kind, ms in ttft.items()]


def test_a_ratio_is_one_within_turns():
    """Of two kinds, one is quicker by a tenth, and the CPU's pace changes by more."""
    turns = [hits(pace, equal=10.0, doubling=9.0) for pace in (1.0, 1.8, 1.0, 1.9, 1.1)]
    assert ratio(turns, "doubling", "equal", "ttft") == pytest.approx(Ratio(0.9, 0.9, 0.9))
    mixed = [*turns, *(hits(1.0, equal=10.0, doubling=11.0) for _ in range(4))]
    found = ratio(mixed, "doubling", "equal", "ttft")
    assert found == pytest.approx(Ratio(0.9, 0.9, 1.1))


def test_the_first_kind_is_the_base_whatever_its_place_in_a_turn():
    rows = summary([hits(1.0, whole=12.0, equal=10.0), hits(2.0, equal=10.0, whole=12.0)])
    assert [row["kind"] for row in rows] == ["equal", "whole"]
    assert rows[1]["ttft / equal"] == [1.2, 1.2, 1.2]
    assert rows[0]["more than resident"] == 13.5


def test_the_record_is_the_summary_of_its_turns():
    record = json.loads(RECORD.read_text())
    assert tuple(record["fields"]) == Hit._fields
    turns = [[Hit(*each) for each in turn] for turn in record["turns"]]
    assert record["rows"] == summary(turns)
    assert record["machine"]["gpu"]["name"] == "NVIDIA H200"
    assert {hit.kind for turn in turns for hit in turn} == set(DEFAULT)


@pytest.mark.parametrize("kinds", ["equal,halves", "kernel"])
def test_unknown_kinds_are_a_usage_error(kinds, capsys):
    with pytest.raises(SystemExit, match="2"):
        cuts.main(["--kinds", kinds])
    assert f"give some of {', '.join(CUTS)}" in capsys.readouterr().err
