"""The transfers that ``python -m benchmarks.choice`` measures: six pairs of layouts, every byte compared."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvplan.errors import TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.copy_program import CopyProgram, compile  # noqa: A004
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = 32
AXES = ("block", "layer", "kv", "token", "head", "dim")
KIB, MIB = 1 << 10, 1 << 20
MOST_NBYTES = 512 * MIB  # of a transfer
POOL_NBYTES = 64 * MIB  # of a side, at least: blocks of a pool lie far apart
HOST_HEADS = 4  # of a head slice: the host holds 4 times the heads of the GPU


class Pair(NamedTuple):
    """A layout on either side.

    Attributes:
        device, host: notations.
        tokens, heads: of a block on the GPU.
        run: the axes whose product is one contiguous run.
        share: heads of the host's side over those of the GPU's.
    """

    device: str
    host: str
    tokens: int
    heads: int
    run: tuple[str, ...]
    share: int = 1


PAIRS = {
    "planes to pages": Pair(
        "layer: kv block token head dim", "block layer kv token head dim", 8, 2, ("token", "head", "dim")
    ),
    "HND to NHD": Pair("layer: block kv head token dim", "block layer kv token head dim", 4, 2, ("dim",)),
    "layer first": Pair(
        "layer: kv block token head dim", "layer kv block token head dim", 8, 2, ("token", "head", "dim")
    ),
    "page first": Pair("kv layer: (block token) head dim", "kv (block token) layer head dim", 4, 2, ("head", "dim")),
    "head slice": Pair(
        "layer: kv block token head dim", "block layer kv token head dim", 4, 2, ("head", "dim"), HOST_HEADS
    ),
    "cross-layer": Pair(
        "block layer kv token head dim", "block layer kv token head dim", 1, 2, ("layer", "kv", "token", "head", "dim")
    ),
}


class Case(NamedTuple):
    """One transfer of the grid.

    Attributes:
        pair: its name in :data:`PAIRS`.
        direction: ``"load"`` or ``"store"``.
        run_nbytes: bytes of a contiguous run of one block.
        blocks: random blocks that are moved.
    """

    pair: str
    direction: str
    run_nbytes: int
    blocks: int

    @property
    def sizes(self) -> dict[str, int]:
        """Extents of a block on the GPU; elements are bytes.

        >>> Case("HND to NHD", "load", 256, 1).sizes
        {'layer': 32, 'kv': 2, 'token': 4, 'head': 2, 'dim': 256}
        """
        pair = PAIRS[self.pair]
        sizes = {"layer": LAYERS, "kv": 2, "token": pair.tokens, "head": pair.heads}
        return sizes | {"dim": self.run_nbytes // prod(sizes.get(axis, 1) for axis in pair.run)}

    @property
    def nbytes(self) -> int:
        """Bytes moved.

        >>> Case("planes to pages", "load", 8192, 4).nbytes == 4 * 32 * 2 * 8192
        True
        """
        return self.blocks * prod(self.sizes.values())


class Memory:
    """Random bytes on the host and on the GPU, and others to overwrite a destination with.

    Args:
        device: ``"cuda:0"``, or ``"cpu"`` to try the bookkeeping without a GPU.
        nbytes: of the GPU's side; the host's side is larger, as a head slice needs.
    """

    def __init__(self, device: str, nbytes: int = 2 * MOST_NBYTES) -> None:
        import torch

        self.device = device
        self.host = torch.empty(HOST_HEADS * nbytes // 2, dtype=torch.uint8, pin_memory=device != "cpu")
        self.gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.noise = torch.empty(self.host.numel(), dtype=torch.uint8, device=device)
        for flat in (self.noise, self.gpu):
            flat.view(torch.int64).random_()
        self.host.copy_(self.noise)
        self.noise.bitwise_not_()


class Side(NamedTuple):
    """One end of a transfer.

    Attributes:
        layout: for kvplan.
        flat: its bytes.
        logical: the same bytes, or bytes of that shape, by logical axes: block, layer, kv, token, head, dim.
    """

    layout: KVLayout
    flat: Tensor
    logical: Callable[[Tensor], Tensor]


class Work(NamedTuple):
    """One case over real memory.

    Attributes:
        case: the transfer.
        program, plan: of the transfer.
        src, dst: its sides.
        ids: blocks of either.
        heads: the heads that move, on either side.
        memory: the bytes that the sides lie in.
    """

    case: Case
    program: CopyProgram
    plan: Plan
    src: Side
    dst: Side
    ids: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
    heads: tuple[slice, slice]
    memory: Memory

    def verify(self, name: str, move: Callable[[], object]) -> None:
        """Overwrite the destination, move, and compare every byte of its pool with the result of plain indexing.

        Args:
            name: of the path, for the error.
            move: moves the plan and returns when all has arrived.

        Raises:
            TransferError: bytes did not arrive, or bytes beside them changed.
        """
        import torch

        (src, dst), device = self.ids, self.memory.device
        expected = self.memory.noise[: self.dst.flat.numel()].clone()
        self.dst.flat.copy_(expected)
        rows = self.src.logical(self.src.flat.to(device))[torch.from_numpy(src).to(device)][..., self.heads[0], :]
        self.dst.logical(expected)[torch.from_numpy(dst).to(device), ..., self.heads[1], :] = rows
        if device != "cpu":
            torch.cuda.synchronize(device)
        move()
        wrong = int((self.dst.flat.to(device) != expected).sum())
        if wrong:
            raise TransferError(f"{name}: {wrong} bytes of the destination are wrong after {self.case}")


def work(memory: Memory, case: Case, seed: int = 0) -> Work:
    """Lay both sides of a case over memory, and plan random blocks in random order."""
    pair, block_nbytes = PAIRS[case.pair], case.nbytes // case.blocks
    wanted = max(2 * case.blocks, POOL_NBYTES // block_nbytes, 2)
    held = min(wanted, memory.gpu.numel() // block_nbytes)
    pooled = min(wanted, memory.host.numel() // (block_nbytes * pair.share))
    device = _side(memory.gpu, pair.device, {"block": held, **case.sizes}, head_start=1 if pair.share > 1 else 0)
    sizes = case.sizes | {"head": pair.heads * pair.share}
    host = _side(memory.host, pair.host, {"block": pooled, **sizes}, head_start=0)
    first = device.layout.heads[0]
    here, there = slice(0, pair.heads), slice(first, first + pair.heads)
    random = np.random.default_rng((seed, case.run_nbytes, case.blocks))
    if case.direction == "load":
        src, dst, heads = host, device, (there, here)
    else:
        src, dst, heads = device, host, (here, there)
    program = compile(src.layout, dst.layout)
    ids = tuple(random.permutation(side.layout.num_blocks)[: case.blocks].astype(np.int64) for side in (src, dst))
    return Work(case, program, program.plan(*ids), src, dst, (ids[0], ids[1]), heads, memory)


def _side(flat: Tensor, notation: str, sizes: dict[str, int], head_start: int) -> Side:
    """A layout of a notation over the first bytes of a buffer."""
    nest, _, dims = notation.rpartition(":")
    outer, inner = nest.split(), dims.replace("(", "").replace(")", "").split()
    axes = [*outer, *inner]
    part = flat[: prod(sizes.values())]
    order = [axes.index(axis) for axis in AXES]

    def logical(raw: Tensor) -> Tensor:
        return raw.view([sizes[axis] for axis in axes]).permute(order)

    shape = [sizes[axis] for axis in axes]
    if "(block token)" in dims:
        at = axes.index("block")
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    tensors = _nested(part.view(shape), len(outer))
    layout = KVLayout.from_tensors(notation, tensors, sizes={"token": sizes["token"]}, head_start=head_start)
    return Side(layout, part, logical)


def _nested(tensor: Tensor, depth: int) -> Any:
    return tensor if not depth else [_nested(one, depth - 1) for one in tensor.unbind(0)]
