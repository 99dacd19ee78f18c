"""Layers of one transfer arrive one by one, and can be waited for one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import kvplan
from tests.gpu.flights import warm
from tests.gpu.gate import Gate
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair, assert_same_bytes, pair_of

pytestmark = pytest.mark.gpu

every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
LAYERS = range(7, 12)  # their global numbers
DEVICE = Paged(DEVICE_NOTATION, layer=5, block=80, dim=16_384, padded=True)
POOL = Paged(HOST_NOTATIONS["page-first"], layer=5, block=80, dim=16_384)
MOVE = Move(range(78, 0, -1), range(2, 80))  # 26 MB
FEW = Move(range(10), range(9, -1, -1))  # where each run is a call of its own, no more than the driver's queue holds
TOLD = ({"layer_start": 7}, {"layer_start": 7})


@contextmanager
def held_up(
    executor: kvplan.Executor, stream: torch.cuda.Stream, *, by_layer: bool, move: Move = MOVE
) -> Iterator[tuple[Pair, kvplan.Transfer, Gate]]:
    """A load of five layers behind a gate."""
    pair = pair_of("load", DEVICE, POOL, told=TOLD)
    executor.submit(pair.plan(move), by_layer=by_layer).synchronize()
    pair.check()
    warm(executor, pair)
    for root, new in zip(pair.src_roots, pair.renew(1), strict=True):
        root.copy_(new)
    with Gate(stream) as gate:
        yield pair, executor.submit(pair.plan(move), after=stream, by_layer=by_layer), gate


@every_path
@pytest.mark.parametrize("by_layer", [True, False], ids=["by layer", "whole"])
def test_a_stream_that_waits_for_a_layer_reads_that_layer(path, by_layer, executor_of):
    """Of a transfer that was not submitted by layer, every layer is there when all of it is."""
    stream, consumers = torch.cuda.Stream(), [torch.cuda.Stream() for _ in LAYERS]
    seen = [torch.zeros(DEVICE.root_nbytes, dtype=torch.uint8, device="cuda:0") for _ in LAYERS]
    move = FEW if path in ("copy_engine", "copy_engine_2d") else MOVE
    with held_up(executor_of(path=path), stream, by_layer=by_layer, move=move) as (pair, transfer, gate):
        for layer, consumer, copy, root in zip(LAYERS, consumers, seen, pair.dst_roots, strict=True):
            transfer.wait_layer(layer, consumer)
            with torch.cuda.stream(consumer):
                copy.copy_(root)
        assert not transfer.done()
        gate.open()
        for k, consumer in enumerate(consumers):
            consumer.synchronize()
            assert_same_bytes([seen[k]], [pair.dst_bytes[k]])
    assert transfer.result().nbytes == transfer.plan.nbytes
    pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("larger", [False, True], ids=["equal blocks", "larger host blocks"])
def test_by_layer_the_same_bytes_move(path, direction, larger, executor_of):
    executor = executor_of(path=path)
    pool = replace(POOL, block=21, token=8) if larger else POOL
    pair = pair_of(direction, DEVICE, pool, told=TOLD)
    moves = [Move(range(1, 80), range(20, 0, -1), 0, 1), Move([0, 5], [0], 0, 2)] if larger else [MOVE, Move([3], [0])]
    if larger and direction == "load":
        moves = [Move(move.dst, move.src, move.dst_skip, move.src_skip) for move in moves]
    for move in moves:
        plan = pair.plan(move)
        transfer = executor.submit(plan, by_layer=True)
        assert transfer.result().nbytes == plan.nbytes
        pair.check()


@every_path
def test_a_layer_that_is_not_moved_cannot_be_waited_for(path, executor_of):
    stream = torch.cuda.Stream()
    with held_up(executor_of(path=path), stream, by_layer=True) as (pair, transfer, gate):
        for layer in (0, 6, 12, -1):
            with pytest.raises(kvplan.KVPlanError, match=f"layer {layer}"):
                transfer.wait_layer(layer, stream)
        gate.open()
        transfer.synchronize()
    pair.check()
