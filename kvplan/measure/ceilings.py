"""Ceilings, which no transfer exceeds: the rate of one large copy per direction, and within the GPU's memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvplan.measure.flights import Begin, Enqueued, Line
from kvplan.measure.workload import DIRECTIONS, Buffers

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES = 9


def measure(buffers: Buffers) -> dict[str, float]:
    """Measure GB/s of one large ``"load"`` and ``"store"``, and of reads plus writes within the GPU (``"memory"``)."""
    host, device = buffers.host[: buffers.nbytes], buffers.other
    line, half = Line(buffers.device), buffers.nbytes // 2
    copies = {way: large_copy(line, host, device, way) for way in DIRECTIONS}
    return {way: _rate(begin, buffers.nbytes) for way, begin in copies.items()} | {
        "memory": _rate(_copy(line, device[half : 2 * half], device[:half]), 2 * half)
    }


def large_copy(line: Line, host: Tensor, device: Tensor, direction: str) -> Begin:
    """Return a function that copies all bytes of one side to the other by one call of the driver."""
    return _copy(line, host, device) if direction == "load" else _copy(line, device, host)


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
