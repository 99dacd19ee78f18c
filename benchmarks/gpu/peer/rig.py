"""The rig of the benchmarks between GPUs: memory, pairs of streams, executors, and the timing of ways in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any, Self

import torch

import kvplan
from benchmarks.gpu.peer.limits import Scale
from benchmarks.gpu.required import speed_row
from benchmarks.gpu.rig import WARM_UPS, Speed, Way
from benchmarks.record import Row
from kvplan.errors import PathError
from kvplan.measure import baselines
from kvplan.measure.baselines import COPY
from kvplan.measure.rig import AtOnce, Line, timed
from kvplan.measure.workload import Buffers, Geometry, Work, work


class Rig:
    """One run: memory is allocated when a group first asks for it, and kept for the others.

    Args:
        scale: sizes of the run.
        gpus: names of the GPUs; or ``"cpu"`` several times, which shows that the code runs, and nothing else.

    Attributes:
        links: GB/s of one large copy by route, which the first group measures; nothing exceeds it.
        not_run: by group, why something of it was not run.
    """

    def __init__(self, scale: Scale, gpus: tuple[str, ...]) -> None:
        self.scale, self.gpus = scale, gpus
        self.links: dict[str, float] = {}
        self.not_run: dict[str, str] = {}
        self._stack = ExitStack()
        self._lines: dict[tuple[str, str], Line] = {}
        self._executors: dict[tuple[Any, ...], kvplan.Executor] = {}
        self._buffers: dict[str, Buffers] = {}

    @property
    def on_cpu(self) -> bool:
        """Whether the CPU stands for all GPUs."""
        return self.gpus[0] == "cpu"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def executor(self, gpu: str, path: str = "auto", **knobs: Any) -> kvplan.Executor:
        """The executor of a GPU with this policy; each is opened once."""
        key = (gpu, path, *sorted(knobs.items()))
        if key not in self._executors:
            policy = kvplan.Policy() if self.on_cpu else kvplan.Policy(path=path, **knobs)
            self._executors[key] = self._stack.enter_context(kvplan.Executor(gpu, policy))
        return self._executors[key]

    def line(self, gpu: str, peer: str) -> Line:
        """The streams of a GPU and its peer, which may be the same."""
        if (gpu, peer) not in self._lines:
            self._lines[gpu, peer] = Line(gpu, peer)
        return self._lines[gpu, peer]

    def peer_of(self, route: str) -> str:
        """The GPU at the other end of a route from the first one."""
        return self.gpus[0] if route == "device" else self.gpus[1]

    def buffers(self, route: str) -> Buffers:
        """Flat bytes of the first GPU, and of the GPU at the other end of the route."""
        where = "within" if route == "device" else "between"
        if where not in self._buffers:
            self._buffers.clear()  # groups go from one to the other once
            nbytes = max(self.scale.blocks * self.scale.planes * 8192, self.scale.nbytes)
            self._buffers[where] = Buffers(nbytes, self.gpus[0], peer=self.peer_of(route))
        return self._buffers[where]

    def runs(self, route: str, run_nbytes: int) -> Work:
        """Blocks of a layer-first cache, in random order, to or from such a cache of the other GPU."""
        planes = self.scale.planes
        count = self.scale.nbytes // (run_nbytes * planes) * planes
        geometry = Geometry(route, "scattered", run_nbytes, count, planes)
        return work(self.buffers(route).front(geometry.nbytes), geometry)

    def ours(self, moved: Work, name: str, **knobs: Any) -> Way:
        """A path of kvplan; every byte is compared first."""
        begin = partial(self.executor(self.gpus[0], name, **knobs).submit, moved.plan)
        moved.verify(name, lambda: begin().synchronize())
        return Way(moved.plan.nbytes, begin)

    def baselines(self, moved: Work, *names: str) -> dict[str, Way]:
        """Baselines on the same blocks, all or those named; every byte is compared first. One that refuses is noted."""
        peer = self.peer_of(moved.geometry.direction)
        if self.on_cpu:
            makers: dict[str, Any] = dict(baselines.makers(Line("cpu")))
            makers[COPY] = makers.pop(baselines.MEMCPY)
        else:
            makers = dict(baselines.makers(self.line(self.gpus[0], peer), peer))
        found = {}
        for name in names or makers:
            if name not in makers:
                continue
            try:
                made = makers[name](moved)
            except PathError as error:
                self.not_run[f"{name}, {moved.geometry.direction}, {moved.geometry.run_nbytes} B"] = str(error)
                continue
            made.verify()
            found[name] = Way(moved.plan.nbytes, made.begin)
        return found

    def copy(self, gpu: str, peer: str, route: str, nbytes: int) -> Way:
        """One large copy between the flat memory of two GPUs, by the first one."""
        src, dst = (torch.empty(nbytes, dtype=torch.uint8, device=name)
                    for name in ((gpu, peer) if route == "push" else (peer, gpu)))  # fmt: skip
        if self.on_cpu:
            return Way(nbytes, lambda: AtOnce(nbytes, lambda: dst.copy_(src)))
        return Way(nbytes, baselines.large_copy(self.line(gpu, peer), src, dst))

    def speeds(self, ways: Mapping[str, Way]) -> dict[str, Speed]:
        """Speed of each way, measured in turns."""
        self.synchronize()
        timings = timed({name: way.begin for name, way in ways.items()}, seconds=inf, most=self.scale.repeats,
                        warm_ups=WARM_UPS)  # fmt: skip
        return {name: Speed(ways[name].nbytes, one.seconds, one.wall) for name, one in timings.items()}

    def synchronize(self) -> None:
        """Wait for all GPUs."""
        for gpu in set(self.gpus) - {"cpu"}:
            torch.cuda.synchronize(gpu)

    def row(self, group: str, what: str, found: Mapping[str, Speed], route: str, share: float | None = None) -> Row:
        """A row of the way ``"ours"``, held against one large copy, with all other ways beside it."""
        ours = found["ours"]
        names = [COPY, *(name for name in found if name not in (COPY, "ours"))]  # the limit is made of the first one
        beside = {name: found[name].gbps for name in names if name in found}
        detail = {"nbytes": ours.nbytes, "wall_gbps": ours.wall_gbps}
        link = inf if self.on_cpu else self.links[route]
        return speed_row(group, what, ours.gbps, beside, link=link, share=share, detail=detail)


def better(rows: Mapping[str, Row], what: str, share: float | None) -> Row:
    """The row of the route that comes closer to one large copy, with a limit.

    Args:
        rows: rows by route, each with one large copy beside it.
        what: the measurement in words.
        share: least share of one large copy.
    """
    route = max(rows, key=lambda name: rows[name].ratios.get(COPY, 0.0))
    row = rows[route]
    copy = row.beside[COPY]
    limit, rule = (None, "") if share is None or "broken" in row.detail else (share * copy, f"{share:g} x {COPY}")
    return Row(row.group, what, row.unit, row.ours, {COPY: copy}, limit, rule, more_is_better=True,
               detail=dict(row.detail) | {"route": route})  # fmt: skip


Group = Callable[[Rig], Any]
