"""What the cost model makes of copies within a GPU and between GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvplan import PathError, Policy
from kvplan.cost.model import (
    Candidate,
    candidates,
    predict,
)
from kvplan.cost.profile import (
    TERMS,
    default,
    default_pair,
)
from kvplan.cost.statistics import Pieces, Statistics
from tests.cost.priced_profiles import PLAN


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("route", "some", "said"),
    [
        ("host", default(), "the profile of any GPU has no costs for route 'host'; it has load, store, device"),
        ("push", replace(default(), gpu="NVIDIA H200"), "the profile of NVIDIA H200 has no costs for route 'push'; it"),
        ("load", default_pair(), "the profile of any GPU to any GPU has no costs for route 'load'; it has push, pull"),
        ("device", default_pair(), "has no costs for route 'device'; it has push, pull"),
    ],
)
def test_a_route_that_the_profile_lacks(route, some, said):
    plan = replace(PLAN, route=route)
    for ask in (lambda: candidates(plan, some, Policy()), lambda: predict("kernel", plan, some, Policy())):
        with pytest.raises(PathError) as caught:
            ask()
        assert said in str(caught.value)


@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_between_gpu_memories_there_is_no_staged_path(route):
    some = default() if route == "device" else default_pair()
    plan = replace(PLAN, route=route)
    with pytest.raises(PathError, match=f"path 'staged' has no costs for route '{route}'; those with costs are kernel"):
        predict("staged", plan, some, Policy())
    made = candidates(plan, some, Policy())
    assert sorted(one.path for one in made) == ["copy_engine", "copy_engine_2d", "kernel"]
    told = candidates(plan, some, Policy(), {"staged": "no side is on the host"})
    assert told[-1] == Candidate("staged", refused="no side is on the host")
    refused = dict.fromkeys(TERMS, "no")
    assert {one.refused for one in candidates(plan, some, Policy(), refused)} == {"no"}


def pages(route: str, run_nbytes: int, runs: int) -> Statistics:
    """Random blocks: no two runs touch, and each block has 16 runs."""
    copies = Pieces.of(runs, run_nbytes * runs)
    return Statistics(route, run_nbytes * runs, 1, runs, 16, copies, -(-runs // 16), runs, Pieces(), Pieces(), 0)


@pytest.mark.parametrize("overlap", ["idle", "decode", "prefill"])
@pytest.mark.parametrize("runs", [16, 160, 4096, 40_960])
@pytest.mark.parametrize("run_nbytes", [256, 512, 2 << 10, 8 << 10, 27 << 10, 28 << 10, 64 << 10])
@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_the_default_moves_runs_between_gpu_memories_by_the_kernel(route, run_nbytes, runs, overlap):
    some = default() if route == "device" else default_pair()
    plan, policy = pages(route, run_nbytes, runs), Policy(overlap=overlap)
    made = candidates(plan, some, policy)
    assert made[0].path == "kernel"
    by_path = {one.path: one for one in made}
    if runs >= 4096:
        assert by_path["copy_engine"].score > 2 * by_path["kernel"].score


@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_narrow_words_between_gpu_memories_are_moved_by_at_most_a_program_per_sm(route):
    some = default() if route == "device" else default_pair()
    plan = replace(pages(route, 4096, 1 << 14), alignment=1)
    most = predict("kernel", plan, some, Policy(max_programs=some.multiprocessors)).seconds
    assert most == near(plan.nbytes / (2e9 * some.multiprocessors))
    assert predict("kernel", plan, some, Policy(max_programs=9 * some.multiprocessors)).seconds == near(most)
