"""The simulated GPU sees what it is for: a wait between streams that is not there."""

from __future__ import annotations

import pytest

from kvplan.execute.gpu.by_layer.ring import Ring
from kvplan.execute.gpu.resources import Limits
from tests.simulated import Device
from tests.simulated.executors import POOL, both_ways, executor_on, pair_on
from tests.simulated.overwrites import TINY_RING, overwrites

SEEDS = range(12)


class Deaf(Device):
    """A device whose streams do not hear some of the events that they are told to wait for."""

    def deaf_to(self, stream: int, event: int) -> bool:
        raise NotImplementedError

    def wait(self, stream: int, event: int) -> None:
        if not self.deaf_to(stream, event):
            super().wait(stream, event)


def noticed(deaf: type[Device], run) -> int:
    """In how many of the seeds bytes came out wrong."""
    wrong = 0
    for seed in SEEDS:
        device = deaf(seed, eager=False)
        try:
            with executor_on(device, limits=Limits(**TINY_RING)) as executor:
                run(device, executor, seed)
        except AssertionError:
            wrong += 1
    return wrong


@both_ways
@pytest.mark.parametrize("which", ["filled", "freed"])
def test_a_ring_without_one_of_its_waits_is_noticed(direction, which, monkeypatch):
    rings: list[Ring] = []
    whole = Ring.__init__
    monkeypatch.setattr(Ring, "__init__", lambda self, *given: (rings.append(self), whole(self, *given))[1])

    class DeafToRing(Deaf):
        def deaf_to(self, stream, event):
            return any(event in getattr(ring, which) for ring in rings)

    def run(device, executor, seed):
        overwrites(device, executor, pair_on(device, direction, pool=POOL), ["staged"] * 4, seed)

    assert not noticed(Device, run)
    assert noticed(DeafToRing, run)


def test_paths_that_do_not_wait_for_each_other_are_noticed():
    class DeafToEnds(Deaf):
        lanes: tuple = ()

        def deaf_to(self, stream, event):
            return any(lane.last is not None and lane.last._end == event for lane in self.lanes)

    def run(device, executor, seed):
        device.lanes = tuple(executor._backend.lanes.values())
        overwrites(device, executor, pair_on(device, "load"), ["kernel", "copy_engine", "staged", "copy_engine_2d"] * 2,
                   seed)  # fmt: skip

    assert noticed(DeafToEnds, run)
