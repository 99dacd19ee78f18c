"""Laws 1 to 3, 5 and 7 for every path of a GPU executor, on a simulated driver whose streams run in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from tests.contract.gpu.favouring import drawn as drawn_profile
from tests.profiles import examples
from tests.simulated.drawn import PLACES, WAYS, Drawn, executor, ring_of
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
