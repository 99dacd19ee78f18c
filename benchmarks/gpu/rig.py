"""The rig of all groups: memory, streams, the timing of ways in turn, and the ceilings of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

import torch

import kvplan
from benchmarks.gpu.sizes import RUN_NBYTES, Scale, shape_of
from kvplan.errors import PathError
from kvplan.measure.baselines import Baseline
from kvplan.measure.rig import Begin, Line, timed
from kvplan.measure.workload import DIRECTIONS, Buffers, Geometry, Side, Work, between, fill_random, work

WARM_UPS = 2
LAYER_FIRST = "layer: kv block token head dim"
PAGE_FIRST = "block layer kv token head dim"


Maker = Callable[[Line, Work], Baseline]


class Ceilings(NamedTuple):
    """GB/s that nothing exceeds, by direction.

    Attributes:
        copy: one large copy by the copy engine.
        sm: SMs that copy one contiguous buffer.
        both: two large copies at once, bytes of both.
    """

    copy: dict[str, float]
    sm: dict[str, float]
    both: float


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
    """One way to move bytes.

    Attributes:
        nbytes: of a transfer.
        begin: starts one.
    """

    nbytes: int
    begin: Begin


class Rig:
    """One run: memory is allocated when a group first asks for it, and kept for the others.

    Attributes:
        lines: by direction, the stream that ceilings and baselines use.
    """

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        self.lines = {direction: Line("cuda:0") for direction in DIRECTIONS}
        self._buffers: dict[str, Buffers] = {}
        self._pages: dict[str, tuple[Side, Side]] = {}
        self._ceilings: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        """The ceilings of this run.

        Raises:
            RuntimeError: not yet measured.
        """
        if self._ceilings is None:
            raise RuntimeError("ceilings come first; nothing is held against those of another run")
        return self._ceilings

    @ceilings.setter
    def ceilings(self, measured: Ceilings) -> None:
        self._ceilings = measured

    def executor(self, path: str, **knobs: Any) -> kvplan.Executor:
        """An executor that takes one path."""
        return kvplan.Executor("cuda:0", kvplan.Policy(path=path, **knobs))

    def buffers(self, direction: str) -> Buffers:
        """Flat bytes of host (pinned by one registration) and of device, as large as the large transfer."""
        if direction not in self._buffers:
            self._buffers[direction] = Buffers(self.scale.large_nbytes, "cuda:0")
        return self._buffers[direction]

    def pages(self, direction: str, blocks: int, seed: int = 0) -> Work:
        """Blocks of a cache of a tensor a layer, to or from a page-first pool of kvplan.allocate; runs of 8 KiB.

        One cache and pool serve the loads, and others the stores, so that both may run at once.
        """
        if direction not in self._pages:
            self._pages[direction] = pool_and_cache(self.scale.layers, self.scale.large, "cuda:0")
        planes = self.scale.planes
        geometry = Geometry(direction, "contiguous", RUN_NBYTES, blocks * planes, planes)
        return between(*self._pages[direction], geometry, "cuda:0", seed)

    def runs(self, direction: str, run_nbytes: int, nbytes: int, *, host: str = "scattered") -> Work:
        """All blocks of a layer-first cache within the flat buffers, to or from a host side within them.

        Args:
            direction: ``"load"`` or ``"store"``.
            run_nbytes: of one block of one (layer, part).
            nbytes: of the transfer; as many blocks as that makes, and one at least.
            host: see :class:`kvplan.measure.workload.Geometry`.
        """
        planes = self.scale.planes
        geometry = Geometry(direction, host, run_nbytes, self.scale.blocks(nbytes, run_nbytes) * planes, planes)
        return work(self.buffers(direction).front(geometry.nbytes), geometry)

    def speeds(self, ways: Mapping[str, Way]) -> dict[str, Speed]:
        """Speed of each way, measured in turns."""
        timings = timed({name: way.begin for name, way in ways.items()}, seconds=inf, most=self.scale.repeats,
                        warm_ups=WARM_UPS)  # fmt: skip
        return {name: Speed(ways[name].nbytes, one.seconds, one.wall) for name, one in timings.items()}

    def ours(self, executor: kvplan.Executor, moved: Work, name: str) -> Way:
        """A path of kvplan; every byte is compared first."""

        def begin() -> Any:
            return executor.submit(moved.plan)

        moved.verify(name, lambda: begin().synchronize())
        return Way(moved.plan.nbytes, begin)

    def baselines(self, moved: Work, makers: Mapping[str, Maker]) -> dict[str, Way]:
        """Baselines on the same blocks; every byte is compared first. A baseline that refuses is left out."""
        found = {}
        for name, make in makers.items():
            try:
                made = make(self.lines[moved.geometry.direction], moved)
            except PathError:
                continue
            made.verify()
            found[name] = Way(moved.plan.nbytes, made.begin)
        return found


def pool_and_cache(layers: int, blocks: int, device: str) -> tuple[Side, Side]:
    """A page-first pool as kvplan allocates it, and a cache as an engine does: a tensor a layer. Of random bytes."""
    size = (2, blocks, *shape_of(RUN_NBYTES))
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
