"""Broken documents of every kind that kvplan reads: an error of ours, or what does not contradict itself."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVLayout, KVPlanError
from kvplan.catalogue.config import geometry
from kvplan.cost import profile
from kvplan.layout.spec import document_of, text_of
from tests.profiles import examples
from tests.unknown import padded_split_kv

SPEC = {"notation": "block layer kv token head dim", "dtype": "fp8", "address": 1 << 40, "layers": [3, 1],
        "sizes": {"layer": 2, "block": 5, "token": 4, "head": 3, "dim": 8}, "seams": [1 << 40]}  # fmt: skip
CONFIG = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096,
          "num_key_value_heads": 8, "layer_types": ["full_attention", "sliding_attention"] * 2,
          "sliding_window": 4096}  # fmt: skip
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
    st.lists(st.integers(-2, 300), max_size=3), st.sampled_from([2**31, 2**62, 2**63 - 1, 2**63, 2**64]),
)  # fmt: skip


def read_layout(document):
    layout = KVLayout.from_spec(document)
    again = KVLayout.from_spec(json.loads(text_of(layout.built)))
    assert again == layout


def read_config(document):
    for group in geometry(document).groups:
        assert group.layers == tuple(sorted(set(group.layers)))


def read_profile(document):
    made = profile.from_json(json.dumps(document))
    assert profile.from_json(made.to_json()) == made


KINDS = {
    "dump": (document_of(padded_split_kv().built), read_layout),
    "spec": (SPEC, read_layout),
    "config": (CONFIG, read_config),
    "profile": (json.loads(profile.default().to_json()), read_profile),
}


def places_of(value):
    """Every container in a document, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from places_of(item)


@pytest.mark.parametrize("kind", KINDS)
@examples(150)
@given(data=st.data())
def test_junk_anywhere_is_an_error_of_ours_or_right(kind, data):
    whole, read = KINDS[kind]
    broken = copy.deepcopy(whole)
    for _ in range(data.draw(st.integers(1, 2))):
        places = list(places_of(broken))
        container, key = places[data.draw(st.integers(0, len(places) - 1))]
        container[key] = data.draw(JUNK)
    try:
        read(broken)
    except KVPlanError:
        return
