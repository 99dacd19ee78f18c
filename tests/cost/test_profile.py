"""A profile survives its file, and a file that is none says what is wrong and where."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVPlanError
from kvplan.cost import store
from kvplan.cost.policy import PEER_ROUTES
from kvplan.cost.profile import (
    ANY_PEER,
    GPU_ROUTES,
    TERMS,
    Beside,
    DeviceProfile,
    PathCosts,
    default,
    default_pair,
    from_json,
    route_paths,
)

KINDS = ("decode", "prefill")


@st.composite
def numbers(draw, least: int = 0) -> float:
    """Numbers of five digits, as a measurement has."""
    return float(f"{draw(st.integers(least, 99_999))}e{draw(st.integers(-8, 8))}")


def costs(path: str) -> st.SearchStrategy[PathCosts]:
    terms = st.fixed_dictionaries({term: numbers() for term in TERMS[path]})
    return st.builds(PathCosts, terms, terms, terms if path == "kernel" else st.just({}))


def beside(path: str) -> st.SearchStrategy[Beside]:
    terms = st.fixed_dictionaries({term: numbers() for term in TERMS[path]})
    return st.builds(Beside, terms, st.sampled_from((1.0, 1.25, 1000.0)))


def ceiling_names(routes: tuple[str, ...]) -> tuple[str, ...]:
    return (*routes, *(f"sm_{route}" for route in routes), *(("memory",) if "device" in routes else ()))


def by_path(routes: tuple[str, ...], make) -> st.SearchStrategy:
    """What ``make(path)`` draws, by route and path."""
    return st.fixed_dictionaries(
        {route: st.fixed_dictionaries({path: make(path) for path in route_paths(route)}) for route in routes}
    )


def profiles(routes: tuple[str, ...], **of_pair: st.SearchStrategy) -> st.SearchStrategy[DeviceProfile]:
    return st.builds(
        DeviceProfile,
        gpu=st.text(),
        driver=st.text(),
        generation=st.none() | st.integers(0, 9),
        width=st.none() | st.integers(0, 32),
        how=st.sampled_from(("calibrated", "shipped", "default")),
        made=st.text(),
        multiprocessors=st.integers(0, 10_000),
        ceilings=st.fixed_dictionaries({name: numbers() for name in ceiling_names(routes)}),
        costs=by_path(routes, costs),
        beside=st.fixed_dictionaries({kind: by_path(routes, beside) for kind in KINDS}),
        note=st.text(),
        guessed=st.lists(st.text(), max_size=3).map(tuple),
        **of_pair,
    )


PROFILES = profiles(GPU_ROUTES) | profiles(
    PEER_ROUTES, peer=st.text(min_size=1), nvlinks=st.none() | st.integers(0, 18)
)


@given(profile=PROFILES)
def test_a_profile_comes_back_as_it_went(profile):
    text = profile.to_json()
    assert from_json(text) == profile
    document = json.loads(text)
    assert json.loads(from_json(text).to_json()) == document
    assert (document["schema"], document["version"]) == ("kvplan.profile", 2)


@pytest.mark.parametrize(
    ("profile", "routes", "peer", "command"),
    [
        (default(), GPU_ROUTES, "", "`kvplan calibrate`"),
        (default_pair(), PEER_ROUTES, ANY_PEER, "`kvplan calibrate --peer cuda:M`"),
    ],
)
def test_the_default_is_valid_and_says_that_it_is_a_guess(profile, routes, peer, command):
    assert from_json(profile.to_json()) == profile
    assert (profile.how, profile.gpu, profile.peer, profile.link) == ("default", "", peer, "a link not known")
    assert profile.note.endswith(command)
    assert tuple(profile.costs) == routes
    assert tuple(profile.ceilings) == ceiling_names(routes)
    for way in routes:
        assert {path: set(found.seconds) for path, found in profile.costs[way].items()} == {
            path: set(TERMS[path]) for path in route_paths(way)
        }
        assert all(paths[way].keys() == profile.costs[way].keys() for paths in profile.beside.values())
        for path, found in profile.costs[way].items():
            assert found.wall["fixed"] > found.seconds["fixed"]
            assert found.wall["fixed"] < profile.beside["decode"][way][path].wall["fixed"]
            assert (
                profile.beside["decode"][way][path].wall["fixed"] <= profile.beside["prefill"][way][path].wall["fixed"]
            )


@pytest.mark.parametrize(
    ("generation", "width", "words"),
    [(5, 16, "PCIe 5 x16"), (4, 8, "PCIe 4 x8"), (None, 16, "a link not known"), (5, None, "a link not known")],
)
def test_a_link_in_words(generation, width, words):
    assert replace(default(), generation=generation, width=width).link == words


@pytest.mark.parametrize(
    ("nvlinks", "words"),
    [(18, "NVLink, 18 links"), (1, "NVLink, 1 link"), (0, "PCIe"), (None, "a link not known")],
)
def test_a_link_of_a_pair_in_words(nvlinks, words):
    assert replace(default_pair(), nvlinks=nvlinks).link == words


SHIPPED = sorted(Path(store.__file__).parent.glob("profiles/nvidia-*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_read(path):
    profile = from_json(path.read_text())
    assert profile.how == "shipped"
    assert tuple(profile.costs) == (PEER_ROUTES if profile.peer else GPU_ROUTES)


def changed(place: str, value: object) -> str:
    """The default's file with another value at a dotted place."""
    document = json.loads(default().to_json())
    *before, last = place.split(".")
    held = document
    for name in before:
        held = held[name]
    held[last] = value
    return json.dumps(document)


