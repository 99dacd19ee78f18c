"""Caches of ranks of live engines: other orders of tokens and heads, other head ranges, several sources at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import kvplan
from benchmarks.gpu.peer.limits import FOUR_SHARE, HEADS_SHARE, ROUTES
from benchmarks.gpu.peer.rig import Rig, better
from benchmarks.gpu.rig import WARM_UPS, Way
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.errors import TransferError
from kvplan.measure.baselines import COPY, INDEXING
from kvplan.measure.rig import Line

NHD, HND = "layer: kv block token head dim", "layer: kv block head token dim"
NEEDED = 4  # GPUs of the last group


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
    """Blocks from source ranks to destination ranks, as one plan.

    Attributes:
        plan: all pairs that are moved, joined.
        pairs: sources and destinations that have heads in common, as (source, destination).
        ids: block ids of the sources, and of the destinations.
        link_nbytes: bytes that go from one GPU to another. On the CPU, which stands for all GPUs, it is all bytes.
    """

    plan: kvplan.Plan
    pairs: tuple[tuple[Rank, Rank], ...]
    ids: tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]
    link_nbytes: int

    def parts(self, source: Rank, target: Rank) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Views of each layer's common heads, of source and destination, and the ids of the destination's blocks."""
        common = range(max(source.heads.start, target.heads.start), min(source.heads.stop, target.heads.stop))
        src, dst = (slice(common.start - rank.heads.start, common.stop - rank.heads.start) for rank in (source, target))
        at = torch.from_numpy(self.ids[1]).to(target.gpu)
        for one, other in zip(source.tensors, target.tensors, strict=True):
            yield one[..., src, :], other[..., dst, :], at

    def verify(self, name: str, move: Any) -> None:
        """Invert the destinations' bytes, move the plan, and compare every byte.

        Raises:
            TransferError: a byte did not arrive.
        """
        for _, target in self.pairs:
            for tensor in target.tensors:
                tensor.bitwise_not_()
        for gpu in {target.gpu for _, target in self.pairs} - {"cpu"}:
            torch.cuda.synchronize(gpu)
        move()
        for source, target in self.pairs:
            blocks = torch.from_numpy(self.ids[0]).to(source.gpu)
            for layer, (src, dst, at) in enumerate(self.parts(source, target)):
                if not torch.equal(src[:, blocks].to(target.gpu), dst[:, at]):
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


def move_of(sources: Sequence[Rank], targets: Sequence[Rank], only: Sequence[tuple[int, int]] = ()) -> Move:
    """Plan all blocks in random order between ranks, or between some pairs of ranks only."""
    programs = kvplan.reshard([rank.layout for rank in sources], [rank.layout for rank in targets], complete=False)
    random = np.random.default_rng(0)
    ids = tuple(random.permutation(ranks[0].layout.num_blocks).astype(np.int64) for ranks in (sources, targets))
    pairs = [pair for pair in programs if not only or pair in only]
    plans = [programs[pair].plan(*ids) for pair in pairs]
    ranks = tuple((sources[one], targets[other]) for one, other in pairs)
    link_nbytes = sum(plan.nbytes for plan, (source, target) in zip(plans, ranks, strict=True)
                      if source.gpu != target.gpu or source.gpu == "cpu")  # fmt: skip
    return Move(kvplan.join(plans), ranks, (ids[0], ids[1]), link_nbytes)


