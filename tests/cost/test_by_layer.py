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
    mixed_in_sequence,
    statistics_by_layer,
)
from kvplan.cost.explain import explain, facts, shares
from kvplan.cost.model import JOIN, MIXED, Candidate, candidates, mixed, predict
from kvplan.cost.policy import Hiding, cuttings, layer_groups
from kvplan.cost.profile import TERMS, Beside, PathCosts, route_paths
from kvplan.cost.statistics import LARGE, Pieces, Statistics, statistics_of
from kvplan.cost.store import by_name
from kvplan.plan.layers import Cutting
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
SMALL, LARGE_RUNS = (
    replace(PLAN, nbytes=nbytes, copies=Pieces.of(count, nbytes), runs=count)
    for count, nbytes in ((10, 10_000), (2, 990_000))
)


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


def test_pieces_end_no_earlier_than_they_are_issued():
    """40 small copies of 10 us of the CPU each take longer than the 84 us that they take the GPU."""
    some = profile(COSTS)
    costs = some.costs["load"]["copy_engine"]
    dear = replace(costs, cpu=dict(costs.cpu) | {"small_copy": 10_000.0}, wall=dict(costs.wall) | {"fixed": 1e6})
    some = replace(some, costs={"load": dict(some.costs["load"]) | {"copy_engine": dear}})
    made = in_sequence("copy_engine", [PLAN] * 4, some, Policy())
    prepared = 3 * NEXT_GROUP * 1e6
    assert made.cpu_seconds == near(0.5 + prepared + 4 * 400)
    assert made.wall == made.cpu_seconds


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


def test_the_lag_of_the_first_group_counts():
    late = Candidate("staged", wall=100.0, groups=4, first_group=40.0)
    assert (late.lag, late.score) == (15.0, 115.0)
    assert Candidate("staged", wall=100.0, groups=4, first_group=20.0).lag == 0
    assert Candidate("staged", wall=100.0).score == 100.0


def test_mixed_pieces():
    some, policy = profile(COSTS), Policy()
    both = LARGE_RUNS, SMALL
    assert mixed_in_sequence([both], some, policy) == mixed(*both, some, policy)
    made = mixed_in_sequence([both, (LARGE_RUNS, None), both], some, policy)
    engine = in_sequence("copy_engine", [LARGE_RUNS] * 3, some, policy)
    kernel = in_sequence("kernel", [SMALL] * 2, some, policy)
    link = (3 * LARGE_RUNS.nbytes + 2 * SMALL.nbytes) / 10e9
    assert made.seconds == pytest.approx(3 * JOIN + max(engine.seconds, kernel.seconds, link))
    assert made.groups == 3
    assert 0 < made.first_group < made.wall
    offered = [one.path for one in candidates_by_layer([PLAN] * 2, some, policy, {}, [both, (None, SMALL)])]
    assert MIXED in offered
    for halves in ([], [(None, SMALL)] * 2, [(LARGE_RUNS, None)] * 2):
        assert MIXED not in [one.path for one in candidates_by_layer([PLAN] * 2, some, policy, {}, halves)]
    assert MIXED not in [one.path for one in candidates_by_layer([PLAN], some, policy, {"kernel": "no"}, [both])]


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


def test_the_limits_hold_for_halved_groups():
    assert layer_groups(1 << 40, 1, 32, most=1) == Cutting(1)
    assert layer_groups(4096 * MIB, 1, 32, least_nbytes=1024 * MIB) == Cutting(4)
    made = [layer_groups(nbytes, 1, 32, 8, 1, halved_nbytes=100, piece_nbytes=1) for nbytes in (1599, 1600, 3199, 3200)]
    assert made == [Cutting(8), Cutting(8, 1), Cutting(8, 1), Cutting(8, 2)]
    made = [layer_groups(1600, units, 32, 8, 1, halved_nbytes=1, piece_nbytes=10) for units in (11, 10, 6, 5)]
    assert made == [Cutting(8), Cutting(8, 1), Cutting(8, 1), Cutting(8, 2)]


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


