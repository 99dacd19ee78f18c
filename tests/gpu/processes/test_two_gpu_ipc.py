"""Two processes that number two GPUs otherwise."""

from __future__ import annotations

import os

import pytest

from tests.agents.processes import PATIENCE
from tests.gpu.processes.agent_worker import other
from tests.gpu.processes.visitor import GPUS, Visitor, every_block, memories

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices")]


@memories
def test_the_owner_s_first_gpu_is_the_visitor_s_second(memory):
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    with other(0, CUDA_VISIBLE_DEVICES=",".join(reversed(seen)), **memory) as them, Visitor(them) as me:
        assert me.there.device == "cuda:1"
        me.peer.submit(me.load.plan(every_block(), every_block())).synchronize(PATIENCE)
        assert me.holds(1)
        me.peer.submit(me.store.plan([1], [2])).synchronize(PATIENCE)
        assert not them.holds(1)
