"""The transfers that are measured: caches and pools of random bytes, plans, and a comparison of every byte.

The cache is memory of the measured GPU. The pool is host memory, or memory of a GPU: of another one, or of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvplan.cost.policy import ROUTES
from kvplan.errors import KVPlanError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

DIRECTIONS = ("load", "store")
TO_CACHE = ("load", "pull", "device")  # routes from the pool to the cache; the others go from the cache to the pool
# Order of the runs in the pool: the runs of a block one after another, or each beside the same run of other blocks.
HOSTS = ("contiguous", "scattered")
WORD = 8  # bytes: runs are whole words of int64
PIECE = 16 << 20  # bytes of random numbers made at a time


class Geometry(NamedTuple):
    """The route, the sizes and the pool's order of a transfer.

    Attributes:
        direction: one of :data:`kvplan.cost.policy.ROUTES`; it must suit the pool of the :class:`Buffers`.
        host: ``"contiguous"`` if the runs of a block lie one after another in the pool; ``"scattered"`` if no two runs
            of a block touch there.
        run_nbytes: bytes per run: one layer's K, or V, of one block.
        runs: number of runs in the transfer.
        block_runs: number of runs per block.
    """

    direction: str
    host: str
    run_nbytes: int
    runs: int
    block_runs: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the transfer.

        >>> Geometry("load", "contiguous", 8192, 160, 16).nbytes
        1310720
        """
        return self.run_nbytes * self.runs

    @property
    def blocks(self) -> int:
        """Return the number of blocks of the transfer."""
        return self.runs // self.block_runs

    def check(self) -> None:
        """Check that the geometry can be built.

        Raises:
            KVPlanError: a number or a name is wrong; the message names it, and a right one.
        """
        if self.direction not in ROUTES or self.host not in HOSTS:
            raise KVPlanError(f"direction {self.direction!r}, host {self.host!r}; expected of {ROUTES} and {HOSTS}")
        if self.run_nbytes < WORD or self.run_nbytes % WORD:
            raise KVPlanError(f"runs of {self.run_nbytes} bytes; give a multiple of {WORD}")
        if self.block_runs < 2 or self.block_runs % 2 or self.runs < 1 or self.runs % self.block_runs:
            raise KVPlanError(
                f"{self.runs} runs, {self.block_runs} a block; a block has K and V of each layer, and blocks are whole"
            )


