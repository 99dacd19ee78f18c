"""The rig of all groups: memory, streams, executors, and the timing of ways in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from typing import Any, NamedTuple, Self

import torch

import kvplan
from benchmarks.gpu.sizes import RUN_NBYTES
from benchmarks.problems import front
from benchmarks.record import Row, speed_row
from kvplan.errors import PathError
from kvplan.measure.rig import AtOnce, Begin, Line, timed
from kvplan.measure.workload import (
    COPY,
    DIRECTIONS,
    Baseline,
    Buffers,
    Geometry,
    Side,
    Work,
    between,
    fill_random,
    large_copy,
    work,
)

LAYER_FIRST = "layer: kv block token head dim"
PAGE_FIRST = "block layer kv token head dim"
Maker = Callable[[Line, Work], Baseline]


class Speed(NamedTuple):
    """Medians of whole transfers, nothing else on the GPU.

    Attributes:
        nbytes: moved by each.
        seconds: from the first to the last event on the GPU.
        wall: by the host's clock, from before the call until the host knows.
    """

    nbytes: int
    seconds: float
    wall: float

    @property
    def gbps(self) -> float:
        """GB/s by the GPU's events."""
        return self.nbytes / self.seconds / 1e9

    @property
    def wall_gbps(self) -> float:
        """GB/s by the host's clock."""
        return self.nbytes / self.wall / 1e9


class Way(NamedTuple):
    """One way to move bytes: the bytes of a transfer, and what starts one."""

    nbytes: int
    begin: Begin


