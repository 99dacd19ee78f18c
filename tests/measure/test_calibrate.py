"""Which transfers a calibration asks for, and in which order it measures; no GPU is used."""

from __future__ import annotations

import pytest
import torch

from kvplan.cost.model import features
from kvplan.cost.policy import HOST_ROUTES
from kvplan.cost.statistics import counted
from kvplan.measure import calibrate as made_by
from kvplan.measure.calibrate import ROUNDS, geometries
from kvplan.measure.workload import Buffers, work
from tests.measure.known_costs import (
    GRIDS,
)

every_grid = pytest.mark.parametrize("routes", GRIDS.values(), ids=GRIDS)


def room(routes) -> tuple[int, int]:
    """Bytes of the pool and of the cache that a calibration of some routes has."""
    if routes == HOST_ROUTES:
        return made_by.HOST_NBYTES, made_by.DEVICE_NBYTES
    return (made_by.WITHIN_NBYTES if routes == ("device",) else made_by.PAIR_NBYTES,) * 2


@every_grid
def test_what_is_moved_is_whole_and_fits(routes):
    every = list(geometries(*routes))
    pool, cache = room(routes)
    assert len(every) == len(set(every))
    for one in every:
        one.check()
        assert one.blocks * one.block_runs == one.runs
        assert one.nbytes <= cache <= pool
        assert one.run_nbytes * one.block_runs * max(one.blocks, 2) <= cache
    assert {one.block_runs for one in every} == set(ROUNDS)
    assert {one.direction for one in every} == set(routes)


@every_grid
def test_each_can_be_laid_over_the_buffers_and_has_the_runs_that_it_says(routes):
    buffers = Buffers.__new__(Buffers)  # as they are in a calibration, but for the random bytes
    pool, cache = room(routes)
    buffers.nbytes, buffers.device, buffers.peer = cache, "cpu", None
    buffers.host, buffers.other = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in (pool, cache))
    wrong = []
    for one in geometries(*routes):
        plan = work(buffers, one).plan
        assert plan.nbytes == one.nbytes
        if features("kernel", counted(plan)) != (1, one.runs, one.nbytes):
            wrong.append(one)
    assert wrong == []
