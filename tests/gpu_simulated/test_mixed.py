"""Plans of large and small runs: the copy engine and the kernel, each with its own, at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvplan.cost import model as cost
from kvplan.cost.policy import Policy
from kvplan.cost.profile import default
from kvplan.cost.statistics import statistics_of
from kvplan.plan.halves import LARGE_RUN, halves_of
from tests.simulated import Device, Tensor
from tests.simulated.executors import both_ways, executor_on, paths_in_turn
from tests.simulated.hybrid import BLOCKS, LAYERS, PAGE, STATE, Hybrid


@both_ways
@pytest.mark.parametrize("seed", range(8))
def test_both_halves_move_every_byte_and_no_other(direction, seed):
    device = Device(seed)
    hybrid = Hybrid(device, direction)
    with executor_on(device) as executor, paths_in_turn(["copy_engine+kernel"]):
        plan = hybrid.plan([0, 3, 5], [4, 1, 2])
        expected = hybrid.expect()
        result = executor.submit(plan).result()
        assert (result.path, result.nbytes) == ("copy_engine+kernel", 3 * (LAYERS * PAGE + STATE))
        assert result.descriptors == 3 * LAYERS + 3
    for found, wanted in zip(hybrid.written, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@both_ways
@pytest.mark.parametrize("seed", range(8))
def test_what_was_submitted_last_is_what_stays(direction, seed):
    device = Device(seed)
    hybrid = Hybrid(device, direction)
    paths = ["copy_engine+kernel", "copy_engine+kernel", "kernel", "copy_engine+kernel", "copy_engine"]
    with executor_on(device) as executor, paths_in_turn(paths):
        device.eager = False
        for turn in range(len(paths)):
            plan = hybrid.plan([turn % BLOCKS], [2])
            transfer = executor.submit(plan)
        expected = hybrid.expect()
        transfer.synchronize()
        for found, wanted in zip(hybrid.written, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_half_waits_for_the_other_half_of_the_transfer_before(order, seed):
    """The same bytes are written in small runs by the kernel, and in one large run by the engine."""
    device = Device(seed)
    tokens, dim = LARGE_RUN // 128, 128
    target = np.zeros((2, tokens, dim), np.uint8)
    pieces, whole = np.full((tokens, 2, dim), 1, np.uint8), np.full((2, tokens, dim), 2, np.uint8)
    for pool in (pieces, whole):
        device.pin(pool)
    cache = kvplan.KVLayout.from_tensors("block token dim", Tensor(target))
    sources = (
        kvplan.KVLayout.from_tensors("token block dim", pieces),
        kvplan.KVLayout.from_tensors("block token dim", whole),
    )
    plans = [kvplan.compile(source, cache).plan([0, 1], [0, 1]) for source in sources]
    assert [bool(half) for plan in plans for half in halves_of(plan)] == [False, True, True, False]
    with executor_on(device) as executor, paths_in_turn(["copy_engine+kernel"] * 2):
        device.eager = False
        for turn in order:
            transfer = executor.submit(plans[turn])
        transfer.synchronize()
    assert (target == 1 + order[-1]).all()


@both_ways
def test_by_layer(direction):
    device = Device(3)
    hybrid = Hybrid(device, direction)
    with executor_on(device) as executor, paths_in_turn(["copy_engine+kernel"]):
        plan = hybrid.plan([1, 2], [0, 5])
        expected = hybrid.expect()
        executor.submit(plan, by_layer=True).synchronize()
    for found, wanted in zip(hybrid.written, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_halves_are_the_same_descriptors():
    hybrid = Hybrid(Device(), "store")
    plan = hybrid.plan([0, 3, 5], [4, 1, 2])
    large, small = halves_of(plan)
    assert (large.nbytes, small.nbytes) == (3 * STATE, 3 * LAYERS * PAGE)
    whole, *parts = (
        set(zip(*(column.tolist() for column in one.descriptors()), strict=True)) for one in (plan, large, small)
    )
    assert parts[0] | parts[1] == whole
    assert not parts[0] & parts[1]
    assert halves_of(plan)[1].parts[0].group is small.parts[0].group, "its table would be uploaded again"


def test_plans_of_one_kind_have_no_halves():
    hybrid = Hybrid(Device(), "load")
    hybrid.plan([0], [1])
    pages, states = (program.plan([0], [1]) for program in hybrid.programs)
    assert halves_of(pages)[0] is None
    assert halves_of(states)[1] is None


def test_the_model_splits_where_neither_path_is_good_at_all_of_it():
    """The engine pays for 65,536 small copies, and SMs are half as fast as the link."""
    hybrid = Hybrid(Device(), "load")
    large, small = (statistics_of(half) for half in halves_of(hybrid.plan([0], [1])))
    large = replace(large, nbytes=1 << 30, copies=large.copies.times(1 << 14), runs=1 << 14)
    small = replace(small, nbytes=1 << 26, copies=small.copies.times(1 << 14), runs=1 << 16)
    copies = small.copies.plus(large.copies)
    plan = replace(small, nbytes=large.nbytes + small.nbytes, copies=copies, runs=large.runs + small.runs)
    slow = replace(default(), ceilings=dict(default().ceilings, sm_load=12.0))
    kernel = replace(slow.costs["load"]["kernel"], wall={"fixed": 65e3, "run": 1.0, "byte": 1 / 12},
                     seconds={"fixed": 15e3, "run": 1.0, "byte": 1 / 12})  # fmt: skip
    slow = replace(slow, costs={"load": dict(slow.costs["load"], kernel=kernel), "store": slow.costs["store"]})
    refused = {"staged": "no", "copy_engine_2d": "no"}
    found = cost.candidates(plan, slow, Policy(), refused, (large, small))
    assert [one.path for one in found if not one.refused] == ["copy_engine+kernel", "kernel", "copy_engine"]
    assert found[0].seconds >= plan.nbytes / 24e9
    alone = cost.candidates(plan, slow, Policy(), {**refused, "kernel": "no"}, (large, small))
    assert [one.path for one in alone if not one.refused] == ["copy_engine"]
