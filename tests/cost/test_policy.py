"""A policy says what it is given, or that it cannot be."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvplan import PathError, Policy

# Of each number: the least and the greatest that are taken, and what the refusal says of others.
BOUNDS = {
    "threads": (1, None, "at least one"),
    "max_programs": (1, 1 << 16, "at least one"),
    "tile_bytes": (1 << 10, None, "power of two"),
    "staging_bytes": (1 << 10, None, "at least 1,024 bytes"),
    "chunk_bytes": (1 << 8, None, "at least 256 bytes"),
    "streams": (1, 8, "1 to 8"),
}


def test_every_number_of_a_policy_is_listed_here():
    assert {field.name for field in dataclasses.fields(Policy)} == {"path", "overlap", *BOUNDS}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("value", [0, -1, True, False, "x", 4096.0, np.True_, np.float32(4096), [1]], ids=repr)
def test_what_is_no_number_is_refused(name, value):
    with pytest.raises(PathError, match=rf"{name} is .*; .*{BOUNDS[name][2]}"):
        Policy(**{name: value})


@pytest.mark.parametrize("name", BOUNDS)
def test_a_numpy_integer_is_kept_as_an_int(name):
    least = BOUNDS[name][0]
    kept = getattr(Policy(**{name: np.int64(least)}), name)
    assert (type(kept), kept) == (int, least)


@pytest.mark.parametrize(("name", "least"), [(name, least) for name, (least, *_) in BOUNDS.items()])
def test_the_least_is_taken_and_less_is_not(name, least):
    assert getattr(Policy(**{name: least}), name) == least
    with pytest.raises(PathError, match=f"{name} is {least - 1}; "):
        Policy(**{name: least - 1})


@pytest.mark.parametrize(("name", "most"), [(name, most) for name, (_, most, _) in BOUNDS.items() if most])
def test_the_greatest_is_taken_and_more_is_not(name, most):
    assert getattr(Policy(**{name: most}), name) == most
    with pytest.raises(PathError, match=f"{name} is {most + 1}; "):
        Policy(**{name: most + 1})


@pytest.mark.parametrize("value", [1025, 3072, 65_535, 1 << 20])
def test_a_tile_is_a_power_of_two_and_fits_a_program(value):
    with pytest.raises(PathError, match=f"tile_bytes is {value}; .*power of two"):
        Policy(tile_bytes=value)


@pytest.mark.parametrize("value", [1 << 10, 1 << 13, 64 << 10])
def test_tiles(value):
    assert Policy(tile_bytes=value).tile_bytes == value


@pytest.mark.parametrize("path", ["", "gpu", "Kernel", None, 3, ("kernel",)])
def test_paths_that_are_none(path):
    with pytest.raises(PathError, match=r"unknown path .*; expected one of 'auto', 'host', 'copy_engine', "):
        Policy(path=path)


def test_what_is_none_is_the_executor_s_choice():
    policy = Policy()
    assert policy.path == "auto"
    assert {getattr(policy, name) for name in BOUNDS} == {None}
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.path = "kernel"


@pytest.mark.parametrize("overlap", ["idle", "decode", "prefill"])
def test_what_runs_beside(overlap):
    assert Policy(overlap=overlap).overlap == overlap


@pytest.mark.parametrize("overlap", ["", "Decode", None, 1])
def test_what_cannot_run_beside(overlap):
    with pytest.raises(PathError, match=r"unknown overlap .*; expected one of 'idle', 'decode', 'prefill'"):
        Policy(overlap=overlap)
