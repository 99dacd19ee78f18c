"""Caches and pools of random bytes, the plans between them, and the proof that a path moves every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import kvplan
from benchmarks.gpu.sizes import RUN_NBYTES, Shape, shape_of

LAYER_FIRST = "layer: kv block token head dim"
PAGE_FIRST = "block layer kv token head dim"
PIECE_WORDS = 8 << 20  # 64 MiB: what is made or bounced at a time
FEW = 8  # up to one block in so many is gathered on the host; of more, everything is compared on the GPU


class Side(NamedTuple):
    """One end of a transfer.

    Attributes:
        layout: for kvplan.
        raw: the tensors as allocated, contiguous.
        planes: a raw tensor as int64 words (plane, block, word), a view; a plane is a (layer, part).
        registered_whole: whether one copy may reach over all of a raw tensor; host memory that was registered in
            chunks cannot be copied across their borders.
    """

    layout: kvplan.KVLayout
    raw: tuple[Tensor, ...]
    planes: Callable[[Tensor], Tensor]
    registered_whole: bool = True

    def select(self, ids: Tensor) -> Tensor:
        """The words of these blocks, (plane, block, word), on the GPU of ``ids``."""
        if not self.raw[0].is_cuda and ids.numel() * FEW <= self.layout.num_blocks:
            here = ids.cpu()
            return torch.cat([self.planes(raw).index_select(1, here) for raw in self.raw]).to(ids.device)
        return torch.cat([self.planes(self._on(raw, ids.device)).index_select(1, ids) for raw in self.raw])

    def _on(self, raw: Tensor, device: torch.device) -> Tensor:
        if raw.is_cuda or self.registered_whole:
            return raw.to(device)
        moved = torch.empty(raw.nbytes // 8, dtype=torch.int64, device=device)
        for piece, target in zip(words_of(raw).split(PIECE_WORDS), moved.split(PIECE_WORDS), strict=True):
            target.copy_(_bounce()[: piece.numel()].copy_(piece))
        return moved

    def clear(self) -> None:
        """Zeros, which random bytes are not."""
        for raw in self.raw:
            raw.zero_()


def words_of(raw: Tensor) -> Tensor:
    """A contiguous tensor as int64 words: bf16 of random bytes holds NaNs, which equal nothing."""
    return raw.view(-1).view(torch.int64)


def fill_random(raw: Tensor, device: torch.device) -> None:
    """Random bytes; made on the GPU, since one CPU thread takes seconds for a gigabyte."""
    words = words_of(raw)
    if words.is_cuda:
        words.random_()
        return
    for piece in words.split(PIECE_WORDS):
        made = torch.empty(piece.numel(), dtype=torch.int64, device=device).random_()
        piece.copy_(_bounce()[: piece.numel()].copy_(made))


@cache
def _bounce() -> Tensor:
    """Pinned memory of one registration, to pass through; copies through it wait for the GPU."""
    return torch.empty(PIECE_WORDS, dtype=torch.int64, pin_memory=torch.cuda.is_available())


def layer_first(raw: Tensor, layers: int, blocks: int, shape: Shape) -> Side:
    """A (kv, block, token, head, dim) cache a layer, all within the front of one flat tensor of bytes."""
    nbytes = layers * 2 * blocks * _run_nbytes(shape)
    part = raw[:nbytes]
    tensors = part.view(torch.bfloat16).view(layers, 2, blocks, *shape)
    layout = kvplan.KVLayout.from_tensors(LAYER_FIRST, list(tensors.unbind(0)))
    return Side(layout, (part,), lambda raw: words_of(raw).view(layers * 2, blocks, -1))


def page_first(raw: Tensor, layers: int, blocks: int, shape: Shape) -> Side:
    """A (block, layer, kv, token, head, dim) pool in the front of one flat tensor of bytes."""
    nbytes = layers * 2 * blocks * _run_nbytes(shape)
    part = raw[:nbytes]
    tensor = part.view(torch.bfloat16).view(blocks, layers, 2, *shape)
    return Side(kvplan.KVLayout.from_tensors(PAGE_FIRST, tensor), (part,), _pages(layers, blocks))


def allocated_cache(layers: int, blocks: int, device: torch.device) -> Side:
    """As an engine allocates it: a tensor a layer."""
    tensors = [torch.empty(2, blocks, *shape_of(RUN_NBYTES), dtype=torch.bfloat16, device=device)
               for _ in range(layers)]  # fmt: skip
    for tensor in tensors:
        fill_random(tensor, device)
    layout = kvplan.KVLayout.from_tensors(LAYER_FIRST, tensors)
    return Side(layout, tuple(tensors), lambda raw: words_of(raw).view(2, blocks, -1))


def allocated_pool(cache: Side, device: torch.device) -> Side:
    """As kvplan allocates it: page-first, pinned."""
    layout = kvplan.allocate(PAGE_FIRST, like=cache.layout)
    tensor = layout.tensors
    fill_random(tensor, device)
    planes = _pages(len(layout.layers), layout.num_blocks)
    return Side(layout, (tensor,), planes, registered_whole=not layout.seams)


def _pages(layers: int, blocks: int) -> Callable[[Tensor], Tensor]:
    return lambda raw: words_of(raw).view(blocks, layers * 2, -1).transpose(0, 1)


def _run_nbytes(shape: Shape) -> int:
    return shape.tokens * shape.heads * shape.dim * 2


class Work(NamedTuple):
    """One transfer: random blocks of one side to random blocks of the other.

    Attributes:
        program: that made the plan; kept, since another compile of the pair would make another.
        plan: of it.
        src, dst: the sides.
        src_ids, dst_ids: block ids, int64 on the CPU.
    """

    program: kvplan.CopyProgram
    plan: kvplan.Plan
    src: Side
    dst: Side
    src_ids: NDArray[np.int64]
    dst_ids: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.plan.nbytes

    def ids(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Source and destination ids on the GPU."""
        return torch.from_numpy(self.src_ids).to(device), torch.from_numpy(self.dst_ids).to(device)

    def verify(self, name: str, move: Callable[[], Any], device: torch.device) -> None:
        """Clear the destination, move, and compare every byte of the blocks moved.

        Raises:
            RuntimeError: some did not arrive.
        """
        src_ids, dst_ids = self.ids(device)
        expected = self.src.select(src_ids)
        self.dst.clear()
        torch.cuda.synchronize()
        move()
        torch.cuda.synchronize()
        if not torch.equal(self.dst.select(dst_ids), expected):
            raise RuntimeError(f"{name}: not every byte of {self.plan!r} arrived")


class Pair:
    """A host and a device side that hold the same blocks.

    Attributes:
        host, device: the sides.
    """

    def __init__(self, host: Side, device: Side) -> None:
        self.host = host
        self.device = device
        self._programs: dict[str, kvplan.CopyProgram] = {}

    def work(self, direction: str, count: int, seed: int = 0) -> Work:
        """``count`` random blocks, in random order, on either side."""
        src, dst = (self.host, self.device) if direction == "load" else (self.device, self.host)
        if direction not in self._programs:
            self._programs[direction] = kvplan.compile(src.layout, dst.layout)
        program = self._programs[direction]
        src_ids, dst_ids = random_ids(count, src.layout.num_blocks, seed)
        return Work(program, program.plan(src_ids, dst_ids), src, dst, src_ids, dst_ids)

    def works(self, direction: str, count: int, times: int) -> Sequence[Work]:
        """Transfers of as many blocks each, of other ids."""
        return [self.work(direction, count, seed) for seed in range(1, times + 1)]


def random_ids(count: int, blocks: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Source and destination ids in no order, none twice."""
    random = np.random.default_rng((count, blocks, seed))
    src, dst = (random.permutation(blocks)[:count].astype(np.int64) for _ in range(2))
    return src, dst