class Rig:
    """One run: memory is allocated when a group first asks for it, and kept for the others.

    A route is a direction between the first GPU and the host, or ``"device"``, ``"push"`` or ``"pull"``.

    Args:
        scale: sizes of the run.
        gpus: names of the GPUs; or ``"cpu"`` several times, which shows that the code runs, and nothing else.

    Attributes:
        ceilings: GB/s by name and route, which the first group measures; nothing exceeds one large copy.
        not_run: by group, why something of it was not run.
    """

    def __init__(self, scale: Any, gpus: Sequence[str]) -> None:
        self.scale, self.gpus, self.on_cpu = scale, gpus, gpus[0] == "cpu"
        self.ceilings: dict[str, dict[str, float]] = {}
        self.not_run: dict[str, str] = {}
        self._stack = ExitStack()
        self._lines: dict[tuple[str, str, str | None], Line] = {}
        self._executors: dict[tuple[Any, ...], kvplan.Executor] = {}
        self._buffers: dict[str, Buffers] = {}
        self._pages: dict[str, tuple[Side, Side]] = {}
        if not self.on_cpu:
            torch.cuda.set_device(gpus[0])
            torch.cuda.init()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def executor(self, path: str, gpu: str = "", **knobs: Any) -> kvplan.Executor:
        """A new executor that takes one path, by default of the first GPU."""
        policy = kvplan.Policy() if self.on_cpu else kvplan.Policy(path=path, **knobs)
        return kvplan.Executor(gpu or self.gpus[0], policy)

    def kept_executor(self, path: str, gpu: str = "", **knobs: Any) -> kvplan.Executor:
        """The same, opened once for the whole run."""
        key = (path, gpu, *sorted(knobs.items()))
        if key not in self._executors:
            self._executors[key] = self._stack.enter_context(self.executor(path, gpu, **knobs))
        return self._executors[key]

    def peer(self, route: str) -> str | None:
        """The GPU at the other end of a route from the first one; None for the host."""
        return None if route in DIRECTIONS else self.gpus[0] if route == "device" else self.gpus[1]

    def line(self, route: str, gpu: str = "", peer: str | None = None) -> Line:
        """The streams that ceilings and baselines of a route use, by default from the first GPU."""
        key = (route, gpu or self.gpus[0], peer if gpu else self.peer(route))
        if key not in self._lines:
            self._lines[key] = Line(*key[1:])
        return self._lines[key]

    def buffers(self, route: str) -> Buffers:
        """Flat bytes of the first GPU, and of the other end: pinned host memory, apart for loads and stores."""
        where = route if route in (*DIRECTIONS, "device") else "between"
        if where not in self._buffers:
            if route not in DIRECTIONS:
                self._buffers.clear()  # groups go from one to the other once
            self._buffers[where] = Buffers(self.scale.flat_nbytes, self.gpus[0], peer=self.peer(route))
        return self._buffers[where]

    def pages(self, direction: str, blocks: int, seed: int = 0) -> Work:
        """Blocks of a cache of a tensor a layer, to or from a page-first pool of kvplan.allocate; runs of 8 KiB.

        One cache and pool serve the loads, and others the stores, so that both may run at once.
        """
        if direction not in self._pages:
            self._pages[direction] = pool_and_cache(self.scale.layers, self.scale.large, self.gpus[0])
        planes = self.scale.planes
        geometry = Geometry(direction, "contiguous", RUN_NBYTES, blocks * planes, planes)
        return between(*self._pages[direction], geometry, self.gpus[0], seed)

    def runs(self, route: str, run_nbytes: int, nbytes: int, *, host: str = "scattered") -> Work:
        """All blocks of a layer-first cache within the flat buffers, to or from the other end within them.

        Args:
            route: the route.
            run_nbytes: of one block of one (layer, part).
            nbytes: of the transfer; as many blocks as that makes, and one at least.
            host: see :class:`kvplan.measure.workload.Geometry`.
        """
        planes = self.scale.planes
        blocks = max(nbytes // (planes * run_nbytes), 1)
        geometry = Geometry(route, host, run_nbytes, blocks * planes, planes)
        return work(front(self.buffers(route), geometry.nbytes), geometry)

    def ours(self, executor: kvplan.Executor, moved: Work, name: str) -> Way:
        """A path of kvplan; every byte is compared first."""

        def begin() -> Any:
            return executor.submit(moved.plan)

        moved.verify(name, lambda: begin().synchronize())
        return Way(moved.plan.nbytes, begin)

    def baselines(self, moved: Work, makers: Mapping[str, Maker]) -> dict[str, Way]:
        """Baselines on the same blocks; every byte is compared first. One that refuses is noted, and left out."""
        ways = {}
        for name, make in makers.items():
            try:
                baseline = make(self.line(moved.geometry.direction), moved)
            except PathError as error:
                self.refused(name, moved, error)
                continue
            baseline.verify()
            ways[name] = Way(moved.plan.nbytes, baseline.begin)
        return ways

    def refused(self, name: str, moved: Work, error: PathError) -> None:
        """Note a way that cannot move the work."""
        self.not_run[f"{name}, {moved.geometry.direction}, {moved.geometry.run_nbytes} B"] = str(error)

    def copy(self, gpu: str, peer: str, route: str, nbytes: int) -> Way:
        """One large copy between new flat memory of two GPUs, by the first one."""
        src, dst = (torch.empty(nbytes, dtype=torch.uint8, device=name)
                    for name in ((gpu, peer) if route == "push" else (peer, gpu)))  # fmt: skip
        if self.on_cpu:
            return Way(nbytes, lambda: AtOnce(nbytes, lambda: dst.copy_(src)))
        return Way(nbytes, large_copy(self.line(route, gpu, peer), src, dst))

    def speeds(self, ways: Mapping[str, Way]) -> dict[str, Speed]:
        """Speed of each way, measured in turns."""
        self.synchronize()
        timings = timed({name: way.begin for name, way in ways.items()}, seconds=inf, most=self.scale.repeats)
        return {name: Speed(ways[name].nbytes, one.seconds, one.wall) for name, one in timings.items()}

    def synchronize(self) -> None:
        """Wait for all GPUs."""
        for gpu in set(self.gpus) - {"cpu"}:
            torch.cuda.synchronize(gpu)

    def link(self, route: str) -> float:
        """GB/s of one large copy, which nothing exceeds; on the CPU, caches do."""
        return inf if self.on_cpu else self.ceilings[COPY][route]

    def row(self, group: str, what: str, speeds: Mapping[str, Speed], route: str, ceilings: Sequence[str] = ()) -> Row:
        """A row of the way ``"ours"``, with some ceilings and all other ways beside it, one large copy first."""
        ours = speeds["ours"]
        beside = {name: self.ceilings[name][route] for name in ceilings}
        names = sorted(speeds.keys() - {"ours"}, key=lambda name: (name != COPY, [*speeds].index(name)))
        beside |= {name: speeds[name].gbps for name in names}
        detail = {"nbytes": ours.nbytes, "wall_gbps": ours.wall_gbps}
        return speed_row(group, what, ours.gbps, beside, link=self.link(route), detail=detail)


def pool_and_cache(layers: int, blocks: int, device: str) -> tuple[Side, Side]:
    """A page-first pool as kvplan allocates it, and a cache as an engine does: a tensor a layer. Of random bytes."""
    size = (2, blocks, 16, 2, RUN_NBYTES // 64)  # K and V, blocks, tokens, heads, elements
    tensors = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(layers)]
    cache = kvplan.KVLayout.from_tensors(LAYER_FIRST, tensors)
    pool = kvplan.allocate(PAGE_FIRST, like=cache)
    host, gpu = (
        Side(layout, tuple(one.view(-1).view(torch.int64) for one in held), paged)
        for layout, held, paged in ((pool, [pool.tensors], True), (cache, tensors, False))
    )
    for part in (*host.parts, *gpu.parts):
        fill_random(part, device)
    return host, gpu
