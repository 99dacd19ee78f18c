"""Ceilings, which no transfer exceeds: the rate of one large copy by route."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from kvplan.cost.policy import HOST_ROUTES, PEER_ROUTES
from kvplan.measure.flights import Begin, Enqueued, Line
from kvplan.measure.rows import Ceilings
from kvplan.measure.workload import TO_CACHE, Buffers

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, MEMCPY_SAMPLES = 9, 5


def routes_of(buffers: Buffers) -> tuple[str, ...]:
    """Return the routes between the pool and the cache of some buffers."""
    if buffers.peer is None:
        return HOST_ROUTES
    return ("device",) if buffers.peer == buffers.device else PEER_ROUTES


def measure(buffers: Buffers) -> dict[str, float]:
    """Measure GB/s of one large copy for each route of some buffers.

    Host buffers, and those within a GPU, also give the bytes read plus the bytes written within its memory
    (``"memory"``). For buffers on two GPUs, peer access must be enabled: the driver would copy through the host.
    """
    pool, cache = buffers.host[: buffers.nbytes], buffers.other
    line, half = Line(buffers.device), buffers.nbytes // 2
    found = {route: _rate(large_copy(line, pool, cache, route), buffers.nbytes) for route in routes_of(buffers)}
    if "device" in found:
        return found | {"memory": 2 * found["device"]}
    if buffers.peer is None:
        found["memory"] = _rate(_copy(line, cache[half : 2 * half], cache[:half]), 2 * half)
    return found


def measured(buffers: Buffers, routes: Collection[str]) -> Ceilings:
    """Measure the ceilings of some routes between some buffers; see :func:`measure`."""
    if buffers.device == "cpu":
        taken = []
        for _ in range(MEMCPY_SAMPLES):  # torch's copy, by all threads
            start = time.perf_counter()
            buffers.other.copy_(buffers.host[: buffers.nbytes])
            taken.append(time.perf_counter() - start)
        rate = buffers.nbytes / min(taken) / 1e9
        return Ceilings(**dict.fromkeys(routes, rate), what="memcpy", hard=False)
    found = measure(buffers)
    if buffers.peer == buffers.device:
        return Ceilings(**dict.fromkeys(routes, found["device"]), what="memory", hard=False)
    return Ceilings(**{route: found[route] for route in routes}, what="link", hard=True)


def large_copy(line: Line, pool: Tensor, cache: Tensor, route: str) -> Begin:
    """Return a function that copies all bytes of one side to the other by one call of the driver."""
    return _copy(line, pool, cache) if route in TO_CACHE else _copy(line, cache, pool)


def _copy(line: Line, src: Tensor, dst: Tensor) -> Begin:
    nbytes = src.numel() * src.element_size()

    def begin() -> Enqueued:
        issue = partial(line.device.copy, dst.data_ptr(), src.data_ptr(), nbytes, line.handle)
        return Enqueued(line, nbytes, issue)

    return begin


def _rate(begin: Begin, nbytes: int) -> float:
    taken: list[float] = [begin().result().seconds for _ in range(SAMPLES + 1)]
    return nbytes / min(taken[1:]) / 1e9  # the best: other processes may use the link at times


def multiprocessors(device: str) -> int:
    """Return the number of SMs of a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)
