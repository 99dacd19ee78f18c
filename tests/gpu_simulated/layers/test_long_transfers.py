"""Long transfers by layer on a simulated GPU: up to 32 groups of layers, for which all is ready after `prepare`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from kvplan.cost.model import MIXED
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.halves import LARGE_RUN
from tests.paged_caches import Move, Paged
from tests.simulated import Device
from tests.simulated.executors import MOVE, PATHS, OnDevice, both_ways, executor_on, favouring, pair_on, paths_in_turn

LAYERS = 40
LONG = Limits(layer_group_nbytes=1, long_group_nbytes=1, long_piece_nbytes=1)  # every transfer is long
CACHE = OnDevice("layer: block kv token head dim", layer=LAYERS)
POOL = Paged("block layer kv token head dim", layer=LAYERS)


def uploaded(executor):
    """The run tables on the GPU, by run group, and the kernels."""
    tables = executor._backend.resources.tables
    return {group: set(known) for group, known in tables._known.items()}, set(tables._functions)


@both_ways
@pytest.mark.parametrize("named", [True, False], ids=["named", "auto"])
@pytest.mark.parametrize("path", PATHS)
def test_a_long_transfer_has_32_groups_and_finds_all_that_it_needs(path, named, direction):
    device = Device()
    pair = pair_on(device, direction, CACHE, POOL)
    with executor_on(device, path if named else "auto", favouring(path), limits=LONG) as executor:
        executor.prepare(pair.program.plan([0], [0]), by_layer=True)
        ready, plan = uploaded(executor), pair.plan(MOVE)
        assert executor.candidates(plan, by_layer=True)[0].groups == 32
        transfer = executor.submit(plan, by_layer=True)
        assert len(transfer.layer_groups) == 32
        assert Counter(map(len, transfer.layer_groups)) == {1: 24, 2: 8}
        assert [layer for layers in transfer.layer_groups for layer in layers] == list(range(LAYERS))
        assert transfer.result().path == path
        pair.check()
        assert uploaded(executor) == ready


@both_ways
def test_both_halves_are_ready_where_only_some_groups_have_both(direction):
    """A layer of a block is a small run, and two layers are a large one: only 32 groups of 40 layers have both."""
    device = Device()
    blocks = {"layer": LAYERS, "block": 2, "token": 1, "dim": LARGE_RUN * 5 // 16}  # of K, and of V
    notation = "block layer kv token head dim"
    pair = pair_on(device, direction, OnDevice(notation, **blocks), Paged(notation, **blocks))
    with executor_on(device, profile=favouring("copy_engine"), limits=LONG) as executor:
        executor.prepare(pair.program.plan([0], [0]), by_layer=True)
        ready, plan = uploaded(executor), pair.plan(Move([1], [0]))
        assert MIXED in [one.path for one in executor.candidates(plan, by_layer=True)]
        for groups in (1, 8, 16):
            assert MIXED not in [one.path for one in executor._backend.selection.all(plan, groups)]
        with paths_in_turn([MIXED]):
            transfer = executor.submit(plan, by_layer=True)
        assert len(transfer.layer_groups) == 32
        assert transfer.result().path == MIXED
        pair.check()
        assert uploaded(executor) == ready


@pytest.mark.parametrize(("share", "groups"), [(32, 32), (31, 16), (16, 16), (15, 8)])
def test_a_long_transfer_of_short_pieces_has_fewer_groups(share, groups):
    device = Device()
    pair = pair_on(device, "load", CACHE, POOL)
    plan = pair.plan(MOVE)
    limits = replace(LONG, long_piece_nbytes=plan.nbytes // plan.units // share)
    with executor_on(device, "kernel", limits=limits) as executor:
        assert executor.candidates(plan, by_layer=True)[0].groups == groups
        transfer = executor.submit(plan, by_layer=True)
        assert len(transfer.layer_groups) == groups
        transfer.synchronize()
        pair.check()


@pytest.mark.parametrize(("more", "groups"), [(0, 32), (1, 16)])
def test_a_transfer_is_long_by_its_bytes(more, groups):
    device = Device()
    pair = pair_on(device, "load", CACHE, POOL)
    plan = pair.plan(MOVE)
    limits = replace(LONG, long_group_nbytes=plan.nbytes // 32 + more)
    with executor_on(device, "kernel", limits=limits) as executor:
        transfer = executor.submit(plan, by_layer=True)
        assert len(transfer.layer_groups) == groups
        transfer.synchronize()
        pair.check()
