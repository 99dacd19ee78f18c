"""Transfers layer by layer on a simulated GPU: what they keep alive, and that they need no program."""

from __future__ import annotations

import gc
from threading import Event

import pytest

from kvplan.execute.gpu.resources import Limits
from kvplan.plan.layers import split_layers
from kvplan.program.passes import compile_geometry
from tests.paged_caches import DEVICE_NOTATION, Move, Paged
from tests.simulated import Device
from tests.simulated.executors import (
    MOVE,
    POOL,
    OnDevice,
    both_ways,
    executor_on,
    pair_on,
)


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("path", ["kernel", "staged"])
def test_the_tables_of_layers_live_as_long_as_their_transfer(path, direction):
    for seed in range(4):
        device = Device(seed, eager=False)
        pair = pair_on(device, direction)
        with executor_on(device, path, limits=Limits(layer_group_nbytes=1)) as executor:
            gate = device.gate(executor._backend.lanes[direction].kernel)
            executor.submit(pair.plan(MOVE), by_layer=True)
            del pair.program
            compile_geometry.cache_clear()
            gc.collect()
            others = []
            for k in range(6):
                dim = 32 * (k + 1)
                others.append(pair_on(device, direction, OnDevice(DEVICE_NOTATION, dim=dim), Paged(POOL.notation,
                                      dim=dim)))  # fmt: skip
                executor.submit(others[-1].plan(Move([k], [8 - k])))
            device.run()  # their tables are uploaded while the first waits
            gate.set()
            device.run()
            for each in (pair, *others):
                each.check()


@both_ways
def test_the_groups_of_a_transfer_are_known_before_it_is_issued(direction):
    """A caller may ask for the groups at once, and wait for the first layer of each."""
    device = Device(eager=False)
    pair, after = pair_on(device, direction), Event()
    with executor_on(device, "copy_engine", limits=Limits(layer_group_nbytes=1)) as executor:
        transfer = executor.submit(pair.plan(MOVE), after, by_layer=True)  # a Python thread waits for it
        assert transfer.queued
        early = transfer.layer_groups
        after.set()
        transfer.await_issue()
        assert early == transfer.layer_groups == ((0,), (1,))
        device.run()


def test_a_plan_is_cut_by_layers_when_nobody_else_holds_its_program():
    pair = pair_on(Device(), "load")
    plan = pair.plan(MOVE)
    del pair
    compile_geometry.cache_clear()
    gc.collect()
    assert [sorted(layers) for layers, _ in split_layers(plan, 2)] == [[0], [1]]
