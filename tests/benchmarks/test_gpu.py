"""The benchmarks of GPUs, on the CPU's memory: they run, and a wrong byte is seen; nothing here is timed."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="the benchmarks' tensors are torch's")

import torch

import kvplan
from benchmarks import choice
from benchmarks.choice import PAIRS, Case
from benchmarks.gpu import rig as module
from benchmarks.gpu.peer import __main__ as command
from benchmarks.gpu.peer import heads
from benchmarks.gpu.rig import Rig, pool_and_cache
from benchmarks.gpu.sizes import PEER_SMOKE
from kvplan.measure.workload import DIRECTIONS, Buffers, Geometry, between

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [1, 7])
def test_what_is_compared_is_what_a_plan_moves(direction, count, monkeypatch, executor):
    """Blocks of a pool of kvplan.allocate and of a cache of a tensor a layer."""
    monkeypatch.setattr(module, "RUN_NBYTES", 512)
    moved = between(*pool_and_cache(3, 10, "cpu"), Geometry(direction, "contiguous", 512, 6 * count, 6), "cpu")
    for part in moved.dst.parts:
        part.zero_()
    executor.submit(moved.plan).synchronize()
    others = sorted(set(range(10)) - set(moved.dst_ids.tolist()))
    assert not bool(moved.dst.select(torch.tensor(others), 6).any())
    moved.verify("host", lambda: executor.submit(moved.plan).synchronize())
    with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
        moved.verify("nothing", lambda: None)


def test_all_groups_run_on_the_cpu(capsys, tmp_path):
    path = tmp_path / "made.json"
    assert command.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    made = json.loads(path.read_text())
    assert (made["failed"], made["not_run"]) == ({}, {"beside": "it needs GPUs"})
    assert {row["group"] for row in made["rows"]} == set(command.GROUPS) - {"beside"}
    assert {
        "device, 512 B", "the better of push and pull, 8 KiB, 16 programs", "push, 4 blocks, 256 KiB: submit",
        "NHD -> HND, TP 2 -> TP 1, 16 B, the better of push and pull", "pull, 1 block, 64 KiB: submit to seen",
    } <= {row["what"] for row in made["rows"]}  # fmt: skip
    assert "not run: beside: it needs GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("orders", [(heads.NHD, heads.HND), (heads.NHD, heads.NHD)])
def test_a_wrong_byte_between_ranks_is_seen(orders):
    with Rig(PEER_SMOKE, ("cpu",) * 2) as rig:
        source = heads.rank_of(rig, orders[0], range(2, 4), "cpu", 6)
        target = heads.rank_of(rig, orders[1], range(8), "cpu", 6)
        moved, executor = heads.Move.between(source, target), rig.kept_executor("auto")
        assert moved.plan.nbytes == 4 * 2 * 6 * 4 * 2 * 8 * 2
        moved.verify("host", lambda: executor.submit(moved.plan).synchronize())

        def almost():
            executor.submit(moved.plan).synchronize()
            target.tensors[2][1, int(moved.ids[1][3]), 2, 3, 5] += 1

        with pytest.raises(kvplan.TransferError, match=r"almost: not every byte of .* arrived, layer 2"):
            moved.verify("almost", almost)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_choice_has_the_runs_that_it_names_and_moves_every_byte(pair, direction, monkeypatch):
    monkeypatch.setattr(choice, "POOL_NBYTES", 1 << 18)
    case = Case(pair, direction, 128, 3)
    src, dst = case.layouts(Buffers(1 << 21, "cpu", host_nbytes=1 << 22))
    plan = case.plan(src, dst)
    assert (plan.nbytes, plan.units) == (case.nbytes, 3)
    assert kvplan.compile(src, dst).run_nbytes == (128, 128)
    assert kvplan.verify(src, dst).ok
