"""Plans between pages of a pool and SGLang's staging ring, where each layer's rows follow one another.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py`` and ``kernels/ops/kvcache/pd_dcp_gather.py``. In
the ring lie all tokens of the first K, then of the next one, then V in the same way. A copy's place in the ring thus
depends on the number of pages. Everything else is compiled once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from kvplan.backends.sglang import DEVICE, SLOTS
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import compile  # noqa: A004
from kvplan.plan.descriptors import Part
from kvplan.plan.packing.chunk_half import HalfProgram
from kvplan.plan.packing.pack_order import GRAIN, REACH, Place, half_group
from kvplan.plan.packing.pack_runs import folded, merged
from kvplan.plan.plan import NO_SEAMS, Plan, direction_of
from kvplan.program.program import RunGroup

Step = Literal["src", "dst"]  # the pool's side: a gather reads the pool, a scatter writes it
KEPT = 256  # run groups of a pool, one for each number of pages; a GPU keeps the table of each
RANKS = {3: "nhd", 4: "hnd", 5: "vectorized_5d"}  # dims of a tensor to the layout that it has in SGLang


class PlaneCopies(NamedTuple):
    """The copies of one page, in all planes (tensors) that are alike.

    Attributes:
        pool: (n,) int64: bytes from the page's address in the first plane.
        before: (n,) int64: bytes of each page in all planes that lie before this one in the ring.
        inner: (n,) int64: bytes from the page's first byte in the ring's plane.
        size: (n,) int64: bytes.
    """

    pool: Int64Array
    before: Int64Array
    inner: Int64Array
    size: Int64Array


class Planes:
    """The planes of a pool that are alike, and their run groups by number of pages.

    Args:
        base: address of page 0 in the first plane.
        stride: bytes from page to page.
        pages: number of pages of the pool.
        row: bytes of a page in one plane of the ring.
        copies: the copies of one page.
    """

    def __init__(self, base: int, stride: int, pages: int, row: int, copies: PlaneCopies) -> None:
        self.base, self.stride, self.pages, self.row, self.copies = base, stride, pages, row, copies
        self._groups: OrderedDict[tuple[Step, int, int], RunGroup] = OrderedDict()

    def part(self, step: Step, pages: Int64Array, ring: int) -> Part:
        """Return the copies of some pages: the first one is the first of each plane in the ring.

        Args:
            step: ``"src"``: from the pool. ``"dst"``: to the pool.
            pages: page ids, checked.
            ring: address of the ring's first byte.
        """
        side = 0 if step == "src" else 1
        units = np.empty((2, pages.size), dtype=np.int64)
        units[side] = pages * self.stride + self.base
        units[1 - side] = np.arange(pages.size, dtype=np.int64) * self.row + ring
        return Part(self._group(step, pages.size, ring % GRAIN), units)

    def _group(self, step: Step, count: int, residue: int) -> RunGroup:
        key = step, count, residue
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._made(step, count, residue)
            while len(self._groups) > KEPT:
                self._groups.popitem(last=False)
        return found

    def _made(self, step: Step, count: int, residue: int) -> RunGroup:
        pool, before, inner, size = self.copies
        at = before * count + inner
        order = np.argsort(at)
        runs = folded(*merged(pool[order], at[order], size[order]))
        group = half_group(step, runs, Place(self.stride, self.base % self.stride, REACH), self.row)
        base = GRAIN + residue  # the ring's addresses need not be multiples of 256
        return replace(group, dst_base=base) if step == "src" else replace(group, src_base=base)


def planes_of(
    k: Sequence[Any], v: Sequence[Any], page_size: int, head: int, heads: int
) -> tuple[KVLayout, list[Planes], int]:
    """Compile some heads of K and of V of all layers.

    Args:
        k, v: torch tensors by layer: ``(slots, heads, dim)``, or paged as SGLang's ``"hnd"`` or ``"vectorized_5d"``.
            They may be strided, and V may be narrower than K, or absent.
        page_size: tokens of a page.
        head: first head.
        heads: number of heads.

    Returns:
        A layout that holds the tensors; the planes that are alike; and the bytes of a page in a plane of the ring,
        which are those of the first tensor. The bytes that a narrower plane leaves are not written.

    Raises:
        LayoutError: an unknown shape; heads that the tensors lack; or a plane wider than the first.

    >>> import torch
    >>> k, v = ([torch.zeros((8, 2, dim)) for layer in range(3)] for dim in (16, 12))
    >>> layout, planes, row = planes_of(k, v, 4, 1, 1)
    >>> [one.copies.size.sum().item() for one in planes], row  # bytes of a page: of K, of V, in the ring
    ([768, 576], 256)
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    tensors = [*k, *v]
    for number, tensor in enumerate(tensors):
        half = int(number >= len(k) and tensor.ndim == 5)  # only there, V has another order than K
        kind = half, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        alike.setdefault(kind, []).append(number)
    layouts, made, pitch = list[KVLayout](), list[Planes](), 0
    for (half, *_), numbers in alike.items():
        layout = _described([tensors[number] for number in numbers], page_size, half, len(layouts))
        if head + heads > layout.sizes["head"]:
            raise LayoutError(f"heads {head} to {head + heads - 1} of tensors with {layout.sizes['head']} heads")
        planes, row = _compiled(layout.slice(heads=range(head, head + heads)), page_size, head, heads)
        pitch = pitch or row
        if row > pitch:
            raise LayoutError(
                f"a page has {row} bytes in tensor {numbers[0]} and {pitch} in the first one; SGLang reserves as many "
                "for each as the first one has: no other may be wider"
            )
        made += _placed(planes, np.array(numbers, dtype=np.int64) * pitch, row)
        layouts.append(layout)
    return KVLayout.merge(layouts), made, pitch