@given(layers=st.integers(1, 130), copying=st.floats(1e-4, 0.1), times=st.floats(3, 20), slower=st.floats(0.7, 1))
def test_the_compute_ends_no_later_for_groups_that_double(layers, copying, times, slower):
    """Beside compute, copies go at 0.7 of the link's rate or more. A group costs the launching thread 0.1 ms."""
    nbytes = round(copying * 55e9)
    told = layer_groups(nbytes, 1, layers, hiding=Hiding(times * copying, copying))
    usual = layer_groups(nbytes, 1, layers)
    ends = []
    for cutting in (told, usual):
        edges, at = cutting.edges(layers), 0.0
        for first, end in pairwise(edges):
            at = max(at, copying / slower * end / layers) + times * copying * (end - first) / layers + 1e-4
        ends.append(at)
    # The first group is priced at the link's rate; for slower copies it comes later by up to 0.43 of what it saves.
    assert ends[0] <= ends[1] + 0.43 * 1e-4 * (len(usual.sizes(layers)) - len(told.sizes(layers)))


@given(layers=st.integers(1, 200), groups=st.integers(1, 6), times=st.floats(2, 10))
def test_the_compute_waits_for_the_first_of_groups_that_double_and_for_no_other(layers, groups, times):
    """Copies take a second a layer, and the compute of a layer at least two."""
    made = Cutting(groups, doubling=True)
    sizes, edges = made.sizes(layers), made.edges(layers)
    assert sum(sizes) == layers
    assert min(sizes) >= 1
    assert len(sizes) <= groups
    assert all(after == 2 * before for before, after in pairwise(sizes[:-1]))
    computed = float(sizes[0])
    for arrived, size in zip(edges[1:], sizes, strict=True):
        assert arrived <= computed + 1e-9
        computed += times * size


def test_the_first_group_of_61_layers_is_not_too_small():
    """DeepSeek-V3: pages of 18 KiB, so one layer's pieces are below what a batch copies."""
    assert layer_groups(61 * 375 * 18432, 375, 61) == Cutting(8, 1)
    assert layer_groups(64 * 375 * 18432, 375, 64) == Cutting(8, 2)
    assert Cutting(8, 1).edges(61)[:3] == [0, 3, 7]


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


def test_pieces_of_a_row_may_be_small_where_the_row_is_not():
    """Pages of 4 KiB: rows of 320 KiB, and 20 KiB of 5 layers. A small copy costs the CPU and the GPU 3 us."""
    plan, policy = load_of(80, 4 << 10, 375), Policy(overlap="decode")
    pieces = statistics_by_layer(plan, groups=16)
    assert pieces[0].extents.small_nbytes == 375 * (20 << 10) < 375 * LARGE
    whole = candidates(statistics_of(plan), by_name("H200"), policy)
    by_layer = candidates_by_layer(pieces, by_name("H200"), policy)
    assert (whole[0].path, by_layer[0].path) == ("staged", "kernel")
    staged = next(one for one in by_layer if one.path == "staged")
    assert staged.wall > 5 * by_layer[0].wall


def test_the_text_tells_the_groups():
    some = replace(profile(COSTS), gpu="A GPU", how="made up", note="")
    pieces = [PLAN] * 3
    found = candidates_by_layer(pieces, some, Policy(), {"staged": "no"})
    text = explain(found, pieces, some, Policy())
    assert "layers:  3 groups, one after another" in text
    assert "until the first layers arrive" in text
    assert "layers:" not in explain(candidates(PLAN, some, Policy()), PLAN, some, Policy())
    kernel = {share.term: share.times for share in shares("kernel", pieces, some)}
    assert kernel == {"fixed": 1, "run": 300, "byte": 3_000_000}
    told = facts(found, pieces, some, Policy())["candidates"][0]
    assert (told["groups"], told["first_group"]) == (3, found[0].first_group)
    assert sum(term["seconds"] for term in told["terms"]) == pytest.approx(found[0].wall)


def test_no_bytes_cost_nothing_more_by_layer():
    """Costs without a fixed part, and a piece of nothing: no division by zero."""
    nothing = Statistics("load", 0, 1, 0, 16, Pieces(), 0, 0, Pieces(), Pieces(), 0)
    free = PathCosts(*(dict.fromkeys(TERMS["staged"], 0.0),) * 3)
    some = profile(COSTS)
    some = replace(some, costs={"load": dict(some.costs["load"]) | {"staged": free}})
    for path in route_paths("load"):
        made = in_sequence(path, [nothing, nothing], some, Policy(overlap="decode"))
        assert made.wall >= made.seconds >= 0


def test_few_groups_are_not_replaced_by_groups_that_double():
    assert [cutting.doubling for cutting in cuttings(4)] == [False] * 3 + [True] * 2
    for most in (1, 2, 3):
        assert not any(cutting.doubling for cutting in cuttings(most))
        assert not layer_groups(4096 * MIB, 1, 80, most, hiding=Hiding(1.0, 0.001)).doubling
