"""verify: what arrives is proved byte by byte, what does not is named, and nothing is lost."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

import kvplan
from kvplan import BlockIndexError, KVLayout, KVPlanError, LayoutError, OverlapError
from kvplan.layout.inverse import Row
from kvplan.memory.reserve import reserve
from kvplan.plan.loops_numpy import Descriptors
from kvplan.verification.raw_bytes import Contents, _torch
from tests.profiles import examples
from tests.strategies import cases, layout_of
from tests.unknown import FIVE, overlaid, padded_split_kv
from tests.verification.broken_moves import Failing, Wrong, exchanged, without


def byte_places(layout, address, nbytes):
    return [place for byte in range(nbytes) for place in kvplan.locate(layout, address + byte)]


def caches(seed=0):
    """A layer-first source of 6 blocks and a head-major pool of 3 larger ones, with random content."""
    rng = np.random.default_rng(seed)
    held = [rng.integers(0, 256, (2, 6, 4, 2, 8), dtype=np.uint8) for _ in range(2)]
    pool = rng.integers(0, 256, (3, 2, 2, 2, 8, 8), dtype=np.uint8)
    return (
        KVLayout.from_tensors("layer: kv block token head dim", held),
        KVLayout.from_tensors("block layer kv head token dim", pool),
        held,
        pool,
    )


@examples(60)
@given(case=cases())
def test_the_host_path_is_right_and_nothing_is_lost(case):
    caches = case.src.build(case.seed), case.dst.build(case.seed + 1)
    src, dst = map(layout_of, caches)
    before = [root.copy() for cache in caches for root in cache.roots]
    for markers in (False, True):
        found = kvplan.verify(src, dst, markers=markers)
        assert (found.ok, found.wrong, found.row) == (True, None, None)
        assert found.nbytes == kvplan.compile(src, dst).plan(*found.blocks).nbytes
        after = [root for cache in caches for root in cache.roots]
        assert all((a == b).all() for a, b in zip(before, after, strict=True))


@examples(60)
@given(case=cases())
def test_a_copy_that_is_left_out_is_always_caught(case):
    caches = case.src.build(case.seed), case.dst.build(case.seed + 1)
    src, dst = map(layout_of, caches)
    before = [root.copy() for cache in caches for root in cache.roots]
    for markers in (False, True):
        dropped = []

        def last_but_dropped(made, dropped=dropped):
            dropped[:] = (int(made.dst[-1]), int(made.size[-1]))
            return without(-1)(made)

        found = kvplan.verify(src, dst, markers=markers, executor=Wrong(last_but_dropped))
        assert not found.ok
        assert found.wrong_nbytes == dropped[1]
        rows = [place.row for place in byte_places(dst, *dropped)]
        assert found.row in rows
        assert "nothing arrived" in found.wrong
    after = [root for cache in caches for root in cache.roots]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


@examples(60)
@given(case=cases())
def test_two_copies_that_are_exchanged_are_always_caught(case):
    src, dst = (layout_of(form.build(case.seed)) for form in (case.src, case.dst))
    plan = kvplan.compile(src, dst).plan(*kvplan.verify(src, dst, markers=True).blocks)
    made = plan.descriptors()
    if len(made.size) < 2 or made.size[0] != made.size[1]:
        return
    found = kvplan.verify(src, dst, markers=True, executor=Wrong(exchanged))
    assert not found.ok
    assert found.wrong_nbytes == 2 * made.size[0]
    assert found.held is not None
    swapped = [place.row for k in (0, 1) for place in byte_places(dst, int(made.dst[k]), int(made.size[k]))]
    assert found.row in swapped
    came = [place.row for k in (0, 1) for place in byte_places(src, int(made.src[k]), int(made.size[k]))]
    assert found.held in came


def test_a_dropped_run_is_named_exactly():
    src, dst, held, pool = caches()
    before = [tensor.copy() for tensor in (*held, pool)]
    target = dst.address(layer=1, part="v", block=0, token=5, head=1)

    def spoil(made):
        return without(int(np.flatnonzero((made.dst <= target) & (target < made.dst + made.size))[0]))(made)

    found = kvplan.verify(src, dst, executor=Wrong(spoil), markers=True, blocks=([3, 1], [0]))
    assert found.row == Row(1, "v", 0, 5, 1, 0)
    assert found.wrong == (
        "token 5, head 1, byte 0 of block 0 of layer 1 v of the destination should hold token 1, head 1, byte 0 of "
        "block 1 of layer 1 v of the source, and nothing arrived; 8 of 512 bytes are wrong"
    )
    assert all((a == b).all() for a, b in zip(before, (*held, pool), strict=True))


def test_what_lies_there_instead_is_named():
    src, dst, *_ = caches()

    def spoil(made):
        pick = [int(np.flatnonzero(made.src == src.address(layer=0, part=part, block=2, token=3, head=1))[0])
                for part in "kv"]  # fmt: skip
        dst_column = made.dst.copy()
        dst_column[pick] = dst_column[pick[::-1]]
        return Descriptors(made.src, dst_column, made.size)

    found = kvplan.verify(src, dst, executor=Wrong(spoil), markers=True, blocks=([5, 2, 0], [2, 1]))
    assert (found.row, found.held) == (Row(0, "k", 2, 7, 1, 0), Row(0, "v", 2, 3, 1, 0))
    assert found.wrong == (
        "token 7, head 1, byte 0 of block 2 of layer 0 k of the destination should hold token 3, head 1, byte 0 of "
        "block 2 of layer 0 k of the source, and holds token 3, head 1, byte 0 of block 2 of layer 0 v; 16 of 768 "
        "bytes are wrong"
    )


def test_a_wrong_byte_within_a_row():
    src, dst, *_ = caches()
    found = kvplan.verify(
        src, dst, executor=Wrong(lambda made: Descriptors(made.src, made.dst, made.size - 3)), blocks=1, markers=False
    )
    assert found.row == Row(0, "k", 0, 0, 0, 5)
    assert found.wrong.endswith("192 of 512 bytes are wrong")
    assert not found.markers


def test_without_markers_the_source_is_never_written():
    src, dst, held, _ = caches()
    for tensor in held:
        tensor.flags.writeable = False
    read_only = KVLayout.from_tensors("layer: kv block token head dim", held)
    assert kvplan.verify(read_only, dst, markers=False).ok
    with pytest.raises(LayoutError, match=r"read-only array; verification writes to it"):
        kvplan.verify(read_only, dst, markers=True)
    with pytest.raises(LayoutError, match="read-only"):
        kvplan.verify(dst, read_only)
    found = kvplan.verify(src, dst, markers=False, executor=Wrong(exchanged))
    assert "and holds something else" in found.wrong


def test_bytes_written_beside_the_transfer_are_found():
    src = KVLayout.from_tensors("block token head dim", np.ones((4, 4, 1, 8), np.uint8))
    pool = KVLayout.from_tensors("block token head dim", np.zeros((4, 4, 2, 8), np.uint8))

    def spoil(made):
        return Descriptors(made.src, made.dst, made.size + 8)  # over the head beside, which the source lacks

    found = kvplan.verify(src, pool, executor=Wrong(spoil), blocks=1)
    assert found.row == Row(0, "kv", 0, 0, 1, 0)
    assert found.wrong == (
        "token 0, head 1, byte 0 of block 0 of layer 0 kv of the destination was written, though nothing belongs "
        "there: 0x5a before, 0x08 after; 32 such bytes in all"
    )
    assert not pool.tensors.any()


@pytest.mark.parametrize("where", ["submit", "result"])
def test_what_the_executor_raises_is_passed_on_and_nothing_is_lost(where):
    src, dst, held, pool = caches()
    before = [tensor.copy() for tensor in (*held, pool)]
    with pytest.raises(RuntimeError, match="no"):
        kvplan.verify(src, dst, executor=Failing(where), markers=True)
    assert all((a == b).all() for a, b in zip(before, (*held, pool), strict=True))


def test_an_executor_of_the_caller_is_left_open():
    src, dst, *_ = caches()
    with kvplan.Executor() as executor:
        assert kvplan.verify(src, dst, executor=executor, markers=False).ok
        assert kvplan.verify(src, dst, executor=executor).rounds == 2
        assert executor.stats().transfers == 4


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"blocks": 0}, BlockIndexError, "blocks is 0; give a number of at least 1"),
        ({"blocks": "3"}, BlockIndexError, "blocks is '3'"),
        ({"blocks": ([0, 0], [0])}, BlockIndexError, "src_blocks name a block more than once"),
        ({"blocks": ([9], [0])}, BlockIndexError, "src_blocks[0] is 9"),
        ({"blocks": ([0, 1, 2, 3], [1, 1])}, OverlapError, "more than once"),
        ({"blocks": ([0, 1, 2], [1])}, BlockIndexError, "cover"),
    ],
)
def test_blocks_that_cannot_be(given, error, message):
    src, dst, *_ = caches()
    with pytest.raises(error, match=re.escape(message)):
        kvplan.verify(src, dst, **given)


def test_what_cannot_be_verified():
    src, dst, *_ = caches()
    with pytest.raises(LayoutError, match="virtual"):
        kvplan.verify(padded_split_kv(), padded_split_kv(), executor=Wrong(lambda made: made))
    with pytest.raises(KVPlanError, match="takes an executor of that GPU"):
        kvplan.verify(padded_split_kv(), padded_split_kv())
    large = reserve(KVLayout.from_spec({"notation": "block dim", "sizes": {"block": 4, "dim": 20 << 20}}))
    with pytest.raises(LayoutError, match="a verification moves at most 67,108,864"):
        kvplan.verify(large, large, blocks=([0, 1], [2, 3]))
    assert kvplan.verify(src, dst, blocks=([], [])).ok


def test_two_pools_in_one_allocation():
    memory = np.arange(8 * 64, dtype=np.uint16).view(np.uint8).reshape(8, 128)
    before = memory.copy()
    pool = KVLayout.from_tensors("block dim", memory)
    assert kvplan.verify(pool, pool, blocks=([0, 1], [2, 3]), markers=True).ok
    attention, state = overlaid()
    assert kvplan.verify(attention, attention, blocks=([0], [5])).ok
    assert kvplan.verify(state, state, blocks=([4], [0])).ok
    assert (memory == before).all()


@pytest.mark.parametrize("name", FIVE)
def test_the_five_reserved(name):
    layout = FIVE[name]()
    here, there = reserve(layout), reserve(layout)
    assert not here.virtual
    half = layout.num_blocks // 2
    found = kvplan.verify(here, there, blocks=(range(half), range(half, 2 * half)), markers=True)
    assert found.ok
    shifts = {a.address - b.address for a, b in zip(here.components, layout.components, strict=True)
              if a.layer == layout.layers[0]}  # fmt: skip
    assert len(shifts) == 1
    assert {(a.address - b.address) % 4096 for a, b in zip(here.regions, layout.regions, strict=True)} == {
        (here.regions[0].address - layout.regions[0].address) % 4096
    }


def test_what_is_too_large_to_reserve():
    spec = {"notation": "block dim", "sizes": {"block": 1 << 40, "dim": 1 << 20}, "dtype": "int8", "address": 0}
    with pytest.raises(LayoutError, match=r"cannot reserve .* describe fewer blocks"):
        reserve(KVLayout.from_spec(spec))


def test_blocks_of_their_own_are_reserved():
    spec = {"notation": "block layer: token dim", "sizes": {"block": 5, "layer": 2, "token": 2, "dim": 100}}
    here, there = (reserve(KVLayout.from_spec(spec)) for _ in range(2))
    assert kvplan.verify(here, there, blocks=([4, 0], [1, 3]), markers=True).ok


def test_memory_of_torch_is_read_by_its_tensors():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(64, dtype=torch.int16).reshape(2, 4, 8)
    layout = KVLayout.from_tensors("block token dim", tensor)
    contents = Contents(layout)
    contents._memory = [_torch(region) for region in contents._regions]  # as of a GPU, whose memory no pointer reads
    addresses = tensor.data_ptr() + np.array([[6, 7], [2, 3]])
    assert contents.read(addresses).view(np.int16).tolist() == [[3], [1]]
    contents.write(addresses, np.array([[1, 1], [2, 2]], np.uint8))
    assert tensor[0, 0, [3, 1]].tolist() == [257, 514]


def test_a_gpu_without_tensors_is_unreadable():
    layout = padded_split_kv()
    layout.regions = tuple(replace(region, virtual=False) for region in layout.regions)
    with pytest.raises(LayoutError, match="belongs to no torch tensor"):
        Contents(layout)