class Buffers:
    """Flat buffers of random bytes on both sides, in which works place their caches.

    Args:
        nbytes: bytes of the device's side, and of the largest transfer.
        device: ``"cuda:0"``; or ``"cpu"``, with both buffers in CPU memory.
        host_nbytes: bytes of the pool, by default ``nbytes``. The blocks of a large pool lie far apart, and move more
            slowly than the blocks of a small pool.
        peer: the GPU that holds the pool, such as ``"cuda:1"``, or ``device`` itself; by default it is host memory,
            which is pinned if the device is a GPU.

    Attributes:
        nbytes, device, peer: as given.
        host: the pool, as flat bytes.
        other: the cache's side, as flat bytes.

    Raises:
        KVPlanError: there is too little memory.
    """

    def __init__(self, nbytes: int, device: str, host_nbytes: int | None = None, peer: str | None = None) -> None:
        import torch

        self.nbytes = nbytes
        self.device = device
        self.peer = peer
        try:
            pinned = peer is None and device != "cpu"
            self.host = torch.empty(host_nbytes or nbytes, dtype=torch.uint8, device=peer, pin_memory=pinned)
            self.other = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            asked = f"{host_nbytes or nbytes} bytes of {peer or 'the host'} and {nbytes} of {device}"
            raise KVPlanError(f"cannot allocate {asked}: {str(error).splitlines()[0]}") from None
        for flat in (self.other, self.host):
            fill_random(flat[: flat.numel() // WORD * WORD].view(torch.int64), peer or device)

    def front(self, nbytes: int) -> Buffers:
        """Return the first bytes of both sides; caches in them have only the blocks that are moved."""
        part = copy(self)
        part.nbytes, part.host, part.other = nbytes, self.host[:nbytes], self.other[:nbytes]
        return part


def fill_random(words: Tensor, device: str) -> None:
    """Fill a flat int64 tensor with random words, made on ``device``: one CPU thread takes seconds for a gigabyte."""
    import torch

    for first in range(0, words.numel(), PIECE // WORD):
        piece = words[first : first + PIECE // WORD]
        piece.copy_(torch.randint(1, 1 << 62, piece.shape, dtype=torch.int64, device=device))


class Side(NamedTuple):
    """The source or the destination of a work.

    Attributes:
        layout: the layout from which kvplan plans.
        parts: its tensors as flat int64 words: one tensor; or one for each layer if blocks are not the outermost dim.
        paged: whether blocks are its outermost dim.
    """

    layout: KVLayout
    parts: tuple[Tensor, ...]
    paged: bool

    def views(self, block_runs: int) -> list[Tensor]:
        """Return each part as an array (block, run, word) if the side is paged, otherwise (run, block, word)."""
        blocks = self.layout.num_blocks
        runs = block_runs // len(self.parts)
        return [part.view(*((blocks, runs) if self.paged else (runs, blocks)), -1) for part in self.parts]

    def select(self, ids: Tensor, block_runs: int) -> Tensor:
        """Return the words of some blocks as an array (run of a block, block, word).

        They are gathered and compared on the device of ``ids``, to which a side of other memory is copied as a whole.
        """
        import torch

        views = [view.to(ids.device) for view in self.views(block_runs)]
        if self.paged:
            return views[0].index_select(0, ids).transpose(0, 1)
        return torch.cat([view.index_select(1, ids) for view in views])


class Work(NamedTuple):
    """One transfer of random blocks in random order, no block twice.

    Attributes:
        geometry: sizes and direction of the transfer.
        program, plan: copy program and plan of the transfer.
        src, dst: source and destination.
        src_ids, dst_ids: block ids of the source and of the destination.
        device: name of the device, such as ``"cuda:0"``.
    """

    geometry: Geometry
    program: CopyProgram
    plan: Plan
    src: Side
    dst: Side
    src_ids: np.ndarray[Any, np.dtype[np.int64]]
    dst_ids: np.ndarray[Any, np.dtype[np.int64]]
    device: str

    def verify(self, name: str, move: Callable[[], object]) -> None:
        """Invert the destination's bytes, move the plan, and compare every byte.

        Args:
            name: name of the path or baseline, for the error message.
            move: function that moves the plan and returns when all bytes have arrived.

        Raises:
            TransferError: a byte did not arrive.
        """
        import torch

        src, dst = (torch.from_numpy(ids).to(self.device) for ids in (self.src_ids, self.dst_ids))
        block_runs = self.geometry.block_runs
        expected = self.src.select(src, block_runs)
        for part in self.dst.parts:
            part.bitwise_not_()  # not zeroed: every byte must differ from the byte that arrives
        for part in self.dst.parts:
            if part.is_cuda:
                torch.cuda.synchronize(part.device)
        move()
        moved = self.dst.select(dst, block_runs)
        if not torch.equal(moved, expected):
            raise TransferError(f"{name}: not every byte of {self.plan!r} arrived: {self._wrong(moved, expected)}")

    def _wrong(self, moved: Tensor, expected: Tensor) -> str:
        """Count the wrong runs and blocks, and the runs that the transfer left untouched."""
        different = (moved != expected).any(dim=-1)
        untouched = (moved == expected.bitwise_not()).all(dim=-1)
        return (
            f"{', '.join(f'{name} {value}' for name, value in self.geometry._asdict().items())}: "
            f"{int(different.sum())} runs of {int(different.any(dim=0).sum())} of {self.geometry.blocks} blocks are "
            f"wrong, {int(untouched.sum())} of them untouched"
        )


def work(buffers: Buffers, geometry: Geometry, seed: int = 0) -> Work:
    """Place a cache and a pool in the buffers, and plan random blocks: all blocks of the cache, some of the pool.

    Raises:
        KVPlanError: the geometry is wrong, or larger than the buffers.
    """
    geometry.check()
    if geometry.nbytes > buffers.nbytes:
        raise KVPlanError(f"{geometry.nbytes} bytes do not fit into buffers of {buffers.nbytes}")
    block_nbytes = geometry.run_nbytes * geometry.block_runs
    pooled = buffers.host.numel() // block_nbytes
    # If there were one block, its runs would touch on the device, too, and be one run.
    held = min(max(geometry.blocks, 2), buffers.nbytes // block_nbytes)
    if min(pooled, held) < 2:
        raise KVPlanError(
            f"one block of {block_nbytes} bytes fills the buffers, and its runs would be one: give more memory"
        )
    host = side_of(buffers.host, geometry, pooled, paged=geometry.host == "contiguous")
    device = side_of(buffers.other, geometry, held, paged=False)
    return between(host, device, geometry, buffers.device, seed)


def between(host: Side, device: Side, geometry: Geometry, name: str, seed: int = 0) -> Work:
    """Plan random blocks from one side to the other, in random order.

    Args:
        host, device: the pool and the cache.
        geometry: number of blocks, and route.
        name: name of the device, such as ``"cuda:0"``.
        seed: seed of the random block ids.
    """
    src, dst = (host, device) if geometry.direction in TO_CACHE else (device, host)
    program = compile(src.layout, dst.layout)
    random = np.random.default_rng((seed, geometry.runs, geometry.run_nbytes))
    src_ids, dst_ids = (
        random.permutation(side.layout.num_blocks)[: geometry.blocks].astype(np.int64) for side in (src, dst)
    )
    plan = program.plan(src_ids, dst_ids)
    return Work(geometry, program, plan, src, dst, src_ids, dst_ids, name)


def side_of(flat: Tensor, geometry: Geometry, blocks: int, *, paged: bool) -> Side:
    """Place a cache or a pool at the start of a flat buffer.

    Args:
        flat: the buffer, as bytes.
        geometry: bytes per run, and runs per block.
        blocks: number of blocks.
        paged: whether blocks are the outermost dim; otherwise each layer has its blocks.
    """
    import torch

    part = flat[: geometry.run_nbytes * geometry.block_runs * blocks]
    elements, layers = part.view(torch.int64), geometry.block_runs // 2
    if paged:
        shaped: Any = elements.view(blocks, layers, 2, 1, -1)
        return Side(KVLayout.from_tensors("block layer kv token dim", shaped), (elements,), paged)
    shaped = list(elements.view(layers, 2, blocks, 1, -1).unbind(0))
    return Side(KVLayout.from_tensors("layer: kv block token dim", shaped), (elements,), paged)
