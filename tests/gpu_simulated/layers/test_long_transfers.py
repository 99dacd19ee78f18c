"""Long transfers by layer on a simulated GPU: halved groups at both ends, for which all is ready after `prepare`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan.cost.model import MIXED
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.halves import LARGE_RUN
from kvplan.plan.layers import Cutting
from tests.paged_caches import Move, Paged
from tests.simulated import Device
from tests.simulated.executors import MOVE, PATHS, OnDevice, both_ways, executor_on, favouring, pair_on, paths_in_turn

LAYERS = 40
LONG = Limits(layer_group_nbytes=1, halved_nbytes=1, halved_piece_nbytes=1)  # every transfer is long
EVEN, ONCE, TWICE = [5] * 8, [2, 3, *[5] * 6, 3, 2], [1, 1, 3, *[5] * 6, 3, 1, 1]
CACHE = OnDevice("layer: block kv token head dim", layer=LAYERS)
POOL = Paged("block layer kv token head dim", layer=LAYERS)


def uploaded(executor):
    """The run tables on the GPU, by run group, and the kernels."""
    tables = executor._backend.resources.tables
    return {group: set(known) for group, known in tables._known.items()}, set(tables._functions)


def least_of(plan, times):
    """The bytes of the shortest group of a plan, halved so often that a group is cut into at most so many pieces."""
    return {4: 1, 2: 2, 1: 5}[times] * plan.nbytes // LAYERS


def sizes(transfer):
    """The number of layers of each group of a transfer, which has all layers in their order."""
    assert [layer for layers in transfer.layer_groups for layer in layers] == list(range(LAYERS))
    return list(map(len, transfer.layer_groups))


@both_ways
@pytest.mark.parametrize(("times", "groups"), [(4, TWICE), (2, ONCE), (1, EVEN)])
@pytest.mark.parametrize("named", [True, False], ids=["named", "auto"])
@pytest.mark.parametrize("path", PATHS)
def test_a_long_transfer_has_short_ends_and_finds_all_that_it_needs(path, named, times, groups, direction):
    device = Device()
    pair = pair_on(device, direction, CACHE, POOL)
    limits = replace(LONG, halved_nbytes=least_of(pair.plan(MOVE), times))
    with executor_on(device, path if named else "auto", favouring(path), limits=limits) as executor:
        executor.prepare(pair.program.plan([0], [0]), by_layer=True)
        ready, plan = uploaded(executor), pair.plan(MOVE)
        assert executor.candidates(plan, by_layer=True)[0].groups == len(groups)
        transfer = executor.submit(plan, by_layer=True)
        assert sizes(transfer) == groups
        assert transfer.result().path == path
        pair.check()
        assert uploaded(executor) == ready


@both_ways
def test_both_halves_are_ready_where_only_some_groups_have_both(direction):
    """One or two layers of a block are a small run, and three are a large one: only halved groups of 40 have both."""
    device = Device()
    blocks = {"layer": LAYERS, "block": 2, "token": 1, "dim": LARGE_RUN * 3 // 16}  # of K, and of V
    notation = "block layer kv token head dim"
    pair = pair_on(device, direction, OnDevice(notation, **blocks), Paged(notation, **blocks))
    with executor_on(device, profile=favouring("copy_engine"), limits=LONG) as executor:
        executor.prepare(pair.program.plan([0], [0]), by_layer=True)
        ready, plan = uploaded(executor), pair.plan(Move([1], [0]))
        assert MIXED in [one.path for one in executor.candidates(plan, by_layer=True)]
        assert MIXED not in [one.path for one in executor._backend.selection.all(plan, Cutting(8))]
        with paths_in_turn([MIXED]):
            transfer = executor.submit(plan, by_layer=True)
        assert sizes(transfer) == TWICE
        assert transfer.result().path == MIXED
        pair.check()
        assert uploaded(executor) == ready


@pytest.mark.parametrize(("least", "groups"), [(1, TWICE), (2, ONCE), (3, EVEN)])
def test_groups_of_short_pieces_are_not_halved(least, groups):
    """A halved group has at least so many layers of a unit."""
    device = Device()
    pair = pair_on(device, "load", CACHE, POOL)
    plan = pair.plan(MOVE)
    limits = replace(LONG, halved_piece_nbytes=plan.nbytes // plan.units // LAYERS * least)
    with executor_on(device, "kernel", limits=limits) as executor:
        transfer = executor.submit(plan, by_layer=True)
        assert sizes(transfer) == groups
        transfer.synchronize()
        pair.check()


@pytest.mark.parametrize(("times", "groups"), [(4, TWICE), (2, ONCE), (1, EVEN)])
@pytest.mark.parametrize("more", [0, 1])
def test_groups_of_few_bytes_are_not_halved(times, groups, more):
    device = Device()
    pair = pair_on(device, "load", CACHE, POOL)
    plan = pair.plan(MOVE)
    limits = replace(LONG, halved_nbytes=least_of(plan, times) + more)
    with executor_on(device, "kernel", limits=limits) as executor:
        transfer = executor.submit(plan, by_layer=True)
        fewer = {len(TWICE): ONCE, len(ONCE): EVEN, len(EVEN): EVEN}
        assert sizes(transfer) == (fewer[len(groups)] if more else groups)
        transfer.synchronize()
        pair.check()
