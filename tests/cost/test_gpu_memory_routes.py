"""What the cost model makes of copies within a GPU and between GPUs."""

from __future__ import annotations

import pytest

from kvplan import PathError, Policy
from kvplan.cost.model import Candidate, Prices, candidates
from kvplan.cost.profile import TERMS, default, default_pair
from kvplan.cost.statistics import LARGE, Counted, GroupFacts
from tests.cost.priced_profiles import PLAN


@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_between_gpu_memories_there_is_no_staged_path(route):
    some = default() if route == "device" else default_pair()
    with pytest.raises(PathError, match=f"no costs for route '{route}' by path 'staged'"):
        Prices("staged", route, some, Policy())
    made = candidates(PLAN, route, some, Policy())
    assert sorted(one.path for one in made) == ["copy_engine", "copy_engine_2d", "kernel"]
    told = candidates(PLAN, route, some, Policy(), {"staged": "no side is on the host"})
    assert told[-1] == Candidate("staged", refused="no side is on the host")
    refused = dict.fromkeys(TERMS, "no")
    assert {one.refused for one in candidates(PLAN, route, some, Policy(), refused)} == {"no"}


def pages(run_nbytes: int, runs: int) -> list[Counted]:
    """Blocks of 16 runs."""
    nbytes, small = 16 * run_nbytes, 16 * (run_nbytes < LARGE)
    terms = {"kernel": (16, nbytes), "copy_engine": (small, 16 - small, nbytes), "copy_engine_2d": (1, 16, nbytes)}
    return [(GroupFacts(nbytes, 16, 0, terms), runs // 16)]


@pytest.mark.parametrize("overlap", ["idle", "decode"])
@pytest.mark.parametrize("runs", [16, 160, 4096, 40_960])
@pytest.mark.parametrize("run_nbytes", [256, 512, 2 << 10, 8 << 10, 27 << 10, 28 << 10, 64 << 10])
@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_the_default_moves_runs_between_gpu_memories_by_the_kernel(route, run_nbytes, runs, overlap):
    some = default() if route == "device" else default_pair()
    made = candidates(pages(run_nbytes, runs), route, some, Policy(overlap=overlap))
    assert made[0].path == "kernel"
    by_path = {one.path: one for one in made}
    if runs >= 4096:
        assert by_path["copy_engine"].score > 2 * by_path["kernel"].score
