"""The bench of two processes, on the CPU: bytes come before times, and what is not measured is listed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvplan.cli.answers.process_findings import in_words
from kvplan.errors import KVPlanError, TransferError
from kvplan.measure import baselines
from kvplan.measure.processes import process_bench, process_cases
from kvplan.measure.processes.pool_layouts import PoolSpec
from kvplan.measure.processes.pool_owner import PoolOwner
from kvplan.measure.processes.process_bench import Findings, ProcessBench, ProcessRun
from kvplan.measure.processes.process_cases import ONE, TWO, Remote
from tests.commands import ROOT

torch = pytest.importorskip("torch")

TINY = {"sizes": (512, 2048), "most_nbytes": 1 << 20, "block_runs": 16, "layers": 3, "layer_nbytes": 1 << 16,
        "seconds": 600.0}  # fmt: skip
WAYS = (TWO, ONE, baselines.MEMCPY)


@pytest.fixture(autouse=True)
def few_notes(monkeypatch):
    monkeypatch.setattr(process_bench, "NOTES", 10)
    monkeypatch.setattr(process_bench, "WARM_NOTES", 2)


def test_all_of_two_processes_is_measured():
    shares = []
    run = ProcessRun(ProcessBench("cpu", "cpu", hosts=("contiguous", "scattered"), **TINY),
                     lambda share, what: shares.append(share))  # fmt: skip
    found = list(run.rows())
    asked = itertools.product(("push", "pull"), ("contiguous", "scattered"), TINY["sizes"], WAYS)
    assert Counter((one.direction, one.host, one.run_nbytes, one.path) for one in found) == Counter(asked)
    for one in found:
        assert one.verified
        assert one.broken == ""
        assert one.nbytes == 1 << 20
        assert one.gbps == pytest.approx(one.nbytes / one.seconds / 1e9)
        assert one.share == pytest.approx(one.gbps / run.ceilings.push)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    told = run.findings.document()
    assert (told["transport"], told["block_nbytes"]) == ("shm", 16 * 2048)
    assert len(told["meet"]) == len(told["meet_layers"]) == 5
    assert told["seen"]["samples"] == told["submit"]["samples"] == 10
    assert told["submit"]["median"] > 0
    assert 0 < told["seen"]["median"] <= told["seen"]["tenth"] <= told["seen"]["hundredth"]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_bytes_that_do_not_arrive_are_told(monkeypatch, direction):
    """The other process's pool is not what it should be: a write of the comparison is lost."""
    lost = "read" if direction == "push" else "write"
    monkeypatch.setattr(Remote, lost, lambda remote: None)
    run = ProcessRun(ProcessBench("cpu", "cpu", directions=(direction,), **TINY))
    found = {one.path: one for one in run.rows() if one.run_nbytes == 512}
    assert "not every byte" in found[TWO].broken
    assert not found[TWO].verified
    assert found[ONE].broken == ""


def test_a_spent_budget_lists_what_was_not_measured():
    run = ProcessRun(ProcessBench("cpu", "cpu", **TINY | {"seconds": 0.5}), clock=itertools.count().__next__)
    assert list(run.rows()) == []
    assert {one.why for one in run.missing if "NIXL" not in one.what} == {"0.5 seconds were over"}
    assert len([one for one in run.missing if "NIXL" not in one.what]) == 4


def test_a_way_that_fails_while_it_is_timed_is_broken(monkeypatch):
    def fails(*args, **told):
        raise TransferError("the owner died")

    monkeypatch.setattr(process_bench, "timed", fails)
    run = ProcessRun(ProcessBench("cpu", "cpu", directions=("push",), **TINY))
    assert {one.broken for one in run.rows()} == {"the owner died"}


@pytest.mark.parametrize(("told", "words"), [
    ({"device": "cuda:0", "peer": "cpu"}, "expected two GPUs, or the CPU twice"),
    ({"directions": ("load",)}, "unknown direction 'load'; expected one of push, pull"),
    ({"sizes": (100,)}, "runs of 100 bytes"), ({"block_runs": 3}, "131070 runs, 3 a block"),
    ({"hosts": ("woven",)}, "host 'woven'"),
    ({"sizes": (1 << 20,), "most_nbytes": 1 << 20}, "two blocks of 160 runs of 1 MiB do not fit into 1 MiB"),
])  # fmt: skip
def test_a_wrong_bench_is_refused(told, words):
    with pytest.raises(KVPlanError, match=words):
        ProcessBench(**told)


def test_an_owner_that_does_not_start_is_told():
    with pytest.raises(KVPlanError, match="the process that owns the pool has ended"):
        PoolOwner(PoolSpec("nowhere", 1 << 20, ()))


def test_notes_that_are_lost_are_told(monkeypatch):
    monkeypatch.setattr(PoolOwner, "arrivals", lambda owner: {})
    with pytest.raises(KVPlanError, match="of 12 notes, the other process has seen 0"):
        list(ProcessRun(ProcessBench("cpu", "cpu", **TINY)).rows())


def test_findings_in_words():
    found = Findings("cuda_ipc", [0.012, 0.002, 0.003], [0.03, 0.05, 0.04], 1310720, [0.0001] * 99 + [0.0009], [3e-5])
    assert in_words(found) == (
        "transport cuda_ipc; a meeting takes 3.0 ms, and 40.0 ms with an allocation for each layer\n"
        "one block of 1280 KiB: 100 us from the submit until its note is seen\n"
        "(1 % take more than 900 us); the submit takes 30 us"
    )
    assert in_words(Findings("shm")).startswith("transport shm; a meeting takes - ms, and - ms with")


def test_the_names_of_baselines():
    assert process_cases.NIXL == {"pull": "NIXL READ", "push": "NIXL WRITE"}


def test_what_libraries_of_the_other_process_print_is_not_an_answer(monkeypatch, tmp_path):
    """UCX writes warnings to descriptor 1."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, kvplan.measure.processes.pool_layouts as one\n"
        "made = one.pool_layouts\n"
        "def loud(*given):\n    os.write(1, b'a warning\\n')\n    return made(*given)\n"
        "one.pool_layouts = loud\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with PoolOwner(PoolSpec("cpu", 1 << 20, ((512, 16, "contiguous"),), 1, 1 << 16)) as other:
        assert other.card
