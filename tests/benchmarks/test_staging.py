"""The benchmark of gather and scatter, on the CPU."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu.staging import measured
from benchmarks.gpu.staging.__main__ import files_of, main
from benchmarks.gpu.staging.pools import KINDS
from benchmarks.gpu.staging.ways import COPY, IN_RING, ROWS, SGLANG


def test_every_kind_of_rows_is_moved_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    output = tmp_path / "made.json"
    assert main(["--device", "cpu", "--mib", "0.1", "--layers", "2", "--repeats", "1", "--output", str(output)]) == 0
    made = json.loads(output.read_text())
    held = [row for row in made["rows"] if COPY in row["beside"] and "ring" not in row["what"]]
    assert [(row["group"].split(",")[0], row["what"]) for row in held] == [
        (step, kind.told) for kind in KINDS for step in ("gather", "scatter")
    ]
    assert "not measured: give --sglang" in capsys.readouterr().out


def test_rows_have_the_bytes_that_their_names_say():
    assert [kind.row for kind in KINDS] == [256, 576, 8 << 10, 64 << 10]


def test_a_missing_file_is_a_reason(tmp_path):
    files, why = files_of(tmp_path)
    assert files is None
    assert why.startswith("not measured: FileNotFoundError")


def test_the_faster_kernel_of_sglang_makes_the_limit():
    speed = measured.Speed
    found = {"kvplan": speed(12, 1, 1), COPY: speed(13, 1, 1), SGLANG: speed(5, 1, 1), ROWS: speed(9, 1, 1),
             IN_RING: speed(10, 1, 1), "kvplan, planned from page ids": speed(12, 1, 2)}  # fmt: skip
    share, _, times, ring, _ = measured.rows_of("gather", "rows", found, {})
    assert (share.ok, share.limit) == (True, pytest.approx(0.85 * share.beside[COPY]))
    assert times.limit == pytest.approx(1.2 * times.beside[ROWS])
    assert times.ok
    assert ring.ok is False
