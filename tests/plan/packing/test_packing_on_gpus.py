"""Chunks of packed plans on a simulated GPU: gathered from one cache, scattered to another, by each path of a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import kvplan
from kvplan.agents.packed import pack_rows
from kvplan.execute.gpu.resources import DEFAULT_LIMITS
from kvplan.plan.packing import chunk_half
from kvplan.plan.packing.chunk_half import ChunkPlan, Slot
from kvplan.plan.packing.packing import packing_of, packings_by_layer
from kvplan.plan.row_plans import Memory, layout_of
from tests.plan.packing.rings import in_batches
from tests.simulated import Device
from tests.simulated.executors import executor_on
from tests.simulated.objects import Tensor

LAYERS, BLOCKS, TOKENS, DIM = 3, 6, 4, 32


def on(device, rng, blocks, slots, slot_nbytes):
    """Two caches and a ring on a device: the source, the destination, the program between them, and the slots."""
    source = rng.integers(0, 256, (LAYERS, blocks, TOKENS, DIM), dtype=np.uint8)
    cache = np.zeros((blocks, TOKENS, LAYERS, DIM), np.uint8)
    ring = np.zeros(slots * slot_nbytes + 256, np.uint8)
    for array in (source, cache, ring):
        device.own(array, 0)
    src = kvplan.KVLayout.from_tensors("layer block token dim", Tensor(source))
    dst = kvplan.KVLayout.from_tensors("block token layer dim", Tensor(cache))
    start = ring.ctypes.data + -ring.ctypes.data % 256
    layout = layout_of([Memory(ring.ctypes.data, ring.nbytes, "cuda:0", ring)])
    made = [Slot(layout, start + k * slot_nbytes, slot_nbytes) for k in range(slots)]
    return source, cache, kvplan.compile(src, dst), made


@pytest.mark.parametrize("order", ["src", "dst"])
@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_one_gpu(path, order, seed):
    rng = np.random.default_rng(seed)
    device = Device(seed, eager=False)
    source, cache, program, slots = on(device, rng, BLOCKS, 4, 1024)
    here, there = rng.permutation(BLOCKS)[:5].tolist(), rng.permutation(BLOCKS)[:5].tolist()
    packing = packing_of(program.plan(here, there), order, most=1024)
    cuts = packing.cuts(1024)
    last = None
    with executor_on(device, path) as executor:
        for k, (first, end) in enumerate(pairwise(cuts)):
            gathered = executor.submit(packing.gather(first, end, slots[k % 4]), after=last)
            last = executor.submit(packing.scatter(first, end, slots[k % 4]), after=gathered)
        device.run()
        assert last is not None
        last.synchronize()
    expected = np.zeros_like(cache)
    expected[there] = source[:, here].transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cache, expected)


def test_offsets_of_units_are_shared_and_few(monkeypatch):
    """Halves share them, nobody can change them, and those of other sizes go before they take too much memory."""
    monkeypatch.setattr(chunk_half, "_offsets", {})
    monkeypatch.setattr(chunk_half, "MOST_OFFSETS", 100)
    one, other = chunk_half.Half("src", [], [], chunk_half.NONE), chunk_half.Half("dst", [], [], chunk_half.NONE)
    first = one.offsets_of(64, 60)
    assert first.tolist() == list(range(0, 64 * 60, 64))
    assert other.offsets_of(64, 10).base is first.base
    assert other.offsets_of(32, 40).tolist() == list(range(0, 32 * 40, 32))
    assert other.offsets_of(64, 60).base is first.base
    assert one.offsets_of(128, 2).tolist() == [0, 128]
    assert one.offsets_of(64, 1).base is not first.base
    assert one.offsets_of(16, 101).tolist() == list(range(0, 16 * 101, 16))
    assert sum(some.size for some in chunk_half._offsets.values()) <= 100
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_a_sample_names_its_units_when_they_are_asked_for():
    """It shows an executor what plans of the half are like."""
    rng = np.random.default_rng(0)
    _, _, program, slots = on(Device(0, eager=False), rng, BLOCKS, 2, 8192)
    packing = packing_of(program.plan([3, 1, 4], [0, 5, 2]), most=8192)
    for half in (packing.src, packing.dst):
        first, last = half.cuts(8192)[:2]
        sample, plan = half.plan_all([(first, last, slots[1])], sample=True), half.plan(first, last, slots[1])
        assert isinstance(sample, ChunkPlan)
        assert (sample.kind, sample.nbytes, sample.units) == (plan.kind, plan.nbytes, plan.units)
        assert sample.group is plan.group
        assert "parts" not in vars(sample)
        np.testing.assert_array_equal(sample.parts[0].units, plan.parts[0].units)


@pytest.mark.parametrize("order", ["src", "dst"])
@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("first", [0, 2])
def test_several_chunks_in_one_launch_whose_units_are_on_the_gpu(monkeypatch, path, order, seed, first):
    """As packed transfers submit them: by their places on the GPU; if they are many, the first ones with addresses."""
    if first:
        monkeypatch.setattr(pack_rows, "KEPT_SOON", 0)
    rng = np.random.default_rng(seed)
    device = Device(seed, eager=False)
    blocks, slot_nbytes = 400, 8192
    source, cache, program, slots = on(device, rng, blocks, 8, slot_nbytes)
    here, there = (rng.permutation(blocks)[:380].tolist() for _ in range(2))
    packing = packing_of(program.plan(here, there), order, most=slot_nbytes)
    with executor_on(device, path, limits=replace(DEFAULT_LIMITS, near_rows=2)) as executor:
        last, kept = in_batches(executor, packing, slots, rng)
        device.run()
        last.synchronize()
    expected = np.zeros_like(cache)
    expected[there] = source[:, here].transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cache, expected)
    assert not any(isinstance(plan, ChunkPlan) for plans in kept[:first] for plan in plans)
    later = [plan for plans in kept[first:] for plan in plans]
    assert later
    if path == "copy_engine":
        assert not any(isinstance(plan, ChunkPlan) for plan in later)
    else:
        assert all(isinstance(plan, ChunkPlan) and "parts" not in vars(plan) for plan in later)
        plan = later[-1]  # the parts that were not needed are those of the plan as it was before
        assert [part.units.shape for part in plan.parts] == [(2, plan.units)]


@pytest.mark.parametrize("path", ["kernel", "copy_engine"])
@pytest.mark.parametrize("expected", [False, True])
def test_a_layer_that_is_expected_has_its_units_on_the_gpu_before_its_submit(path, expected):
    """A layer of one chunk is no half that many chunks share: its units are uploaded only while it is waited for."""
    rng = np.random.default_rng(1)
    device = Device(1, eager=False)
    source, cache, program, slots = on(device, rng, BLOCKS, 2, 4096)
    _, packing = packings_by_layer(program.plan([3, 1, 4], [0, 5, 2]), LAYERS, most=4096)[1]
    with executor_on(device, path, limits=replace(DEFAULT_LIMITS, near_rows=2)) as executor:
        keep, uploads = executor._backend.keep, []
        executor._backend.keep = lambda *given, **more: uploads.append(keep(*given, **more)) or uploads[-1]
        last, copier = None, pack_rows.Copier(executor)
        for half in (packing.src, packing.dst):
            (row,) = pack_rows.rows_of([half], 4096)
            if expected:
                for slot in slots:  # the second one finds that it was tried
                    copier.expect(row, slot)
            last = copier.submit([(row, slots[1])], last, urgent=False)
            assert isinstance(last.plan, ChunkPlan) == (expected and path == "kernel")
            assert not expected or copier._kept[half] is None  # only the plan holds the units now
        device.run()
        last.synchronize()
    assert [kept is not None for kept in uploads] == [path == "kernel"] * (2 if expected else 0)
    np.testing.assert_array_equal(cache[[0, 5, 2], :, 1], source[1, [3, 1, 4]])
    assert not cache[[0, 5, 2], :, ::2].any()


@pytest.mark.parametrize("error", [kvplan.KVPlanError("no room"), RuntimeError("no driver"), MemoryError()])
@pytest.mark.parametrize("many", [False, True])
def test_an_upload_that_fails_leaves_the_copy_as_it_was(monkeypatch, error, many):
    """It is tried once; and not at all if it has so many units that it takes long."""
    if many:
        monkeypatch.setattr(pack_rows, "KEPT_SOON", 2)
    rng = np.random.default_rng(1)
    device = Device(1, eager=False)
    source, _, program, slots = on(device, rng, BLOCKS, 1, 4096)
    _, packing = packings_by_layer(program.plan([3, 1, 4], [0, 5, 2]), LAYERS, most=4096)[0]
    tries = []

    def fail(*given, **more):
        tries.append(given)
        raise error

    with executor_on(device, "kernel", limits=replace(DEFAULT_LIMITS, near_rows=2)) as executor:
        executor._backend.keep = fail
        copier = pack_rows.Copier(executor)
        (row,) = pack_rows.rows_of([packing.src], 4096)
        for _ in range(3):
            copier.expect(row, slots[0])
        moved = copier.submit([(row, slots[0])], None, urgent=False)
        device.run()
        moved.synchronize()
    assert len(tries) == (0 if many else 1)
    held = (ctypes.c_uint8 * row.nbytes).from_address(slots[0].address)
    assert sorted(bytes(held)) == sorted(source[0, [3, 1, 4]].tobytes())
