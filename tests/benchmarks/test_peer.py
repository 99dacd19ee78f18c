"""The benchmarks between GPUs, on the CPU's memory: they run, compare every byte, and hold their limits."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the benchmark's tensors are torch's")

import torch

import kvplan
from benchmarks.gpu.beside_compute import BesideCompute
from benchmarks.gpu.peer import __main__ as command
from benchmarks.gpu.peer import decode, heads, limits, whole
from benchmarks.gpu.peer.limits import FULL, SMOKE
from benchmarks.gpu.peer.rig import Rig, better
from benchmarks.gpu.rig import Speed
from benchmarks.record import Row
from kvplan.measure.baselines import COPY

pytestmark = [pytest.mark.slow, pytest.mark.slow]


@pytest.fixture
def rig():
    with Rig(SMOKE, ("cpu",) * 4) as made:
        yield made


def test_all_groups_run_on_the_cpu(capsys, tmp_path):
    path = tmp_path / "made.json"
    assert command.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    made = json.loads(path.read_text())
    assert made["failed"] == {}
    assert made["not_run"] == {"beside": "it needs GPUs"}
    assert {row["group"] for row in made["rows"]} == set(command.GROUPS) - {"beside"}
    held = {row["what"] for row in made["rows"] if row["limit"] is not None}
    assert {
        "device, 512 B", "device, 8 KiB",
        "the better of push and pull, 8 KiB", "the better of push and pull, 8 KiB, 16 programs",
        "NHD -> HND, TP 2 -> TP 1, 16 B, the better of push and pull",
        "two ranks, both on one GPU, the better of push and pull",
        "the middle heads, all at once", "the outer heads, all at once",
        "pull, 1 block, 64 KiB: submit to seen", "push, 4 blocks, 256 KiB: submit",
    } <= held  # fmt: skip
    assert "not run: beside: it needs GPUs" in capsys.readouterr().err


def test_importing_needs_no_torch():
    code = "import sys, benchmarks.gpu.peer.__main__; assert not {'torch', 'triton', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_full_sizes_are_those_of_the_requirement():
    assert doctest.testmod(limits).failed == 0
    assert FULL.nbytes > 600_000_000
    assert [FULL.nbytes % (size * FULL.planes) for size in FULL.runs] == [0] * 4
    assert set(FULL.runs) == set(limits.WITHIN) == {512, *limits.BETWEEN}
    assert FULL.dim * 2 == 256
    assert (FULL.heads // 2 * FULL.dim * 2, FULL.tokens * FULL.dim * 2) == (1024, 4096)


def test_arguments(capsys):
    assert command.arguments_of([]).run == list(command.GROUPS)
    assert command.arguments_of(["four", "--smoke"]).run == ["ceilings", "four"]
    for wrong, said in ((["nothing"], "no group nothing"), (["--device", "cpu"], "give --smoke, too")):
        with pytest.raises(SystemExit) as left:
            command.arguments_of(wrong)
        assert left.value.code == 2
        assert said in capsys.readouterr().err


def test_without_two_gpus_nothing_runs(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert command.main(["--smoke"]) == 2
    assert capsys.readouterr().err == "1 CUDA devices: these benchmarks need 2\n"


def test_four_ranks_need_four_gpus():
    with Rig(SMOKE, ("cpu", "cpu")) as two:
        assert list(heads.four(two)) == []
        assert two.not_run == {"four": "it needs 4 GPUs; there are 2"}


# Bytes.


@pytest.mark.parametrize("orders", [(heads.NHD, heads.HND), (heads.HND, heads.NHD), (heads.NHD, heads.NHD)])
def test_a_wrong_byte_between_ranks_is_seen(orders, rig):
    source = heads.rank_of(rig, orders[0], range(2, 4), "cpu", 6)
    target = heads.rank_of(rig, orders[1], range(8), "cpu", 6)
    moved = heads.move_of([source], [target])
    assert moved.plan.nbytes == 4 * 2 * 6 * 4 * 2 * 8 * 2
    executor = rig.executor("cpu")
    moved.verify("host", lambda: executor.submit(moved.plan).synchronize())

    def almost():
        executor.submit(moved.plan).synchronize()
        target.tensors[2][1, int(moved.ids[1][3]), 2, 3, 5] += 1

    with pytest.raises(kvplan.TransferError, match=r"almost: not every byte of .* arrived, layer 2"):
        moved.verify("almost", almost)
    with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
        moved.verify("nothing", lambda: None)


def test_several_sources_are_one_plan(rig):
    sources = [heads.rank_of(rig, heads.NHD, range(4 * k, 4 * k + 4), "cpu", 6) for k in range(2)]
    target = heads.rank_of(rig, heads.HND, range(2, 6), "cpu", 6)
    moved, one = heads.move_of(sources, [target]), heads.move_of(sources, [target], only=[(1, 0)])
    assert (len(moved.pairs), len(one.pairs)) == (2, 1)
    assert moved.plan.nbytes == 2 * one.plan.nbytes
    moved.verify("host", lambda: rig.executor("cpu").submit(moved.plan).synchronize())


def test_only_bytes_between_gpus_count_as_bytes_of_the_link(rig):
    sources = [heads.rank_of(rig, heads.NHD, range(4 * k, 4 * k + 4), "cpu", 6) for k in range(2)]
    target = heads.rank_of(rig, heads.HND, range(8), "cpu", 6)
    moved = heads.move_of(sources, [target])
    assert moved.link_nbytes == moved.plan.nbytes  # the CPU stands for all GPUs
    sources = [rank._replace(gpu=f"cuda:{k}") for k, rank in enumerate(sources)]
    apart = heads.move_of(sources, [target._replace(gpu="cuda:1")])
    assert (apart.plan.nbytes, apart.link_nbytes) == (moved.plan.nbytes, moved.plan.nbytes // 2)


# Limits.


def speed(gbps):
    return Speed(10**9, 1 / gbps, 1 / gbps)


def test_the_better_route_is_held(rig, monkeypatch):
    monkeypatch.setattr(Rig, "on_cpu", False)
    rig.links = {"push": 395.0, "pull": 394.0}
    rows = {route: rig.row("between", route, {"ours": speed(ours), "kernel": speed(9.0), COPY: speed(copy)}, route)
            for route, ours, copy in (("push", 360.0, 395.0), ("pull", 370.0, 394.0))}  # fmt: skip
    assert list(rows["push"].beside) == [COPY, "kernel"]
    row = better(rows, "the better", 0.92)
    assert (row.ours, row.detail["route"], row.ok) == (pytest.approx(370.0), "pull", True)
    assert row.limit == pytest.approx(0.92 * 394.0)
    assert better(rows, "the better", 0.95).ok is False
    assert better(rows, "the better", None).ok is None
    above = {"push": rig.row("between", "push", {"ours": speed(420.0), COPY: speed(395.0)}, "push")}
    assert better(above, "the better", 0.92).detail["broken"] == "420.0 GB/s is above the link's 395.0"


@pytest.mark.parametrize(
    ("overlap", "copy", "choice", "ok"),
    [
        ((178.0, 1.03), (370.0, 1.10), (328.0, 1.06), [True, True, True]),
        ((178.0, 1.09), (370.0, 1.10), (328.0, 1.23), [False, False, False]),
        ((109.0, 1.08), (370.0, 1.00), (281.0, 1.12), [False, False, True]),
    ],
)
def test_what_is_held_beside_decode(overlap, copy, choice, ok):
    """The pull's figures are slower, or slow compute too much: the push decides."""
    names = {COPY: copy, decode.OVERLAP: overlap, decode.CHOICE: choice}
    measured = {(on, route, name): BesideCompute(gbps - 5 * (route == "pull"), slowdown, {})
                for on in (0, 1) for route in ("push", "pull")
                for name, (gbps, slowdown) in names.items()}  # fmt: skip
    rows = list(decode.held(measured))
    assert [row.ok for row in rows] == ok
    assert all(row.detail["route"] == "push" if row.ours else row.detail == {} for row in rows)


