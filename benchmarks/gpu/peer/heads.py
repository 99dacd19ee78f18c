"""Caches of ranks of live engines on two GPUs: other orders of tokens and heads, other head ranges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import kvplan
from benchmarks.gpu.peer.whole import ROUTES, better
from benchmarks.gpu.rig import Rig, Way
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.errors import TransferError
from kvplan.measure.rig import Line
from kvplan.measure.workload import COPY, INDEXING

NHD, HND = "layer: kv block token head dim", "layer: kv block head token dim"
WORDS = {NHD: "NHD", HND: "HND"}


class Rank(NamedTuple):
    """The cache of a rank: a tensor per layer, of random bytes.

    Attributes:
        layout: what kvplan plans from.
        tensors: the same memory as int16 (kv, block, token, head, dim), whatever the order in memory.
        heads: global numbers of its heads.
        gpu: name of its GPU.
    """

    layout: kvplan.KVLayout
    tensors: list[torch.Tensor]
    heads: range
    gpu: str


class Move(NamedTuple):
    """All blocks of a rank to a rank that has its heads, in random order.

    Attributes:
        plan: the transfer.
        source, target: the ranks.
        ids: block ids of the source, and of the target.
    """

    plan: kvplan.Plan
    source: Rank
    target: Rank
    ids: tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]

    @classmethod
    def between(cls, source: Rank, target: Rank) -> Move:
        """Plan it."""
        random = np.random.default_rng(0)
        here, there = (random.permutation(rank.layout.num_blocks).astype(np.int64) for rank in (source, target))
        return cls(kvplan.compile(source.layout, target.layout).plan(here, there), source, target, (here, there))

    def layers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of each layer's heads that move, of source and target."""
        first = self.source.heads.start - self.target.heads.start
        heads = slice(first, first + len(self.source.heads))
        for src, dst in zip(self.source.tensors, self.target.tensors, strict=True):
            yield src, dst[..., heads, :]

    def indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block ids on the GPU of each side."""
        here, there = map(torch.from_numpy, self.ids)
        return here.to(self.source.gpu), there.to(self.target.gpu)

    def verify(self, name: str, move: Any) -> None:
        """Invert the target's bytes, move the plan, and compare every byte.

        Raises:
            TransferError: a byte did not arrive.
        """
        for tensor in self.target.tensors:
            tensor.bitwise_not_()
        if self.target.gpu != "cpu":
            torch.cuda.synchronize(self.target.gpu)
        move()
        here, there = self.indices()
        for layer, (src, dst) in enumerate(self.layers()):
            if not torch.equal(src[:, here].to(self.target.gpu), dst[:, there]):
                raise TransferError(f"{name}: not every byte of {self.plan!r} arrived, layer {layer}")


def rank_of(rig: Rig, order: str, heads: range, gpu: str, blocks: int) -> Rank:
    """Allocate a rank's cache."""
    scale = rig.scale
    nhd = order == NHD
    shape = (2, blocks, scale.tokens, len(heads)) if nhd else (2, blocks, len(heads), scale.tokens)
    made = [torch.randint(-(2**15), 2**15, (*shape, scale.dim), dtype=torch.int16, device=gpu)
            for _ in range(scale.layers)]  # fmt: skip
    layout = kvplan.KVLayout.from_tensors(order, [one.view(torch.bfloat16) for one in made], head_start=heads.start)
    return Rank(layout, made if nhd else [one.transpose(2, 3) for one in made], heads, gpu)


def layouts(rig: Rig) -> Iterator[Row]:
    """A rank with some heads to a rank with all heads: orders that differ, and runs of 256 B to 4 KiB."""
    scale = rig.scale
    half, one = range(scale.heads // 2), range(1)
    for first, second, heads in ((NHD, HND, half), (NHD, NHD, half), (HND, HND, one)):
        run_nbytes = {(NHD, HND): 1, (NHD, NHD): len(heads), (HND, HND): scale.tokens}[first, second] * scale.dim * 2
        blocks = scale.head_blocks(len(heads))
        source = rank_of(rig, first, heads, rig.gpus[0], blocks)
        target = rank_of(rig, second, range(scale.heads), rig.gpus[1], blocks)
        words = f"{WORDS[first]} -> {WORDS[second]}, TP {scale.heads // len(heads)} -> TP 1, {spell(run_nbytes)}"
        moved = Move.between(source, target)
        rows = {route: _row(rig, words, moved, route) for route in ROUTES}
        yield from rows.values()
        yield better(rows, f"{words}, the better of push and pull")


def _row(rig: Rig, words: str, moved: Move, route: str) -> Row:
    """A row of a push by the source's GPU, or of a pull by the target's."""
    gpu, peer = rig.gpus if route == "push" else rig.gpus[::-1]
    begin, nbytes = partial(rig.kept_executor("auto", gpu).submit, moved.plan), moved.plan.nbytes
    moved.verify("auto", lambda: begin().synchronize())
    ways = {"ours": Way(nbytes, begin), COPY: rig.copy(gpu, peer, route, nbytes)}
    if not rig.on_cpu:
        ways[INDEXING] = _indexing(rig.line(route, gpu, peer), moved, route)
    return rig.row("layouts", f"{words}, {route}", rig.speeds(ways), route)


def _indexing(line: Line, moved: Move, route: str) -> Way:
    """torch: the blocks' heads are gathered for each layer, copied to the other GPU at once, and scattered."""
    assert line.far is not None  # two GPUs
    source, target = (line, line.far) if route == "push" else (line.far, line)
    views, (here, there) = list(moved.layers()), moved.indices()
    shapes = [(2, there.numel(), *src.shape[2:]) for src, _ in views]
    gathered, arrived = ([torch.empty(shape, dtype=torch.int16, device=side.name) for shape in shapes]
                         for side in (source, target))  # fmt: skip

    def issue() -> None:
        with torch.cuda.stream(source.stream), torch.cuda.stream(target.stream):
            for (src, _), staging in zip(views, gathered, strict=True):
                staging.copy_(src[:, here])
            for near, far in zip(gathered, arrived, strict=True):
                far.copy_(near, non_blocking=True)
            for (_, dst), staging in zip(views, arrived, strict=True):
                dst.index_copy_(1, there, staging)

    def begin() -> Any:
        return line.start(moved.plan.nbytes, issue)

    moved.verify(INDEXING, lambda: begin().synchronize())
    return Way(moved.plan.nbytes, begin)
