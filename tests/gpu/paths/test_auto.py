"""What `auto` takes on a real GPU: every byte arrives by it, and what it says of itself holds."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan.cost.profile import default
from kvplan.cost.store import find_for
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, pair_of

pytestmark = pytest.mark.gpu

PROFILES = {"default": default, "found": lambda: find_for(0)}
# Runs and blocks of a transfer: a few kilobytes, and some megabytes.
SIZES = {"small": (512, 9, 3), "large": (8192, 260, 256)}
every_profile = pytest.mark.parametrize("profile", PROFILES)
every_size = pytest.mark.parametrize("size", SIZES)
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
both_hosts = pytest.mark.parametrize("host", HOST_NOTATIONS)


def moves_of(size: str, *, scattered: bool) -> Move:
    _, blocks, count = SIZES[size]
    if not scattered:
        return Move(range(count), range(1, count + 1))
    random = np.random.default_rng(0)
    return Move(random.permutation(blocks)[:count], random.permutation(blocks)[:count])


@every_profile
@every_size
@both_ways
@both_hosts
@pytest.mark.parametrize("scattered", [False, True], ids=["in order", "scattered"])
@pytest.mark.parametrize("overlap", ["idle", "decode"])
def test_every_byte_arrives_by_the_path_that_is_told(profile, size, direction, host, scattered, overlap):
    dim, blocks, _ = SIZES[size]
    device = Paged(DEVICE_NOTATION, layer=4, block=blocks, dim=dim)
    pair = pair_of(direction, device, Paged(HOST_NOTATIONS[host], layer=4, block=blocks, dim=dim))
    plan = pair.plan(moves_of(size, scattered=scattered))
    with kvplan.Executor("cuda:0", kvplan.Policy(overlap=overlap), PROFILES[profile]()) as executor:
        every = executor.candidates(plan)
        result = executor.submit(plan).result()
        pair.check()
        stats = executor.stats()
    assert (result.path, result.predicted, result.nbytes) == (every[0].path, every[0].seconds, plan.nbytes)
    assert result.predicted > 0
    assert {one.path for one in every} == {"kernel", "copy_engine", "copy_engine_2d", "staged"}
    assert not any(one.refused for one in every)
    assert (stats.transfers, stats.failed, stats.predicted, stats.nbytes) == (1, 0, 1, plan.nbytes)
    assert stats.seconds == stats.paths[result.path].seconds == result.seconds
    assert stats.prediction_error >= 0


@both_ways
def test_sums_are_those_of_all_transfers(direction):
    device, pool = Paged(DEVICE_NOTATION, dim=4096), Paged(HOST_NOTATIONS["page-first"], dim=4096)
    pair = pair_of(direction, device, pool)
    with kvplan.Executor("cuda:0", profile=default()) as executor:
        results = [executor.submit(pair.plan(Move([k], [8 - k]))).result() for k in range(5)]
        pair.check()
        stats = executor.stats()
    assert (stats.transfers, stats.predicted, stats.failed) == (5, 5, 0)
    for name in ("nbytes", "descriptors", "launches"):
        assert getattr(stats, name) == sum(getattr(one, name) for one in results)
        assert getattr(stats, name) == sum(getattr(one, name) for one in stats.paths.values())
    assert stats.seconds == pytest.approx(sum(one.seconds for one in results))


def test_a_transfer_within_a_gpu_is_predicted():
    pair = pair_of("device", Paged(DEVICE_NOTATION), Paged(HOST_NOTATIONS["page-first"]))
    with kvplan.Executor("cuda:0") as executor:
        assert executor.submit(pair.plan(Move([3, 1], [0, 7]))).result().predicted > 0
        pair.check()
        assert executor.stats().predicted == 1
