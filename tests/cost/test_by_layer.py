"""The cost of a transfer by layers: pieces one after another, by hand; and measured transfers on an H200."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import PathError, Policy
from kvplan.cost.by_layer import (
    LAUNCHES_WAIT,
    NEXT_GROUP,
    candidates_by_layer,
    in_sequence,
    kernel_wins_by_layer,
    statistics_by_layer,
)
from kvplan.cost.model import JOIN, candidates, predict
from kvplan.cost.policy import Hiding, layer_groups
from kvplan.cost.profile import TERMS, Beside
from kvplan.cost.statistics import Pieces, statistics_of
from kvplan.cost.store import by_name
from tests.cost.priced_profiles import PLAN, profile

COSTS = {
    "kernel": (5000.0, 10.0, 0.05),
    "copy_engine": (3000.0, 1000.0, 0.1, 500.0, 0.02),
    "copy_engine_2d": (4000.0, 300.0, 20.0, 0.05),
    "staged": (20_000.0, 2.0, 1000.0, 0.1, 500.0, 0.02),
}
# Microseconds of PLAN on the GPU, and of the part that a later piece does not take: a launch begins anew, copies queue.
ALONE = {"kernel": 56.0, "copy_engine": 84.0, "copy_engine_2d": 63.5, "staged": 51.2}
SAVED = {"kernel": 0.0, "copy_engine": 3.0 - JOIN * 1e6, "copy_engine_2d": 4.0, "staged": 20.0}


def near(microseconds: float) -> object:
    return pytest.approx(microseconds * 1e-6, rel=1e-9)


@pytest.mark.parametrize("path", TERMS)
def test_one_piece_is_the_plan(path):
    assert in_sequence(path, [PLAN], profile(COSTS), Policy()) == predict(path, PLAN, profile(COSTS), Policy())
    assert candidates_by_layer([PLAN], profile(COSTS), Policy()) == candidates(PLAN, profile(COSTS), Policy())


@pytest.mark.parametrize("path", TERMS)
def test_three_pieces_by_hand(path):
    made = in_sequence(path, [PLAN] * 3, profile(COSTS), Policy())
    gpu = 3 * ALONE[path] - 2 * SAVED[path]
    prepared = 2 * NEXT_GROUP * 1e6
    assert (made.seconds, made.wall) == (near(gpu), near(gpu + 1 + prepared))
    assert (made.groups, made.first_group) == (3, near(ALONE[path] + 1 + prepared))
    assert made.cpu_seconds == near(0.5 + prepared)  # a piece costs this profile's CPU nothing but its fixed share
    assert made.score == pytest.approx(made.wall + max(made.first_group - made.wall / 3, 0))


def test_compute_beside_slows_every_piece():
    some = profile(COSTS, {"kernel": Beside(rate=0.5, slower=1.25)})
    alone = in_sequence("kernel", [PLAN] * 4, some, Policy())
    # The policy for decode has 4 programs and the profile was measured with 8: 2 us and 50 us, each piece.
    made = in_sequence("kernel", [PLAN] * 4, some, Policy(overlap="decode", max_programs=8))
    assert made.seconds == pytest.approx(4 * predict("kernel", PLAN, some, Policy(max_programs=8)).seconds)
    one = predict("kernel", PLAN, some, Policy(overlap="decode", max_programs=8))
    assert made.wall == pytest.approx(one.wall + 3 * one.seconds / 0.5 + 3 * NEXT_GROUP)
    waits = LAUNCHES_WAIT * made.cpu_seconds  # the model's launches wait for the driver's lock
    assert made.compute_seconds == pytest.approx(4 * one.compute_seconds + waits)
    assert alone.compute_seconds == 0


def test_refused_paths_and_routes_without_costs():
    made = candidates_by_layer([PLAN] * 2, profile(COSTS), Policy(), {"staged": "no"})
    assert [one.path for one in made if one.refused] == ["staged"]
    assert {one.groups for one in made if not one.refused} == {2}
    with pytest.raises(PathError, match="no costs for route 'push'"):
        candidates_by_layer([replace(PLAN, route="push")] * 2, profile(COSTS), Policy())


def test_the_kernel_wins_whatever_merges():
    cheap = profile({"kernel": (1.0, 0.0, 0.0)})
    assert kernel_wins_by_layer([PLAN] * 4, cheap, Policy(), ())
    assert not kernel_wins_by_layer([PLAN] * 4, profile(COSTS), Policy(), ())
    assert kernel_wins_by_layer([PLAN] * 4, profile(COSTS), Policy(), ("copy_engine", "copy_engine_2d", "staged"))


MIB = 1 << 20


@pytest.mark.parametrize(("nbytes", "units", "groups"), [
    (0, 0, (1, 0)), (31 * MIB, 1, (1, 0)), (32 * MIB, 1, (2, 0)), (127 * MIB, 1, (7, 0)),
    (128 * MIB, 1, (8, 1)), (256 * MIB - 8, 1, (8, 1)), (256 * MIB, 1, (8, 2)), (1 << 36, 1, (8, 2)),
    # a unit has 128 KiB, 64 KiB and a byte, 64 KiB, 32 KiB and less of a group of layers
    (4096 * MIB, 4096, (8, 2)), (4096 * MIB, 4097, (8, 1)), (4096 * MIB, 8192, (8, 1)), (4096 * MIB, 8193, (8, 0)),
])  # fmt: skip
def test_how_many_groups(nbytes, units, groups):
    assert layer_groups(nbytes, units, 32) == (*groups, False)


@given(layers=st.integers(1, 130), units=st.integers(1, 4000), page=st.integers(1, 1 << 17))
def test_halved_groups_have_the_least_bytes(layers, units, page):
    """Layers do not split evenly: the smallest piece counts, not their mean."""
    nbytes = layers * units * page
    made = layer_groups(nbytes, units, layers)
    edges = made.edges(layers)
    assert edges == sorted(set(edges)), "no group is empty"
    assert (edges[0], edges[-1]) == (0, layers)
    if made.halvings:
        fewest = min(after - before for before, after in pairwise(edges))
        assert fewest * units * page >= 8 * MIB
        assert fewest * page >= 32 << 10


GQA1 = 240 * MIB, 384, 80  # 6,000 tokens of 80 layers and 1 KV head: 4.5 ms of copies
LLAMA = 750 * MIB, 375, 32  # 6,000 tokens of Llama-8B: 14.2 ms


@pytest.mark.parametrize(("sizes", "hiding", "groups"), [
    (GQA1, Hiding(0.0135, 0.0045), [6, 12, 24, 38]),  # of 3 layers, a unit has 24 KiB
    (GQA1, Hiding(0.0134, 0.0045), None),
    (GQA1, None, None),
    (GQA1, Hiding(1.0, 0.0), None),
    (LLAMA, Hiding(0.043, 0.0142), [2, 4, 8, 16, 2]),  # a layer more in the first group: 0.44 ms, and 7 groups less
    (LLAMA, Hiding(0.090, 0.0284), None),  # of 12,000 tokens: 0.9 ms
    ((80 * MIB, 1, 80), Hiding(1.0, 0.001), [6, 12, 24, 38]),  # five groups of 16 MiB: five others save none
    ((96 * MIB, 1, 80), Hiding(1.0, 0.001), [3, 6, 12, 24, 35]),
    ((64 * MIB, 1, 80), Hiding(1.0, 0.001), None),
    ((0, 0, 0), Hiding(1.0, 0.001), None),
    ((1920 * MIB, 4608, 80), Hiding(1.0, 0.002), [6, 12, 24, 38]),  # a unit has 32 KiB of 6 layers
    ((1920 * MIB, 4609, 80), Hiding(1.0, 0.002), None),
    ((750 * MIB, 375, 3), Hiding(1.0, 0.0142), [1, 2]),
])  # fmt: skip
def test_groups_double_where_the_compute_hides_them_and_fewer_groups_pay(sizes, hiding, groups):
    layers = sizes[2]
    made, usual = layer_groups(*sizes, hiding=hiding), layer_groups(*sizes)
    assert not usual.doubling
    assert made.sizes(layers) == (usual.sizes(layers) if groups is None else groups)


def load_of(layers: int, page: int, blocks: int) -> kvplan.Plan:
    """Random blocks of a pool that keeps all layers of a block together, into a cache with a tensor for each layer."""
    told = {"sizes": {"layer": layers, "block": blocks, "token": 16, "dim": page // 16}, "dtype": "uint8"}
    gpu = kvplan.KVLayout.from_spec(told | {"notation": "layer: block token dim", "device": "cuda:0"})
    host = kvplan.KVLayout.from_spec(told | {"notation": "block layer token dim", "device": "cpu"})
    chance = np.random.default_rng(0)
    return kvplan.compile(host, gpu).plan(chance.permutation(blocks), chance.permutation(blocks))


# Layers, bytes of a page, blocks; bytes of a piece on the host as a whole and by layer; milliseconds measured by layer
# on an H200. Pieces of 80 KiB are a tenth faster than the profile's line through pieces of 32 KiB to 1 MiB.
MEASURED = [
    (32, 64 << 10, 375, 2 << 20, 256 << 10, {"staged": (15.2, 0.06), "kernel": (16.0, 0.06)}),
    (80, 8 << 10, 375, 640 << 10, 80 << 10, {"staged": (4.8, 0.15), "kernel": (4.9, 0.05)}),
]


@pytest.mark.parametrize(("layers", "page", "blocks", "whole", "cut", "measured"), MEASURED)
def test_loads_by_layer_as_measured(layers, page, blocks, whole, cut, measured):
    plan = load_of(layers, page, blocks)
    pieces = statistics_by_layer(plan, groups=8)
    assert len(pieces) == 8
    assert blocks - 3 <= statistics_of(plan).extents.large <= blocks, "hardly any rows touch"
    assert statistics_of(plan).granule_nbytes == whole
    assert {piece.extents for piece in pieces} == {Pieces.of(blocks, blocks * cut)}
    made = {one.path: one for one in candidates_by_layer(pieces, by_name("H200"), Policy())}
    for path, (milliseconds, error) in measured.items():
        assert made[path].seconds == pytest.approx(milliseconds / 1e3, rel=error)