def test_what_a_group_yields_beside_decode(monkeypatch, rig):
    monkeypatch.setattr(Rig, "on_cpu", False)
    rig.links = {"push": 395.0, "pull": 394.0}
    case = BesideCompute(300.0, 1.05, {})
    monkeypatch.setattr(decode, "_measured", lambda _: {
        (on, route, name): case for on in (0, 1) for route in ("push", "pull")
        for name in (COPY, decode.OVERLAP, decode.CHOICE)})  # fmt: skip
    rows = list(decode.beside(rig))
    assert len(rows) == 2 * 2 * 3 * 2 + 3
    assert all(row.ok for row in rows[-3:])


def test_ways_beside_decode_take_turns(monkeypatch, rig):
    computed, seen = [], []
    monkeypatch.setattr(decode, "compute_of", lambda gpu, kind, sizes: computed.append((gpu, kind)) or len(computed))

    def window(compute, begin, **_):
        begin().synchronize()
        seen.append(compute)
        return SimpleNamespace(
            transfers=(1e-3,), alone=(1.0,), beside=(1.1,), slowdown=1.1, mean_slowdown=1.1, dry=False
        )

    monkeypatch.setattr(decode, "window", window)
    found = decode._measured(rig)
    assert computed == [("cpu", "decode")] * 2
    assert seen == [1] * 6 + [2] * 6
    assert set(found) == {(on, route, name) for on in (0, 1) for route in ("push", "pull")
                          for name in (COPY, decode.OVERLAP, decode.CHOICE)}  # fmt: skip


def test_a_group_with_a_missed_limit_is_named(capsys):
    rows = [Row("within", "device, 8 KiB", "GB/s", 1.0, {COPY: 2.0}, 1.8, more_is_better=True)]
    assert command.conclude(command.run({}, None, budget=1, report=lambda *_: None)._replace(rows=rows), None,
                            smoke=False) == 1  # fmt: skip
    assert "missed: within, device, 8 KiB" in capsys.readouterr().err


def test_a_ceiling_by_route(rig):
    rows = list(whole.ceilings(rig))
    assert [row.what.split(", ")[1] for row in rows] == ["device", "push", "pull"]
    assert set(rig.links) == {"device", "push", "pull"}
