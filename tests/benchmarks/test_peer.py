"""The benchmarks between GPUs, on the CPU's memory: they run, and a wrong byte is seen."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="the benchmark's tensors are torch's")


import kvplan
from benchmarks.gpu.peer import __main__ as command
from benchmarks.gpu.peer import heads
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.sizes import PEER_SMOKE

pytestmark = pytest.mark.slow


@pytest.fixture
def rig():
    with Rig(PEER_SMOKE, ("cpu",) * 2) as made:
        yield made


def test_all_groups_run_on_the_cpu(capsys, tmp_path):
    path = tmp_path / "made.json"
    assert command.main(["--smoke", "--device", "cpu", "--output", str(path)]) == 0
    made = json.loads(path.read_text())
    assert made["failed"] == {}
    assert made["not_run"] == {"beside": "it needs GPUs"}
    assert {row["group"] for row in made["rows"]} == set(command.GROUPS) - {"beside"}
    assert {
        "device, 512 B", "the better of push and pull, 8 KiB", "the better of push and pull, 8 KiB, 16 programs",
        "NHD -> HND, TP 2 -> TP 1, 16 B, the better of push and pull",
        "pull, 1 block, 64 KiB: submit to seen", "push, 4 blocks, 256 KiB: submit",
    } <= {row["what"] for row in made["rows"]}  # fmt: skip
    assert "not run: beside: it needs GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("orders", [(heads.NHD, heads.HND), (heads.HND, heads.NHD), (heads.NHD, heads.NHD)])
def test_a_wrong_byte_between_ranks_is_seen(orders, rig):
    source = heads.rank_of(rig, orders[0], range(2, 4), "cpu", 6)
    target = heads.rank_of(rig, orders[1], range(8), "cpu", 6)
    moved = heads.Move.between(source, target)
    assert moved.plan.nbytes == 4 * 2 * 6 * 4 * 2 * 8 * 2
    executor = rig.kept_executor("auto")
    moved.verify("host", lambda: executor.submit(moved.plan).synchronize())

    def almost():
        executor.submit(moved.plan).synchronize()
        target.tensors[2][1, int(moved.ids[1][3]), 2, 3, 5] += 1

    with pytest.raises(kvplan.TransferError, match=r"almost: not every byte of .* arrived, layer 2"):
        moved.verify("almost", almost)
    with pytest.raises(kvplan.TransferError, match="nothing: not every byte"):
        moved.verify("nothing", lambda: None)
