"""Executors of a simulated GPU, caches on it, and limits so small that everything happens in a small test."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.cost.profile import GPU_ROUTES, TERMS, DeviceProfile, PathCosts, default, route_paths
from kvplan.execute.gpu import backend
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits
from kvplan.execute.gpu.selection import Choice, Selection
from kvplan.plan.layers import Cutting
from tests import oracle
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair, assert_same_bytes
from tests.simulated.device import Device
from tests.simulated.objects import Tensor
from tests.simulated.toy_path import ToyPath
from tests.strategies import Case

PATHS = ("copy_engine", "copy_engine_2d", "kernel", "staged")
MOVE = Move([3, 1, 8, 5], [0, 7, 2, 4])

ALL_PATHS = (*PATHS, ToyPath.name)  # one more, which only tests have: it shows what a path must keep
every_path = pytest.mark.parametrize("path", ALL_PATHS)
both_ways = pytest.mark.parametrize("direction", ["load", "store"])


@contextmanager
def executor_on(
    device: Device, path: str = "auto", profile: DeviceProfile | None = None, *, limits: Limits = DEFAULT_LIMITS,
    **policy: Any,
) -> Iterator[kvplan.Executor]:  # fmt: skip
    """An executor of the device; afterwards it is closed and has given everything back."""
    executor = open_executor(device, path, profile, limits=limits, **policy)
    try:
        yield executor
    finally:
        for gate in device.gates:
            gate.set()
        device.eager = True
        executor.close()
    device.run()
    if device.wrong:
        raise device.wrong[0]
    held = {address for address, _ in executor._backend.rooms._pinned._blocks}  # by plans that the test still has
    assert not device.memory.keys() - held, "memory was left allocated"
    assert not device.modules, "a kernel was left loaded"
    assert device.made <= device.theirs, "an event was left"


def favouring(path: str) -> DeviceProfile:
    """A profile in which one path costs next to nothing and the others the same as one another, much."""
    costs = {}
    for name, terms in TERMS.items():
        nothing = dict.fromkeys(terms, 0.0)
        each = nothing | {"fixed": 1.0 if name == path else 1e9}
        costs[name] = PathCosts(each, each, each, nothing if name == "kernel" else {})
    return replace(default(), costs={way: {path: costs[path] for path in route_paths(way)} for way in GPU_ROUTES})


class Unchecked(kvplan.Policy):
    """A policy that may name any path."""

    def __post_init__(self) -> None:
        pass


def open_executor(
    device: Device, path: str = "auto", profile: DeviceProfile | None = None, *, limits: Limits = DEFAULT_LIMITS,
    **policy: Any,
) -> kvplan.Executor:  # fmt: skip
    """An executor whose driver is the device."""
    device.limits = limits
    asked = (Unchecked if path == ToyPath.name else kvplan.Policy)(path=path, **policy)
    made = backend.GpuBackend(
        device, asked, profile or default(), limits, (*backend.PATHS, ToyPath), lambda: device.lent
    )

    def simulated(*_: Any) -> backend.GpuBackend:  # to make a mock is fifteen times as dear
        return made

    with mock.patch("kvplan.execute.executor._backend", simulated):
        return kvplan.Executor(f"cuda:{device.ordinal}", asked)


@contextmanager
def paths_in_turn(names: Iterable[str]) -> Iterator[None]:
    """What auto takes, one transfer after another."""
    todo = iter(names)

    def take(selection: Selection, plan: kvplan.Plan, groups: Cutting | None) -> Choice:
        del groups
        selection._sides(plan)  # which lets the GPU reach its peers
        return Choice(selection._paths[next(todo)], None, pageable=False)

    with mock.patch.object(Selection, "_auto", autospec=True, side_effect=take):
        yield


@contextmanager
def current_stream(handle: int) -> Iterator[None]:
    """Torch's current stream, wherever it is asked for."""

    def current(*_: Any) -> int:
        return handle

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("kvplan.execute") and hasattr(module, "current_stream"):
                stack.enter_context(mock.patch.object(module, "current_stream", current))
        yield


