"""In a CUDA graph the kernel path is captured and replayed with new ids; no other path pretends to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from tests.gpu.flights import MOVE, small_pair, warm
from tests.paged_caches import DEVICE_NOTATION, Move, Paged, Pair, assert_same_bytes, pair_of

pytestmark = pytest.mark.gpu

both_ways = pytest.mark.parametrize("direction", ["load", "store"])


def captured(executor: kvplan.Executor, pair: Pair, move: Move, *, after: bool = True):
    """A graph of one transfer and the transfer; nothing has moved yet."""
    warm(executor, pair)
    graph, plan = torch.cuda.CUDAGraph(), pair.program.plan(move.src, move.dst)
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        transfer = executor.submit(plan, after=stream) if after else executor.submit(plan)
        transfer.wait(stream)
    torch.cuda.synchronize()
    pair.check()
    return graph, transfer


def replay(graph: torch.cuda.CUDAGraph, pair: Pair) -> None:
    graph.replay()
    torch.cuda.current_stream().synchronize()
    pair.check()


@both_ways
@pytest.mark.parametrize("after", [True, False], ids=["after the stream", "after nothing"])
def test_a_captured_transfer_moves_at_every_replay(direction, after, executor_of):
    pair = small_pair(direction)
    graph, _transfer = captured(executor_of(path="kernel"), pair, MOVE, after=after)
    pair.plan(MOVE)
    replay(graph, pair)
    for seed in (1, 2):
        for root, new in zip(pair.src_roots, pair.renew(seed), strict=True):
            root.copy_(new)
        pair.plan(MOVE)
        replay(graph, pair)


@both_ways
def test_a_replay_takes_new_ids(direction, executor_of):
    pair = small_pair(direction)
    graph, transfer = captured(executor_of(path="kernel"), pair, MOVE)
    rng = np.random.default_rng(1)
    for count in (6, 1, 3, 0, 6, 5):
        transfer.replan(pair.plan(Move(rng.permutation(32)[:count], rng.permutation(32)[:count])))
        replay(graph, pair)
        replay(graph, pair)


@both_ways
def test_a_captured_transfer_lies_between_its_neighbours_in_the_graph(direction, executor_of):
    executor, pair = executor_of(path="kernel"), small_pair(direction)
    warm(executor, pair)
    fresh = pair.renew(1)
    seen = [torch.zeros_like(root, device="cuda:0") for root in pair.dst_roots]
    torch.cuda.synchronize()
    plan = pair.plan(MOVE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for root, new in zip(pair.src_roots, fresh, strict=True):
            if root.is_cuda:
                root.copy_(new)
        transfer = executor.submit(plan, after=torch.cuda.current_stream())
        transfer.wait(torch.cuda.current_stream())
        for copy, root in zip(seen, pair.dst_roots, strict=True):
            copy.copy_(root, non_blocking=True)
    if direction == "load":
        for root, new in zip(pair.src_roots, fresh, strict=True):
            root.copy_(new)
    replay(graph, pair)
    assert_same_bytes(seen, pair.dst_bytes)


@both_ways
def test_what_was_not_captured_cannot_be_replayed(direction, executor_of):
    executor, pair = executor_of(path="kernel"), small_pair(direction)
    other = pair_of(
        direction, Paged(DEVICE_NOTATION, dim=584, padded=True), Paged("block kv layer token head dim", dim=584)
    )
    graph, transfer = captured(executor, pair, MOVE)
    pair.plan(MOVE)
    for wrong in (
        pair.program.plan(range(7), range(7)),  # one unit more than captured
        other.program.plan([1], [2]),  # another program
        kvplan.join([pair.program.plan([1], [1]), other.program.plan([1], [1])]),
    ):
        with pytest.raises(kvplan.KVPlanError):
            transfer.replan(wrong)
    replay(graph, pair)  # what was captured, still
    other.check()


@both_ways
def test_only_a_captured_transfer_is_planned_again(direction, executor_of):
    pair = small_pair(direction)
    transfer = executor_of(path="kernel").submit(pair.plan(MOVE))
    transfer.synchronize()
    with pytest.raises(kvplan.KVPlanError, match="captur"):
        transfer.replan(pair.program.plan([1], [2]))
    pair.check()


@both_ways
@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "staged"])
@pytest.mark.parametrize("after", [True, False], ids=["after the stream", "after nothing"])
def test_other_paths_refuse_before_anything_and_the_capture_goes_on(direction, path, after, executor_of):
    executor, pair = executor_of(path=path), small_pair(direction)
    warm(executor, pair)
    number = torch.zeros(16, device="cuda:0")
    number.add_(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number.add_(1)
        with pytest.raises(kvplan.PathError, match="captur"):
            executor.submit(
                pair.program.plan(MOVE.src, MOVE.dst), **({"after": torch.cuda.current_stream()} if after else {})
            )
        number.add_(1)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert number.tolist() == [4.0] * 16
    pair.check()
    executor.submit(pair.plan(MOVE)).synchronize()
    pair.check()


def test_of_a_captured_transfer_nobody_knows_when_it_is_done(executor_of):
    pair = small_pair("load")
    graph, transfer = captured(executor_of(path="kernel"), pair, MOVE)
    for ask in (transfer.done, transfer.synchronize, transfer.result):
        with pytest.raises(kvplan.TransferError, match="captur"):
            ask()
    pair.plan(MOVE)
    replay(graph, pair)


@both_ways
def test_after_a_capture_the_executor_takes_plain_transfers(direction, executor_of):
    executor, pair = executor_of(path="kernel"), small_pair(direction)
    graph, transfer = captured(executor, pair, MOVE)
    executor.submit(pair.plan(Move([20], [21]))).synchronize()
    pair.check()
    pair.plan(MOVE)
    replay(graph, pair)
    transfer.replan(pair.plan(Move([4], [5])))
    replay(graph, pair)
    del transfer, graph
    executor.submit(pair.plan(Move([22], [23]))).synchronize()
    pair.check()


@both_ways
def test_two_transfers_of_one_graph_are_planned_apart(direction, executor_of):
    executor, pair, other = executor_of(path="kernel"), small_pair(direction), small_pair(direction, seed=1)
    warm(executor, pair, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream()
        flying = [executor.submit(each.program.plan(MOVE.src, MOVE.dst), after=stream) for each in (pair, other)]
        for transfer in flying:
            transfer.wait(stream)
    flying[0].replan(pair.plan(Move([2, 3], [4, 5])))
    other.plan(MOVE)
    replay(graph, pair)
    other.check()
