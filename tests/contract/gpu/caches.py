"""Pairs of caches on a machine, and the bytes that they must hold: those that the oracle moves, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from tests import oracle
from tests.contract.gpu.machines import PATIENCE, Machine
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Paged, assert_same_bytes

# Places of source and destination. The executor of cuda:0 moves all but the first, which is the CPU's.
ROUTES = {
    "host": ("pageable", "pageable"),
    "load": ("pinned", "cuda:0"), "store": ("cuda:0", "pinned"), "device": ("cuda:0", "cuda:0"),
    "pageable load": ("pageable", "cuda:0"), "pageable store": ("cuda:0", "pageable"),
    "push": ("cuda:0", "cuda:1"), "pull": ("cuda:1", "cuda:0"),
}  # fmt: skip
BOTH_WAYS = ("load", "store")
# The routes that each path serves, as the docs say.
SERVED = {
    "host": ("host",),
    "copy_engine": (*BOTH_WAYS, "device", "pageable load", "pageable store", "push", "pull"),
    "copy_engine_2d": (*BOTH_WAYS, "device", "pageable load", "pageable store", "push", "pull"),
    "kernel": (*BOTH_WAYS, "device", "push", "pull"),
    "staged": BOTH_WAYS,
    "auto": (*BOTH_WAYS, "device", "pageable load", "pageable store", "push", "pull"),
}
GPU_PATHS = tuple(path for path in SERVED if path != "host")
PAGE_FIRST = HOST_NOTATIONS["page-first"]


def forms(cache=DEVICE_NOTATION, pool=PAGE_FIRST, *, padded=True, **sizes):
    """A cache and a pool of the same sizes."""
    return Paged(cache, padded=padded, **sizes), Paged(pool, **sizes)


CACHE, POOL = forms(dim=256)


class Ids(NamedTuple):
    """Block ids of both sides, and units that are skipped at the front of each."""

    src: Sequence[int]
    dst: Sequence[int]
    src_skip: int = 0
    dst_skip: int = 0

    @property
    def back(self) -> Ids:
        return Ids(self.dst, self.src, self.dst_skip, self.src_skip)


every_path = pytest.mark.parametrize("path", GPU_PATHS)
both_ways = pytest.mark.parametrize("route", BOTH_WAYS)


def each_way(test: Any) -> Any:
    return every_path(both_ways(test))


MOVE = Ids([3, 1, 8, 5], [0, 7, 2, 4])


class Pair:
    """Two caches, and what each must hold once everything that was planned has been moved, in order.

    Args:
        machine: where they are.
        src, dst: their forms.
        route: one of :data:`ROUTES`.
        seed: of their bytes.
        told: what else the layouts are told.
    """

    def __init__(self, machine, src=CACHE, dst=POOL, route="store", *, seed=0, **told):
        self.machine, self.src, self.dst, self.places = machine, src, dst, ROUTES[route]
        self.src_bytes, self.dst_bytes = src.random(seed), dst.random(seed + 1)
        self.sources = [machine.place(root, self.places[0]) for root in self.src_bytes]
        self.targets = [machine.place(root, self.places[1]) for root in self.dst_bytes]
        self.layouts = described(src, self.sources, **told), described(dst, self.targets, **told)
        self.program = kvplan.compile(*self.layouts)

    def plan(self, ids: Ids = MOVE) -> kvplan.Plan:
        """Plan a move, and let the oracle make it."""
        plan = self.program.plan(*ids)
        tokens = [side.token if "token" in side.dims else 1 for side in (self.src, self.dst)]
        unit = gcd(*tokens)
        here, there = as_oracle(self.src, self.src_bytes), as_oracle(self.dst, self.dst_bytes)
        left = [
            len(blocks) * count // unit - skip for count, blocks, skip in zip(tokens, ids[:2], ids[2:], strict=True)
        ]
        oracle.copy(here, there, *ids, unit, min(left))
        return plan

    def behind(self, other: Pair) -> Pair:
        """Read the destination of another pair, in place of a source of its own."""
        self.sources, self.src_bytes = other.targets, other.dst_bytes
        self.layouts = other.layouts[1], self.layouts[1]
        self.program = kvplan.compile(*self.layouts)
        return self

    def fresh(self, seed: int) -> list[Any]:
        """New bytes for the source, on the GPU. Made before a stream is held up: a driver may block in between."""
        place = "cuda:0" if self.places[0] == "pinned" else self.places[0]
        return [self.machine.place(root, place) for root in self.src.random(seed)]

    def renew(self, stream: Any, fresh: Sequence[Any]) -> None:
        """Let a stream write new bytes into the source, late. Plans that follow move them."""
        for memory, root, new in zip(self.sources, self.src_bytes, fresh, strict=True):
            root[:] = new.bytes()
            self.machine.copy(stream, memory, new)

    def reader(self, stream: Any, place: str = "cuda:0") -> Reader:
        """A stream of the caller's that reads the destination. Made before a stream is held up, as new bytes are."""
        return Reader(self, stream, place)

    def warm(self, *executors: kvplan.Executor, by_layer: bool = False) -> None:
        """Move a block, so that later transfers allocate nothing while a stream is held up."""
        for executor in executors:
            executor.submit(self.plan(Ids([1], [1])), by_layer=by_layer).synchronize(PATIENCE)

    def check(self) -> None:
        """Both sides hold what they must: every byte of every root, guards and padding included."""
        assert_same_bytes([memory.bytes() for memory in self.sources], self.src_bytes)
        assert_same_bytes([memory.bytes() for memory in self.targets], self.dst_bytes)


class Reader:
    """Copies of a destination that a stream makes, late, and what they must hold."""

    def __init__(self, pair: Pair, stream: Any, place: str) -> None:
        self.pair, self.stream = pair, stream
        self.copies = [pair.machine.place(np.zeros(root.nbytes, np.uint8), place) for root in pair.targets]

    def read(self) -> Reader:
        """Let the stream copy all bytes; what is planned is what must be there then."""
        for copy, target in zip(self.copies, self.pair.targets, strict=True):
            self.pair.machine.copy(self.stream, copy, target)
        self.due = [root.copy() for root in self.pair.dst_bytes]
        return self

    def check(self) -> None:
        """Wait for the stream, and compare."""
        self.pair.machine.finish(self.stream)
        assert_same_bytes([copy.bytes() for copy in self.copies], self.due)


def described(form: Paged, roots: Sequence[Any], **told: Any) -> KVLayout:
    views = [root.view(form.shape, form.strides, form.start) for root in roots]
    return KVLayout.from_tensors(form.notation, views if form.nested else views[0], **told)


def as_oracle(form: Paged, roots: Sequence[np.ndarray]) -> oracle.Cache:
    """The same memory for the oracle: a row of bytes is one element, which it moves as a whole."""
    row = np.dtype(f"V{form.dim}")
    shape, strides = (*form.shape[:-1], 1), (*form.strides[:-1], form.dim)
    tensors = [np.ndarray(shape, row, root, form.start, strides) for root in roots]
    sizes = dict(zip(form.dims, shape, strict=True)) | {"layer": form.layer}
    return oracle.Cache(form.notation, sizes, tensors if form.nested else tensors[0], list(roots))


def way(machine: Machine, route: str, cache: Paged = CACHE, pool: Paged = POOL, **more: Any) -> Pair:
    """A pair of a GPU's cache and a pool; the pool is the source of loads and pulls."""
    loads = ROUTES[route][0] != "cuda:0" and route != "host"
    return Pair(machine, pool, cache, route, **more) if loads else Pair(machine, cache, pool, route, **more)
