"""Two processes and two GPUs: memory of one GPU, opened in the context of the other, which runs the kernels."""

from __future__ import annotations

import os

import pytest
import torch

import kvplan
from kvplan import KVLayout
from tests.commands import python
from tests.gpu.processes.moving import BLOCKS, NBYTES, NHD, SHAPE, every_path, memories, pull_and_push
from tests.gpu.processes.visiting import owner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


def swapped() -> dict[str, str]:
    """The visible GPUs in the other order."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    return {"CUDA_VISIBLE_DEVICES": ",".join(reversed(seen))}


@memories
@every_path
@pytest.mark.parametrize("order", ["same", "swapped"])
def test_blocks_are_pulled_and_pushed(path, memory, order):
    """With the GPUs swapped, the owner's cuda:0 is cuda:1 here."""
    environment, ordinal = (memory, 1) if order == "same" else (memory | swapped(), 0)
    with owner(ordinal, NBYTES, **environment) as visited, visited.open(0) as (address, opening):
        assert (opening.owner, opening.ordinal) == (1, 0)
        pull_and_push(visited, visited.layout(NHD, address, SHAPE, 1), path)


def test_an_executor_of_the_owner_s_gpu_is_refused():
    """The memory is mapped in the context of cuda:0 only: a kernel of cuda:1 would fault."""
    mine = torch.zeros((BLOCKS, 64), dtype=torch.uint8, device="cuda:1")
    with owner(1, NBYTES) as visited, visited.open(0) as (address, _):
        there = visited.layout("block dim", address, (BLOCKS, 64), 1)
        plan = kvplan.compile(there, KVLayout.from_tensors("block dim", mine)).plan([0], [1])
        with (
            kvplan.Executor("cuda:1", kvplan.Policy(path="kernel")) as executor,
            pytest.raises(kvplan.PathError, match="was opened for cuda:0; let an executor of cuda:0"),
        ):
            executor.submit(plan)


BLIND = """
from tests.gpu.processes.visiting import owner, refused
import os, sys

both, first = sys.argv[1], sys.argv[2]
os.environ["CUDA_VISIBLE_DEVICES"] = first
with owner(1, 1 << 20, CUDA_VISIBLE_DEVICES=both) as visited:
    print(refused(visited, 0))
"""


def test_a_gpu_that_only_the_owner_sees_is_refused():
    both = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    done = python("-c", BLIND, both, both.split(",")[0])
    assert done.returncode == 0, done.stderr
    assert "which this process does not see" in done.stdout
    assert "CUDA_VISIBLE_DEVICES" in done.stdout
