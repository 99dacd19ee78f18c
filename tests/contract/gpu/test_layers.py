"""Layers of one transfer arrive in order, and each can be waited for; stores can be submitted layer by layer."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from tests.contract.gpu.caches import Ids, assert_same_bytes, both_ways, each_way, every_path, forms, way
from tests.contract.gpu.machines import PATIENCE

LAYERS = range(7, 13)  # their global numbers
# 48 MiB: long enough that a transfer is cut into groups of layers.
LONG, SHORT = forms(layer=6, block=34, dim=1 << 16, padded=False), forms(layer=6, dim=256)
SOME = Ids([3, 1, 8], [0, 7, 2])
FORMS = {"long": (*LONG, Ids(range(32), range(33, 1, -1))), "short": (*SHORT, SOME)}


@every_path
@pytest.mark.parametrize(("form", "joined"), [("long", False), ("short", False), ("long", True)])
def test_a_stream_that_waits_for_a_layer_reads_that_layer(gpu, executor, stream, form, joined):
    cache, pool, ids = FORMS[form]
    pair = way(gpu, "load", cache, pool, layer_start=LAYERS[0])
    other = way(gpu, "load", *SHORT, layer_start=LAYERS[0], seed=9)
    for each in (pair, other):
        each.warm(executor, by_layer=True)
    consumers, fresh = [gpu.stream() for _ in LAYERS], pair.fresh(3)
    seen = [gpu.place(np.zeros(root.nbytes, np.uint8), "cuda:0") for root in pair.targets]
    pair.renew(stream, fresh)
    plan = kvplan.join([pair.plan(ids), other.plan(SOME)]) if joined else pair.plan(ids)
    transfer = executor.submit(plan, after=stream, by_layer=True)
    for layer, consumer, copy, target in zip(LAYERS, consumers, seen, pair.targets, strict=True):
        transfer.wait_layer(layer, consumer)
        gpu.copy(consumer, copy, target)
    for consumer, copy, due in zip(consumers, seen, pair.dst_bytes, strict=True):
        gpu.finish(consumer)
        assert_same_bytes([copy.bytes()], [due])
    assert transfer.result().nbytes == transfer.plan.nbytes
    groups = transfer.layer_groups
    assert [layer for group in groups for layer in group] == list(LAYERS)
    assert (len(groups) > 1) == (form == "long")
    pair.check()
    other.check()


@both_ways
def test_layers_through_a_ring_that_is_used_again_and_again(gpu, route):
    cache, pool, ids = FORMS["long"]
    executor, pair = gpu.executor("staged", staging_bytes=4 << 20), way(gpu, route, cache, pool)
    transfer = executor.submit(pair.plan(ids if route == "load" else ids.back), by_layer=True)
    transfer.synchronize(PATIENCE)
    assert len(transfer.layer_groups) > 1
    pair.check()


@each_way
def test_a_whole_transfer_can_be_waited_for_by_layer_and_no_other_layer_can(gpu, route, executor, stream):
    pair = way(gpu, route, *SHORT, layer_start=LAYERS[0])
    reader, transfer = pair.reader(stream), executor.submit(pair.plan())
    transfer.wait_layer(LAYERS[2], stream)
    reader.read().check()
    for layer in (0, 6, 13, -1):
        with pytest.raises(kvplan.LayoutError, match=f"layer {layer}"):
            transfer.wait_layer(layer, stream)
    pair.check()


@every_path
@pytest.mark.parametrize("groups", [None, 2])
def test_a_store_reads_each_layer_after_the_stream_that_writes_it(gpu, groups, executor, stream):
    pair = way(gpu, "store", *SHORT, layer_start=LAYERS[0])
    for seed in range(gpu.rounds):
        fresh = pair.fresh(seed)
        for root, new in zip(pair.src_bytes, fresh, strict=True):
            root[:] = new.bytes()
        layers = executor.begin(pair.plan(), groups=groups)
        layers.prepare()
        for layer, source, new in zip(LAYERS, pair.sources, fresh, strict=True):
            assert not layers.done()
            gpu.copy(stream, source, new)
            layers.submit(layer, after=stream)
        assert layers.result().nbytes == layers.plan.nbytes
        assert layers.done()
        pair.check()


def test_a_store_by_layers_says_which_layers_are_missing(gpu, stream):
    executor, pair = gpu.executor("kernel"), way(gpu, "store", *SHORT, layer_start=LAYERS[0])
    layers = executor.begin(pair.plan())
    for layer in (12, 8, 7):  # in any order
        layers.submit(layer)
    assert layers.missing == (9, 10, 11)
    for ask in (lambda: layers.wait(stream), lambda: layers.wait_layer(9, stream)):
        with pytest.raises(kvplan.TransferError, match="not submitted"):
            ask()
    assert not layers.cancel()
    for layer in layers.missing:
        layers.submit(layer)
    layers.synchronize(PATIENCE)
    assert executor.begin(pair.program.plan([0], [0])).cancel()
    pair.check()
