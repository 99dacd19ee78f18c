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
    ceiling_names,
    default,
    default_pair,
    names_of_costs,
    route_paths,
)
from kvplan.cost.profile_file import from_json

KINDS = ("decode", "prefill")
TARGETS = ("seconds", "wall", "cpu")


@st.composite
def numbers(draw, least: int = 0) -> float:
    """At most five digits: what a file keeps."""
    return float(f"{draw(st.integers(least, 99_999))}e{draw(st.integers(-8, 8))}")


def costs(path: str) -> st.SearchStrategy[PathCosts]:
    terms = st.fixed_dictionaries({term: numbers() for term in TERMS[path]})
    return st.builds(PathCosts, terms, terms, terms, terms if path == "kernel" else st.just({}))


BESIDE = st.builds(Beside, st.sampled_from((0.001, 0.5, 1.0, 1000.0)), st.sampled_from((1.0, 1.25, 1000.0)))


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
        beside=st.fixed_dictionaries({kind: by_path(routes, lambda path: BESIDE) for kind in KINDS}),
        programs=st.fixed_dictionaries(dict.fromkeys(routes, st.integers(1, 2000))),
        note=st.text(),
        calibrations=st.integers(0, 1000),
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
    assert (document["schema"], document["version"]) == ("kvplan.profile", 1)


@pytest.mark.parametrize(
    ("profile", "routes", "peer", "command"),
    [
        (default(), GPU_ROUTES, "", "`kvplan calibrate`"),
        (default_pair(), PEER_ROUTES, ANY_PEER, "`kvplan calibrate --peers`"),
    ],
)
def test_the_default_is_valid_and_says_that_it_is_a_guess(profile, routes, peer, command):
    assert from_json(profile.to_json()) == profile
    assert (profile.how, profile.gpu, profile.peer, profile.link) == ("default", "", peer, "a link not known")
    assert profile.note.endswith(command)
    assert profile.routes == tuple(profile.costs) == tuple(profile.programs) == routes
    assert tuple(profile.ceilings) == ceiling_names(routes)
    for way in routes:
        assert {path: set(found.seconds) for path, found in profile.costs[way].items()} == {
            path: set(TERMS[path]) for path in route_paths(way)
        }
        assert all(paths[way].keys() == profile.costs[way].keys() for paths in profile.beside.values())
        for found in profile.costs[way].values():
            assert found.wall["fixed"] == found.seconds["fixed"] + found.cpu["fixed"]


def test_numbers_are_kept_to_five_digits():
    ceilings = dict(default().ceilings) | {"load": 54.123456, "store": 0.000123456, "memory": 1234567.0}
    kept = from_json(replace(default(), ceilings=ceilings).to_json()).ceilings
    assert (kept["load"], kept["store"], kept["memory"]) == (54.123, 0.00012346, 1234600.0)


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


SHIPPED = sorted(Path(store.__file__).parent.glob("profiles/*.json"))


def without_device(document: dict) -> dict:
    """The file of a profile as kvplan 0.1.0 wrote it."""
    old = json.loads(json.dumps(document))
    for held in (old["ceilings"], old["costs"], *old["beside"].values(), old["programs"]):
        for name in ("device", "sm_device"):
            held.pop(name, None)
    for name in ("peer", "nvlinks"):
        old.pop(name, None)
    return old


@given(profile=profiles(GPU_ROUTES))
def test_an_old_file_has_the_guess_of_copies_within_a_gpu(profile):
    found, guess = from_json(json.dumps(without_device(json.loads(profile.to_json())))), default()
    assert found.guessed[: len(profile.guessed)] == profile.guessed
    assert set(names_of_costs(["device"])) <= set(found.guessed)
    assert found.costs == dict(profile.costs) | {"device": guess.costs["device"]}
    assert {kind: routes["device"] for kind, routes in found.beside.items()} == dict.fromkeys(
        KINDS, guess.beside["decode"]["device"]
    )
    assert (found.ceilings["device"], found.ceilings["sm_device"]) == (
        guess.ceilings["device"],
        guess.ceilings["sm_device"],
    )
    # The guess is of the number of programs that the default policy has on this GPU, so it is taken as it is.
    assert found.programs["device"] == 8 * max(profile.multiprocessors, 1)
    same = {"costs", "beside", "ceilings", "programs", "guessed"}
    assert {name: held for name, held in vars(found).items() if name not in same} == {
        name: held for name, held in vars(profile).items() if name not in same
    }
    assert from_json(found.to_json()) == found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_read(path):
    profile = from_json(path.read_text())
    assert profile.how == "shipped"
    assert tuple(profile.costs) == profile.routes


def test_a_pair_has_no_guess_for_a_route_that_is_missing():
    document = json.loads(default_pair().to_json())
    del document["costs"]["pull"]
    with pytest.raises(KVPlanError, match=r"costs\.pull\.kernel\.seconds is missing, or not an object"):
        from_json(json.dumps(document))


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
    assert refusal(text).startswith("no JSON: ")


@pytest.mark.parametrize("nested", ["[" * 200_000, '{"a":' * 200_000])
def test_what_is_nested_too_deep(nested):
    assert refusal(nested).startswith("no JSON: ")


