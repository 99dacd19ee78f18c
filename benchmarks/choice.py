"""``python -m benchmarks.choice``: does ``auto`` take the best path, alone and beside compute?

Measures every path over pairs of layouts, run lengths, numbers of blocks and both directions: with nothing else on the
GPU, beside decode, and beside prefill. What counts is a transfer's time, plus what compute loses in it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvplan
from kvplan.cost.model import features
from kvplan.cost.policy import OVERLAPS, Policy
from kvplan.cost.profile import TERMS
from kvplan.cost.statistics import counted
from kvplan.errors import TransferError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.rig import KINDS, Compute, timed, window
from kvplan.measure.workload import DIRECTIONS, Buffers

NEAR = 1.05  # times the best path
HOPELESS = 6.0  # a path is not measured where the model expects so many times the time of the best
KIB, MIB = 1 << 10, 1 << 20
LAYERS = 32
RUN_NBYTES, BLOCKS = (512, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB), (4, 64, 1024)
MOST_NBYTES = 512 * MIB  # of a transfer
POOL_NBYTES = 64 * MIB  # of a side, at least: blocks of a pool lie far apart
VERIFIED_NBYTES = 64 * MIB  # a verification takes seconds for more
HOST_HEADS = 4  # of a head slice: the host holds 4 times the heads of the GPU
Point = dict[str, Any]


class Pair(NamedTuple):
    """A layout on either side.

    Attributes:
        device, host: notations.
        tokens: of a block on the GPU, which has two heads.
        run: the axes whose product is one contiguous run.
        share: heads of the host's side over those of the GPU's.
    """

    device: str
    host: str
    tokens: int
    run: tuple[str, ...]
    share: int = 1


BY_LAYER, PAGES = "layer: kv block token head dim", "block layer kv token head dim"
PAIRS = {
    "planes to pages": Pair(BY_LAYER, PAGES, 8, ("token", "head", "dim")),
    "HND to NHD": Pair("layer: block kv head token dim", PAGES, 4, ("dim",)),
    "layer first": Pair(BY_LAYER, "layer kv block token head dim", 8, ("token", "head", "dim")),
    "page first": Pair("kv layer: (block token) head dim", "kv (block token) layer head dim", 4, ("head", "dim")),
    "head slice": Pair(BY_LAYER, PAGES, 4, ("head", "dim"), HOST_HEADS),
    "cross-layer": Pair(PAGES, PAGES, 1, ("layer", "kv", "token", "head", "dim")),
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
        sizes = {"layer": LAYERS, "kv": 2, "token": pair.tokens, "head": 2}
        return sizes | {"dim": self.run_nbytes // math.prod(sizes.get(axis, 1) for axis in pair.run)}

    @property
    def nbytes(self) -> int:
        """Bytes moved.

        >>> Case("planes to pages", "load", 8192, 4).nbytes == 4 * 32 * 2 * 8192
        True
        """
        return self.blocks * math.prod(self.sizes.values())

    def layouts(self, buffers: Buffers) -> tuple[KVLayout, KVLayout]:
        """Lay both sides over memory; return the source and the destination."""
        pair, block_nbytes = PAIRS[self.pair], self.nbytes // self.blocks
        wanted = max(2 * self.blocks, POOL_NBYTES // block_nbytes, 2)
        held = min(wanted, buffers.other.numel() // block_nbytes)
        pooled = min(wanted, buffers.host.numel() // (block_nbytes * pair.share))
        device = _laid(buffers.other, pair.device, {"block": held, **self.sizes}, int(pair.share > 1))
        host = _laid(buffers.host, pair.host, {"block": pooled, **self.sizes, "head": 2 * pair.share}, 0)
        return (host, device) if self.direction == "load" else (device, host)

    def plan(self, src: KVLayout, dst: KVLayout) -> kvplan.Plan:
        """Plan random blocks in random order."""
        rng = np.random.default_rng((0, self.run_nbytes, self.blocks))
        ids = [rng.permutation(side.num_blocks)[: self.blocks].astype(np.int64) for side in (src, dst)]
        return kvplan.compile(src, dst).plan(*ids)


def _laid(flat: Any, notation: str, sizes: dict[str, int], head_start: int) -> KVLayout:
    """Return the layout of a notation over the first bytes of a buffer."""
    nest, _, dims = notation.rpartition(":")
    outer, inner = nest.split(), dims.replace("(block token)", "slot").split()
    sizes = {**sizes, "slot": sizes["block"] * sizes["token"]}
    shape = [sizes[axis] for axis in (*outer, *inner)]
    tensors = _nested(flat[: math.prod(shape)].view(shape), len(outer))
    return KVLayout.from_tensors(notation, tensors, sizes={"token": sizes["token"]}, head_start=head_start)


def _nested(tensor: Any, depth: int) -> Any:
    return tensor if not depth else [_nested(one, depth - 1) for one in tensor.unbind(0)]


def points(device: str, until: float) -> Iterator[Point]:
    """Measure the grid in random order; no transfer begins after a time of ``time.perf_counter()``."""
    buffers = Buffers(2 * MOST_NBYTES, device, host_nbytes=HOST_HEADS * MOST_NBYTES)
    grid = [Case(pair, way, run, blocks) for pair in PAIRS for run in RUN_NBYTES for blocks in BLOCKS
            for way in DIRECTIONS]  # fmt: skip
    random.Random(7).shuffle(grid)  # not secret
    with ExitStack() as stack:
        executors = {(kind, path): stack.enter_context(Executor(device, Policy(path=path, overlap=kind)))
                     for kind in OVERLAPS for path in (*TERMS, "auto")}  # fmt: skip
        computes = {kind: Compute(device, *KINDS[kind]) for kind in OVERLAPS[1:]}
        for case in [case for case in grid if case.nbytes <= MOST_NBYTES]:
            if time.perf_counter() > until:
                print("the time is spent", file=sys.stderr)
                return
            src, dst = case.layouts(buffers)
            plan = case.plan(src, dst)
            if case.blocks == BLOCKS[0] and case.nbytes <= VERIFIED_NBYTES:
                seen = kvplan.verify(src, dst, executor=executors[OVERLAPS[0], "auto"])
                if not seen.ok:
                    raise TransferError(f"{case}: {seen.text}")
            for kind in OVERLAPS:
                able = [one for one in executors[kind, "auto"].candidates(plan) if not one.refused]
                least, walls, slower = min(one.wall for one in able), {}, {}
                for path in [one.path for one in able if one.wall <= HOPELESS * least]:
                    walls[path], slower[path] = _time(executors[kind, path], plan, computes.get(kind))
                yield {
                    "case": case._asdict(), "overlap": kind, "taken": able[0].path, "walls": walls, "slower": slower,
                    "terms": {path: features(path, counted(plan))[1:] for path in TERMS},
                    "scores": {path: wall * (2 - 1 / slower[path]) for path, wall in walls.items()},
                }  # fmt: skip


def _time(executor: Executor, plan: Any, compute: Compute | None) -> tuple[float, float]:
    """Return the seconds of a transfer, and how much slower compute is meanwhile."""
    for _ in range(2):
        executor.submit(plan).synchronize()

    def begin() -> Any:
        return executor.submit(plan)

    if compute is None:
        return timed({"": begin}, seconds=0.02)[""].wall, 1.0
    taken = window(compute, begin, warm=4, alone=12, transfers=4, seconds=0.012)
    return statistics.median(taken.transfers), max(taken.mean_slowdown, 1.0)


def show(found: Sequence[Point]) -> None:
    """Print how often a choice is within 5 % of the best path, and its worst ratio."""
    for kind in OVERLAPS:
        some = [point for point in found if point["overlap"] == kind]
        for name in ("auto", *TERMS):
            ratios = [point["scores"].get(point["taken"] if name == "auto" else name, math.inf) /
                      min(point["scores"].values()) for point in some]  # fmt: skip
            if ratios:
                near = sum(ratio <= NEAR for ratio in ratios) / len(ratios)
                print(f"{kind:8} {name:22} {len(ratios):4} {near:7.1%} within 5 %, at worst {max(ratios):.2f}x")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    found = list(points(chosen.device, time.perf_counter() + chosen.budget))
    if chosen.output:
        chosen.output.write_text(json.dumps({"schema": "kvplan.choice", "version": 4, "points": found}))
    show(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
