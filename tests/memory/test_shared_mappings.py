"""Memory that can be offered to other processes, without being asked for it."""

from __future__ import annotations

import gc
import os
import resource
from functools import partial
from pathlib import Path

import pytest

from kvplan.errors import HostMemoryError
from kvplan.memory.shared_mappings import Mapping, sealed_memory, shareable
from tests.interrupts import Interrupt

BYTES = 3 * 4096


def left():
    """The mappings of files in memory, and the number of descriptors."""
    gc.collect()
    rows = Path("/proc/self/maps").read_text().splitlines()
    return [row for row in rows if "/memfd:" in row], len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def swept(make):
    """Interrupt a call at each point, and drop what it has made; return the number of points."""
    before, at, made = left(), 1, []
    while True:
        one = Interrupt(at)
        interrupted = one.within(lambda: made.append(make()))
        made.clear()
        if not interrupted:
            return at - 1
        assert left() == before, f"left by an interrupt at {one.where}"
        at += 1


def test_a_mapping_that_is_interrupted_leaves_nothing():
    fd = os.memfd_create("mapped")
    os.ftruncate(fd, BYTES)
    assert swept(partial(Mapping, fd, 0, BYTES, writable=True)) > 5
    os.close(fd)


def test_sealed_memory_that_is_interrupted_leaves_nothing():
    assert swept(partial(sealed_memory, BYTES)) > 5


def test_a_mapping_that_the_system_refuses_is_not_unmapped_either():
    before = left()
    with pytest.raises(HostMemoryError, match=r"cannot map 12,288 bytes from 4,096 on: Bad file descriptor"):
        Mapping(1 << 20, 4096, BYTES, writable=False)
    assert left() == before


def test_files_of_pinned_memory_leave_descriptors_for_the_process():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4 * before, limits[1]))
    try:
        held = [shareable(4096) for _ in range(8 * before)]
        assert len(list(Path("/proc/self/fd").iterdir())) <= 2 * before + 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    held[-1][:3] = b"abc"
    assert held[-1][:4] == b"abc\0"
