"""Transfers whose kernels run on a stream of the caller's: the default one, or another."""

from __future__ import annotations

import pytest
import torch

import kvplan
from tests.gpu.flights import MOVE, copy_onto, small_pair

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("path", ["copy_engine", "kernel", "staged", "auto"])
@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("lent", ["the default stream", "another stream", "none"])
def test_every_byte_arrives_after_the_work_of_a_stream(path, direction, lent):
    """The engine's stream is a third one, and captures a graph meanwhile; the caller's stream stays usable."""
    pair, engine, other = small_pair(direction), torch.cuda.Stream(), torch.cuda.Stream()
    lends = {"the default stream": torch.cuda.default_stream, "another stream": lambda: other, "none": lambda: None}
    graph, counted = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with kvplan.Executor("cuda:0", kvplan.Policy(path=path), kernel_stream=lends[lent]) as executor:
        for seed in range(1, 7):
            fresh = pair.renew(seed)
            with torch.cuda.stream(engine):
                copy_onto(pair.src_roots, fresh)
                urgent = "high" if seed % 2 else "normal"
                transfer = executor.submit(pair.plan(MOVE), after=engine, by_layer=seed > 3, priority=urgent)
                if seed == 2:
                    with torch.cuda.graph(graph, stream=engine):
                        counted.add_(1)
                transfer.wait(engine)
                graph.replay() if seed > 1 else None
            transfer.synchronize()
            engine.synchronize()
            pair.check()
    assert counted.item() == 5
    with torch.cuda.stream(lends[lent]() or other):
        counted.add_(1)
    torch.cuda.synchronize()
    assert counted.item() == 6
