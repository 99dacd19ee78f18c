"""The benchmarks of wires, on host memory and tiny: they run, and a wrong byte is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.wires import __main__ as wires
from benchmarks.wires.far import fill, same
from benchmarks.wires.rows import beside_rows, rows_of
from benchmarks.wires.sizes import DECODE, KIB, MIB, SMOKE, Wire

CPUS = ("cpu", "cpu")
nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_one_wrong_byte_is_seen(kind):
    mine, order = np.zeros((6, 3, 16), np.uint8), np.array([3, 1, 0, 5, 4, 2])
    if kind == "torch":
        mine = pytest.importorskip("torch").from_numpy(mine)
    fill(mine.reshape(-1), 1)
    theirs = mine[order]
    assert same(mine, order, theirs, np.arange(6))
    theirs[4, 2, 15] ^= 1
    assert not same(mine, order, theirs, np.arange(6))


@nixl
@pytest.mark.slow
def test_a_smoke_run_saves_its_rows(tmp_path):
    output = tmp_path / "found.json"
    assert wires.main(["shm", "--smoke", "--slots", "6", "1", "--output", str(output)]) == 0
    made = json.loads(output.read_text())
    speeds = {row["what"]: row for row in made["rows"] if row["unit"] == "GB/s"}
    ways = {f"rows of {size}, packed {way}" for size in ("576 bytes", "8 KiB") for way in ("pull", "push")}
    assert set(speeds) == ways
    assert all(row["detail"]["posted rows"] == 64 and row["ours"] > 0 for row in speeds.values())
    assert made["scales"]["shm"]["slots"] == [6, MIB]


@nixl
@pytest.mark.slow
def test_a_paced_wire_is_no_faster_than_its_card_also_beside_a_stand_in_for_decode():
    wire, scale = Wire("slow", "host", "", paced=0.05), replace(SMOKE, rows=(8 * KIB,), slots=(12, 64 * KIB))
    result = wires.measured(wire, scale, CPUS)
    assert all(gbps <= 0.05 for gbps in result["rows"][8 * KIB]["GB/s"].values())
    assert all(row.unit != "GB/s" or set(row.beside) == {"one message"} for row in rows_of(wire, result, {}))
    rows = list(beside_rows(wire, wires.measured(wire, replace(SMOKE, rows=(8 * KIB,)), CPUS, DECODE)))
    assert [row.unit for row in rows] == ["GB/s", "x", "x"]
    assert 0 < rows[0].ours <= 0.05
    assert min(rows[1].detail["iterations"]) > 0
