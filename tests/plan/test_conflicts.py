"""Two plans have an order where one writes what the other reads or writes, and nowhere else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.plan.conflicts import conflict
from tests import oracle
from tests.profiles import examples

SHAPES = {"layer block dim": (3, 6, 8), "block layer dim": (6, 3, 8), "block dim layer": (6, 8, 3)}


def layouts(memory: np.ndarray) -> list[KVLayout]:
    """Four ways to see the same 288 bytes: blocks of different layouts are different bytes."""
    first = [KVLayout.from_tensors(text, memory[:144].reshape(shape)) for text, shape in list(SHAPES.items())[:2]]
    second = [KVLayout.from_tensors(text, memory[144:].reshape(SHAPES[text])) for text in ("layer block dim",)]
    heads = KVLayout.from_tensors("layer block dim", memory[144:].reshape(3, 6, 8)).slice(layers=range(1, 2))
    return [*first, *second, heads]


BLOCKS = st.lists(st.integers(0, 5), min_size=0, max_size=4, unique=True)


@st.composite
def moves(draw):
    """A source and destination that share no memory, and blocks of each."""
    src, dst = draw(st.sampled_from([(0, 2), (2, 0), (1, 2), (2, 1), (3, 4), (4, 3)]))
    ids = draw(BLOCKS)
    return src, dst, ids, draw(st.permutations(range(6)))[: len(ids)]


@examples(250)
@given(first=moves(), second=moves())
def test_a_conflict_is_a_byte_that_one_writes_and_the_other_touches(first, second):
    memory = np.zeros(288, np.uint8)
    seen = layouts(memory)
    seen.append(seen[0].slice(layers=range(1, 2)))
    plans = [kvplan.compile(seen[src], seen[dst]).plan(ids, others) for src, dst, ids, others in (first, second)]
    moved = [oracle.byte_moves(plan.descriptors()) for plan in plans]
    written = [set(one) for one in moved]
    read = [set(one.values()) for one in moved]
    expected = bool(written[0] & (written[1] | read[1]) or written[1] & read[0])
    assert conflict(*plans) == conflict(*plans[::-1]) == expected


def test_joined_plans_meet_by_any_part():
    memory = np.zeros(288, np.uint8)
    a, _, c, _ = layouts(memory)
    program, back = kvplan.compile(a, c), kvplan.compile(c, a)
    joined = kvplan.join([program.plan([0], [0]), program.plan([1], [5])])
    assert conflict(joined, program.plan([3], [5]))
    assert conflict(back.plan([5], [4]), joined)
    assert conflict(back.plan([3], [1]), joined)
    assert not conflict(joined, back.plan([3], [4]))
    assert not conflict(joined, program.plan([], []))


def test_a_run_inside_a_longer_one_is_seen():
    memory = np.zeros(1024, np.uint8)
    whole = KVLayout.from_tensors("block dim", memory[:512].reshape(2, 256))
    parts = KVLayout.from_tensors("block dim", memory[:512].reshape(32, 16))
    apart = KVLayout.from_tensors("block dim", memory[512:].reshape(32, 16))
    other = KVLayout.from_tensors("block dim", memory[512:].reshape(2, 256))
    assert conflict(kvplan.compile(whole, other).plan([0], [1]), kvplan.compile(apart, parts).plan([0], [15]))
    assert not conflict(kvplan.compile(whole, other).plan([0], [1]), kvplan.compile(apart, parts).plan([0], [16]))


def subsets(count: int) -> list[list[int]]:
    return [[k for k in range(count) if chosen >> k & 1] for chosen in range(1 << count)]


def together(src: KVLayout, dst: KVLayout) -> list[kvplan.Plan]:
    """Every way to write some of three blocks, each from the block of its number."""
    program = kvplan.compile(src, dst)
    return [program.plan(ids, ids) for ids in subsets(3)]


def test_plans_that_write_near_one_another_conflict_just_where_they_share_a_byte():
    """Blocks that touch, rows that interleave, and layers that lie in memory from the last to the first."""
    memory, apart = np.zeros(48, np.uint8), np.zeros(48, np.uint8)
    planes = list(memory[:36].reshape(3, 3, 4))
    backwards = [planes[k] for k in (2, 1, 0)]
    source = KVLayout.from_tensors("layer block dim", apart[:36].reshape(3, 3, 4))
    one = source.slice(layers=(0,))
    plans = [
        *together(one, KVLayout.from_tensors("block dim", memory[:12].reshape(3, 4))),
        *together(one, KVLayout.from_tensors("block dim", memory[8:20].reshape(3, 4))),
        *together(one, KVLayout.from_tensors("block dim", memory[24:].reshape(3, 8)[:, 4:])),
        *together(source, KVLayout.from_tensors("block layer dim", memory[12:].reshape(3, 3, 4))),
        *together(source, KVLayout.from_tensors("layer: block dim", backwards)),
    ]
    written = [set(oracle.byte_moves(plan.descriptors())) for plan in plans]
    assert min(offset for part in plans[-1].parts for offset in part.group.offsets[1]) < 0
    for plan, its in zip(plans, written, strict=True):
        for other, others in zip(plans, written, strict=True):
            assert conflict(plan, other) == bool(its & others)


def test_plans_that_only_read_the_same_bytes_do_not_conflict():
    memory, targets = np.zeros((3, 4), np.uint8), np.zeros((2, 3, 4), np.uint8)
    source, *others = (KVLayout.from_tensors("block dim", one) for one in (memory, *targets))
    program, beside = (kvplan.compile(source, other) for other in others)
    back = kvplan.compile(others[0], source)
    assert not conflict(program.plan([0, 1], [0, 1]), beside.plan([0, 1], [0, 1]))
    for ids in subsets(3):
        for reads in subsets(3):
            plan, other = program.plan(reads, reads), back.plan(ids, ids)
            assert conflict(plan, other) == conflict(other, plan) == bool(set(ids) & set(reads))


def test_one_program_s_reads_and_writes_meet_by_bytes_and_not_by_blocks():
    """Three blocks of 4 bytes are read from byte 0 on, and written from byte 2 on."""
    memory = np.zeros(14, np.uint8)
    program = kvplan.compile(*(KVLayout.from_tensors("block dim", memory[at : at + 12].reshape(3, 4)) for at in (0, 2)))
    plan, other = program.plan([0], [2]), program.plan([2], [0])  # 0-3 to 10-13, and 8-11 to 2-5
    assert conflict(plan, other)
    assert conflict(other, plan)
    assert not conflict(program.plan([0], [1]), program.plan([0], [2]))
