"""Layers that are submitted one by one, on a simulated GPU: every path, and a stream that waits for them."""

from __future__ import annotations

from threading import Event
from types import SimpleNamespace

import pytest

from tests.simulated import Device
from tests.simulated.executors import MOVE, both_ways, every_path, executor_on, pair_on


@every_path
@both_ways
@pytest.mark.parametrize("groups", [None, 1])
def test_the_bytes_of_each_layer_arrive(path, direction, groups):
    for seed in range(3):
        device = Device(seed, eager=False)
        pair = pair_on(device, direction)
        plan = pair.plan(MOVE)
        with executor_on(device, path) as executor:
            begun = executor.begin(plan, groups=groups)
            for layer in reversed(plan.layers):
                begun.submit(layer)
            begun.await_issue()
            device.run()
            begun.synchronize()
            assert begun.result().nbytes == plan.nbytes
        pair.check()


@both_ways
def test_each_layer_waits_for_its_own_event(direction):
    device = Device(eager=False)
    pair = pair_on(device, direction)
    plan = pair.plan(MOVE)
    with executor_on(device, "copy_engine") as executor:
        begun = executor.begin(plan)
        gates = {layer: Event() for layer in plan.layers}
        for layer, gate in gates.items():
            begun.submit(layer, after=gate)
        assert not begun.done()
        for gate in gates.values():
            gate.set()
        begun.await_issue()
        device.run()
        begun.synchronize()
        assert begun.done()
    pair.check()


def test_a_stream_waits_for_all_layers():
    device = Device(eager=False)
    pair = pair_on(device, "load")
    plan = pair.plan(MOVE)
    with executor_on(device, "kernel") as executor:
        begun = executor.begin(plan)
        for layer in plan.layers:
            begun.submit(layer)
        stream = SimpleNamespace(cuda_stream=device.stream())
        begun.wait_layer(plan.layers[0], stream)
        begun.wait(stream)
        device.run()
        assert begun.done()
    pair.check()
