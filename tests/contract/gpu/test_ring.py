"""Transfers through one ring: none writes a slot that another still reads, whoever fails or prepares in between."""

from __future__ import annotations

import threading

import pytest

import kvplan
from tests.contract.gpu.caches import PAGE_FIRST, Ids, Paged, both_ways, described, forms, way
from tests.contract.gpu.favouring import favouring
from tests.contract.gpu.machines import PATIENCE, Simulated

SEEDS = 6
CACHE, POOL = forms(block=30)
LARGER = Paged(PAGE_FIRST, block=5, token=12)  # its blocks need larger slots
IDS = Ids(range(2, 29), range(1, 28))


def pairs_of(machine, route, pool=POOL):
    return [way(machine, route, CACHE, pool, seed=seed) for seed in (1, 11, 21)]


def ids_of_larger(route):
    return Ids(range(24), range(4)) if route == "store" else Ids(range(4), range(24))


def ring_of(machine):
    return machine.executor("staged", staging_bytes=8 << 10, profile=favouring("staged"))


@both_ways
@pytest.mark.parametrize("pools", [(POOL, POOL, POOL), (POOL, LARGER, LARGER), (LARGER, LARGER, LARGER)])
@pytest.mark.parametrize("failing", ["normal", "high"])
@pytest.mark.parametrize("second", ["normal", "high"])
def test_a_submit_that_fails_takes_no_slot_from_transfers_in_flight(route, pools, failing, second):
    for seed in range(SEEDS):
        with Simulated(seed) as machine:
            executor = ring_of(machine)
            pairs = [pairs_of(machine, route, form)[k] for k, form in enumerate(pools)]
            ids = [IDS if form is POOL else ids_of_larger(route) for form in pools]
            failed = executor.submit(pairs[1].program.plan(*ids[1]), after=threading.Event())
            failed.cancel()
            executor.submit(pairs[0].plan(ids[0]))
            with pytest.raises(kvplan.TransferError):
                executor.submit(pairs[1].program.plan(*ids[1]), after=failed, priority=failing).synchronize(PATIENCE)
            executor.submit(pairs[2].plan(ids[2]), priority=second).synchronize(PATIENCE)
            executor.close()
            for pair in pairs:
                pair.check()


@both_ways
@pytest.mark.parametrize("prepared", [False, True])
def test_larger_slots_are_written_behind_the_transfers_in_smaller_ones(route, prepared):
    ids = ids_of_larger(route)
    for seed in range(SEEDS):
        with Simulated(seed) as machine:
            executor, small, large = ring_of(machine), pairs_of(machine, route), pairs_of(machine, route, LARGER)
            for pair, priority in zip(small, ("normal", "high", "normal"), strict=True):
                executor.submit(pair.plan(IDS), priority=priority)
            if prepared:
                executor.prepare(large[0].program.plan(*ids))
            flying = [executor.submit(pair.plan(ids), priority=priority)
                      for pair, priority in zip(large, ("normal", "high", "normal"), strict=True)]  # fmt: skip
            for transfer in flying:
                transfer.synchronize(PATIENCE)
            executor.close()
            for pair in (*small, *large):
                pair.check()


@both_ways
@pytest.mark.parametrize("path", ["auto", "staged"])
def test_a_plan_is_refused_also_behind_its_layers(simulated, route, path):
    """Blocks of all layers are larger than the ring, and those of each layer are not."""
    pair = way(simulated, route, *forms(padded=False, layer=4, block=30, dim=256))
    small = way(simulated, route, CACHE, POOL, seed=5)
    executor = simulated.executor(path, staging_bytes=3 << 10, profile=favouring("staged"))
    plan = pair.plan(Ids([1, 2], [3, 4]))
    layers = executor.begin(plan)
    for layer in range(4):
        layers.submit(layer)
    assert layers.result().path == "staged"
    if path == "auto":
        assert executor.submit(plan).result().path != "staged"
    else:
        with pytest.raises(kvplan.PathError, match="staging_bytes"):
            executor.submit(plan)
    assert executor.submit(small.plan(IDS)).result().path == "staged"
    pair.check()
    small.check()


@both_ways
@pytest.mark.parametrize("nbytes", [300 << 10, 1_000_000])
def test_a_ring_of_any_size_stays_within_its_memory(route, nbytes):
    with Simulated() as machine:
        pair, executor = (
            way(machine, route, *forms(block=30, dim=4096)),
            machine.executor("staged", staging_bytes=nbytes),
        )
        executor.submit(pair.plan(IDS)).synchronize(PATIENCE)
        executor.close()
        pair.check()


def test_blocks_that_are_read_several_times_across_a_seam(gpu):
    pair = way(gpu, "load", CACHE, POOL)
    seams = [pair.layouts[0].address(layer=pair.layouts[0].layers[0], part="k", block=3, token=0, head=0) + 100]
    pair.program = kvplan.compile(described(pair.src, pair.sources, seams=seams), pair.layouts[1])
    gpu.executor("staged").submit(pair.plan(Ids([3] * 20, range(20)))).synchronize(PATIENCE)
    pair.check()