def layouts(rig: Rig) -> Iterator[Row]:
    """A rank with some heads to a rank with all heads: orders that differ, and runs of 256 B to 4 KiB."""
    scale = rig.scale
    half, one = range(scale.heads // 2), range(1)
    for first, second, heads in ((NHD, HND, half), (NHD, NHD, half), (HND, HND, one)):
        run_nbytes = {(NHD, HND): 1, (NHD, NHD): len(heads), (HND, HND): scale.tokens}[first, second] * scale.dim * 2
        blocks = scale.head_blocks(len(heads))
        source = rank_of(rig, first, heads, rig.gpus[0], blocks)
        target = rank_of(rig, second, range(scale.heads), rig.gpus[1], blocks)
        words = f"{_word(first)} -> {_word(second)}, TP {scale.heads // len(heads)} -> TP 1, {spell(run_nbytes)}"
        yield from _both(rig, "layouts", words, move_of([source], [target]))


def resharding(rig: Rig) -> Iterator[Row]:
    """Two source ranks to one destination in one submission: both on one GPU, then one beside the destination.

    The last case has no limit: its GPU also copies half of the bytes within its memory, and the figure is the other
    half, which crosses the link.
    """
    half, blocks = rig.scale.heads // 2, rig.scale.head_blocks(rig.scale.heads)
    target = rank_of(rig, HND, range(2 * half), rig.gpus[1], blocks)
    for words, gpus in (("both on one GPU", (0, 0)), ("one on each GPU", (0, 1))):
        sources = [rank_of(rig, NHD, range(k * half, (k + 1) * half), rig.gpus[gpu], blocks)
                   for k, gpu in enumerate(gpus)]  # fmt: skip
        moved = move_of(sources, [target])
        if gpus == (0, 0):
            yield from _both(rig, "resharding", f"two ranks, {words}", moved)
        else:
            yield _row(rig, "resharding", f"two ranks, {words}", moved, "pull")


def _both(rig: Rig, group: str, words: str, moved: Move) -> Iterator[Row]:
    """Rows of a push by the source's GPU and of a pull by the destination's, and of the better one."""
    rows = {route: _row(rig, group, words, moved, route) for route in ROUTES}
    yield from rows.values()
    yield better(rows, f"{words}, the better of push and pull", HEADS_SHARE)


def _row(rig: Rig, group: str, words: str, moved: Move, route: str) -> Row:
    """A row of the bytes that cross the link, over the time in which all bytes have arrived."""
    gpu, peer = rig.gpus[:2] if route == "push" else rig.gpus[1::-1]
    begin = partial(rig.executor(gpu).submit, moved.plan)
    moved.verify("auto", lambda: begin().synchronize())
    ways = {"ours": Way(moved.link_nbytes, begin), COPY: rig.copy(gpu, peer, route, moved.link_nbytes)}
    apart = {source.gpu for source, _ in moved.pairs}.isdisjoint(target.gpu for _, target in moved.pairs)
    if apart and not rig.on_cpu:
        ways[INDEXING] = _indexing(rig.line(gpu, peer), moved, route)
    row = rig.row(group, f"{words}, {route}", rig.speeds(ways), route)
    return replace(row, detail=dict(row.detail) | {"moved_nbytes": moved.plan.nbytes})


def _indexing(line: Line, moved: Move, route: str) -> Way:
    """torch: the blocks' common heads are gathered for each layer, copied to the other GPU at once, and scattered."""
    assert line.far is not None  # two GPUs
    source, target = (line, line.far) if route == "push" else (line.far, line)
    held: list[Any] = []  # of each pair and layer: gathered, arrived
    for one, other in moved.pairs:
        for src, _, at in moved.parts(one, other):
            shape = (2, at.numel(), *src.shape[2:])
            held.append([torch.empty(shape, dtype=torch.int16, device=name) for name in (source.name, target.name)])
    blocks = torch.from_numpy(moved.ids[0]).to(source.name)
    views = [part for one, other in moved.pairs for part in moved.parts(one, other)]

    def issue() -> None:
        with torch.cuda.stream(source.stream), torch.cuda.stream(target.stream):
            for (src, _, _), (gathered, _) in zip(views, held, strict=True):
                gathered.copy_(src[:, blocks])
            for gathered, arrived in held:
                arrived.copy_(gathered, non_blocking=True)
            for (_, dst, at), (_, arrived) in zip(views, held, strict=True):
                dst.index_copy_(1, at, arrived)

    def begin() -> Any:
        return line.start(moved.plan.nbytes, issue)

    moved.verify(INDEXING, lambda: begin().synchronize())
    return Way(moved.plan.nbytes, begin)


def four(rig: Rig) -> Iterator[Row]:
    """Two ranks to two ranks of other head ranges, on four GPUs, all at once; each destination pulls.

    Each source sends a half of its heads to each destination, so no GPU has more to do than the others.
    """
    if len(rig.gpus) < NEEDED:
        rig.not_run["four"] = f"it needs {NEEDED} GPUs; there are {len(rig.gpus)}"
        return
    half, quarter = rig.scale.heads // 2, rig.scale.heads // 4
    blocks, gpus = rig.scale.head_blocks(half), rig.gpus
    sources = [rank_of(rig, NHD, range(k * half, (k + 1) * half), gpus[k], blocks) for k in range(2)]
    middle = rank_of(rig, HND, range(quarter, quarter + half), gpus[2], blocks)
    outer = [rank_of(rig, HND, heads, gpus[3], blocks)
             for heads in (range(quarter), range(quarter + half, 2 * half))]  # fmt: skip
    moves = {"the middle heads": (gpus[2], move_of(sources, [middle])),
             "the outer heads": (gpus[3], move_of(sources, outer))}  # fmt: skip
    alone_begin = partial(rig.executor(gpus[2]).submit, move_of(sources, [middle], only=[(0, 0)]).plan)
    alone = rig.speeds({"pair": Way(alone_begin().result().nbytes, alone_begin)})["pair"].gbps
    begins = {}
    for name, (gpu, moved) in moves.items():
        begins[name] = partial(rig.executor(gpu).submit, moved.plan)
        moved.verify(name, lambda begin=begins[name]: begin().synchronize())
    for name, seconds in _at_once(rig, begins).items():
        gbps = moves[name][1].plan.nbytes / seconds / 1e9
        yield Row("four", f"{name}, all at once", "GB/s", gbps, {"one pair alone": alone}, FOUR_SHARE * alone,
                  f"{FOUR_SHARE:g} x one pair alone", more_is_better=True)  # fmt: skip


def _at_once(rig: Rig, begins: Mapping[str, Any]) -> dict[str, float]:
    """Median seconds of each transfer, by its own events, while the others run."""
    taken: dict[str, list[float]] = {name: [] for name in begins}
    for _ in range(WARM_UPS + rig.scale.repeats):
        for name, flight in {name: begin() for name, begin in begins.items()}.items():
            taken[name].append(flight.result().seconds)
    return {name: statistics.median(some[WARM_UPS:]) for name, some in taken.items()}


def _word(order: str) -> str:
    return "NHD" if order == NHD else "HND"
