"""Laws 1 to 3, 5 and 7 for every path of a GPU executor, on a simulated GPU whose streams run in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.cost.policy import HOST_ROUTES, ROUTES
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.staging import stage
from tests.profiles import examples
from tests.simulated import Device, Stream
from tests.simulated.executors import ALL_PATHS, PATHS, TIGHT, Drawn, executor_on, paths_in_turn
from tests.strategies import cases

WAYS = [(path, route) for path in ALL_PATHS for route in ROUTES if path != "staged" or route in HOST_ROUTES]
LATE = {"inline_effort": 0, "lane_calls": -1}


def ring_of(plan: kvplan.Plan, slots: int) -> dict[str, int]:
    """The policy of a ring of so many slots, each of one granule, or of many where granules are small."""
    load = plan.direction == "load"
    needed = max((stage(part.group, host_is_src=load).nbytes for part in plan.parts), default=1)
    return {"staging_bytes": max(1024, slots * needed), "chunk_bytes": 256}


@pytest.mark.parametrize(("path", "direction"), WAYS)
@examples(100)
@given(
    case=cases(),
    seed=st.integers(0, 2**32),
    tight=st.booleans(),
    late=st.booleans(),
    old=st.booleans(),
    by_layer=st.booleans(),
    slots=st.integers(1, 4),
    streams=st.sampled_from((None, 1, 3)),
)
def test_every_path_moves_what_the_oracle_moves(
    path, direction, case, seed, tight, late, old, by_layer, slots, streams
):
    """Laws 1 to 3 for every path of a GPU executor, in whatever order its streams run."""
    device = Device(seed)
    drawn = Drawn(case, device, direction)
    if old:  # a driver without batches
        device.driver.cuMemcpyBatchAsync = None
    policy = ring_of(drawn.plan, slots) if path == "staged" else {}
    limits = Limits(**(TIGHT if tight else {}), **(LATE if late else {}))
    with executor_on(device, path, limits=limits, streams=streams, **policy) as executor:
        reader = Stream(device.stream())
        transfer = executor.submit(drawn.plan, by_layer=by_layer)
        transfer.wait(reader)
        for layer in drawn.plan.layouts[0][0].layers if by_layer else ():
            transfer.wait_layer(layer, reader)
        result = transfer.result()
        assert transfer.done()
        assert (result.nbytes, result.path) == (drawn.plan.nbytes, path)
        assert bool(result.launches) == bool(result.descriptors) == bool(drawn.plan.nbytes)
        drawn.check()


@examples(100)
@given(case=cases(same_heads=True), seed=st.integers(0, 2**32), path=st.sampled_from(PATHS))
def test_there_and_back_by_way_of_the_host(case, seed, path):
    """Law 5: a store by any path and a load behind it restore the cache."""
    device = Device(seed)
    drawn = Drawn(case, device, "store")
    back = kvplan.compile(drawn.program.dst, drawn.program.src)
    policy = ring_of(drawn.plan, 2) if path == "staged" else {}
    with executor_on(device, path, **policy, limits=Limits(**TIGHT)) as executor:
        store = executor.submit(drawn.plan)
        distinct = len(set(case.src_ids)) == len(case.src_ids)
        if distinct:
            load = back.plan(case.dst_ids, case.src_ids, case.dst_skip, case.src_skip)
            if path == "staged" and ring_of(load, 1)["staging_bytes"] > policy["staging_bytes"]:
                with pytest.raises(kvplan.PathError, match="staging_bytes is"):
                    executor.submit(load, after=store)
            else:
                executor.submit(load, after=store).synchronize()
        store.synchronize()
        drawn.check()


@examples(100)
@given(
    drawn=st.lists(st.tuples(cases(max_blocks=3), st.sampled_from(ROUTES)), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
    paths=st.lists(st.sampled_from(PATHS), min_size=1, max_size=4),
)
def test_several_transfers_of_different_caches_are_in_flight_together(drawn, seed, paths):
    """Laws 1 and 2 for several transfers that are in flight together."""
    device = Device(seed, eager=False)
    made = [Drawn(case, device, direction) for case, direction in drawn]
    with executor_on(device, limits=Limits(**TIGHT, chunk_nbytes=256)) as executor:
        turns = ["kernel" if path == "staged" and direction not in HOST_ROUTES else path
                 for path, (_, direction) in zip(paths * 4, drawn, strict=False)]  # fmt: skip
        with paths_in_turn(turns):
            flying = [executor.submit(each.plan) for each in made]
        device.run()
        for each, transfer in zip(made, flying, strict=True):
            assert transfer.result().nbytes == each.plan.nbytes
            each.check()


@examples(100)
@given(
    several=st.lists(cases(max_blocks=3), min_size=2, max_size=3),
    way=st.sampled_from([way for way in WAYS if way[0] in PATHS]),
    groups=st.sampled_from((0, 4)),
    seed=st.integers(0, 2**32),
)
def test_joined_plans_are_one_transfer(several, way, groups, seed):
    """Law 7: joined plans are one transfer that moves what each of them moves."""
    device, (path, direction) = Device(seed), way
    made = [Drawn(case, device, direction) for case in several]
    plan = kvplan.join([each.plan for each in made])
    with executor_on(
        device, path, limits=Limits(launch_groups=groups, chunk_nbytes=256, small_chunk_nbytes=1)
    ) as executor:
        assert executor.submit(plan).result().nbytes == sum(each.plan.nbytes for each in made)
        for each in made:
            each.check()
