"""The laws of the design on a GPU, over layouts drawn by hypothesis: executing equals copying by coordinates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.paged_caches import Drawn
from tests.profiles import examples
from tests.strategies import Case, cases, neighbour_cases

pytestmark = pytest.mark.gpu

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged")
PLACES = {
    "load": ("pinned", "cuda:0"), "store": ("cuda:0", "pinned"), "device": ("cuda:0", "cuda:0"),
    "push": ("cuda:0", "cuda:1"), "pull": ("cuda:1", "cuda:0"),
}  # fmt: skip
WAYS = [(path, route) for path in PATHS for route in PLACES if path != "staged" or route in ("load", "store")]


@pytest.mark.parametrize(("path", "route"), WAYS)
@given(case=st.one_of(cases(), neighbour_cases()), by_layer=st.booleans())
@examples(150)
def test_laws_1_and_2_executing_equals_copying_by_coordinates(path, route, case: Case, by_layer, executor_of):
    if "cuda:1" in PLACES[route] and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    drawn = Drawn(case, PLACES[route])
    result = executor_of(path=path).submit(drawn.plan, by_layer=by_layer).result()
    assert result.nbytes == drawn.plan.nbytes
    drawn.check()


@pytest.mark.parametrize("path", PATHS)
@given(some=st.lists(st.tuples(cases(), st.sampled_from(["load", "store"])), min_size=2, max_size=6))
@examples(30)
def test_transfers_in_flight_together_do_not_disturb_one_another(path, some, executor_of):
    flying = [Drawn(case, PLACES[direction]) for case, direction in some]
    transfers = [executor_of(path=path).submit(drawn.plan) for drawn in flying]
    for drawn, transfer in reversed(list(zip(flying, transfers, strict=True))):
        transfer.synchronize()
        drawn.check()
