"""The benchmarks between two processes: rows and limits, made of what the commands write; and their tables."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks import process_tables, readme
from benchmarks.gpu.peer.layered import measured
from benchmarks.gpu.peer.process_rows import BETTER, COPY, NIXL, ONE, TWO, rows_of
from benchmarks.record import Row
from kvplan.measure.processes.process_bench import ProcessBench


def bench(*, nixl=True):
    """What ``kvplan bench --peer process --output`` writes, as far as it is read."""
    rows = []
    for nbytes in (2048, 8192, 65536, 1 << 20):
        for direction, name in (("push", "NIXL WRITE"), ("pull", "NIXL READ")):
            ways = {TWO: 360.0, ONE: 361.0, COPY: 385.0} | ({name: nbytes / 8192} if nixl else {})
            rows += [{"direction": direction, "run_nbytes": nbytes, "path": path, "gbps": gbps, "broken": ""}
                     for path, gbps in ways.items()]  # fmt: skip
    taken = {"median": 2e-4 if nixl else 9e-5, "tenth": 2e-4, "hundredth": 3e-4, "samples": 200}
    return {"rows": rows, "processes": {"meet": [0.012, 0.011, 0.013], "meet_layers": [0.06, 0.055, 0.07],
                                        "seen": taken, "submit": taken}}  # fmt: skip


def interface(*, nixl=True):
    """What ``benchmarks.gpu.peer.nixl_interface --json`` writes, as far as it is read."""
    ours = {"make_us": 350.0, "post_us": 280.0, "gbps": 190.0, "gbps_in_flight": 330.0, "gbps_after_make": 320.0,
            "gbps_to_last_byte": 330.0}  # fmt: skip
    its = {"make_us": 1500.0, "post_us": 3e5, "gbps": 1.0}
    made = {"large_copy_gbps": 385.0, "kvplan": {"READ": ours, "WRITE": ours}}
    return made | ({"nixl": {"READ": its, "WRITE": its}} if nixl else {})


def found(rows):
    return {(row.group, row.what): row for row in rows}


def test_rates_are_held_to_one_process_and_to_the_better_of_nixl():
    rows = found(rows_of(bench(nixl=False), bench(), interface()))
    pull = rows["between", "pull, 8 KiB"]
    assert (pull.ours, next(iter(pull.beside)), pull.limit, pull.ok) == (360.0, ONE, pytest.approx(350.17), True)
    assert rows["beside NIXL", "pull, 8 KiB"].beside == {BETTER: 1.0}
    assert rows["beside NIXL", "push, 64 KiB"].limit == 15 * 8.0
    assert rows["beside NIXL", "push, 1 MiB"].ok
    assert ("beside NIXL", "push, 2 KiB") not in rows


def test_one_block_is_held_without_nixl_and_shown_with_it():
    rows = found(rows_of(bench(nixl=False), bench(), interface()))
    assert rows["one block", "submit to seen"].ok
    assert rows["one block", "submit"].ok is False
    assert rows["one block", "submit, with NIXL's agents in both processes"].ok is None
    assert (rows["meeting", "one allocation"].ours, rows["meeting", "80 allocations"].ok) == (12.0, False)


def test_transfers_through_the_interface():
    rows = found(rows_of(bench(nixl=False), bench(), interface()))
    assert rows["NIXL's interface", "READ, 4 in flight"].limit == pytest.approx(0.85 * 385)
    assert rows["NIXL's interface", "READ, after the make"].ok is False
    assert rows["NIXL's interface", "READ, to the last byte"].ok
    assert rows["NIXL's interface", "WRITE: post"].beside == {NIXL: 3e5}


def test_host_pools_are_held_to_the_host_path_of_one_process():
    rows = found(rows_of(bench(), None, interface(), bench(nixl=False)))
    assert rows["host pools", "pull, 8 KiB"].limit == pytest.approx(0.9 * 361)


def test_the_last_layer_is_held_to_one_layer_alone():
    made = {"layers": 80, "layer_nbytes": 1 << 20, "tail_us": 61.0, "alone_us": 60.0, "turns": 30}
    row = rows_of(bench(), None, interface(), None, made)[-1]
    assert (row.group, row.limit, row.ok) == ("by layer", 60.0, False)
    assert row.what == "last of 80 layers of 1.05 MB, from its compute to seen"


def test_a_prefill_sends_each_layer_behind_its_compute():
    sizes = ProcessBench("cpu", "cpu", sizes=(8192,), block_runs=8, most_nbytes=1 << 20)
    found = measured(sizes, blocks=3, turns=2)
    assert found["layers"] * found["layer_nbytes"] == 3 * 8 * 8192
    assert min(found["tail_us"], found["alone_us"]) > 0


def test_a_machine_without_nixl_has_no_rows_beside_it():
    rows = rows_of(bench(nixl=False), None, interface(nixl=False))
    assert not any(NIXL in name for row in rows for name in row.beside)
    assert not [row for row in rows if row.group == "beside NIXL"]


@pytest.mark.parametrize("nixl", [True, False])
def test_tables_have_the_rows_of_the_run(tmp_path, monkeypatch, nixl):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    result = tmp_path / "made.json"
    assert process_tables.agents_table(result) == ""
    rows: list[Row] = rows_of(bench(nixl=False), bench() if nixl else None, interface(nixl=nixl))
    gpu = {"name": "a GPU", "driver": "580", "cuda": "13.0", "devices": 2, "link": "NVLink, 18 links"}
    made = {"machine": {"gpu": gpu}, "versions": {"kvplan": "0.1.0"}, "rows": [asdict(row) for row in rows]}
    result.write_text(json.dumps(made))
    made = process_tables.agents_table(result)
    assert "| pull, runs of 2 KiB | 360 GB/s | one process: 361 GB/s | 1.00 |" in made
    assert (f"| push, runs of 64 KiB | 360 GB/s | {BETTER}: 8 GB/s | 45.00 |" in made) == nixl
    assert "2 x a GPU, NVLink, 18 links, driver 580, CUDA 13.0" in made
    through = process_tables.interface_table(result)
    assert ("| READ, posting it | 280 us | NIXL: 300,000 us | 1071.43 |" in through) == nixl
    assert through.endswith("<!-- end of interface numbers -->")
