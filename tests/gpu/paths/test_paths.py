"""More descriptors than a driver takes at once, by every path."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.gpu.caches import Ids, both_ways, every_path, way
from tests.contract.gpu.machines import Real
from tests.paged_caches import Paged

pytestmark = pytest.mark.gpu
BLOCKS = 16_000


@every_path
@both_ways
def test_more_descriptors_than_a_driver_takes_at_once(path, route):
    cache = Paged("layer: kv token block head dim", block=BLOCKS, dim=8, align=8, padded=True)
    pool = Paged("block layer kv token head dim", block=BLOCKS, dim=8, align=8)
    order = np.random.default_rng(3).permutation(BLOCKS)
    with Real() as machine:
        pair = way(machine, route, cache, pool)
        plan = pair.plan(Ids(order.tolist(), np.roll(order, 1).tolist()))
        assert machine.executor(path).submit(plan).result().nbytes == plan.nbytes
        pair.check()
