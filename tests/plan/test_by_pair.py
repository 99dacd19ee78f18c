"""Values that are kept by pair of layouts."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, join
from kvplan.plan.by_pair import MOST, ByPair


def layout():
    return KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8))


def plan_of(src, dst):
    return kvplan.compile(src, dst).plan([0], [1])


def test_a_pair_has_its_own_value_in_each_direction():
    a, b = layout(), layout()
    known = ByPair[str]()
    known.keep(plan_of(a, b), "there")
    assert known.get(plan_of(b, a)) is None
    known.keep(plan_of(b, a), "back")
    assert (known.get(plan_of(a, b)), known.get(plan_of(b, a))) == ("there", "back")


def test_joined_plans_of_several_pairs_have_none():
    a, b, c = layout(), layout(), layout()
    both = join([plan_of(a, b), plan_of(a, c)])
    known = ByPair[str]()
    assert known.keep(both, "kept nowhere") == "kept nowhere"
    assert known.get(both) is None
    assert known.get(plan_of(a, b)) is None


@pytest.mark.parametrize("side", [0, 1])
def test_layouts_are_not_kept_alive_and_a_new_one_at_their_place_is_unknown(side):
    known, pair, new = ByPair[str](), [layout(), layout()], layout()
    known.keep(plan_of(*pair), "old")
    (kept,) = known._known.values()
    pair[side] = new
    gc.collect()
    assert kept[side]() is None
    known._known[id(pair[0]), id(pair[1])] = kept  # as if it had the id of the one that is gone
    assert known.get(plan_of(*pair)) is None


def test_pairs_are_bounded():
    known, b = ByPair[int](), layout()
    alive = [layout() for _ in range(MOST + 1)]
    for k, a in enumerate(alive):
        known.keep(plan_of(a, b), k)
    assert len(known._known) == 1
    assert known.get(plan_of(alive[-1], b)) == MOST