# Every transfer is issued in pieces, by layers, and in turn by the lane's own thread.
TIGHT = {
    "batch_copies": 3, "launch_rows": 4, "layer_group_nbytes": 1, "small_chunk_nbytes": 1, "few_chunks": 1,
    "launch_groups": 1, "flat_nbytes": 64, "near_rows": 2, "batch_nbytes": 24, "calls_in_flight": 5,
}  # fmt: skip


TINY_RING = {"chunk_nbytes": 1024, "small_chunk_nbytes": 1}


@dataclass(frozen=True)
class OnDevice(Paged):
    """A paged cache that is the GPU's."""

    ordinal: int = field(default=0, kw_only=True)

    def describe(self, roots: list[np.ndarray], **told: Any) -> KVLayout:
        views = [Tensor(self.view(root), f"cuda:{self.ordinal}") for root in roots]
        return KVLayout.from_tensors(self.notation, views if self.nested else views[0], **told)


SMALL = OnDevice(DEVICE_NOTATION, dim=96, padded=True)
POOL = Paged(HOST_NOTATIONS["page-first"], dim=96)


def pair_on(
    device: Device, direction: str, cache: Paged = SMALL, pool: Paged = POOL, *, pin: bool = True, **more: Any
) -> Pair:
    """A transfer between a cache of the device and a pool: of the host, of another GPU, or of the same."""
    places = PLACES[direction]
    there = places[0 if direction in ("load", "pull") else 1]
    if there is not None:
        shape = (pool.layer, pool.block, pool.token, pool.head, pool.dim, pool.align, pool.padded)
        pool = OnDevice(pool.notation, *shape, ordinal=there)
    src, dst = (pool, cache) if direction in ("load", "pull") else (cache, pool)
    src_roots, dst_roots = src.poisoned(), dst.poisoned()
    made = Pair(src, dst, ("", ""), src_roots=src_roots, dst_roots=dst_roots, **more)
    for roots, place in zip((src_roots, dst_roots), places, strict=True):
        for root in roots:
            if place is not None:
                device.own(root, place)
            elif pin:
                device.pin(root)
    return made


class Drawn:
    """A case of tests.strategies with one side, or both, on the device; planned; and the oracle's answer."""

    def __init__(self, case: Case, device: Device, direction: str) -> None:
        self.src, self.dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
        src, dst = PLACES[direction]
        self.program = kvplan.compile(layout_on(self.src, device, src), layout_on(self.dst, device, dst))
        self.plan = self.program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
        self.before, wanted = [root.copy() for root in self.src.roots], case.dst.build(case.seed + 1)
        oracle.copy(self.src, wanted, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens,
                    case.units)  # fmt: skip
        self.wanted = wanted.roots

    def check(self) -> None:
        assert_same_bytes(self.src.roots, self.before)
        assert_same_bytes(self.dst.roots, self.wanted)


# Memory of each side by route: of the host (None), or the number of a GPU.
PLACES: dict[str, tuple[int | None, int | None]] = {
    "load": (None, 0), "store": (0, None), "device": (0, 0), "push": (0, 1), "pull": (1, 0),
}  # fmt: skip


def layout_on(cache: oracle.Cache, device: Device, place: int | None) -> KVLayout:
    """A cache as a layout: of a GPU, or of host memory that is pinned for it."""
    for root in cache.roots:
        if place is None:
            device.pin(root)
        else:
            device.own(root, place)
    return KVLayout.from_tensors(
        cache.notation,
        cache.tensors if place is None else _tensors(cache.tensors, f"cuda:{place}"),
        sizes=cache.told,
        layer_start=cache.layer_start,
        head_start=cache.head_start,
    )


def _tensors(nested: Any, name: str) -> Any:
    return [_tensors(each, name) for each in nested] if isinstance(nested, list) else Tensor(nested, name)
