"""Recipes of a process that lies: they are refused with one error, or move nothing but offered memory."""

from __future__ import annotations

import random
import struct
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, TransferError
from kvplan.base.limits import LIMITS
from kvplan.plan.packing.pack_recipe import HEADER, half_of
from kvplan.plan.packing.packing import packing_of
from tests.compiled_cases import planned
from tests.plan.packing.rings import Ring, assert_harmless
from tests.profiles import examples
from tests.strategies import cases

NBYTES = 1 << 14  # of a chunk


def lie(recipe: bytes, dice: random.Random) -> bytes:
    """Change some words of the tables by numbers that may pass, or some bytes of the indices."""
    words = list(struct.unpack_from(f"<{(len(recipe) - HEADER.size) // 8}q", recipe, HEADER.size))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        at = dice.randrange(len(words))
        old = words[at]
        new = dice.choice(
            (0, 1, 2, old + 1, old - 1, 2 * old, -old, old // 2, dice.choice(words), 1 << dice.randrange(63))
        )
        if dice.random() < 0.2:
            new = old ^ dice.randrange(256) << 8 * dice.randrange(8)
        words[at] = max(min(new, (1 << 63) - 1), -(1 << 63))
    return recipe[: HEADER.size] + struct.pack(f"<{len(words)}q", *words)


@examples(200)
@given(
    several=st.lists(cases(max_blocks=3), min_size=1, max_size=2),
    side=st.sampled_from(("src", "dst")),
    order=st.sampled_from(("src", "dst")),
    seed=st.integers(0, 2**32),
)
def test_lies_are_refused_or_harmless(several, side, order, seed):
    plan = kvplan.join([planned(case) for case in several])
    layouts = list(dict.fromkeys(pair[("src", "dst").index(side)] for pair in plan.layouts))
    recipe = packing_of(plan, order, 1024).recipe(side)
    if len(recipe) == HEADER.size:
        return
    dice, ring = random.Random(seed), Ring(1, NBYTES)
    for _ in range(20):
        try:
            half = half_of(lie(recipe, dice), layouts, side)
        except TransferError:
            continue
        if half.unit_nbytes <= NBYTES and half.nbytes <= 8 * NBYTES:
            assert_harmless(half, layouts, ring)


# ---- work that a short recipe could ask for ----

POOL = np.zeros((64, 256), np.uint8)


def made(*, sections, rows, columns, indices=b"", side=0) -> bytes:
    """A recipe of these rows: (column, runs, bytes of a unit, step, residue, period), and so on."""
    words = [*sum(sections, ()), *sum(rows, ()), *sum(columns, ())]
    body = struct.pack(f"<{len(words)}q", *words) + indices
    counts = len(sections), len(rows), len(columns)
    return HEADER.pack(b"kvpr", 1, side, *counts, 0, HEADER.size + len(body)) + body


def offered():
    return [KVLayout.from_tensors("block dim", POOL)], POOL.ctypes.data


def one_run(nbytes, *loops):
    return (0, 0, nbytes, *(loops or (1, 0, 0, 1, 0, 0)))


def test_these_numbers_are_a_recipe():
    layouts, at = offered()
    recipe = made(
        sections=[(0, 1, 256, 256, at % 256, 256)], rows=[one_run(256)], columns=[(2, at, 256, 1, 0)],
        indices=bytes([3, 63, 0, 0, 0, 0, 0, 0]),
    )  # fmt: skip
    half = half_of(recipe, layouts, "src")
    assert half.sections[0].addresses.tolist() == [at + 3 * 256, at + 63 * 256]
    assert_harmless(half, layouts, Ring(1, 512))


def test_blocks_read_over_and_over_are_bounded():
    """A gather may read a block twice; a recipe of some kilobytes does not make a peer send for days."""
    layouts, at = offered()
    section, row = (0, 1, 1 << 14, 1, 0, 256), one_run(1 << 14)
    assert half_of(made(sections=[section], rows=[row], columns=[(16, at, 1, 1, 0)], indices=bytes(16)), layouts, "src")
    count = 1 << 20
    many = made(sections=[section] * 512, rows=[row] * 512, columns=[(count, at, 1, 1, 0)], indices=bytes(count))
    assert 512 * count << 14 > LIMITS.recipe_moved
    with pytest.raises(TransferError, match="it moves at most 4,398,046,511,104"):
        half_of(many, layouts, "src")


def test_repeated_columns_are_bounded():
    """Each would take memory for all its units, and is 40 bytes of a recipe."""
    layouts, at = offered()
    count, several = LIMITS.recipe_units // 64, 100
    columns = [(count, at, 1, 1, 0), *[(count, at, 1, 0, 0)] * (several - 1)]
    recipe = made(
        sections=[(k, 1, 1, 1, 0, 1) for k in range(several)], rows=[one_run(1)] * several, columns=columns,
        indices=bytes(count),
    )  # fmt: skip
    with pytest.raises(TransferError, match="has a column of 262,144 units"):
        half_of(recipe, layouts, "src")


@pytest.mark.parametrize("count", [1 << 11, 1 << 12])
def test_copies_of_a_unit_are_bounded(count):
    """Two loops make up to 4 million copies of a byte; these take no second, and more are refused."""
    layouts, at = offered()
    loops = (count, 0, count, count, 0, 1)
    assert prod(loops[::3]) in (LIMITS.recipe_copies, 4 * LIMITS.recipe_copies)
    recipe = made(
        sections=[(0, 1, count * count, 1, 0, 1)], rows=[one_run(1, *loops)], columns=[(1, at, 1, 1, 0)],
        indices=bytes(8),
    )  # fmt: skip
    if count * count <= LIMITS.recipe_copies:
        assert half_of(recipe, layouts, "src").nbytes == count * count
    else:
        with pytest.raises(TransferError, match="makes over 4,194,304 copies"):
            half_of(recipe, layouts, "src")


def test_a_scatter_of_many_units_that_weave_is_decided_or_refused():
    """Units of every second byte, at every address: whether they meet takes a look at each range."""
    layouts, at = offered()
    weave = (32, 2, 1, 1, 0, 0)
    fine = made(
        sections=[(0, 1, 32, 1, 0, 1 << 48)], rows=[one_run(1, *weave)], columns=[(2, at, 1, 1, 0)],
        indices=bytes([0, 1, *[0] * 6]), side=1,
    )  # fmt: skip
    assert_harmless(half_of(fine, layouts, "dst"), layouts, Ring(1, 256))
    for index in (0, 2, 62):
        twice = fine[:-8] + bytes([0, index, *[0] * 6])
        with pytest.raises(TransferError, match="writes a byte twice"):
            half_of(twice, layouts, "dst")


def test_alignment_is_not_taken_on_trust():
    """A kernel moves words of 16 bytes if all addresses allow it; a fault would end a CUDA context."""
    layouts, at = offered()
    columns, indices = [(1, at + 8, 16, 1, 0)], bytes(8)
    section = (0, 1, 256, 256, at % 256, 256)
    with pytest.raises(TransferError, match="not as aligned as it says"):
        half_of(made(sections=[section], rows=[one_run(256)], columns=columns, indices=indices), layouts, "src")
    odd, even = (0, 1, 3, 1, 0, 256), (0, 1, 16, 16, (at + 8) % 16, 256)
    rows = [one_run(3), one_run(16)]
    swapped = made(sections=[odd, (0, 1, 16, 8, (at + 8) % 8, 256)], rows=rows, columns=columns, indices=indices)
    with pytest.raises(TransferError, match="lose their alignment"):
        half_of(swapped, layouts, "src")
    assert (
        half_of(made(sections=[even, odd], rows=rows[::-1], columns=columns, indices=indices), layouts, "src").units
        == 2
    )
