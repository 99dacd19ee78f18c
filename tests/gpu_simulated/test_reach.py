"""Which host memory a simulated GPU reaches, where copies must be cut in it, and which path ``auto`` takes there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.cost import model as cost
from kvplan.cost.profile import GPU_ROUTES, TERMS, DeviceProfile, PathCosts, default, route_paths
from kvplan.cuda.device import DEVICE_POINTER, MEMORY_TYPE, RANGE_SIZE
from kvplan.execute.gpu import reaper
from kvplan.execute.gpu.resources import Limits
from kvplan.layout.address_ranges import stretches
from tests.paged_caches import Move, Paged
from tests.patience import PATIENCE, once, takes_no_more
from tests.profiles import examples
from tests.simulated import Device, Stream, Tensor
from tests.simulated.executors import (
    LARGE_BLOCKS,
    MOVE,
    PATHS,
    POOL,
    SMALL,
    OnDevice,
    both_ways,
    every_path,
    executor_on,
    favouring,
    pair_on,
)
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

    def copy(self, dst, src, nbytes, stream):
        self.look(dst, src, nbytes)
        if any(first <= src < last for first, last in self.pinned):  # not a header, which lies elsewhere
            self.moved += nbytes
        super().copy(dst, src, nbytes, stream)

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


@every_path
@both_ways
@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_pool_that_ranks_share_each_reaches_the_heads_that_it_pinned(path, direction, rank):
    """Rank 0 has not pinned the pool's end, and rank 1 not its beginning: these are the other's."""
    device, chance, own = Device(1), np.random.default_rng(1), slice(2 * rank, 2 * rank + 2)
    pool, cache = (chance.integers(0, 256, (8, 2, heads, 16), np.uint8) for heads in (4, 2))
    whole = KVLayout.from_tensors("block layer head dim", pool)
    mine = KVLayout.from_tensors("block layer head dim", Tensor(cache), head_start=own.start)
    ((first, last),) = stretches(whole.slice(heads=mine.heads).components)
    device.pin(pool, first - pool.ctypes.data, last - pool.ctypes.data)
    wanted_pool, wanted_cache = pool.copy(), cache.copy()
    if direction == "load":
        wanted_cache[2:5] = pool[[4, 0, 7], :, own]
        program = kvplan.reshard(whole, [mine])[0, 0]
    else:
        wanted_pool[2:5, :, own] = cache[[4, 0, 7]]
        program = kvplan.compile(mine, whole)
    with executor_on(device, path) as executor:
        executor.submit(program.plan([4, 0, 7], [2, 3, 4])).synchronize()
    np.testing.assert_array_equal(cache, wanted_cache)
    np.testing.assert_array_equal(pool, wanted_pool)


PAGED = ("layer block dim", "block layer dim")


def by_auto(direction: str, cache: np.ndarray, pool: np.ndarray, ids: int, profile: DeviceProfile, **policy) -> str:
    """The path that auto takes between a cache on the device and a pinned pool; every byte is compared."""
    device = Device()
    device.pin(pool if pool.base is None else pool.base)
    made = KVLayout.from_tensors(PAGED[0], Tensor(cache)), KVLayout.from_tensors(PAGED[1], pool)
    before = cache.copy(), pool.copy()
    with executor_on(device, profile=profile, **policy) as executor:
        plan = kvplan.compile(*(made[::-1] if direction == "load" else made)).plan(range(ids), range(ids))
        first = executor.candidates(plan)[0]
        result = executor.submit(plan).result()
    assert (result.nbytes, result.path, result.predicted) == (plan.nbytes, first.path, first.seconds)
    np.testing.assert_array_equal(np.moveaxis(cache, 1, 0)[:ids], pool[:ids])
    kept, moved = (1, 0) if direction == "load" else (0, 1)
    np.testing.assert_array_equal((cache, pool)[kept], before[kept])
    rest = np.moveaxis(cache, 1, 0)[ids:], pool[ids:]
    np.testing.assert_array_equal(rest[moved], (np.moveaxis(before[0], 1, 0), before[1])[moved][ids:])
    return result.path


@both_ways
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("layers", "run", "ids"), [(2, 64 * KIB, 2), (64, 4 * KIB, 16), (8, 512, 40)])
def test_auto_takes_the_path_that_the_profile_makes_the_cheapest(direction, path, layers, run, ids):
    # A block more than is moved, and padding: neither runs nor blocks touch.
    random = np.random.default_rng(0)
    cache = random.integers(0, 256, (layers, ids + 1, run + 16), np.uint8)[:, :, :run]
    pool = random.integers(0, 256, (ids + 1, layers + 1, run), np.uint8)[:, :layers]
    assert by_auto(direction, cache, pool, ids, favouring(path)) == path


@both_ways
def test_auto_does_without_a_ring_that_is_too_small(direction):
    random = np.random.default_rng(0)
    cache, pool = (random.integers(0, 256, shape, np.uint8) for shape in ((64, 17, 4 * KIB), (17, 64, 4 * KIB)))
    assert by_auto(direction, cache, pool, 17, favouring("staged"), staging_bytes=64 * KIB) == "kernel"
    assert by_auto(direction, cache, pool, 17, favouring("staged"), staging_bytes=256 * KIB) == "staged"


def test_candidates_say_why_the_ring_is_too_small():
    device = Device()
    pair = pair_on(device, "load", pool=LARGE_BLOCKS)
    with executor_on(device, profile=favouring("staged"), staging_bytes=1024) as executor:
        *able, last = executor.candidates(pair.program.plan([1], [2, 4, 5]))
    assert [one.path for one in able] == ["kernel", "copy_engine", "copy_engine_2d"]
    assert not any(one.refused for one in able)
    assert (last.path, last.refused) == (
        "staged", "staging_bytes is 1024; a block here takes 2304 bytes of the ring; give at least that",
    )  # fmt: skip


@both_ways
def test_where_no_path_serves_each_is_listed_once(direction):
    device = Device()
    pair = pair_on(Device(ordinal=1), direction, OnDevice(SMALL.notation, dim=96, padded=True, ordinal=1))
    for root in pair.src_roots if direction == "load" else pair.dst_roots:
        device.pin(root)
    with executor_on(device) as executor:
        plan = pair.program.plan([1], [2])
        with pytest.raises(kvplan.PathError, match=f"no path serves this '{direction}' plan: ") as caught:
            executor.submit(plan)
        assert all(one.refused for one in executor.candidates(plan))
    said = str(caught.value)
    assert [said.count(f"{path}: ") for path in PATHS] == [1, 1, 1, 1]
    assert "moves memory of cuda:0, and this plan is of cuda:1" in said


# What was decided is remembered by the group of runs, the count of units, and how many of these touch.


@contextmanager
def asked() -> Iterator[mock.Mock]:
    """Counts how often the model is asked."""
    with mock.patch.object(cost, "candidates", wraps=cost.candidates) as asking:
        yield asking


@both_ways
def test_a_decision_is_remembered(direction):
    device = Device()
    pair = pair_on(device, direction)
    with executor_on(device, profile=favouring("staged")) as executor, asked() as asking:
        counts = []
        for src, dst in (([3, 1], [0, 7]), ([4, 8], [5, 2]), ([3, 1, 5], [0, 7, 4]), ([2, 6], [1, 3]), ([5], [6])):
            result = executor.submit(pair.plan(Move(src, dst))).result()
            pair.check()
            counts.append(asking.call_count)
            assert (result.path, result.predicted) == ("staged", 1e-9)
    assert counts == [1, 1, 2, 2, 3]  # another count of blocks is another decision


def test_units_that_touch_are_another_decision():
    device = Device()
    layer_first = Paged("layer block kv token head dim", dim=96), OnDevice("layer block kv token head dim", dim=96)
    pair = pair_on(device, "load", layer_first[1], layer_first[0])
    with executor_on(device, profile=favouring("copy_engine")) as executor, asked() as asking:
        counts = []
        for src, dst in (([1, 3, 5], [0, 2, 4]), ([2, 4, 6], [8, 6, 1]), ([1, 2, 5], [3, 4, 7]), ([1, 2, 3], [4, 5, 6]),
                         ([5, 6, 1], [1, 2, 7])):  # fmt: skip
            executor.submit(pair.plan(Move(src, dst))).synchronize()
            pair.check()
            counts.append(asking.call_count)
    assert counts == [1, 1, 2, 3, 3]  # none, none, two of three, all three, two of three


def test_units_that_touch_are_no_other_decision_where_the_kernel_is_taken_whatever_merges():
    device = Device()
    layer_first = Paged("layer block kv token head dim", dim=96), OnDevice("layer block kv token head dim", dim=96)
    pair = pair_on(device, "load", layer_first[1], layer_first[0])
    with executor_on(device, profile=favouring("kernel")) as executor, asked() as asking:
        for src, dst in (([1, 3, 5], [0, 2, 4]), ([1, 2, 3], [4, 5, 6]), ([1, 3], [0, 2]), ([1, 2], [4, 5])):
            executor.submit(pair.plan(Move(src, dst))).synchronize()
            pair.check()
        assert asking.call_count == 2  # three units, and two


@both_ways
@examples(62)
@given(seed=st.integers(0, 2**32), counts=st.lists(st.integers(1, 6), min_size=2, max_size=12))
def test_what_is_remembered_is_what_the_model_takes(direction, seed, counts):
    """A copy is as dear as merging decides between copy engine and kernel, and blocks that touch are common."""
    chance, device = np.random.default_rng(seed), Device()
    layer_first = Paged("layer block kv token head dim", dim=96), OnDevice("layer block kv token head dim", dim=96)
    pair = pair_on(device, direction, layer_first[1], layer_first[0])
    costs = {}
    for name, terms in TERMS.items():
        each = dict.fromkeys(terms, 0.0)
        if name == "copy_engine":
            each |= {"small_copy": 20.0, "large_copy": 20.0}
        else:
            each["fixed"] = chance.uniform(0, 20 * 6 * pair.program.runs) if name == "kernel" else 1e9
        costs[name] = PathCosts(each, each, each, each if name == "kernel" else {})
    profile = replace(default(), costs={way: {path: costs[path] for path in route_paths(way)} for way in GPU_ROUTES})
    with executor_on(device, profile=profile) as executor:
        for count in counts:
            rising = np.arange(count) + chance.integers(0, 3)
            src, dst = (rising if chance.random() < 0.5 else chance.permutation(8)[:count] for _ in range(2))
            plan = pair.program.plan(src, dst)
            taken = executor._backend.selection.choose(plan, capturing=False).path.name
            assert taken == executor.candidates(plan)[0].path


def test_several_groups_are_decided_once():
    device = Device()
    pairs = [pair_on(device, "load", seed=seed) for seed in (1, 2)]
    with executor_on(device) as executor, asked() as asking:
        for _ in range(2):
            plan = kvplan.join([pair.plan(MOVE) for pair in pairs])
            executor.submit(plan).synchronize()
    assert asking.call_count == 1


def test_a_decision_ends_with_the_layouts_that_it_is_of():
    device = Device()
    with executor_on(device, profile=favouring("kernel")) as executor, asked() as asking:
        decided = executor._backend.selection._decided
        gone, pair = pair_on(device, "load"), pair_on(device, "load", seed=1)
        for one in (gone, pair, gone, pair):
            executor.submit(one.plan(MOVE)).synchronize()
        assert (len(decided), asking.call_count) == (2, 2)
        del gone, one
        gc.collect()
        assert len(decided) == 1, "its key is free before its identities are given to others"
        executor.submit(pair.plan(MOVE)).synchronize()
        assert asking.call_count == 2


def test_only_so_many_decisions_are_remembered():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, limits=Limits(decisions=2)) as executor, asked() as asking:
        for count in (1, 2, 1, 2, 3, 3):
            executor.submit(pair.plan(Move(range(count), range(count)))).synchronize()
        pair.check()
        assert len(executor._backend.selection._decided) <= 2
    assert asking.call_count == 3


@both_ways
def test_pageable_memory_is_asked_about_again_once_it_is_pinned(direction):
    device = Device()
    pair = pair_on(device, direction, pin=False)
    with executor_on(device, profile=favouring("kernel")) as executor, asked() as asking:
        for _ in range(2):
            result = executor.submit(pair.plan(MOVE)).result()
            assert (result.path, asking.call_count) == ("copy_engine", 0)
        assert {one.path for one in executor.candidates(pair.program.plan([1], [2])) if one.refused} == {
            "kernel", "staged"
        }  # fmt: skip
        for root in pair.src_roots if direction == "load" else pair.dst_roots:
            device.pin(root)
        asking.reset_mock()
        for _ in range(2):
            assert executor.submit(pair.plan(MOVE)).result().path == "kernel"
        pair.check()
    assert asking.call_count == 1


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
    device, seconds = Device(), PATIENCE if opened else 0.1
    pair = pair_on(device, "load")
    with executor_on(device, "kernel", limits=Limits(exit_seconds=seconds)) as executor:
        user = device.stream()
        gate = device.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
        if opened:
            once(lambda: takes_no_more(executor), gate.set)
        with mock.patch.object(reaper, "_live", {executor._backend.reaper}):
            if opened:
                reaper._drain_at_exit()
                assert transfer.done()
                pair.check()
            else:
                with pytest.warns(RuntimeWarning, match="at exit, 1 transfers of a GPU were given up"):
                    reaper._drain_at_exit()
