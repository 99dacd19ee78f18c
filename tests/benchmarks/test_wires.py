"""The benchmarks of wires, on host memory and tiny: they run, compare bytes, and hold rows to their limits."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.record import document, machine, save
from benchmarks.wires import __main__ as wires
from benchmarks.wires import far, wire_pages
from benchmarks.wires.contents import by_block, fill, same
from benchmarks.wires.limits import FULL, KIB, MIB, SMOKE, WIRES, Wire
from benchmarks.wires.prefill import arrival, tail_of
from benchmarks.wires.wire_rows import beside_rows, prefill_rows, rows_of

CPUS = ("cpu", "cpu")
nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")


def test_contents_are_the_same_for_numpy_and_torch_and_differ_by_seed():
    torch = pytest.importorskip("torch")
    ours, theirs, other = (
        np.zeros(1 << 12, np.uint8),
        torch.zeros(1 << 12, dtype=torch.uint8),
        np.zeros(1 << 12, np.uint8),
    )
    fill(ours, 7)
    fill(theirs, 7)
    fill(other, 8)
    np.testing.assert_array_equal(ours, theirs.numpy())
    assert (ours == other).mean() < 0.02
    assert np.bincount(ours, minlength=256).max() < 60  # as even as random bytes


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


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["near", "far"])
def test_a_side_sees_one_wrong_byte_of_what_the_other_one_filled(name, kind, monkeypatch):
    if kind == "torch":
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(far, "_buffer", lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8))
    mine, theirs = (far.Side.__new__(far.Side) for _ in range(2))
    for side, who in ((mine, name), (theirs, "far" if name == "near" else "near")):
        side.notation, side.scale, side.device = far.ORDERS[who], replace(SMOKE, nbytes=8192, most_rows=64), "cpu"
        side.other = next(order for order in far.ORDERS.values() if order != side.notation)
        side.buffer = far._buffer(8192, "cpu")
        side.pools = {64: side._pool(side.buffer, 64, side.notation)}
    theirs.fill(5)
    blocks = SMOKE.layers * 4
    a, b = (np.random.default_rng(seed).permutation(blocks) for seed in (1, 2))
    by_block(mine.pools[64], mine.notation)[b] = by_block(theirs.pools[64], theirs.notation)[a]
    assert mine.holds(64, b, a, 5)
    assert not mine.holds(64, b, a, 6)
    mine.buffer[777] ^= 4
    assert not mine.holds(64, b, a, 5)


def test_wires_of_gpus_move_large_transfers_also_in_small_rows():
    for name in ("cuda_ipc", "cuda_ipc_50"):
        scale = FULL.on(WIRES[name])
        moved = {row: scale.blocks(row) * scale.layers * row for row in scale.rows}
        assert {moved[256], moved[8 * KIB], moved[64 * KIB]} == {4096 * MIB}
        assert 4095 * MIB < moved[576] <= 4096 * MIB
        assert scale.most_posted <= 32768
    assert [FULL.on(WIRES["cuda_tcp"]).blocks(row) * 16 * row > 127 * MIB for row in FULL.rows] == [True] * 4
    assert FULL.on(WIRES["cuda_tcp"]).nbytes == FULL.on(WIRES["shm"]).nbytes == 128 * MIB


def found(gbps: float, *, posted: float | None = None, whole: float = 100.0, row: int = 8192):
    """A result of one size of rows."""
    speeds = {"packed pull": gbps, "packed push": gbps}
    if posted is not None:
        speeds["READ flat"] = posted
    ways = ("packed pull", "packed push")
    one = {"nbytes": 1 << 30, "descriptors": 131072, "posted rows": 8192, "GB/s": speeds,
           "CPU ms per GB": {name: [1.0, 2.0] for name in ways},
           "messages": {name: {"chunks": 32, "posted": 32} for name in ways}}  # fmt: skip
    made = {
        "one message": {"READ": whole / 2, "WRITE": whole},
        "rows": {row: one},
        "note": {"us": 20.0},
        "one block": {
            f"{way} {name}": us
            for way, us in (("auto", 69.0), ("packed", 500.0), ("direct", 68.0))
            for name in ("pull", "push")
        }
        | {"READ flat": 30.0, "READ strided": 31.0, "WRITE flat": 32.0},
    }
    if posted is not None:
        made["NIXL as it comes"] = {row: {"GB/s": {"READ flat": posted, "WRITE flat": posted / 2}, "rows": 8192}}
    return made


@pytest.mark.parametrize(
    ("wire", "gbps", "posted", "ok"),
    [("cuda_ipc", 71.0, 3.5, True), ("cuda_ipc", 71.0, 3.6, False), ("cuda_ipc", 69.0, 1.0, False),
     ("cuda_ipc", 71.0, None, True), ("cuda_ipc_50", 95.5, None, True), ("cuda_ipc_50", 94.0, None, False)],
)  # fmt: skip
def test_packed_rows_are_held_to_one_message_and_to_a_descriptor_each(wire, gbps, posted, ok):
    rows = rows_of(WIRES[wire], found(gbps, posted=posted))
    speeds = [row for row in rows if row.unit == "GB/s"]
    assert [row.ok for row in speeds] == [ok, ok]
    assert ("a descriptor each" in speeds[0].beside) == (posted is not None)
    assert all(row.detail.get("posted rows") == (None if posted is None else 8192) for row in speeds)
    assert all(row.ok for row in rows if row.unit != "GB/s" and row.limit is not None)
    assert len([row for row in rows if row.limit is not None]) == 8


def test_compute_beside_decode_is_held_to_its_limit_unless_it_ran_dry():
    window = {"slowdown": 1.02, "mean slowdown": 1.05, "iteration ms": 2.5, "iterations": 200, "dry": False}
    result = {"one message": {"WRITE": 49.0}, "beside": {"nbytes": 1 << 30, "GB/s": 48.0, "transfers": 60,
              "sender": [window, window], "receiver": [window | {"slowdown": 1.08}] * 2}}  # fmt: skip
    assert [row.ok for row in beside_rows(WIRES["cuda_ipc_50"], result)] == [None, True, False]
    result["beside"]["receiver"][0]["dry"] = True
    told = beside_rows(WIRES["cuda_ipc_50"], result)[2]
    assert (told.ok, "broken" in told.detail) == (None, True)


@pytest.mark.parametrize(("seconds", "floor"), [(-1e-6, 0.0), (0.9e-3, 1e-3)])
def test_a_layer_that_comes_before_it_can_have_is_no_result(seconds, floor):
    with pytest.raises(RuntimeError, match="too soon for its bytes"):
        tail_of(seconds, floor)


def test_a_note_that_does_not_come_is_told(monkeypatch):
    monkeypatch.setattr("benchmarks.wires.prefill.PATIENCE", 0.01)
    assert arrival(lambda: [("near", b"other")], b"pushed") is None


def test_the_last_layer_of_a_prefill_is_held_to_its_bytes_and_a_note():
    one = {"layers": 16, "layer nbytes": 50_000_000, "products a layer": 2, "compute us": 9.0, "alone us": 1500.0}
    found = {"one message": {"READ": 25.0, "WRITE": 50.0}, "note": {"us": 40.0}}
    for tails, ok in (([900.0, 1010.0, 1500.0], True), ([1030.0], False)):
        (row,) = prefill_rows(WIRES["cuda_ipc_50"], found | {"prefill": one | {"tail us": tails}})
        assert (row.beside["its bytes"], row.beside["a note"], row.limit) == (1000.0, 20.0, 1020.0)
        assert row.ok is ok
    assert prefill_rows(WIRES["shm"], found | {"prefill": one | {"tail us": tails}})[0].ok is None


def test_pages_show_two_gpus_and_decode_once_they_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(wire_pages, "TWO_GPUS", tmp_path / "two.json")
    monkeypatch.setattr(wire_pages, "SMALLER", tmp_path / "smaller.json")
    monkeypatch.setattr(wire_pages, "BESIDE", tmp_path / "beside.json")
    assert not [*wire_pages.two_gpus(), *wire_pages.beside()]
    for name, gbps, posted in (("two", 71.0, 3.5), ("smaller", 60.0, None)):
        assert not [*wire_pages.two_gpus()]
        rows = [*rows_of(WIRES["cuda_ipc"], found(gbps, posted=posted)), *rows_of(WIRES["cuda_ipc_50"], found(48.0))]
        save(tmp_path / f"{name}.json", document(rows, scale=FULL, started=machine()))
    window = {"slowdown": 1.02, "dry": False}
    result = {"one message": {"WRITE": 49.0}, "beside": {"nbytes": 1 << 30, "GB/s": 48.0, "transfers": 60,
              "sender": [window], "receiver": [window | {"slowdown": 1.01}]}}  # fmt: skip
    beside = beside_rows(WIRES["cuda_ipc_50"], result)
    save(tmp_path / "beside.json", document(beside, scale=FULL, started=machine()))
    shown = [*wire_pages.two_gpus()]
    assert len(shown) == 7
    assert shown[3] == "| `cuda_ipc`, rows of 8 KiB, packed pull | 71 | 0.71 | 60 | 0.60 | 3.5 | 20 |"
    assert shown[5] == "| `cuda_ipc` at 50 GB/s, rows of 8 KiB, packed pull | 48 | 0.48 | 48 | 0.48 | - | - |"
    save(tmp_path / "smaller.json", document(rows_of(WIRES["cuda_ipc"], found(60.0)), scale=FULL, started=machine()))
    assert [*wire_pages.two_gpus()][
        5
    ] == "| `cuda_ipc` at 50 GB/s, rows of 8 KiB, packed pull | 48 | 0.48 | - | - | - | - |"
    assert [*wire_pages.beside()][-1] == (
        "| `cuda_ipc` at 50 GB/s, rows of 8 KiB, packed push | 48 | x 1.020 | x 1.010 |"
    )


def test_pages_show_two_rings_once_both_are_recorded(tmp_path, monkeypatch):
    files = [tmp_path / f"{number}.json" for number in range(4)]
    monkeypatch.setattr(wire_pages, "RINGS", {"two GPUs, NIXL": files[:2], "a second machine": files[2:]})
    lines = []
    for file, gbps in zip(files, (71.0, 80.0, 75.0, 78.0), strict=True):
        lines.append(len([*wire_pages.rings()]))
        save(file, document(rows_of(WIRES["cuda_ipc"], found(gbps)), scale=FULL, started=machine()))
    shown = [*wire_pages.rings()]
    assert [*lines, len(shown)] == [0, 0, 5, 5, 10]
    assert shown[8] == "| `cuda_ipc`, rows of 8 KiB, packed pull | 0.75 | 2.00 | 0.78 | 2.00 |"
    assert shown[1] == (
        "| two GPUs, NIXL | 24 slots of 64 MiB, of one message | CPU, ms a GB "
        "| 8 of 256 MiB, of one message | CPU, ms a GB |"
    )
    assert shown[3] == "| `cuda_ipc`, rows of 8 KiB, packed pull | 0.71 | 2.00 | 0.80 | 2.00 |"


def test_pages_show_one_block_once_all_runs_are_recorded(tmp_path, monkeypatch):
    files = {name: tmp_path / f"{name}.json" for name in ("TWO_GPUS", "SMALLER", "LARGER")}
    for name, file in files.items():
        monkeypatch.setattr(wire_pages, name, file)
    for file in files.values():
        assert not [*wire_pages.one_block()]
        rows = [row for wire in ("cuda_ipc", "cuda_ipc_50") for row in rows_of(WIRES[wire], found(71.0, posted=3.5))]
        save(file, document(rows, scale=FULL, started=machine()))
    shown = [*wire_pages.one_block()]
    assert len(shown) == 3 + 3 * 2
    assert shown[3] == "| one block, pull, first run | 69 | 30 | 70 |"
    assert shown[-1] == "| one block, push, third run | 69 | 32 | 70 |"


def test_pages_show_the_last_layer_of_a_prefill_once_it_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(wire_pages, "PREFILL", tmp_path / "prefill.json")
    assert not [*wire_pages.prefill()]
    one = {"layer nbytes": 64 << 20, "layers": 16, "alone us": 1500.0, "tail us": [1600.0]}
    found = {"one message": {"WRITE": 50.0}, "note": {"us": 40.0}, "prefill": one}
    rows = prefill_rows(WIRES["cuda_ipc_50"], found)
    save(tmp_path / "prefill.json", document(rows, scale=FULL, started=machine()))
    assert [*wire_pages.prefill()][-1] == "| `cuda_ipc` at 50 GB/s, 64 MiB | 1,600 | 1,362 | 1,500 |"


@nixl
def test_a_machine_without_gpus_says_so(monkeypatch, capsys):
    monkeypatch.setattr(wires, "devices", tuple)
    assert wires.main(["cuda_ipc", "--smoke"]) == 1
    assert "cuda_ipc failed: this machine has no GPU" in capsys.readouterr().err
    assert wires.main(["--beside", "decode"]) == 1
    assert "no GPU for a wire beside decode" in capsys.readouterr().err


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


@nixl
@pytest.mark.slow
def test_a_push_by_layer_beside_a_stand_in_for_prefill():
    scale = replace(SMOKE, rows=(8 * KIB,))
    (row,) = prefill_rows(Wire("shm", "host", ""), wires.measured(WIRES["shm"], scale, CPUS, "prefill"))
    found = row.detail
    assert (found["layers"], found["layer nbytes"]) == (scale.layers, scale.nbytes // scale.layers)
    assert len(found["tail us"]) == scale.repeats
    assert found["compute us"] > 0
    assert row.beside["this layer alone"] > 0
