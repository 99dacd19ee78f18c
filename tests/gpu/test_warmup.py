"""Prepared: nothing has moved, and the first transfer compiles no kernel and uploads no table."""

from __future__ import annotations

import pytest
import torch

import kvplan
from tests.gpu.flights import MOVE, small_pair

pytestmark = pytest.mark.gpu


def made(executor):
    tables = executor._backend.resources.tables
    return set(tables._functions), sum(len(known) for known in tables._known.values())


@pytest.mark.parametrize("path", ["auto", "copy_engine", "copy_engine_2d", "kernel", "staged"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_first_transfer_finds_all_that_it_needs(path, direction):
    pair = small_pair(direction)
    before = [root.cpu().clone() for root in pair.src_roots + pair.dst_roots]
    with kvplan.Executor("cuda:0", kvplan.Policy(path=path)) as executor:
        executor.prepare(pair.program.plan([0], [0]))
        torch.cuda.synchronize()
        for root, was in zip(pair.src_roots + pair.dst_roots, before, strict=True):
            assert torch.equal(root.cpu(), was)
        ready = made(executor)
        executor.submit(pair.plan(MOVE)).synchronize()
        assert made(executor) == ready
        pair.check()
