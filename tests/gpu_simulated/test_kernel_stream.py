"""All kernels of an executor on one stream of the caller's."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan import PathError
from kvplan.cuda.handles import lender
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move
from tests.simulated import Device
from tests.simulated.executors import MOVE, PATHS, TIGHT, both_ways, executor_on, pair_on, paths_in_turn
from tests.simulated.overwrites import TINY_RING

KERNELS = ("kernel", "staged")


def lending(seed: int = 0, *, eager: bool = True) -> Device:
    """A device whose executors get one stream for their kernels."""
    device = Device(seed, eager=eager)
    device.lent = device.stream()
    return device


@both_ways
@pytest.mark.parametrize("path", KERNELS)
@pytest.mark.parametrize("by_layer", [False, True])
def test_every_kernel_runs_on_it_and_it_stays(path, direction, by_layer):
    device = lending()
    pair = pair_on(device, direction)
    with executor_on(device, path) as executor:
        for priority in ("normal", "high"):
            executor.submit(pair.plan(MOVE), by_layer=by_layer, priority=priority).synchronize()
        assert device.launched_on == {device.lent}
    pair.check()
    assert set(device.streams) == {device.lent}, "the executor destroyed the caller's stream, or left one of its own"


def test_nothing_asks_for_it_before_the_first_kernel():
    """An engine prepares before it captures, and only then has a stream to lend."""
    device = Device(0)
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        executor.prepare(pair.plan(MOVE))
        device.lent = device.stream()
        executor.submit(pair.plan(MOVE)).synchronize()
        assert device.launched_on == {device.lent}


@both_ways
@pytest.mark.parametrize("seed", range(12))
def test_what_was_submitted_last_is_what_stays(direction, seed):
    """Each overwrites some blocks of those before it, over any path, with and without layers."""
    device = lending(seed, eager=False)
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.choice(PATHS, 12)]
    pair = pair_on(device, direction)
    limits = Limits(**(TINY_RING | (TIGHT if seed % 2 else {})))
    with executor_on(device, limits=limits) as executor, paths_in_turn(names):
        for _ in names:
            move = Move(rng.permutation(9)[:3], rng.permutation(7)[:3])
            urgent = str(rng.choice(["normal", "high"]))
            executor.submit(pair.plan(move), priority=urgent, by_layer=bool(rng.integers(2)))
        device.run()
        pair.check()


@pytest.mark.parametrize("seed", range(12))
def test_loads_and_stores_that_wait_for_each_other_all_end(seed):
    """They share the stream, and each waits for events of the other's streams."""
    device = lending(seed, eager=False)
    store, load = pair_on(device, "store"), pair_on(device, "load")
    rng = np.random.default_rng(seed)
    with executor_on(device, limits=Limits(**TINY_RING)) as executor:
        last = None
        for turn in range(10):
            pair = (store, load)[int(rng.integers(2))]
            move = Move(rng.permutation(9)[:3], rng.permutation(7)[:3])
            last = executor.submit(pair.plan(move), after=last if turn % 3 else None, by_layer=bool(turn % 2))
        device.run()
    store.check()
    load.check()


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, None),
        (SimpleNamespace(cuda_stream=7), 7),
        (lambda: SimpleNamespace(cuda_stream=8), 8),
        (lambda: None, None),
    ],
)
def test_a_stream_or_a_function_that_returns_one(stream, handle):
    assert lender(stream)() == handle


@both_ways
@pytest.mark.parametrize("path", KERNELS)
def test_a_function_that_returns_no_stream_is_told_before_anything_moves(path, direction):
    returned = [7]

    class Asking(Device):
        lent = property(lambda self: lender(lambda: returned[0])(), lambda self, none: None)

    device = Asking(0)
    pair = pair_on(device, direction)
    with executor_on(device, path) as executor:
        with pytest.raises(PathError, match="the function kernel_stream returned 7; expected a CUDA stream or None"):
            executor.submit(pair.plan(MOVE))
        assert not device.launched_on
        returned[0] = None
        executor.submit(pair.plan(MOVE)).synchronize()
    pair.check()


def test_anything_else_is_refused():
    with pytest.raises(PathError, match="kernel_stream is 3; give a CUDA stream"):
        lender(3)
    with pytest.raises(PathError, match="device 'cpu' runs no kernels; leave it out"):
        kvplan.Executor("cpu", kernel_stream=lambda: None)
