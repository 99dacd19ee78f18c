"""Files in memory that can be mapped in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan.errors import HostMemoryError
from kvplan.memory import huge_pages
from kvplan.memory.huge_pages import HUGE, map_file, take_huge_pages
from kvplan.memory.shared_mappings import Mapping, sealed_memory

BOTH = mmap.PROT_READ | mmap.PROT_WRITE


@pytest.fixture
def file():
    fd = os.memfd_create("pages")
    os.ftruncate(fd, 8 * HUGE)
    yield fd
    os.close(fd)


def holes():
    """Numbers of bytes that this process has mapped without a file and without access."""
    rows = Path("/proc/self/maps").read_text().splitlines()
    return sum(1 for row in rows if " ---p " in row and row.endswith(" 0 "))


def huge_nbytes(start):
    """Bytes of the mapping at an address that this process sees in huge pages."""
    rows = Path("/proc/self/smaps").read_text().split("\n")
    at = next(k for k, row in enumerate(rows) if re.match(f"{start:x}-", row))
    return next(int(row.split()[1]) << 10 for row in rows[at:] if row.startswith("ShmemPmdMapped:"))


@pytest.mark.parametrize("offset", [0, mmap.PAGESIZE, HUGE - mmap.PAGESIZE, HUGE, 3 * HUGE + 5 * mmap.PAGESIZE])
@pytest.mark.parametrize("nbytes", [HUGE, HUGE + 1, 3 * HUGE - 7])
def test_a_file_lies_in_huge_pages_as_in_the_file(file, offset, nbytes):
    mapping = Mapping(file, offset, nbytes, writable=True)
    assert (mapping.address - offset) % HUGE == 0
    seen = np.frombuffer((ctypes.c_char * nbytes).from_address(mapping.address), np.uint8)
    seen[:] = np.arange(nbytes) % 251
    assert os.pread(file, nbytes, offset) == seen.tobytes()


def test_nothing_is_left_of_the_place(file):
    before = holes()
    kept = [Mapping(file, 0, 2 * HUGE + 1, writable=True) for _ in range(20)]
    assert holes() == before
    for one in kept:
        one.close()
    rows = Path("/proc/self/maps").read_text().splitlines()
    assert not [row for row in rows if "/memfd:pages" in row]


def test_small_files_lie_anywhere(file):
    address = map_file(4096, BOTH, mmap.MAP_SHARED, file, 0)
    ctypes.memmove(address, b"abc", 3)
    assert os.pread(file, 3, 0) == b"abc"
    huge_pages.libc().munmap(address, 4096)


def test_a_file_that_cannot_be_mapped_leaves_no_place():
    before = holes()
    with pytest.raises(HostMemoryError, match=r"cannot map 4,194,304 bytes from 0 on: Bad file descriptor"):
        map_file(2 * HUGE, BOTH, mmap.MAP_SHARED, 1 << 20, 0)
    assert holes() == before


def test_huge_pages_are_asked_for_where_they_fit_whole(monkeypatch):
    asked = []

    class Asked:
        @staticmethod
        def madvise(*given):
            asked.append(given)
            return 0

    memory = sealed_memory(4 * HUGE)
    start = ctypes.addressof(memory)
    memory[:] = b"x" * len(memory)
    monkeypatch.setattr(huge_pages, "libc", Asked)
    assert take_huge_pages(start + 4096, 3 * HUGE)
    assert asked == [(start + HUGE, 2 * HUGE, 25)]
    assert not take_huge_pages(start + 1, HUGE)
    monkeypatch.setattr(huge_pages, "_available", lambda: 4 * HUGE - 1)
    assert not take_huge_pages(start, 2 * HUGE)
    assert len(asked) == 1


@pytest.mark.parametrize("text", ["", "MemFree: 5 kB\n", None])
def test_a_system_that_does_not_tell_its_memory_is_asked_for_none(monkeypatch, tmp_path, text):
    told = tmp_path / "meminfo"
    if text is not None:
        told.write_text(text)
    monkeypatch.setattr(huge_pages, "Path", lambda _: told)
    assert not take_huge_pages(ctypes.addressof(sealed_memory(2 * HUGE)), 2 * HUGE)


def test_a_shared_pool_is_in_the_pages_that_the_system_gives(file):
    by_hand = Mapping(file, 0, 8 * HUGE, writable=True)
    given = take_huge_pages(by_hand.address, 8 * HUGE)  # Linux before 6.1 gives none
    like = kvplan.KVLayout.from_tensors("block dim", np.zeros((1, 8), np.uint8))
    pool = kvplan.allocate("block dim", like=like, num_blocks=HUGE, shared=True)
    start = pool.address(layer=0, part="kv", block=0, token=0, head=0)
    assert start % HUGE == 0
    assert not pool.tensors[0].any()
    assert huge_nbytes(start) == huge_nbytes(by_hand.address) == (8 * HUGE if given else 0)
