"""Time and memory of calls. Calls that are compared take turns, so that a drifting machine drifts under all of them."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvplan.measure.rig import no_collection

SAMPLE_SECONDS = 2e-4  # calls shorter than this are repeated within a sample
LARGE_SECONDS = 1e-3

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


# glibc's numbers, and its defaults in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _DEFAULT_THRESHOLD, _LARGEST_THRESHOLD = -1, -3, 128 << 10, 32 << 20


@contextmanager
def allocator(memory: str) -> Iterator[bool]:
    """Choose the memory of large arrays within a ``with``; the allocator's own choice depends on earlier frees.

    Args:
        memory: ``"new"``: pages that the system hands out, zeroed, at first touch; ``"reused"``: pages in use before.

    Yields:
        Whether the C library takes such advice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield False
        return
    threshold = _DEFAULT_THRESHOLD if memory == "new" else _LARGEST_THRESHOLD
    try:
        taken = bool(mallopt(_MMAP_THRESHOLD, threshold))
        yield bool(mallopt(_TRIM_THRESHOLD, _DEFAULT_THRESHOLD if memory == "new" else 1 << 30)) and taken
    finally:
        mallopt(_MMAP_THRESHOLD, _DEFAULT_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, _DEFAULT_THRESHOLD)


def peak_nbytes(call: Call) -> int:
    """Peak of the bytes that Python and numpy hold during a call, above those before it.

    Memory that compiled loops allocate is not seen; see :func:`resident_peak_nbytes`.
    """
    gc.collect()
    tracemalloc.start()
    try:
        kept = call()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return peak


def resident_peak_nbytes(call: Call) -> int | None:
    """Peak of the process's resident memory during a call, above that before it; None where Linux does not tell.

    It counts all memory in pages, and misses bytes that fit into memory freed earlier.
    """
    gc.collect()
    try:
        with open("/proc/self/clear_refs", "w") as reset:  # noqa: PTH123
            reset.write("5")
    except OSError:
        return None
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    return max(peak - before, 0)


def _status(key: str) -> int:
    with open("/proc/self/status") as lines:  # noqa: PTH123
        for line in lines:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0
