"""A profile survives its file, and a file that is none says what is wrong and where."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.cost import store
from kvplan.cost.policy import PEER_ROUTES
from kvplan.cost.profile import (
    GPU_ROUTES,
    default,
    default_pair,
    from_json,
)


def measured(value: object, dice: random.Random) -> object:
    """A profile's document with other numbers, of five digits, as a measurement has."""
    if isinstance(value, dict):
        return {key: 1 + dice.random() if key == "slower" else measured(item, dice) for key, item in value.items()}
    return float(f"{dice.randrange(100_000)}e{dice.randrange(-8, 9)}") if isinstance(value, float) else value


@given(of_pair=st.booleans(), dice=st.randoms(use_true_random=False), text=st.text())
def test_a_profile_comes_back_as_it_went(of_pair, dice, text):
    whole = replace(default_pair() if of_pair else default(), gpu="a GPU", made=text, note=text, guessed=(text, "load"))
    document = measured(json.loads(whole.to_json()), dice)
    made = from_json(json.dumps(document))
    assert json.loads(made.to_json()) == document
    assert from_json(made.to_json()) == made
    assert (document["schema"], document["version"]) == ("kvplan.profile", 2)


SHIPPED = sorted(Path(store.__file__).parent.glob("profiles/nvidia-*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_read(path):
    profile = from_json(path.read_text())
    assert profile.how == "shipped"
    assert tuple(profile.costs) == (PEER_ROUTES if profile.peer else GPU_ROUTES)


def changed(place: str, value: object = None) -> str:
    """The default's file with another value at a dotted place, or without it."""
    document = json.loads(default().to_json())
    *before, last = place.split(".")
    held = document
    for name in before:
        held = held[name]
    del held[last]
    if value is not None:
        held[last] = value
    return json.dumps(document)


WRONG = "a value of the device profile is missing or wrong: "
PLACES = ("ceilings.load", "costs.load.kernel.program.byte", "beside.prefill.store.kernel.slower")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1 column"),
        ("[]", "no device profile: its schema is not 'kvplan.profile'"),
        (changed("schema", "kvplan.doctor"), "no device profile: its schema is not 'kvplan.profile'"),
        (changed("version", 3), "version 3, and 2 is read here: calibrate again"),
        *((changed(place), WRONG) for place in (*PLACES, "costs.store", "how")),
        *((changed(place, value), WRONG) for place in PLACES for value in (float("nan"), -1, True, "1.0", [1.0])),
    ],
)
def test_what_is_wrong_is_said(text, said):
    with pytest.raises(KVPlanError) as caught:
        from_json(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
