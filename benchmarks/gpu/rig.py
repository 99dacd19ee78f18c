"""What all groups share: buffers, streams, the driver, and the ceilings once they are measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kvplan
from benchmarks.gpu.driver import Driver
from benchmarks.gpu.memory import Pair, Work, allocated_cache, allocated_pool, fill_random, layer_first, page_first
from benchmarks.gpu.sizes import Scale, shape_of

WARM_UPS = 2


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


class Bench:
    """One run: memory is allocated when a group first asks for it, and kept for the others."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.device = torch.device("cuda:0")
        torch.cuda.set_device(self.device)
        torch.cuda.init()
        torch.empty(1, device=self.device)  # makes the context current, for calls by address
        self.driver = Driver()
        # torch's own streams come from a pool that goes round: an executor's might be the one that compute runs on.
        self.streams = {
            name: torch.cuda.ExternalStream(self.driver.stream(), device=self.device)
            for name in ("load", "store", "compute")
        }
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}
        self._pages: dict[str, Pair] = {}
        self._ceilings: Ceilings | None = None

    @property
    def ceilings(self) -> Ceilings:
        """Of this run.

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
        return kvplan.Executor(str(self.device), kvplan.Policy(path=path, **knobs))

    def buffers(self, direction: str) -> tuple[Tensor, Tensor]:
        """Flat bytes of host (pinned by one registration) and of device, as large as the large transfer."""
        if direction not in self._buffers:
            nbytes = self.scale.large_nbytes
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            device = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            for raw in (host, device):
                fill_random(raw, self.device)
            self._buffers[direction] = host, device
        return self._buffers[direction]

    def pages(self, direction: str) -> Pair:
        """A cache of a tensor a layer, and a page-first pool that kvplan allocated, of runs of 8 KiB.

        One pair serves the loads and another the stores, so that what is read stays random and both may run at once.
        """
        if direction not in self._pages:
            cache = allocated_cache(self.scale.layers, self.scale.large, self.device)
            self._pages[direction] = Pair(allocated_pool(cache, self.device), cache)
        return self._pages[direction]

    def runs(self, direction: str, run_nbytes: int, nbytes: int, *, host: str = "layer first") -> Work:
        """All blocks of a layer-first cache of such runs within the flat buffers, to or from a host side of an order.

        Args:
            direction: ``"load"`` or ``"store"``.
            run_nbytes: of one block of one (layer, part).
            nbytes: of the transfer; as many blocks as that makes, and one at least.
            host: ``"layer first"``: host extents are single runs; ``"page first"``: those of a block are one extent.
        """
        flat_host, flat_device = self.buffers(direction)
        blocks, layers, shape = self.scale.blocks(nbytes, run_nbytes), self.scale.layers, shape_of(run_nbytes)
        order = layer_first if host == "layer first" else page_first
        pair = Pair(order(flat_host, layers, blocks, shape), layer_first(flat_device, layers, blocks, shape))
        return pair.work(direction, blocks)

    def issued(self, direction: str, nbytes: int, issue: Callable[[], Any], repeats: int | None = None) -> Speed:
        """Speed of what ``issue`` enqueues on the stream of a direction; events stand before and after it."""
        stream, seconds, wall = self.streams[direction], [], []
        for turn in range(WARM_UPS + (repeats or self.scale.repeats)):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start = time.perf_counter()
            before.record(stream)
            kept = issue()
            after.record(stream)
            after.synchronize()
            end = time.perf_counter()
            del kept
            if turn >= WARM_UPS:
                wall.append(end - start)
                seconds.append(before.elapsed_time(after) / 1e3)
        return Speed(nbytes, statistics.median(seconds), statistics.median(wall))

    def submitted(self, executor: kvplan.Executor, work: Work, repeats: int | None = None) -> Speed:
        """Speed of a plan by an executor."""
        seconds, wall = [], []
        for turn in range(WARM_UPS + (repeats or self.scale.repeats)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            transfer = executor.submit(work.plan)
            transfer.synchronize()
            end = time.perf_counter()
            if turn >= WARM_UPS:
                wall.append(end - start)
                seconds.append(transfer.result().seconds)
        return Speed(work.nbytes, statistics.median(seconds), statistics.median(wall))

    def proven(self, executor: kvplan.Executor, work: Work, name: str) -> Speed:
        """The same, once every byte was seen to arrive."""
        work.verify(name, lambda: executor.submit(work.plan).synchronize(), self.device)
        return self.submitted(executor, work)
