"""Caches in GPU, pinned and pageable memory, and the reference that moves them by coordinates.

The reference indexes numpy views by (layer, kv, block, token, head) and never asks kvplan where a byte lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

import kvplan
from kvplan import KVLayout
from tests import oracle
from tests.strategies import POISON, Case

GUARD = 256  # bytes before and after every tensor that nothing may touch
AXES = ("kv", "block", "token", "head", "dim")
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

    def of_layer(self, roots: Sequence[np.ndarray], layer: int) -> np.ndarray:
        """A view of one layer, axes in the order of AXES."""
        view, dims = self.view(roots[layer if self.nested else 0]), list(self.dims)
        if not self.nested:
            view = view[_at(dims.index("layer"), layer)]
            dims.remove("layer")
        return view.transpose([dims.index(axis) for axis in AXES])

    def describe(self, roots: Sequence[Any], **told: Any) -> KVLayout:
        views = [self.view(root) for root in roots]
        return KVLayout.from_tensors(self.notation, views if self.nested else views[0], **told)


def _at(axis: int, index: int) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, index)


class Move(NamedTuple):
    """Block ids of both sides; skips in units; layers and heads where not all of them."""

    src: Sequence[int]
    dst: Sequence[int]
    src_skip: int = 0
    dst_skip: int = 0
    layers: Sequence[int] | None = None
    heads: range | None = None


def copy(src: Paged, src_roots: Sequence[Any], dst: Paged, dst_roots: Sequence[Any], move: Move) -> None:
    """Move the bytes by coordinates."""
    unit = gcd(src.token, dst.token)
    sides = ((src, move.src, move.src_skip), (dst, move.dst, move.dst_skip))
    slots = [list(product(ids, range(side.token)))[skip * unit :] for side, ids, skip in sides]
    count = min(map(len, slots))
    (src_block, src_token), (dst_block, dst_token) = (
        np.array(side[:count], dtype=np.int64).reshape(-1, 2).T for side in slots
    )
    heads = slice(None) if move.heads is None else slice(move.heads.start, move.heads.stop)
    for layer in range(dst.layer) if move.layers is None else move.layers:
        rows = src.of_layer(src_roots, layer)[:, src_block, src_token, heads]
        dst.of_layer(dst_roots, layer)[:, dst_block, dst_token, heads] = rows


class Pair:
    """Two caches somewhere, and what their bytes must be once every move that was planned has been made, in order.

    Args:
        src, dst: the forms of both sides.
        places: where they lie (see :func:`put`).
        src_roots, dst_roots: memory that is there already, of the forms' sizes; its bytes are set here.
        told: what else the two layouts are told (``seams``, ``layer_start``).
    """

    def __init__(
        self,
        src: Paged,
        dst: Paged,
        places: tuple[str, str],
        *,
        seed: int = 0,
        src_roots: Sequence[np.ndarray] | None = None,
        dst_roots: Sequence[np.ndarray] | None = None,
        told: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
    ) -> None:
        self.src, self.dst, self.places = src, dst, places
        self.src_bytes, self.dst_bytes = src.random(seed), dst.poisoned()
        self.src_roots = _placed(self.src_bytes, places[0], src_roots)
        self.dst_roots = _placed(self.dst_bytes, places[1], dst_roots)
        self.layouts = src.describe(self.src_roots, **told[0]), dst.describe(self.dst_roots, **told[1])
        self.program = kvplan.compile(*self.layouts)

    def plan(self, move: Move) -> kvplan.Plan:
        """Plan a move, and make it in the reference."""
        program = self.program
        if move.layers is not None or move.heads is not None:
            program = kvplan.compile(*(layout.slice(layers=move.layers, heads=move.heads) for layout in self.layouts))
        plan = program.plan(move.src, move.dst, move.src_skip, move.dst_skip)
        copy(self.src, self.src_bytes, self.dst, self.dst_bytes, move)
        return plan

    def onward(self, dst: Paged, place: str) -> Pair:
        """A pair whose source is this one's destination: the same memory, the same expectation."""
        pair = Pair(self.dst, dst, (self.places[1], place))
        pair.src_bytes, pair.src_roots = self.dst_bytes, self.dst_roots
        pair.layouts = self.layouts[1], pair.layouts[1]
        pair.program = kvplan.compile(*pair.layouts)
        return pair

    def renew(self, seed: int) -> list[torch.Tensor]:
        """New bytes for the source, beside it on the same device; whoever calls copies them over."""
        fresh = self.src.random(seed)
        for root, new in zip(self.src_bytes, fresh, strict=True):
            root[:] = new
        return [put(root, self.places[0]) for root in fresh]

    def check(self) -> None:
        """Both sides hold what they must. Nothing is waited for here: a transfer that is finished has arrived."""
        assert_same_bytes(self.src_roots, self.src_bytes)
        assert_same_bytes(self.dst_roots, self.dst_bytes)


def _placed(content: Sequence[np.ndarray], place: str, roots: Sequence[np.ndarray] | None) -> list[Any]:
    if roots is None:
        return [put(root, place) for root in content]
    for root, new in zip(roots, content, strict=True):
        root[:] = new
    return list(roots)


def pair_of(direction: str, device: Paged, host: Paged, **more: Any) -> Pair:
    """A load or a store between the first GPU and pinned memory, or a copy within the GPU."""
    if direction == "load":
        return Pair(host, device, ("pinned", "cuda:0"), **more)
    return Pair(device, host, ("cuda:0", "pinned" if direction == "store" else "cuda:0"), **more)


class Drawn:
    """A case of tests.strategies with both sides moved to other memory, planned there, and the oracle's answer."""

    def __init__(self, case: Case, places: tuple[str, str]) -> None:
        src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
        self.src_roots, src_layout = moved(src, places[0])
        self.dst_roots, dst_layout = moved(dst, places[1])
        self.program = kvplan.compile(src_layout, dst_layout)
        self.plan = self.program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
        oracle.copy(src, dst, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
        self.expected = src.roots, dst.roots

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