def _described(tensors: list[Any], page_size: int, half: int, number: int) -> KVLayout:
    form = RANKS.get(len(tensors[0].shape))
    if form is None:
        raise LayoutError(f"a tensor of {len(tensors[0].shape)} dims; a pool of SGLang has 3, 4 (hnd) or 5")
    dims = DEVICE[form][half]
    whole = [tensor[: len(tensor) // page_size * page_size] if dims == SLOTS else tensor for tensor in tensors]
    return KVLayout.from_tensors(f"layer: {dims}", whole, sizes={"token": page_size}, part=f"planes{number}")


def _compiled(part: KVLayout, page_size: int, head: int, heads: int) -> tuple[list[_Compiled], int]:
    """Compile a layout against two pages of a ring. With two of them, no copy reaches from a plane to the next."""
    import torch

    sizes, (name,) = part.sizes, part.parts
    shape = (sizes["layer"], 2, page_size, heads, sizes["dim"])
    ring = torch.empty(shape, dtype=getattr(torch, part.dtype))
    row = ring[0, 0].numel() * ring.element_size()
    program = compile(part, KVLayout.from_tensors("layer block token head dim", ring, head_start=head, part=name))
    found = []
    for group, units in program.plan([0], [0]).moving:
        pool, at, size = group.offsets
        plane, inner = np.divmod(at + int(units[1, 0]) - ring.data_ptr(), 2 * row)
        stride = group.src.stride
        if stride is None:
            raise LayoutError(f"{part!r} has no single distance between pages")
        found.append(_Compiled(int(units[0, 0]), stride, part.num_blocks, PlaneCopies(pool, plane, inner, size)))
    return found, row


class _Compiled(NamedTuple):
    """Copies as they are compiled; ``copies.before`` counts planes."""

    base: int
    stride: int
    pages: int
    copies: PlaneCopies


def _placed(compiled: list[_Compiled], before: Int64Array, row: int) -> list[Planes]:
    return [
        Planes(base, stride, pages, row, copies._replace(before=before[copies.before]))
        for base, stride, pages, copies in compiled
    ]


def planes_of_rows(addresses: Sequence[int], nbytes: Sequence[int], strides: Sequence[int]) -> list[Planes]:
    """Return the planes of rows that are given by addresses, such as latents. A row is a page of one token.

    Args:
        addresses: address of row 0 of each plane.
        nbytes: bytes of a row that are copied, of each plane.
        strides: bytes from row to row, of each plane.

    >>> [planes] = planes_of_rows([4096, 8192], [576, 576], [640, 640])
    >>> planes.copies.before.tolist(), planes.row
    ([0, 576], 576)
    """
    at = np.cumsum([0, *nbytes])[:-1]
    alike: dict[tuple[int, int], list[int]] = {}
    for number, kind in enumerate(zip(nbytes, strides, strict=True)):
        alike.setdefault(kind, []).append(number)
    made = []
    for (row, stride), numbers in alike.items():
        pool = np.array([addresses[number] for number in numbers], dtype=np.int64)
        base, zeros = int(pool.min()), np.zeros(pool.size, dtype=np.int64)
        copies = PlaneCopies(pool - base, at[numbers], zeros, zeros + row)
        made.append(Planes(base, stride, REACH // stride, row, copies))
    return made


def plan_of(step: Step, parts: Sequence[Part], pool: KVLayout, ring: KVLayout) -> Plan:
    """Return the plan of some parts between a pool and a ring.

    Args:
        step: see :meth:`Planes.part`.
        parts: of :meth:`Planes.part`.
        pool, ring: layouts that hold all of their memory.
    """
    pair = (pool, ring) if step == "src" else (ring, pool)
    units = sum(int(part.units.shape[1]) for part in parts)
    skips = ((0, 0),) * len(parts)
    nbytes = sum(part.nbytes for part in parts)
    return Plan(tuple(parts), units, nbytes, direction_of(*pair), (pair,), NO_SEAMS, skips, (HalfProgram(*pair),))


def checked_pages(pages: Int64Array, most: int) -> Int64Array:
    """Return page ids that lie within a pool.

    Raises:
        BlockIndexError: one does not.

    >>> checked_pages(np.array([0, 9]), 8)
    Traceback (most recent call last):
    kvplan.errors.BlockIndexError: page_indices[1] is 9; the pool has pages 0 to 7
    """
    wrong = np.flatnonzero((pages < 0) | (pages >= most))
    if wrong.size:
        at = int(wrong[0])
        raise BlockIndexError(f"page_indices[{at}] is {int(pages[at])}; the pool has pages 0 to {most - 1}")
    return pages
