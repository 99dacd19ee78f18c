"""A plan layer by layer: the same byte moves, in the order of the layers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.plan.layers import split_layers
from tests.compiled_cases import moves, planned
from tests.profiles import examples
from tests.strategies import cases


@examples(200)
@given(case=cases(), count=st.integers(1, 3))
def test_each_part_moves_the_bytes_of_its_layers(case, count):
    plan = planned(case)
    for layers, part in split_layers(plan, count):
        src, dst = plan.layouts[0]
        program = kvplan.compile(src.slice(layers=sorted(layers)), dst.slice(layers=sorted(layers)))
        if len(layers) == len(src.layers) or program.unit_tokens == case.unit_tokens:
            alone = program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
            assert moves(part) == moves(alone)


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5), (9, [1] * 5)])
def test_layers_are_dealt_out_evenly(count, sizes):
    cache = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((5, 4, 2, 8), np.int8), layer_start=3)
    host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((4, 5, 2, 8), np.int8), layer_start=3)
    plan = kvplan.compile(cache, host).plan([1, 2], [3, 0])
    made = split_layers(plan, count)
    assert [len(layers) for layers, _ in made] == sizes
    assert [layer for layers, _ in made for layer in sorted(layers)] == [3, 4, 5, 6, 7]
    assert [part.nbytes for _, part in made] == [32 * size for size in sizes]


def test_layers_that_would_be_cut_into_other_units_stay_one_plan():
    from kvplan.plan import layers as module

    cache = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 4, 2, 8), np.int8))
    plan = kvplan.compile(cache, cache.slice()).plan([1], [2])
    whole = module._cuts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_cuts", lambda *given: None)
        assert split_layers(plan, 2) == [(frozenset({0, 1}), plan)]
    assert module._cuts is whole
    assert len(split_layers(plan, 2)) == 2


def test_a_plan_made_by_hand_of_groups_that_no_program_has_stays_one():
    cache = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 4, 2, 8), np.int8))
    plan = kvplan.compile(cache, cache).plan([1], [2])
    group = plan.parts[0].group
    foreign = type(group)(group.src, group.dst, group.src_base, group.dst_base, group.runs)
    strange = kvplan.Plan(
        (plan.parts[0]._replace(group=foreign),), plan.units, plan.nbytes, plan.direction, plan.layouts, plan.seams,
        plan.skips,
    )  # fmt: skip
    assert split_layers(strange, 2) == [(frozenset({0, 1}), strange)]
