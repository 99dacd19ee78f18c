"""The table of a plan's candidates, at any width."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvplan import Policy
from kvplan.cost.explain import Explained, explain, facts
from kvplan.cost.model import candidates
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
