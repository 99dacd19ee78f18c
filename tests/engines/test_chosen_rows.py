"""Rows that a NIXL transfer chooses of two lists: which indices are refused, and the addresses of the others."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.engines.nixl.chosen_rows import chosen_rows
from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.plan import loops

ROWS, SIZE = 64, 48


@pytest.fixture(autouse=True)
def _with_loops():
    loops.loops_for(1 << 20)


@pytest.fixture
def lists():
    """A list of rows of this process, and one of the peer."""
    return [Rows.of(np.array([[first, SIZE, 0, SIZE, ROWS]]), "VRAM") for first in (1 << 20, 1 << 30)]


@pytest.mark.parametrize("wrong", [[-1, 0, 1], [0, 1, ROWS], [0, 1, 1 << 32], [0, 1, 1 << 62], [-(1 << 63), 1, 2]])
def test_indices_out_of_range_are_found_on_either_side(lists, wrong):
    right = [0, 1, 2]
    for at, to in ((wrong, right), (right, wrong)):
        assert chosen_rows("READ", *lists, (at, to)) is None
        assert chosen_rows("READ", *lists, (np.array(at, np.int64), np.array(to, np.int64))) is None
    for at, to in (([], []), (right, right[:2]), ([right], [right]), ([0.0, 1.0, 2.0], right)):
        assert chosen_rows("READ", *lists, (at, to)) is None
    assert chosen_rows("READ", *lists, (np.array([0, 1, 1 << 63], np.uint64), right)) is None


def test_indices_of_any_kind_are_copied(lists):
    fixed = np.arange(5)
    fixed.setflags(write=False)
    for at in (fixed, np.arange(5, dtype=np.int32), np.arange(10)[::2] // 2, np.arange(5, dtype=np.uint64), range(5)):
        rows = chosen_rows("READ", *lists, (at, np.arange(5)[::-1]))
        assert rows.kept.tolist() == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
        assert rows.pass_on(lambda note, one, other: (note, one.tolist(), other.dtype))(b"n") == (
            b"n", [0, 1, 2, 3, 4], np.int64)  # fmt: skip
    mine = np.arange(5)
    rows = chosen_rows("READ", *lists, (mine, mine))
    mine[:] = 7
    assert rows.kept.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (rows.units[1] - (1 << 20)).tolist() == [0, 48, 96, 144, 192]


@pytest.mark.parametrize("seed", range(30))
def test_addresses_are_those_of_the_lists_in_whatever_order(seed):
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(2):
        rows = int(rng.integers(1, 40))
        count = rng.integers(1, 300 if seed % 3 else 2, rows)
        stride = rng.integers(1, 1 << 20, rows)
        tables.append(np.stack([rng.integers(0, 1 << 40, rows), np.full(rows, 8), np.zeros(rows), stride, count], 1))
    lists = [Rows.of(table.astype(np.int64), "VRAM") for table in tables]
    size = int(rng.integers(1, 2000))
    chosen = [rng.integers(0, len(one), size) for one in lists]
    if seed % 2:
        chosen = [np.sort(one) for one in chosen]
    made = chosen_rows("WRITE", *lists, tuple(chosen))
    for k in range(2):
        assert made.kept[k].tolist() == chosen[k].tolist()
        assert made.units[k].tolist() == lists[k].addresses(chosen[k]).tolist()
