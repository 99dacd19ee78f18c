"""Cases of tests.strategies in memory of simulated GPUs, and the policies under which small cases need many steps."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvplan
from kvplan import KVLayout
from kvplan.plan.packing import stage
from tests import oracle
from tests.paged_caches import assert_same_bytes
from tests.simulated.objects import Tensor
from tests.simulated_driver import SimulatedDriver
from tests.strategies import Case

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged")
# Memory of each side by route: of the host (None), or the number of a GPU.
PLACES: dict[str, tuple[int | None, int | None]] = {
    "load": (None, 0), "store": (0, None), "device": (0, 0), "push": (0, 1), "pull": (1, 0),
}  # fmt: skip
# Each path, and a route that it serves.
WAYS = [(path, route) for path in PATHS for route in PLACES if path != "staged" or route in ("load", "store")]


def executor(path: str = "auto", **policy: Any) -> kvplan.Executor:
    """An executor of the first GPU."""
    return kvplan.Executor("cuda:0", kvplan.Policy(path=path, **policy))


def ring_of(path: str, *plans: kvplan.Plan, slots: int = 1) -> dict[str, int]:
    """The policy of a ring whose halves have so many slots of one granule of any of these plans; {} for other paths."""
    groups = [(part.group, plan.direction == "load") for plan in plans for part in plan.parts]
    needed = max((stage(group, host_is_src=load).nbytes for group, load in groups), default=1)
    return {"staging_bytes": max(1024, 2 * slots * needed)} if path == "staged" else {}


class Drawn:
    """A case whose sides are where a route says; planned; and the oracle's answer."""

    def __init__(self, case: Case, driver: SimulatedDriver, route: str) -> None:
        self.src, self.dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
        src, dst = PLACES[route]
        self.program = kvplan.compile(layout_on(self.src, driver, src), layout_on(self.dst, driver, dst))
        self.plan = self.program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
        self.before, wanted = [root.copy() for root in self.src.roots], case.dst.build(case.seed + 1)
        oracle.copy(self.src, wanted, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens,
                    case.units)  # fmt: skip
        self.wanted = wanted.roots

    def check(self) -> None:
        assert_same_bytes(self.src.roots, self.before)
        assert_same_bytes(self.dst.roots, self.wanted)


def layout_on(cache: oracle.Cache, driver: SimulatedDriver, place: int | None) -> KVLayout:
    """A cache as a layout: of a GPU, or of pinned host memory."""
    for root in cache.roots:
        if place is None:
            driver.pin(root)
        else:
            driver.own(root, place)
    tensors = cache.tensors if place is None else tensors_on(cache.tensors, place)
    return KVLayout.from_tensors(
        cache.notation, tensors, sizes=cache.told, layer_start=cache.layer_start, head_start=cache.head_start
    )


def tensors_on(nested: Any, place: int) -> Any:
    """Arrays as tensors of a GPU."""
    return [tensors_on(each, place) for each in nested] if isinstance(nested, list) else Tensor(nested, f"cuda:{place}")


def owned(driver: SimulatedDriver, array: np.ndarray, place: int = 0) -> Tensor:
    """Make an array the memory of a GPU."""
    driver.own(array, place)
    return Tensor(array, f"cuda:{place}")
