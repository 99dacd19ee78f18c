"""What the cost model makes of a plan's numbers, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvplan import Policy
from kvplan.cost import store
from kvplan.cost.model import TIE, Candidate, Prices, candidates, features
from kvplan.cost.policy import ROUTES
from kvplan.cost.profile import TERMS, Beside, DeviceProfile, PathCosts, default_pair, route_paths
from kvplan.cost.statistics import Counted, GroupFacts
from tests.cost.priced_profiles import FACTS, PLAN, profile

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def predict(path: str, plan: list[Counted], some: DeviceProfile, policy: Policy, route: str = "load") -> Candidate:
    return Prices(path, route, some, policy).of(plan)


COSTS = {
    "kernel": (5000.0, 10.0, 0.05),
    "copy_engine": (3000.0, 1000.0, 500.0, 0.02),
    "copy_engine_2d": (4000.0, 300.0, 20.0, 0.05),
    "staged": (20_000.0, 1000.0, 500.0, 0.02),
}
ALONE = {
    "kernel": 56e-6,  # 5 + 100 x 0.01 + 50
    "copy_engine": 68e-6,  # 3 + 40 + 5 + 20
    "copy_engine_2d": 61.6e-6,  # 4 + 6 + 1.6 + 50
    "staged": 47e-6,  # 20 + 4 + 3 + 20
}


@pytest.mark.parametrize("path", TERMS)
def test_a_prediction_by_hand(path):
    made = predict(path, PLAN, profile(COSTS), Policy())
    assert (made.seconds, made.wall) == (near(ALONE[path]), near(ALONE[path] + 1e-6))
    assert (made.path, made.compute_seconds, made.refused, made.score) == (path, 0.0, "", made.wall)
    assert features(path, PLAN) == (1.0, *(10 * count for count in FACTS.terms[path]))


def test_beside_compute_other_costs_count_and_compute_loses():
    some = profile(COSTS, {"kernel": Beside({"fixed": 200e3, "run": 0.0, "byte": 0.1}, 1.25)})
    made = predict("kernel", PLAN, some, Policy(overlap="decode"))
    assert (made.seconds, made.wall) == (near(56e-6), near(300e-6))
    assert made.compute_seconds == near(20e-6)  # a fifth of the 100 us in which bytes move: 1 - 1 / 1.25
    assert made.score == near(320e-6)


COUNT = st.integers(0, 10**6)
POLICIES = st.builds(
    Policy, overlap=st.sampled_from(("idle", "decode", "prefill")), max_programs=st.none() | st.integers(1, 200)
)


@st.composite
def drawn(draw) -> DeviceProfile:
    """Costs of all routes: of a GPU and of a pair at once."""

    def terms(path: str) -> dict[str, float]:
        return {term: draw(st.floats(0, 1e6)) for term in TERMS[path]}

    costs = {path: PathCosts(terms(path), terms(path), terms(path)) for path in TERMS}
    beside = {path: Beside(terms(path), draw(st.floats(1, 3))) for path in TERMS}
    made = profile({})
    return replace(
        made,
        costs={route: {path: costs[path] for path in route_paths(route)} for route in ROUTES},
        ceilings=made.ceilings | default_pair().ceilings,
        beside={kind: dict.fromkeys(ROUTES, beside) for kind in made.beside},
    )


@st.composite
def plans(draw) -> list[Counted]:
    terms = {path: draw(st.tuples(*[COUNT] * (len(names) - 1))) for path, names in TERMS.items()}
    facts = GroupFacts(draw(COUNT), draw(st.sampled_from((1, 2, 4, 8, 16))), 4096, terms)
    return [(facts, draw(st.integers(1, 100)))]


@given(
    some=drawn(), plan=plans(), route=st.sampled_from(ROUTES), policy=POLICIES,
    refused=st.sets(st.sampled_from(sorted(TERMS))),
)  # fmt: skip
def test_the_first_is_within_the_tie_of_all_and_all_are_there(some, plan, route, policy, refused):
    made = candidates(plan, route, some, policy, dict.fromkeys(refused, "no"))
    assert {one.path for one in made} == {*route_paths(route), *refused}
    able = [one for one in made if not one.refused]
    assert [bool(one.refused) for one in made] == [False] * len(able) + [True] * len(refused)
    assume(able)
    assert able[0].score <= min(one.score for one in able) * (1 + TIE)
    assert [one.score for one in able[1:]] == sorted(one.score for one in able[1:])
    assert all(min(one.seconds, one.wall, one.compute_seconds) >= 0 for one in able)


@pytest.mark.parametrize(
    ("overlap", "direction", "near_best", "mean"),
    [("decode", "load", 0.93, 1.02), ("decode", "store", 0.87, 1.04), ("prefill", "load", 0.85, 1.05),
     ("prefill", "store", 0.8, 1.07)],
)  # fmt: skip
def test_choices_beside_compute_as_measured(overlap, direction, near_best, mean):
    """Of an H200, by the shipped profile: a transfer and what compute loses beside it, against the best path."""
    some, ratios = store.by_name("h200"), []
    for point in json.loads((RESULTS / "choice-beside-nvidia-h200.json").read_text())["points"]:
        if (point["overlap"], point["case"]["direction"]) == (overlap, direction):
            plan = [(GroupFacts(0, 16, 0, {path: tuple(counts) for path, counts in point["terms"].items()}), 1)]
            first = candidates(plan, direction, some, Policy(overlap=overlap))[0].path
            ratios.append(point["scores"][first] / min(point["scores"].values()))
    assert len(ratios) == 68
    assert sum(ratio <= 1.05 for ratio in ratios) / len(ratios) > near_best
    assert sum(ratios) / len(ratios) < mean