@pytest.mark.parametrize(
    "text",
    ["null", "1", '"kvplan.profile"', "[]", "{}", '{"schema": "kvplan.doctor"}', '{"schema": ["kvplan.profile"]}'],
)
def test_another_schema(text):
    assert refusal(text) == "no device profile: its schema is not 'kvplan.profile'"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (2, "version 2, newer than 1 is what is read here"),
        (0, "version 0, where 1 is what is read here"),
        ("1", "version '1', where 1 is what is read here"),
        (None, "version None, where 1 is what is read here"),
        ([1], "version [1], where 1 is what is read here"),
    ],
)
def test_another_version(version, said):
    assert refusal(changed("version", version)) == said


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("ceilings", "ceilings is missing, or not an object"),
        ("ceilings.sm_store", "ceilings.sm_store is None; expected a number of at least 0"),
        ("costs", "costs.load.kernel.seconds is missing, or not an object"),
        ("costs.store", "costs.store.kernel.seconds is missing, or not an object"),
        ("costs.load.staged", "costs.load.staged.seconds is missing, or not an object"),
        ("costs.load.copy_engine.cpu", "costs.load.copy_engine.cpu is missing, or not an object"),
        ("costs.store.kernel.program", "costs.store.kernel.program is missing, or not an object"),
        ("costs.store.kernel.program.run", "costs.store.kernel.program.run is None; expected a number of at least 0"),
        ("costs.load.staged.wall.run", "costs.load.staged.wall.run is None; expected a number of at least 0"),
        ("beside", "beside.decode.load.kernel is missing, or not an object"),
        ("beside.prefill", "beside.prefill.load.kernel is missing, or not an object"),
        ("beside.decode.store.staged", "beside.decode.store.staged is missing, or not an object"),
        ("beside.decode.store.staged.rate", "beside.decode.store.staged.rate is None; expected a number of at least 0"),
        ("how", "how is ''; expected one of calibrated, shipped, default"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(place, said):
    assert refusal(without(place)) == said


PLACES = ("ceilings.load", "costs.store.copy_engine.wall.small_copy", "costs.load.kernel.program.byte",
          "beside.prefill.store.kernel.slower")  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (-1, "-1"),
        (-1e-300, "-1e-300"),
        (True, "True"),
        (False, "False"),
        ("1.0", "'1.0'"),
        (None, "None"),
        ([1.0], "[1.0]"),
        ({"a": 1.0}, "{'a': 1.0}"),
    ],
)
def test_what_is_no_number_is_named(place, value, shown):
    assert refusal(changed(place, value)) == f"{place} is {shown}; expected a number of at least 0"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [10**400, 10**4000, 1e308], ids=["e400", "e4000", "e308"])
def test_a_number_whose_products_no_float_holds_is_refused(place, value):
    assert refusal(changed(place, value)).startswith(f"{place} is ")


@pytest.mark.parametrize("name", ["rate", "slower"])
@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_a_rate_of_nothing(name, zero):
    said = refusal(changed(f"beside.decode.load.staged.{name}", zero))
    assert said.startswith("beside.decode.load.staged is {")
    assert said.endswith("; a rate is 0.001 to 1000, and slower is 1 to 1000")


@pytest.mark.parametrize(
    "place", ["costs.load", "costs.load.kernel", "costs.load.kernel.wall", "beside.decode", "ceilings"]
)
@pytest.mark.parametrize("value", [None, 1, "x", [], True])
def test_what_is_no_object(place, value):
    said = refusal(changed(place, value))
    assert said.startswith(place)
    assert said.endswith("is missing, or not an object")


@pytest.mark.parametrize("place", ["gpu", "driver", "made", "note", "how"])
@pytest.mark.parametrize("value", [1, None, ["x"], {}, True])
def test_what_is_no_text(place, value):
    assert refusal(changed(place, value)) == f"{place} is {value!r}; expected a text"


@pytest.mark.parametrize("place", ["generation", "width", "multiprocessors", "calibrations"])
@pytest.mark.parametrize("value", [-1, 1.0, "5", True, [5], {}])
def test_what_is_no_whole_number(place, value):
    assert refusal(changed(place, value)) == f"{place} is {value!r}; expected a whole number"


def test_another_way_of_being_made():
    assert refusal(changed("how", "dreamt")) == "how is 'dreamt'; expected one of calibrated, shipped, default"


def test_what_a_later_version_adds_is_left_out():
    document = json.loads(default().to_json()) | {"later": 1}
    document["ceilings"]["later"] = 5
    document["costs"]["load"]["later"] = {}
    assert from_json(json.dumps(document)) == default()


def test_whole_numbers_are_read_as_floats():
    profile = from_json(changed("costs.load.kernel.wall.run", 3))
    assert repr(profile.costs["load"]["kernel"].wall["run"]) == "3.0"
    assert set(asdict(profile)) == set(asdict(default()))


def test_a_file_that_names_no_programs_was_measured_with_those_that_run_beside_compute():
    document = json.loads(default().to_json())
    del document["programs"]
    assert from_json(json.dumps(document)).programs == {"load": 4, "store": 2, "device": 24}


@pytest.mark.parametrize("count", [0, -1, True, "8", None])
def test_a_kernel_has_at_least_one_program(count):
    document = json.loads(default().to_json())
    document["programs"]["store"] = count
    with pytest.raises(KVPlanError, match=r"^programs"):
        from_json(json.dumps(document))
