"""Which transfers a calibration asks for, and in which order it measures; no GPU is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import kvplan
from kvplan import KVPlanError
from kvplan.cost.policy import HOST_ROUTES, PEER_ROUTES, Policy
from kvplan.cost.profile import GPU_ROUTES, default, default_pair, route_paths
from kvplan.cost.statistics import statistics_of
from kvplan.measure import calibrate as made_by
from kvplan.measure import ceilings
from kvplan.measure.calibration.geometries import ROUNDS, geometries
from kvplan.measure.calibration.profile_fit import (
    LARGE_NBYTES,
    LEAST_SAMPLES,
)
from kvplan.measure.workload import HOSTS, Buffers, Geometry, work
from tests.measure.known_costs import (
    ALL_CEILINGS,
    GRIDS,
    H100,
    known,
    plan_of,
    samples,
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


@pytest.mark.parametrize("routes", [("device",), PEER_ROUTES])
def test_between_gpu_memories_the_largest_transfers_fill_the_buffers(routes):
    every = list(geometries(*routes))
    largest = max(one.nbytes for one in every)
    assert largest == room(routes)[1] >= 256 << 20
    assert {one.run_nbytes for one in every} >= {256, 512, 8 << 10, 64 << 10, 1 << 20}
    # Transfers that show a ceiling are larger than what a GPU's cache holds.
    assert len([one for one in every if one.nbytes >= LARGE_NBYTES]) >= 2 * len(routes)
    # The copy engine takes microseconds a copy, so it is not asked for tens of thousands.
    engine = [one for one in every if "copy_engine" in made_by.measured_paths(one.direction, one.runs)]
    assert max(one.runs for one in engine) == 4096
    assert sum(one.runs for one in engine) * 5 * 4e-6 < 1.5 * len(routes)  # seconds


@every_grid
def test_each_can_be_laid_over_the_buffers_and_has_the_runs_that_it_says(routes):
    buffers = Buffers.__new__(Buffers)  # as they are in a calibration, but for the random bytes
    pool, cache = room(routes)
    buffers.nbytes, buffers.device, buffers.peer = cache, "cpu", None
    buffers.host, buffers.other = (torch.empty(nbytes, dtype=torch.uint8) for nbytes in (pool, cache))
    wrong = []
    for one in geometries(*routes):
        plan = statistics_of(work(buffers, one).plan, one.direction)
        assert (plan.nbytes, plan.route) == (one.nbytes, one.direction)
        if plan.runs != one.runs:
            wrong.append(one)
    assert wrong == []


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1.0])
@every_grid
def test_however_early_it_is_cut_there_is_some_of_every_kind(routes, share):
    every = list(geometries(*routes))
    some = every[: int(len(every) * share)]
    hosts = HOSTS if routes == HOST_ROUTES else HOSTS[:1]
    for route in routes:
        if routes != HOST_ROUTES:  # without one, the kernel's costs would be a guess
            assert max(one.nbytes for one in some if one.direction == route) >= LARGE_NBYTES or share < 0.5
        for host in hosts:
            kind = [one for one in some if (one.direction, one.host) == (route, host)]
            assert len(kind) >= LEAST_SAMPLES
            assert {one.run_nbytes < 28 << 10 for one in kind} == {True, False}
            assert len({one.runs for one in kind}) >= 3
    ways = [one.direction for one in some]
    assert max(map(ways.count, routes)) - min(map(ways.count, routes)) <= len(hosts)


def test_a_path_that_cannot_serve_has_no_sample():
    moved = work(Buffers(1 << 16, "cpu"), Geometry("load", "contiguous", 512, 64, 16))

    class Refusing:
        def submit(self, plan):
            raise kvplan.PathError("no")

    with kvplan.Executor() as executor:
        made = made_by.measure(moved, {"a": Refusing(), "b": executor}, verify=True, seconds=1e-9)
    assert [(one.path, one.plan.nbytes, one.timing.samples) for one in made] == [("b", 32_768, 3)]


class Placed(NamedTuple):
    """A geometry in buffers; the plan is the geometry itself."""

    buffers: Any
    plan: Geometry


class Calls(list):
    """What a calibration did, in order."""

    def of(self, name: str) -> list:
        return [what for called, *what in self if called == name]


@pytest.fixture
def rig(monkeypatch):
    """A calibration whose GPU gives the known costs; executors and buffers are not made."""
    calls = Calls()

    class Room:
        def __init__(self, nbytes, device, host_nbytes=None, peer=None) -> None:
            calls.append(("buffers", nbytes, host_nbytes, device, peer))
            self.nbytes, self.device, self.peer = nbytes, device, peer

    class Opened:
        def __init__(self, device, policy) -> None:
            self.device, self.policy = device, policy

        def __enter__(self):
            calls.append(("opened", self.policy))
            return self

        def __exit__(self, *_) -> None:
            calls.append(("closed", self.policy))

        def prepare(self, plan) -> None:
            calls.append(("prepared", self.policy.path, plan))
            if self.policy.path == "copy_engine_2d":
                raise kvplan.PathError("no")  # as measure() does, go on without the path

    class Opening:
        """A line of a GPU, and its device."""

        why = ""

        def __init__(self, name) -> None:
            self.name, self.device = name, self

        def enable_peer(self, ordinal) -> str:
            calls.append(("enabled", self.name, ordinal))
            return self.why

    def timed(moved, executors, *, verify, seconds, route):
        buffers, one = moved
        calls.append(("measured", route, buffers, verify, seconds))
        found = [each for each in samples(routes=(route,)) if each.plan == plan_of(one)]
        return [each for each in found if each.path in executors]

    def beside(buffers, executors, kind, until):
        calls.append(("beside", kind, {route: one.peer for route, one in buffers.items()}, executors["kernel"].policy))
        return {route: default_pair().beside[kind].get(route, default().beside[kind].get(route)) for route in buffers}

    monkeypatch.setattr(made_by, "Buffers", Room)
    monkeypatch.setattr(made_by, "Executor", Opened)
    monkeypatch.setattr(made_by, "Line", Opening)
    monkeypatch.setattr(made_by, "work", lambda buffers, geometry, k=0: Placed(buffers, geometry))
    monkeypatch.setattr(made_by, "measure", timed)
    monkeypatch.setattr(made_by, "measure_beside", beside)
    monkeypatch.setattr(made_by.ceilings, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(
        made_by.ceilings, "measure", lambda buffers: {
            name: rate for name, rate in ALL_CEILINGS.items()
            if name in ceilings.routes_of(buffers) or (name == "memory" and buffers.peer == buffers.device)
        },
    )  # fmt: skip
    calls.opening = Opening
    return calls


def test_a_gpu_is_measured_whole(rig):
    steps, kept = [], []
    profile = made_by.calibrate(H100, "cuda:1", lambda share, step: steps.append((share, step)), keep=kept, seconds=1e9)
    assert rig.of("buffers") == [
        [made_by.DEVICE_NBYTES, made_by.HOST_NBYTES, "cuda:1", None],
        [made_by.WITHIN_NBYTES, None, "cuda:1", "cuda:1"],
    ]
    assert all((route == "device") == (buffers.peer == "cuda:1") for route, buffers, *_ in rig.of("measured"))
    assert {route for route, _, verify, _ in rig.of("measured") if verify} == set(GPU_ROUTES)
    assert rig.of("beside") == [
        [kind, {"load": None, "store": None, "device": "cuda:1"}, Policy(path="kernel", overlap=kind)]
        for kind in ("decode", "prefill")
    ]
    assert sorted(map(str, rig.of("opened"))) == sorted(map(str, rig.of("closed")))
    assert [share for share, _ in steps] == sorted(share for share, _ in steps)
    assert (profile.guessed, profile.routes, len(kept)) == ((), GPU_ROUTES, len(samples()))
    for route in GPU_ROUTES:
        assert profile.costs[route]["kernel"].seconds == pytest.approx(known("kernel", route), rel=0.05)


def test_a_pair_is_measured_whole(rig):
    profile = made_by.calibrate_pair(H100, "cuda:0", "cuda:1", peer_name="NVIDIA H200", nvlinks=18, seconds=1e9)
    assert rig.of("enabled") == [["cuda:0", 1]]
    assert rig.of("buffers") == [[made_by.PAIR_NBYTES, None, "cuda:0", "cuda:1"]]
    assert "staged" not in {policy.path for (policy,) in rig.of("opened")}
    assert [kind for kind, *_ in rig.of("beside")] == ["decode", "prefill"]
    assert (profile.kind, profile.guessed, profile.routes) == ("NVIDIA H100 to NVIDIA H200", (), PEER_ROUTES)


def test_a_peer_out_of_reach_is_refused_before_memory_is_allocated(rig):
    rig.opening.why = "cuda:0 cannot reach the memory of cuda:1: a reason"
    with pytest.raises(KVPlanError, match=r"^cuda:0 cannot reach the memory of cuda:1: a reason$"):
        made_by.calibrate_pair(H100, "cuda:0", "cuda:1", peer_name="NVIDIA H200", nvlinks=18)
    assert not rig.of("buffers")


def test_compiling_costs_no_time_of_the_transfers(rig, monkeypatch):
    """On a new machine, torch and the compilers take longer than the calibration, and all of it was cut."""
    now = [0.0]
    monkeypatch.setattr(made_by, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    compiled = set[str]()

    def slow(self, plan):
        compiled.add(self.policy.path)
        now[0] += 100.0

    monkeypatch.setattr(made_by.Executor, "prepare", slow)
    whole = made_by.calibrate(H100)
    pair = made_by.calibrate_pair(H100, "cuda:0", "cuda:1", peer_name="NVIDIA H200", nvlinks=18)
    assert (whole.guessed, pair.guessed, compiled) == ((), (), set(route_paths("load")))


def test_all_kinds_of_transfers_are_prepared_once(rig):
    made_by.calibrate(H100, seconds=1e9)
    began = next(k for k, (what, *_) in enumerate(rig) if what == "measured")
    assert all(what != "prepared" for what, *_ in rig[began:])
    every = [*geometries(*HOST_ROUTES), *geometries("device")]
    kinds = {(one.direction, one.host, one.run_nbytes) for one in every}
    for path in route_paths("load"):
        found = [(one.direction, one.host, one.run_nbytes) for which, one in rig.of("prepared") if which == path]
        assert set(found) <= kinds
        if path == "kernel":
            assert set(found) == kinds


def test_no_transfer_begins_after_the_time(rig):
    with pytest.raises(KVPlanError, match="too little could be measured in time"):
        made_by.calibrate(H100, seconds=0)
    assert not rig.of("measured")
    assert made_by.SECONDS + 2 <= 20
    assert made_by.PAIR_SECONDS + 1 <= 15


def test_the_pool_s_gpu_says_which_routes_there_are():
    for peer, routes in ((None, HOST_ROUTES), ("cuda:0", ("device",)), ("cuda:1", PEER_ROUTES)):
        buffers = Buffers.__new__(Buffers)
        buffers.device, buffers.peer = "cuda:0", peer
        assert ceilings.routes_of(buffers) == routes