def without(place: str) -> str:
    document = json.loads(default().to_json())
    *before, last = place.split(".")
    held = document
    for name in before:
        held = held[name]
    del held[last]
    return json.dumps(document)


def refusal(text: str) -> str:
    with pytest.raises(KVPlanError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "not json", "{'schema': 1}", '{"a": 1,}', "\x00"])
def test_what_is_no_json(text):
    assert "line 1 column" in refusal(text)


@pytest.mark.parametrize(
    "text",
    ["null", "1", '"kvplan.profile"', "[]", "{}", '{"schema": "kvplan.doctor"}', '{"schema": ["kvplan.profile"]}'],
)
def test_another_schema(text):
    assert refusal(text) == "no device profile: its schema is not 'kvplan.profile'"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (3, "version 3, and 2 is read here: calibrate again"),
        (1, "version 1, and 2 is read here: calibrate again"),
        ("2", "version '2', and 2 is read here: calibrate again"),
        (None, "version None, and 2 is read here: calibrate again"),
    ],
)
def test_another_version(version, said):
    assert refusal(changed("version", version)) == said


WRONG = "a value of the device profile is missing or wrong: "
PLACES = ("ceilings.load", "costs.store.copy_engine.wall.small_copy", "costs.load.kernel.program.byte",
          "beside.prefill.store.kernel.slower", "beside.decode.load.staged.wall.byte")  # fmt: skip


@pytest.mark.parametrize(
    "place", [*PLACES, "ceilings", "costs", "costs.store", "costs.load.copy_engine.wall", "beside", "how"]
)
def test_what_is_missing_is_refused(place):
    assert refusal(without(place)).startswith(WRONG)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, -1e-300, True, "1.0", None, [1.0], {"a": 1.0}])
def test_what_is_no_number_is_refused(place, value):
    assert refusal(changed(place, value)).startswith(WRONG)


def test_what_a_later_version_adds_is_left_out():
    document = json.loads(default().to_json()) | {"later": 1}
    document["ceilings"]["later"] = 5
    document["costs"]["load"]["later"] = {}
    assert from_json(json.dumps(document)) == default()


def test_whole_numbers_are_read_as_floats():
    profile = from_json(changed("costs.load.kernel.wall.run", 3))
    assert repr(profile.costs["load"]["kernel"].wall["run"]) == "3.0"
    assert set(asdict(profile)) == set(asdict(default()))
