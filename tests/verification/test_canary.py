"""verify sees what is written beside its rows: always, the first byte, with what it was and what it became."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, KVPlanError
from kvplan.memory.reserve import reserve
from kvplan.verification import canary as guard
from kvplan.verification.canary import Guard, Stray, Stretches
from kvplan.verification.raw_bytes import Contents, _torch
from tests.profiles import examples
from tests.strategies import cases, layout_of
from tests.verification.broken_moves import Failing, Wrong


class Poking(Wrong):
    """An executor that moves all that it should, and sets bytes where it should not."""

    def __init__(self, pokes):
        super().__init__(lambda made: made)
        self.pokes = pokes

    def submit(self, plan):
        super().submit(plan)
        for address, value in self.pokes.items():
            ctypes.memset(address, value, 1)
        return self


def padded():
    """Three pages of 64 bytes in 80 each, 16 bytes before the first; a source of one block like them."""
    memory = np.arange(16 + 3 * 80, dtype=np.uint8)
    pool = KVLayout.from_tensors("block token dim", memory[16:].reshape(3, 5, 16)[:, :4])
    src = KVLayout.from_tensors("block token dim", np.ones((1, 4, 16), np.uint8))
    return src, pool, memory


def free_bytes(dst, plan):
    """Addresses of the regions of a layout that a plan does not write."""
    made = plan.descriptors()
    written = {at for first, size in zip(made.dst.tolist(), made.size.tolist(), strict=True)
               for at in range(first, first + size)}  # fmt: skip
    every = {at for region in dst.regions for at in range(region.address, region.end)}
    return sorted(every - written)


@examples(80)
@given(case=cases(), where=st.integers(0, 2**31), value=st.integers(0, 255), markers=st.booleans())
def test_one_byte_anywhere_is_always_seen_and_put_back(case, where, value, markers):
    caches = case.src.build(case.seed), case.dst.build(case.seed + 1)
    src, dst = map(layout_of, caches)
    before = [root.copy() for cache in caches for root in cache.roots]
    right = kvplan.verify(src, dst, markers=markers)
    assert right.ok
    free = free_bytes(dst, kvplan.compile(src, dst).plan(*right.blocks))
    if not free:
        return
    at = free[where % len(free)]
    found = kvplan.verify(src, dst, markers=markers, executor=Poking({at: value}))
    assert not found.ok
    assert found.wrong_nbytes == 0
    assert (found.stray.address, found.stray.nbytes, found.stray.after, found.stray_nbytes) == (at, 1, value, 1)
    assert found.row == kvplan.locate(dst, at)[0].row
    after = [root for cache in caches for root in cache.roots]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


@examples(60)
@given(case=cases())
def test_a_correct_transfer_changes_nothing_beside(case):
    src, dst = (layout_of(side.build(case.seed)) for side in (case.src, case.dst))
    for beside in ("poison", "watch", "ignore"):
        found = kvplan.verify(src, dst, beside=beside)
        assert (found.ok, found.stray, found.stray_nbytes) == (True, None, 0)
        assert beside != "ignore" or found.watched_nbytes == 0


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (
            16 + 80 + 64,
            "1 byte of padding, right after block 1 of layer 0 kv, 16 bytes before block 2 of the destination",
        ),
        (16 + 160 + 16, "token 1, byte 0 of block 2 of layer 0 kv of the destination"),
        (3, "1 byte before all content of region 0, 13 bytes before block 0 of layer 0 kv of the destination"),
    ],
    ids=["padding", "another block", "before the first"],
)
@pytest.mark.parametrize(("beside", "before"), [("poison", "0x5a"), ("watch", None)])
def test_where_and_what(at, words, beside, before):
    src, pool, memory = padded()
    held = memory.copy()
    start = pool.regions[0].address
    found = kvplan.verify(src, pool, blocks=([0], [1]), executor=Poking({start + at: 0xEE}), beside=beside)
    was = before or f"{held[at]:#04x}"
    assert found.wrong == f"{words} was written, though nothing belongs there: {was} before, 0xee after"
    assert found.watched_nbytes == 16 + 3 * 80 - 64
    assert str(found) == f"0 of 64 bytes are wrong, 1 around them changed: {found.wrong}"
    assert np.flatnonzero(memory != held).tolist() == ([] if beside == "poison" else [at])


def test_the_default_writes_nothing_beside_blocks_that_were_named():
    src, pool, memory = padded()
    seen = []

    class Looking(Poking):
        def submit(self, plan):
            seen.append(memory[:16].tolist())
            return super().submit(plan)

    assert kvplan.verify(src, pool, blocks=([0], [1]), executor=Looking({})).ok
    assert seen == [list(range(16))] * 2
    seen.clear()
    assert kvplan.verify(src, pool, blocks=1, executor=Looking({})).ok
    assert seen == [[0x5A] * 16, [0xFF] * 16]
    assert memory.tolist() == [at % 256 for at in range(256)]


def test_ignored_where_something_else_writes():
    src, pool, _ = padded()
    executor = Poking({pool.regions[0].address: 0xEE})
    assert kvplan.verify(src, pool, blocks=([0], [1]), executor=executor, beside="ignore").ok
    with pytest.raises(KVPlanError, match="beside is 'no'; it is 'poison', 'watch' or 'ignore'"):
        kvplan.verify(src, pool, beside="no")


def test_both_what_is_missing_and_what_is_too_much_are_told():
    src, pool, _ = padded()
    inside, beside = pool.address(layer=0, part="kv", block=0, token=2), pool.regions[0].address + 2
    found = kvplan.verify(src, pool, blocks=1, executor=Poking({inside: 0xEE, beside: 0xEE}))
    assert found.wrong == (
        "token 2, byte 0 of block 0 of layer 0 kv of the destination should hold token 2, byte 0 of block 0 of layer 0 "
        "kv of the source, and holds something else; 1 of 64 bytes are wrong; 1 byte before all content of region 0, "
        "14 bytes before block 0 of layer 0 kv of the destination was written, though nothing belongs there: 0x5a "
        "before, 0xee after"
    )
    assert (found.row.token, found.wrong_nbytes, found.stray.address) == (2, 1, beside)


@pytest.mark.parametrize("markers", [True, False])
def test_a_source_that_is_written_is_told_and_put_back(markers):
    src, pool, _ = padded()
    at = src.address(layer=0, part="kv", block=0, token=3) + 5
    found = kvplan.verify(src, pool, blocks=1, markers=markers, executor=Poking({at: 0xEE}))
    before = 53 if markers else 1  # token 3, byte 5 is number 53
    assert found.wrong.startswith("token 3, byte 5 of block 0 of layer 0 kv of the source was written, though nothing")
    assert found.wrong.endswith("0xee after")
    assert (found.row, found.wrong_nbytes, found.stray.before) == (None, 0, before)
    assert (src.tensors == 1).all()


def test_what_is_far_is_watched_by_checksums(monkeypatch):
    monkeypatch.setattr(guard, "SAVED_NBYTES", guard.WINDOW)
    pool = KVLayout.from_tensors("block dim", np.zeros((400, 1024), np.uint8))
    src = KVLayout.from_tensors("block dim", np.ones((1, 1024), np.uint8))
    near, far = (pool.address(layer=0, part="kv", block=block) for block in (1, 300))
    found = kvplan.verify(src, pool, blocks=1, executor=Poking({far + 7: 1}))
    assert found.stray == Stray(far, 4096, None, None)
    assert found.wrong.startswith(
        f"one of 4,096 bytes from {far:#x} of the destination on was written, though nothing "
    )
    assert found.wrong.endswith("the first of these bytes is byte 0 of block 300 of layer 0 kv")
    assert kvplan.verify(src, pool, blocks=1, executor=Poking({near: 1})).stray == Stray(near, 1, 0x5A, 1)
    assert pool.tensors[1:300].sum() == 0


def test_memory_is_bounded_however_large_the_region():
    spec = {"notation": "block dim", "dtype": "uint8", "sizes": {"block": 1 << 20, "dim": 1 << 16}}
    pool = reserve(KVLayout.from_spec(spec))
    middle = pool.regions[0].address + (1 << 35)
    taken = Stretches(np.array([middle]), np.array([middle + 100]))
    watching = Guard(Contents(pool), pool.regions, taken, poison=False)
    assert sum(len(saved) for _, saved in watching._saved) == guard.SAVED_NBYTES
    assert watching.nbytes == guard.SAVED_NBYTES + guard.SUMMED_NBYTES - 100
    reach = [window.address for window, _ in (*watching._saved, *watching._summed)]
    assert max(reach) - min(reach) < guard.SAVED_NBYTES + guard.SUMMED_NBYTES


def test_nothing_is_lost_where_the_executor_raises():
    for where in ("submit", "result"):
        src, pool, memory = padded()
        with pytest.raises(RuntimeError, match="no"):
            kvplan.verify(src, pool, blocks=1, executor=Failing(where))
        assert memory.tolist() == [at % 256 for at in range(256)]


def test_two_pools_in_one_allocation_are_told_apart():
    memory = np.arange(8 * 64, dtype=np.uint16).view(np.uint8).reshape(8, 128)
    before = memory.copy()
    pool = KVLayout.from_tensors("block dim", memory)
    at = pool.address(layer=0, part="kv", block=5)
    found = kvplan.verify(pool, pool, blocks=([0, 1], [2, 3]), executor=Poking({at: 9}), beside="poison")
    assert (found.stray, found.row.block) == (Stray(at, 1, 0x5A, 9), 5)
    assert (memory == before).all()


@pytest.mark.slow
def test_stretches_of_a_gpu_tensor_are_read_and_written_by_it():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(64, dtype=torch.uint8)
    layout = KVLayout.from_tensors("block dim", tensor.reshape(4, 16))
    contents = Contents(layout)
    contents._memory = [_torch(region) for region in contents._regions]  # as of a GPU, whose memory no pointer reads
    assert contents.stretch(tensor.data_ptr() + 5, 3).tolist() == [5, 6, 7]
    contents.write_stretch(tensor.data_ptr() + 60, np.array([1, 2], np.uint8))
    assert tensor[59:].tolist() == [59, 1, 2, 62, 63]
    outside = replace(layout.regions[0], address=layout.regions[0].end)
    with pytest.raises(LookupError, match="no single region holds"):
        contents.stretch(outside.address, 1)


@examples(250)
@given(
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=8),
    address=st.integers(0, 70),
    nbytes=st.integers(1, 40),
)
def test_which_bytes_of_a_window_are_free(spans, address, nbytes):
    stretches = Stretches.joined([(np.array([start], np.int64), size) for start, size in spans])
    taken = {at for start, size in spans for at in range(start, start + size)}
    one_by_one = [at not in taken for at in range(address, address + nbytes)]
    free = stretches.free(address, nbytes)
    assert ([True] * nbytes if free is None else free.tolist()) == one_by_one
    assert (free is None) == all(one_by_one)


@examples(250)
@given(data=st.data())
def test_memory_is_read_and_written_whatever_regions_nest_or_touch(data):
    memory = np.arange(64, dtype=np.uint8)
    layout = KVLayout.from_tensors("block dim", memory.reshape(4, 16))
    (whole,) = layout.regions
    spans = data.draw(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 64)), min_size=1, max_size=6))
    spans = [(first, min(nbytes, 64 - first)) for first, nbytes in spans]
    layout.regions = tuple(replace(whole, address=whole.address + first, nbytes=nbytes) for first, nbytes in spans)
    held = sorted({at for first, nbytes in spans for at in range(first, first + nbytes)})
    chosen = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=9, unique=True))
    contents, addresses = Contents(layout), whole.address + np.array(chosen)
    contents._piece = data.draw(st.integers(1, 10))  # addresses at once
    assert contents.read(addresses).tolist() == chosen
    contents.write(addresses, np.array([200 + k for k in range(len(chosen))], np.uint8))
    assert memory[chosen].tolist() == [200 + k for k in range(len(chosen))]
    untouched = [at for at in range(64) if at not in chosen]
    assert memory[untouched].tolist() == untouched


def test_a_region_inside_another_is_reserved_where_it_lies():
    layout = KVLayout.from_spec({"notation": "block: dim", "dtype": "uint8", "sizes": {"block": 3, "dim": 25}})
    first = min(layout.regions, key=lambda region: region.address)
    at = {"layer": 0, "part": "kv"}
    given = [layout.address(block=k, **at) - first.address for k in range(3)]
    inner = replace(first, address=first.address + 5, nbytes=10)  # ends before the second block begins
    layout.regions = (inner, replace(first, nbytes=given[2] + 25))
    there = reserve(layout)
    assert [there.address(block=k, **at) - there.address(block=0, **at) for k in range(3)] == given
    assert sorted(region.address - there.address(block=0, **at) for region in there.regions) == [0, 5]
