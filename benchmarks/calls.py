"""Time of calls on a CPU, as short as microseconds."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvplan.measure.rig import no_collection

SAMPLE_SECONDS = 2e-4  # calls shorter than this are repeated within a sample
LARGE_SECONDS = 1e-3
# glibc's numbers, and its defaults in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _DEFAULT_THRESHOLD, _LARGEST_THRESHOLD = -1, -3, 128 << 10, 32 << 20

Call = Callable[[], Any]


def interleaved(calls: Mapping[str, Call], *, small: int, large: int) -> dict[str, float]:
    """Median seconds of each call, sampled in turns. The result of a long call is freed outside its time.

    Args:
        calls: by name.
        small, large: samples of each where the longest call is below, or at least, 1 ms.
    """
    for call in calls.values():  # compile, load, fault in
        call()
    once = {name: min(_sample(call, 1) for _ in range(2)) for name, call in calls.items()}
    within = {name: max(1, int(SAMPLE_SECONDS / max(seconds, 1e-9))) for name, seconds in once.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    with no_collection():
        for _ in range(large if max(once.values()) >= LARGE_SECONDS else small):
            for name, call in calls.items():
                samples[name].append(_sample(call, within[name]))
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _sample(call: Call, times: int) -> float:
    if times == 1:
        start = time.perf_counter()
        kept = call()
        seconds = time.perf_counter() - start
        del kept
        return seconds
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


@contextmanager
def reused_memory() -> Iterator[None]:
    """Let large arrays lie in pages that were in use before: the system's zeroing of new ones outweighs all.

    Without it, the allocator's choice depends on earlier frees. Only glibc takes the advice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    try:
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 1 << 30)
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _DEFAULT_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, _DEFAULT_THRESHOLD)
