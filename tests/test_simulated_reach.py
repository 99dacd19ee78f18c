"""Which host memory a simulated GPU reaches, where copies must be cut in it, and which path ``auto`` takes there."""

from __future__ import annotations

import threading
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.execute import ending
from kvplan.execute.cuda import DEVICE_POINTER, MEMORY_TYPE, RANGE_SIZE
from tests.gpu.caches import Move
from tests.simulated import Device, Stream, Tensor
from tests.simulated.executors import MOVE, POOL, both_ways, executor_on, pair_on
from tests.simulated.kernel import words

KIB = 1 << 10


@both_ways
def test_seams_that_were_told_are_crossed_by_no_copy(direction):
    device = Watching()
    for path in ("copy_engine", "copy_engine_2d", "staged"):
        device.pinned.clear()
        pair = pair_on(device, direction, pin=False)
        root = (pair.src_roots if direction == "load" else pair.dst_roots)[0]
        start = root.ctypes.data
        seams = [start + POOL.start + 768 * 2 + 50, start + POOL.start + 768 * 5]
        device.seams = seams
        device.pin(root)
        host = KVLayout.from_tensors(POOL.notation, POOL.view(root), seams=seams)
        sides = (host, pair.layouts[1]) if direction == "load" else (pair.layouts[0], host)
        pair.program = kvplan.compile(*sides)
        run_over(device, path, pair)


@both_ways
def test_seams_that_nobody_told_of_are_found(direction):
    device = Watching()
    for path in ("copy_engine", "copy_engine_2d", "staged"):
        device.pinned.clear()
        pair = pair_on(device, direction, pin=False)
        root = (pair.src_roots if direction == "load" else pair.dst_roots)[0]
        edges = [0, POOL.start + 768 * 2 + 50, POOL.start + 768 * 5, root.nbytes]
        device.seams = [root.ctypes.data + edge for edge in edges[1:-1]]
        for first, last in pairwise(edges):
            device.pin(root, first, last)
        run_over(device, path, pair)


def run_over(device: Watching, path: str, pair) -> None:
    with executor_on(device, path) as executor:
        executor.submit(pair.plan(Move(range(9), range(9)))).synchronize()
        pair.check()
    assert device.moved == 9 * 768, "the test sees all copies between host and device"
    device.moved = 0


class Watching(Device):
    """Refuses copies over a seam, as a driver does of two registrations."""

    seams: list[int]
    moved = 0

    def look(self, dst: int, src: int, nbytes: int) -> None:
        for at in (dst, src):
            host = self.pointer(at, MEMORY_TYPE)  # rows of the device's tensors may reach over anything
            assert not host or not any(at < seam < at + nbytes for seam in self.seams), "a copy crosses a seam"

    def copy_batch(self, dst, src, size, count, stream):
        for move in zip(*(words(at, count).tolist() for at in (dst, src, size)), strict=True):
            self.look(*move)
            self.moved += move[2] if any(self.pointer(at, MEMORY_TYPE) for at in move[:2]) else 0
        super().copy_batch(dst, src, size, count, stream)

    def copy_2d(self, parameters, stream):
        row = words(parameters, 16).tolist()
        for at, pitch in ((row[4], row[6]), (row[11], row[13])):
            self.look(at, at, (row[15] - 1) * pitch + row[14])
        self.moved += row[14] * row[15]
        return super().copy_2d(parameters, stream)


def by_auto(direction: str, cache: np.ndarray, pool: np.ndarray, notations: tuple[str, str], ids: int, **policy) -> str:
    """The path that auto takes between a cache on the device and a pinned pool."""
    device = Device()
    device.pin(pool if pool.base is None else pool.base)
    made = KVLayout.from_tensors(notations[0], Tensor(cache)), KVLayout.from_tensors(notations[1], pool)
    pair = made[::-1] if direction == "load" else made
    with executor_on(device, **policy) as executor:
        plan = kvplan.compile(*pair).plan(range(ids), range(ids))
        result = executor.submit(plan).result()
        assert result.nbytes == plan.nbytes
        np.testing.assert_array_equal(
            np.moveaxis(cache, notations[0].split().index("block"), 0)[:ids],
            np.moveaxis(pool, notations[1].split().index("block"), 0)[:ids],
        )
    return result.path


PAGED = ("layer block dim", "block layer dim")


@both_ways
@pytest.mark.parametrize(
    ("layers", "run", "ids", "path"),
    [
        (2, 64 * KIB, 2, "copy_engine"),  # runs of 64 KiB
        (2, 64 * KIB - 16, 2, "kernel"),  # shorter ones, and not 4 MiB
        (64, 4 * KIB, 16, "staged"),  # 4 MiB in pieces of 256 KiB on the host
        (64, 4 * KIB, 15, "kernel"),  # less
        (8, 4 * KIB, 128, "kernel"),  # 4 MiB in pieces of 32 KiB
    ],
)
def test_auto_takes_the_path_that_its_rule_says(direction, layers, run, ids, path):
    # A block more than is moved, and padding: neither runs nor blocks touch.
    cache = np.random.default_rng(0).integers(0, 256, (layers, ids + 1, run + 16), np.uint8)[:, :, :run]
    pool = np.zeros((ids + 1, layers + 1, run), np.uint8)[:, :layers]
    pool[:] = np.moveaxis(cache, 1, 0) if direction == "load" else 0
    assert by_auto(direction, cache, pool, PAGED, ids) == path


@both_ways
def test_auto_does_without_a_ring_that_is_too_small(direction):
    cache, pool = np.ones((64, 17, 4 * KIB), np.uint8), np.ones((17, 64, 4 * KIB), np.uint8)
    assert by_auto(direction, cache, pool, PAGED, 17, staging_bytes=64 * KIB) == "kernel"
    assert by_auto(direction, cache, pool, PAGED, 17, staging_bytes=256 * KIB) == "staged"


class Silent(Device):
    """A driver that does not say where registrations end."""

    def pointer(self, address, attribute):
        return 0 if attribute == RANGE_SIZE else super().pointer(address, attribute)


def test_where_ends_of_registrations_are_not_said_the_last_byte_counts():
    device = Silent()
    pair, half = pair_on(device, "load"), pair_on(device, "load", pin=False)
    device.pin(half.src_roots[0], 0, half.src_roots[0].nbytes // 2)
    with executor_on(device, "kernel") as executor:
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()
        with pytest.raises(kvplan.HostMemoryError, match=r"host memory at 0x\w+ is not pinned"):
            executor.submit(half.program.plan([1], [2]))


class Elsewhere(Device):
    """A driver under which pinned memory has another address on the GPU."""

    def pointer(self, address, attribute):
        found = super().pointer(address, attribute)
        return found + 4096 if found and attribute == DEVICE_POINTER else found


def test_memory_that_the_gpu_finds_elsewhere_is_not_reached():
    device = Elsewhere()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor, pytest.raises(kvplan.HostMemoryError, match="another address"):
        executor.submit(pair.program.plan([1], [2]))


@pytest.mark.parametrize("opened", [True, False])
def test_an_exit_drains_and_gives_up_what_never_comes(opened):
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor, mock.patch.object(ending, "EXIT_SECONDS", 10.0 if opened else 0.1):
        user = device.stream()
        gate = device.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
        if opened:
            threading.Timer(0.05, gate.set).start()
        with mock.patch.object(ending, "_live", {executor._backend.keeper}):
            if opened:
                ending._drain_at_exit()
                assert transfer.done()
                pair.check()
            else:
                with pytest.warns(RuntimeWarning, match="at exit, 1 transfers of a GPU were given up"):
                    ending._drain_at_exit()
