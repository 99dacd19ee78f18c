"""The benchmarks of wires, on host memory and tiny: they run, and a wrong byte is seen."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.wires import __main__ as wires
from benchmarks.wires.contents import by_block, fill, same
from benchmarks.wires.limits import KIB, MIB, SMOKE, Wire
from benchmarks.wires.wire_rows import beside_rows, rows_of

CPUS = ("cpu", "cpu")
nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")


@pytest.mark.parametrize("row", [16, 20])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_one_wrong_byte_is_seen(row, kind):
    pool = np.zeros(6 * 3 * row * 8, np.uint8)
    fill(pool, 1)
    mine = pool[: 6 * 3 * row].reshape(6, 3, row)
    order = np.array([3, 1, 0, 5, 4, 2])
    theirs = np.ascontiguousarray(mine[order].swapaxes(0, 1))
    made = (mine, theirs)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        made = tuple(map(torch.from_numpy, made))
    views = by_block(made[0], "block layer dim"), by_block(made[1], "layer block dim")
    assert same(views[0], order, views[1], np.arange(6))
    theirs[2, 4, row - 1] ^= 1
    assert not same(views[0], order, views[1], np.arange(6))


@nixl
@pytest.mark.slow
def test_a_smoke_run_saves_its_rows(tmp_path, capsys):
    output = tmp_path / "found.json"
    assert wires.main(["shm", "--smoke", "--slots", "6", "1", "--output", str(output)]) in (0, 1)
    made = json.loads(output.read_text())
    assert not made["failed"], capsys.readouterr().err
    speeds = {row["what"]: row for row in made["rows"] if row["unit"] == "GB/s"}
    assert set(speeds) == {
        f"rows of {size}, packed {way}" for size in ("576 bytes", "8 KiB") for way in ("pull", "push")
    }
    assert all(row["detail"]["posted rows"] == 64 and row["ours"] > 0 for row in speeds.values())
    assert made["scale"]["slots"] == [6, MIB]
    assert made["scales"] == {"shm": made["scale"]}


@nixl
@pytest.mark.slow
def test_a_paced_wire_is_no_faster_than_its_card():
    wire, scale = Wire("slow", "host", "", paced=0.05), replace(SMOKE, rows=(8 * KIB,), slots=(12, 64 * KIB))
    result = wires.measured(wire, scale, CPUS, "packed")
    assert max(result["one message"].values()) <= 0.05
    assert all(gbps <= 0.05 for gbps in result["rows"][8 * KIB]["GB/s"].values())
    assert "READ flat" not in result["rows"][8 * KIB]["GB/s"]
    assert all(row.unit != "GB/s" or set(row.beside) == {"one message"} for row in rows_of(wire, result))


@nixl
@pytest.mark.slow
def test_transfers_beside_a_stand_in_for_decode():
    wire, scale = Wire("slow", "host", "", paced=0.2), replace(SMOKE, rows=(8 * KIB,))
    rows = beside_rows(wire, wires.measured(wire, scale, CPUS, "decode"))
    assert [row.unit for row in rows] == ["GB/s", "x", "x"]
    assert all(row.limit is None and row.ours > 0 for row in rows)
    assert 0 < rows[0].ours <= 0.2
    assert min(rows[1].detail["iterations"]) > 0
