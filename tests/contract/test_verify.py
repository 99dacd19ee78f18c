"""verify: what arrives is proved byte by byte, what does not is named, and nothing is lost."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given

import kvplan
from kvplan import KVLayout
from tests.profiles import examples
from tests.strategies import cases, layout_of


class Wrong:
    """An executor that copies a plan's descriptors after something was done to them; on the CPU, at once."""

    def __init__(self, spoil, fails=""):
        self.spoil, self.fails = spoil, fails

    def submit(self, plan):
        if self.fails == "submit":
            raise RuntimeError("no")
        for src, dst, size in zip(*(column.tolist() for column in self.spoil(plan.descriptors())), strict=True):
            ctypes.memmove(dst, src, size)
        return self

    def result(self):
        if self.fails == "result":
            raise RuntimeError("no")

    def synchronize(self):
        pass


def without(number):
    return lambda made: kvplan.Descriptors(*(np.delete(column, number) for column in made))


def exchanged(made):
    """The first two copies go each to the other's place."""
    dst = made.dst.copy()
    dst[[0, 1]] = dst[[1, 0]]
    return kvplan.Descriptors(made.src, dst, made.size)


def places(layout, address, nbytes):
    return [place.row for byte in range(nbytes) for place in kvplan.locate(layout, address + byte)]


def caches():
    """A layer-first source of 6 blocks and a head-major pool of 3 larger ones, with random content."""
    rng = np.random.default_rng(0)
    held = [rng.integers(0, 256, (2, 6, 4, 2, 8), dtype=np.uint8) for _ in range(2)]
    pool = rng.integers(0, 256, (3, 2, 2, 2, 8, 8), dtype=np.uint8)
    return (
        KVLayout.from_tensors("layer: kv block token head dim", held),
        KVLayout.from_tensors("block layer kv head token dim", pool),
        [*held, pool],
    )


@examples(60)
@given(case=cases())
def test_what_arrives_is_ok_and_what_does_not_is_caught(case):
    memory = case.src.build(case.seed), case.dst.build(case.seed + 1)
    src, dst = map(layout_of, memory)
    before = [root.copy() for cache in memory for root in cache.roots]
    found = kvplan.verify(src, dst)
    assert (found.ok, found.text) == (True, f"{found.nbytes:,} bytes arrived where they belong")
    made = kvplan.compile(src, dst).plan(*found.blocks).descriptors()
    assert found.nbytes == int(made.size.sum())
    lost = kvplan.verify(src, dst, executor=Wrong(without(-1)))
    assert (lost.ok, lost.wrong_nbytes) == (False, int(made.size[-1]))
    assert lost.row in places(dst, int(made.dst[-1]), int(made.size[-1]))
    assert "nothing arrived" in lost.text
    if len(made.size) > 1 and made.size[0] == made.size[1]:
        mixed = kvplan.verify(src, dst, executor=Wrong(exchanged))
        assert (mixed.ok, mixed.wrong_nbytes) == (False, 2 * made.size[0])
        assert mixed.row in [row for k in (0, 1) for row in places(dst, int(made.dst[k]), int(made.size[k]))]
    after = [root for cache in memory for root in cache.roots]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_the_first_wrong_byte_is_named_and_what_lies_there():
    src, dst, memory = caches()
    before = [tensor.copy() for tensor in memory]
    target = dst.address(layer=1, part="v", block=0, token=5, head=1)

    def drop(made):
        return without(int(np.flatnonzero((made.dst <= target) & (target < made.dst + made.size))[0]))(made)

    found = kvplan.verify(src, dst, executor=Wrong(drop), blocks=([3, 1], [0]))
    assert str(found) == found.text
    assert found.text == (
        "8 of 512 bytes are wrong: token 5, head 1, byte 0 of block 0 of layer 1 v of the destination should hold "
        "token 1, head 1, byte 0 of block 1 of layer 1 v of the source, and nothing arrived"
    )

    def swap(made):
        pick = [int(np.flatnonzero(made.src == src.address(layer=0, part=part, block=2, token=3, head=1))[0])
                for part in "kv"]  # fmt: skip
        dst_column = made.dst.copy()
        dst_column[pick] = dst_column[pick[::-1]]
        return kvplan.Descriptors(made.src, dst_column, made.size)

    found = kvplan.verify(src, dst, executor=Wrong(swap), blocks=([5, 2, 0], [2, 1]))
    assert found.row == (0, "k", 2, 7, 1, 0, None)
    assert found.text.endswith("and holds token 3, head 1, byte 0 of block 2 of layer 0 v")
    assert all((a == b).all() for a, b in zip(before, memory, strict=True))


def test_other_content_of_the_written_blocks_is_compared_and_put_back():
    src = KVLayout.from_tensors("block token head dim", np.ones((4, 4, 1, 8), np.uint8))
    pool = KVLayout.from_tensors("block token head dim", np.zeros((4, 4, 2, 8), np.uint8))
    beside = Wrong(lambda made: kvplan.Descriptors(made.src, made.dst, made.size + 8))  # over the head that src lacks
    found = kvplan.verify(src, pool, executor=beside, blocks=1)
    assert found.text == (
        "0 of 32 bytes are wrong: token 0, head 1, byte 0 of block 0 of layer 0 kv of the destination was written, "
        "though nothing belongs there"
    )
    assert not pool.tensors.any()


@pytest.mark.parametrize("where", ["submit", "result"])
def test_what_the_executor_raises_is_passed_on_and_nothing_is_lost(where):
    src, dst, memory = caches()
    before = [tensor.copy() for tensor in memory]
    with pytest.raises(RuntimeError, match="no"):
        kvplan.verify(src, dst, executor=Wrong(lambda made: made, fails=where))
    assert all((a == b).all() for a, b in zip(before, memory, strict=True))


def test_an_executor_of_the_caller_is_left_open():
    src, dst, _ = caches()
    with kvplan.Executor() as executor:
        assert kvplan.verify(src, dst, executor=executor).ok
        assert executor.stats().transfers == 2
    assert kvplan.verify(src, dst, blocks=([], [])).ok


def test_two_pools_in_one_allocation():
    memory = np.arange(8 * 64, dtype=np.uint16).view(np.uint8).reshape(8, 128)
    before = memory.copy()
    pool = KVLayout.from_tensors("block dim", memory)
    assert kvplan.verify(pool, pool, blocks=([0, 1], [2, 3])).ok
    assert (memory == before).all()
