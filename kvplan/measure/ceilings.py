"""What nothing exceeds: one large copy each way, and a copy within the GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplan.measure.workload import Buffers

SAMPLES = 9


def measure(buffers: Buffers) -> dict[str, float]:
    """GB/s of one large copy ``"load"`` and ``"store"``, and bytes read and written within the GPU, ``"memory"``."""
    host, device = buffers.host[: buffers.nbytes], buffers.other
    half = device.numel() // 2
    return {
        "load": _rate(buffers, lambda: device.copy_(host, non_blocking=True), buffers.nbytes),
        "store": _rate(buffers, lambda: host.copy_(device, non_blocking=True), buffers.nbytes),
        "memory": _rate(buffers, lambda: device[:half].copy_(device[half : 2 * half]), 2 * half),
    }


def _rate(buffers: Buffers, copy: Callable[[], Any], nbytes: int) -> float:
    import torch

    make: Any = torch.cuda.Event
    open_stream: Any = torch.cuda.Stream
    stream = open_stream(buffers.device)
    taken: list[float] = []
    with torch.cuda.stream(stream):
        for _ in range(SAMPLES + 1):
            before, after = make(enable_timing=True), make(enable_timing=True)
            before.record(stream)
            copy()
            after.record(stream)
            after.synchronize()
            taken.append(before.elapsed_time(after) / 1e3)
    return nbytes / min(taken[1:]) / 1e9  # the best: others may use the link now and then


def multiprocessors(device: str) -> int:
    """SMs of a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)
