"""Laws 1 to 3, 5 and 7 for every path of a GPU executor, on a simulated driver whose streams run in any order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from tests.contract.gpu.caches import Ids, Paged, way
from tests.contract.gpu.favouring import drawn as drawn_profile
from tests.contract.gpu.machines import PATIENCE, Simulated
from tests.profiles import examples
from tests.simulated.drawn import PATHS, PLACES, WAYS, Drawn, executor, ring_of
from tests.simulated.objects import Stream
from tests.simulated_driver import simulated
from tests.strategies import cases, neighbour_cases

SEEDS = st.integers(0, 2**32)


@pytest.mark.parametrize(("path", "route"), WAYS)
@examples(100)
@given(
    case=st.one_of(cases(), cases(max_blocks=12), neighbour_cases()), seed=SEEDS, batches=st.booleans(),
    by_layer=st.booleans(), slots=st.integers(1, 9), programs=st.sampled_from((None, 1, 3)),
)  # fmt: skip
def test_every_path_moves_what_the_oracle_moves(path, route, case, seed, batches, by_layer, slots, programs):
    """Laws 1 to 3 for every path of a GPU executor, in whatever order its streams run."""
    with simulated(2, seed, batches=batches) as driver:
        drawn = Drawn(case, driver, route)
        with executor(path, max_programs=programs, **ring_of(path, drawn.plan, slots=slots)) as made:
            for again in (False, True):  # the second time, tables and rings are there
                reader = Stream(driver.stream())
                transfer = made.submit(drawn.plan, by_layer=by_layer != again)
                transfer.wait(reader)
                for layer in drawn.plan.layouts[0][0].layers if by_layer else ():
                    transfer.wait_layer(layer, reader)
                result = transfer.result()
                assert transfer.done()
                assert (result.nbytes, result.path) == (drawn.plan.nbytes, path)
                assert bool(result.launches) == bool(result.descriptors) == bool(drawn.plan.nbytes)
                drawn.check()


NOTATIONS = ("layer: block kv token head dim", "block layer kv token head dim", "layer block kv token head dim",
             "kv layer block token head dim")  # fmt: skip


@examples(20)
@given(
    where=st.sampled_from(WAYS), notations=st.tuples(*[st.sampled_from(NOTATIONS)] * 2), layers=st.integers(2, 7),
    ids=st.tuples(*[st.permutations(range(5))] * 2), count=st.integers(3, 5), several=st.booleans(),
    slots=st.integers(1, 3), seed=SEEDS,
)  # fmt: skip
def test_each_layer_is_there_for_the_stream_that_waits_for_it(
    where, notations, layers, ids, count, several, slots, seed
):
    """Laws 1 and 7, by layers: transfers so long that they are cut, of one run group or of two."""
    path, route = where
    dim = -(-(49 << 20) // (2 * 2 * layers * count))
    forms = [Paged(notation, layer=layers, block=5, dim=dim) for notation in notations]
    with Simulated(seed % 1000) as gpu:
        pairs = [way(gpu, route, *forms, seed=3)]
        if several:
            pairs.append(way(gpu, route, *(replace(form, dim=48) for form in forms), seed=5))
        plan = kvplan.join([pair.plan(Ids(*(side[:count] for side in ids))) for pair in pairs])
        transfer = gpu.executor(path, **ring_of(path, plan, slots=slots)).submit(plan, by_layer=True)
        assert len(transfer.layer_groups) > 1
        target, due = pairs[0].targets, pairs[0].dst_bytes
        for layer in range(layers) if len(target) == layers else ():
            consumer = gpu.stream()
            transfer.wait_layer(layer, consumer)
            gpu.driver.put(
                consumer.cuda_stream,
                lambda k=layer: np.testing.assert_array_equal(target[k].root, due[k]),
            )
        transfer.synchronize(PATIENCE)
        for pair in pairs:
            pair.check()


@examples(100)
@given(case=cases(same_heads=True), seed=SEEDS, path=st.sampled_from(PATHS), slots=st.integers(1, 3))
def test_there_and_back_by_way_of_the_host(case, seed, path, slots):
    """Law 5: a store by any path and a load behind it restore the cache."""
    with simulated(1, seed) as driver:
        drawn = Drawn(case, driver, "store")
        load, distinct = drawn.plan, len(set(case.src_ids)) == len(case.src_ids)
        if distinct:
            back = kvplan.compile(drawn.program.dst, drawn.program.src)
            load = back.plan(case.dst_ids, case.src_ids, case.dst_skip, case.src_skip)
        with executor(path, **ring_of(path, drawn.plan, load, slots=slots)) as made:
            store = made.submit(drawn.plan)
            if distinct:
                made.submit(load, after=store).synchronize()
            store.synchronize()
            drawn.check()


@examples(150)
@given(
    drawn=st.lists(
        st.tuples(cases(max_blocks=4), st.sampled_from(list(PLACES)), st.booleans(), st.booleans()),
        min_size=2, max_size=6,
    ),
    seed=SEEDS,
    path=st.sampled_from(("auto", "auto", "staged", "kernel", "copy_engine")),
    slots=st.integers(1, 4),
)  # fmt: skip
def test_several_transfers_of_different_caches_are_in_flight_together(drawn, seed, path, slots):
    """Laws 1 and 2 for several transfers in flight together: of one priority or two, by one path or several."""
    with simulated(2, seed) as driver:
        some = [(case, route if path != "staged" or route in ("load", "store") else "load", urgent, after)
                for case, route, urgent, after in drawn]  # fmt: skip
        made = [Drawn(case, driver, route) for case, route, *_ in some]
        staged = ring_of("staged", *(each.plan for each in made if each.plan.direction != "device"), slots=slots)
        policy = kvplan.Policy(path=path, **staged)
        with kvplan.Executor("cuda:0", policy, drawn_profile(seed)) as here:
            flying = []
            for each, (_, _, urgent, after) in zip(made, some, strict=True):
                behind = flying[-1] if after and flying else None
                flying.append(here.submit(each.plan, after=behind, priority="high" if urgent else "normal"))
            for each, transfer in zip(made, flying, strict=True):
                assert transfer.result().nbytes == each.plan.nbytes
                each.check()


@examples(100)
@given(
    several=st.lists(cases(max_blocks=3), min_size=2, max_size=4), where=st.sampled_from(WAYS), many=st.booleans(),
    by_layer=st.booleans(), slots=st.integers(1, 4), seed=SEEDS,
)  # fmt: skip
def test_joined_plans_are_one_transfer(several, where, many, by_layer, slots, seed):
    """Law 7: joined plans are one transfer that moves what each of them moves; also those of many run groups."""
    path, route = where
    with simulated(2, seed) as driver:
        made = [Drawn(case, driver, route) for case in several * (9 if many else 1)]
        plan = kvplan.join([each.plan for each in made])
        with executor(path, **ring_of(path, plan, slots=slots)) as here:
            assert here.submit(plan, by_layer=by_layer).result().nbytes == sum(each.plan.nbytes for each in made)
            for each in made:
                each.check()
