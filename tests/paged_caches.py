"""Caches in GPU, pinned and pageable memory, and the reference that moves them by coordinates.

The reference indexes numpy views by (layer, kv, block, token, head) and never asks kvplan where a byte lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kvplan
from kvplan import KVLayout
from tests import oracle
from tests.strategies import POISON, Case

GUARD = 256  # bytes before and after every tensor that nothing may touch
DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
DEVICE_NOTATION = "layer: kv block token head dim"
HOST_NOTATIONS = {"page-first": "block layer kv token head dim", "layer-first": "layer kv block token head dim"}


def put(root: np.ndarray, place: str) -> torch.Tensor:
    """The same bytes elsewhere: "pinned", "cpu" (pageable), or a device."""
    host = torch.from_numpy(root.copy())
    if place == "pinned":
        return torch.empty(root.size, dtype=torch.uint8, pin_memory=True).copy_(host)
    there = host.to(place)
    if there.is_cuda:
        torch.cuda.synchronize(there.device)  # a pageable copy may return before its last bytes have landed
    return there


def bytes_of(root: Any) -> np.ndarray:
    return root.cpu().numpy() if isinstance(root, torch.Tensor) else root


def assert_same_bytes(roots: Sequence[Any], expected: Sequence[np.ndarray]) -> None:
    """All bytes of all roots, guards and padding included."""
    for k, (root, want) in enumerate(zip(roots, expected, strict=True)):
        got = bytes_of(root)
        assert got.shape == want.shape
        wrong = np.flatnonzero(got != want)
        if wrong.size:
            first = int(wrong[0])
            raise AssertionError(f"root {k}: {wrong.size} of {want.size} bytes differ, the first at {first}: "
                                 f"{got[first : first + 8]} where {want[first : first + 8]} is due")  # fmt: skip


def odd_multiple(nbytes: int, align: int) -> int:
    """The smallest odd multiple of ``align`` that is no less: no larger power of two divides it."""
    return (-(-nbytes // align) | 1) * align


@dataclass(frozen=True)
class Paged:
    """A paged cache of bytes, every tensor in a root of its own.

    Each tensor begins ``align`` bytes after a round address; ``padded`` strides are odd multiples of ``align``, so that
    runs neither touch nor lie rounder than asked.
    """

    notation: str
    layer: int = 2
    block: int = 9
    token: int = 2
    head: int = 1
    dim: int = 64
    align: int = 16
    padded: bool = False

    @property
    def dims(self) -> list[str]:
        return self.notation.rpartition(":")[2].split()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(2 if axis == "kv" else getattr(self, axis) for axis in self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        strides: list[int] = []
        step = 1
        for axis, size in zip(reversed(self.dims), reversed(self.shape), strict=True):
            if self.padded and axis not in ("head", "dim"):
                step = odd_multiple(step + 1, self.align)
            strides.insert(0, step)
            step *= size
        return tuple(strides)

    @property
    def start(self) -> int:
        return GUARD + self.align

    @property
    def root_nbytes(self) -> int:
        return self.start + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1 + GUARD

    @property
    def nested(self) -> bool:
        return ":" in self.notation

    @property
    def count(self) -> int:
        return self.layer if self.nested else 1

    def random(self, seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, 256, self.root_nbytes, np.uint8) for _ in range(self.count)]

    def poisoned(self) -> list[np.ndarray]:
        return [np.full(self.root_nbytes, POISON, np.uint8) for _ in range(self.count)]

    def view(self, root: Any) -> Any:
        if isinstance(root, torch.Tensor):
            return torch.as_strided(root, self.shape, self.strides, self.start)
        return np.ndarray(self.shape, np.uint8, root, self.start, self.strides)

    def describe(self, roots: Sequence[Any], **told: Any) -> KVLayout:
        views = [self.view(root) for root in roots]
        return KVLayout.from_tensors(self.notation, views if self.nested else views[0], **told)


class Drawn:
    """A case of tests.strategies with both sides moved to other memory, planned there, and the oracle's answer."""

    def __init__(self, case: Case, places: tuple[str, str]) -> None:
        src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
        self.src_roots, src_layout = moved(src, places[0])
        self.dst_roots, dst_layout = moved(dst, places[1])
        self.program = kvplan.compile(src_layout, dst_layout)
        self.plan = self.program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
        self.expected = src.roots, case.moved(src).roots

    def check(self) -> None:
        assert_same_bytes(self.src_roots, self.expected[0])
        assert_same_bytes(self.dst_roots, self.expected[1])


def moved(cache: oracle.Cache, place: str) -> tuple[list[torch.Tensor], KVLayout]:
    """A cache's roots elsewhere, and the layout of the same views there."""
    roots = [put(root, place) for root in cache.roots]
    layout = KVLayout.from_tensors(
        cache.notation,
        _rebuilt(cache.tensors, cache.roots, roots),
        sizes=cache.told,
        layer_start=cache.layer_start,
        head_start=cache.head_start,
    )
    return roots, layout


def _rebuilt(tensors: Any, old: Sequence[np.ndarray], new: Sequence[torch.Tensor]) -> Any:
    if isinstance(tensors, list):
        return [_rebuilt(tensor, old, new) for tensor in tensors]
    offsets = [tensors.ctypes.data - root.ctypes.data for root in old]
    k = next(k for k, root in enumerate(old) if 0 <= offsets[k] < root.size)
    itemsize = tensors.itemsize
    strides = [stride // itemsize for stride in tensors.strides]
    return torch.as_strided(new[k].view(DTYPES[itemsize]), tensors.shape, strides, offsets[k] // itemsize)
