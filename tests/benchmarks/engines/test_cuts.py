"""Groups of layers that are compared in turn: the cuts and paths of the kinds, and the ratios within turns."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.engines import cuts
from benchmarks.engines.cuts import CUTS, DEFAULT, Hit, changing, summary
from benchmarks.engines.pages import ROOT
from kvplan.cost.profile import default
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Paged
from tests.simulated import Device
from tests.simulated.executors import MOVE, OnDevice, executor_on, pair_on

RECORDS = sorted((ROOT / "benchmarks" / "results" / "engines" / "cuts").glob("*.json"))


def test_each_kind_has_its_groups_and_its_path():
    device = Device()
    pair = pair_on(device, "load", OnDevice("layer: block kv token head dim", layer=16),
                   Paged("block layer kv token head dim", layer=16))  # fmt: skip
    plan, found, cut = pair.plan(MOVE), {}, {}
    limits = Limits(layer_group_nbytes=1, halved_nbytes=plan.nbytes, halved_piece_nbytes=1)
    with executor_on(device, profile=replace(default(), how="shipped"), limits=limits) as executor:
        usual = executor.submit(plan, by_layer=True).result().path
        with changing(cut) as now_is:
            for kind in (*DEFAULT, "doubling"):
                now_is[0] = kind
                transfer = executor.submit(plan, by_layer=True, beside_seconds=1)
                transfer.synchronize()
                found[kind] = [len(layers) for layers in transfer.layer_groups]
                assert transfer.result().path == ("kernel" if kind.endswith("kernel") else usual)
                pair.check()
        assert cut == found
        now = executor.submit(plan, by_layer=True)
        now.synchronize()
        assert len(now.layer_groups) == 8
    equal, told = [2] * 8, [1, 2, 4, 8, 1]
    assert found == {"equal": equal, "told": told, "whole": [16], "equal-kernel": equal, "told-kernel": told,
                     "doubling": [2, 4, 8, 2]}  # fmt: skip


def hits(pace, **ttft):
    return [Hit(kind, ms * pace, ms * pace, pace, pace) for kind, ms in ttft.items()]


def test_hits_of_one_turn_are_compared():
    """Of two kinds, one is quicker by a tenth, and the CPU's pace changes by more."""
    turns = [hits(pace, told=9.0, equal=10.0) for pace in (1.0, 1.8, 1.0, 1.9, 1.1)]
    equal, told = summary(turns)
    assert (equal["kind"], told["kind"]) == ("equal", "told"), "whatever their order in a turn"
    assert told["ttft, ratio"] == told["cpu, ratio"] == [0.9, 0.9, 0.9]
    assert told["ttft, ms more"] == told["ttft over resident, ms more"] == [-1.1, -1.9, -1.0]
    assert "ttft, ratio" not in equal
    assert equal["ttft over resident"] == 9.9
    mixed = [*turns, *(hits(1.0, equal=10.0, told=11.0) for _ in range(4))]
    assert summary(mixed)[1]["ttft, ratio"] == [0.9, 0.9, 1.1]


@pytest.mark.parametrize("result", RECORDS, ids=lambda result: result.stem)
def test_a_record_is_the_summary_of_its_turns(result):
    record = json.loads(result.read_text())
    assert tuple(record["fields"]) == Hit._fields
    turns = [[Hit(*each) for each in turn] for turn in record["samples"]]
    assert record["rows"] == summary(turns)
    assert record["machine"]["gpu"]["name"] == "NVIDIA H200"
    assert {hit.kind for turn in turns for hit in turn} == set(DEFAULT)


@pytest.mark.parametrize("kinds", ["equal,halves", "kernel"])
def test_unknown_kinds_are_a_usage_error(kinds, capsys):
    with pytest.raises(SystemExit, match="2"):
        cuts.main(["--kinds", kinds])
    assert f"give some of {', '.join(CUTS)}" in capsys.readouterr().err
