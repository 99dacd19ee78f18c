"""The table of a plan's candidates, at any width."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Policy
from kvplan.cost.explain import Explained, explain, facts
from kvplan.cost.model import candidates
from kvplan.cost.policy import PEER_ROUTES, ROUTES
from kvplan.cost.profile import default, default_pair
from tests.cost.priced_profiles import PLAN, profile

PROFILE = replace(
    profile(
        {
            "kernel": (9_000, 40, 0.02),
            "copy_engine": (4_000, 1_000, 2_000, 0.05),
            "copy_engine_2d": (4_000, 3_000, 20, 0.05),
        }
    ),
    gpu="A GPU",
    how="made up",
    note="",
)
REFUSED = {"staged": "a block takes 100,000 bytes of the ring, which has 4,096"}


def text_of(width: int) -> str:
    made = candidates(PLAN, "load", PROFILE, Policy(), REFUSED)
    return explain(made, Explained(PLAN, "load", PROFILE, Policy()), width)


@given(width=st.integers(1, 300))
def test_any_width_holds_the_same_words(width):
    text = text_of(width)
    terms = [line for line in text.splitlines() if line.startswith("    ") and "cannot" not in line]
    assert max(map(len, terms)) <= max(width, 60)
    assert text.split() == text_of(300).split()
    # What a column says stands under its head: figures end where the head does.
    lines = text.splitlines()
    head = next(line for line in lines if "in all" in line)
    figures = [line for line in lines if line.endswith("s       -")]
    assert len(figures) == 3
    assert {len(line) for line in figures} == {len(head)}


def test_why_the_first_is_taken():
    made = candidates(PLAN, "load", PROFILE, Policy(), REFUSED)
    told = [facts(few, Explained(PLAN, "load", PROFILE, Policy()))["verdict"] for few in (made, made[1::-1])]
    ratio = made[1].score / made[0].score
    assert told == [
        f"{made[0].path} is taken: {made[1].path}, the next, takes {ratio:.2f} times as long",
        f"{made[1].path} is taken: {made[0].path} is as fast, within the 3 % that choices are not made by",
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_in_words(route):
    h200 = {"gpu": "NVIDIA H200", "note": ""}
    some = replace(default_pair(), peer="NVIDIA H200", nvlinks=18, **h200) if route in PEER_ROUTES else replace(
        default(), generation=5, width=16, **h200)  # fmt: skip
    lines = explain(candidates(PLAN, route, some, Policy()), Explained(PLAN, route, some, Policy())).splitlines()
    profile, words = {
        "load": ("NVIDIA H200, PCIe 5 x16", "from the host"),
        "store": ("NVIDIA H200, PCIe 5 x16", "to the host"),
        "device": ("NVIDIA H200, PCIe 5 x16", "within the GPU"),
        "push": ("NVIDIA H200 to NVIDIA H200, NVLink, 18 links", "to another GPU"),
        "pull": ("NVIDIA H200 to NVIDIA H200, NVLink, 18 links", "from another GPU"),
    }[route]
    assert lines[:2] == [f"profile: {profile}, default", f"route:   {words}"]
    assert len([line for line in lines if line.endswith("s       -")]) == len(some.costs[route])
