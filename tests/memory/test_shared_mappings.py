"""Memory that can be offered to other processes, without being asked for it."""

from __future__ import annotations

import resource
from pathlib import Path

from kvplan.memory.shared_mappings import shareable

BYTES = 3 * 4096


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
