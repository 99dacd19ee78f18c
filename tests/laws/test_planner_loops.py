"""Law 8: each loop of the planner, compiled and as it is written, equals its twin or a plain search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.plan import loops, loops_numba
from kvplan.program.program import merge_adjacent
from tests.profiles import examples


def compiled(name: str):
    return getattr(loops_numba, name)


def as_written(name: str):
    function = compiled(name).py_func

    def called(*given_, **more):
        with np.errstate(over="ignore"):  # hashes wrap around
            return function(*given_, **more)

    return called


both = pytest.mark.parametrize("loop", [compiled, as_written])


def array(values, *shape: int) -> np.ndarray:
    return np.array(values, np.int64).reshape(shape or -1)


@both
@examples(250)
@given(ids=st.lists(st.integers(-2, 6), max_size=6))
def test_the_first_id_that_is_no_block(loop, ids):
    """Law 8: the loop that reads block ids, against a plain search."""
    expected = next((at for at, block in enumerate(ids) if not 0 <= block < 5), -1)
    copied = np.full(6, 99, np.int64)
    assert loop("_copy_outside")(array(ids), 5, copied) == expected
    known = len(ids) if expected < 0 else expected + 1
    assert copied[:known].tolist() == ids[:known]


TABLES = array([0, 70, 10, 400, 25, 9, 0, 33, 34, 1], 2, 5)


@st.composite
def sides(draw, count: int) -> tuple:
    """Ids, skip and axes of one side, as many ids as ``count`` units need."""
    units = draw(st.sampled_from((1, 2, 3)))
    skip = draw(st.integers(0, units - 1)) if count else 0
    needed = -(-(count + skip) // units)
    ids = draw(st.lists(st.integers(0, 4), min_size=needed, max_size=needed))
    rows = []
    for base in (1000, 2000):
        row = draw(st.integers(-1, 1))  # of the tables, or -1: a stride says where blocks are
        rows.append([base, 0 if row >= 0 else 50, row, *(7, 3, 11)[:units]])
    return array(ids), skip, array(rows, 2, 3 + units)


@both
@examples(250)
@given(data=st.data(), count=st.integers(0, 6))
def test_units_are_placed_as_their_twin_places_them(loop, data, count):
    """Law 8: the loop that turns block ids into unit addresses, against its numpy twin."""
    (src_ids, src_skip, src), (dst_ids, dst_skip, dst) = (data.draw(sides(count)) for _ in range(2))
    src_blocks, dst_blocks = (data.draw(st.integers(3, 5)) for _ in range(2))
    made, seen = [], np.zeros(1, np.uint64)
    for place in (loop("place_units"), loops.place_units):
        out = np.zeros((2, 2, count), np.int64)
        found = place(src_ids, dst_ids, src_skip, dst_skip, src, dst, TABLES, TABLES, src_blocks, dst_blocks, seen, out)
        made.append((tuple(map(int, found)), out.tolist() if found[0] == loops.PLACED else None))
        assert not seen.any()
    assert made[0] == made[1]


@st.composite
def neighbours(draw) -> tuple[np.ndarray, int]:
    """Units on a coarse grid, no two with one destination, so that much is adjacent."""
    nbytes = draw(st.sampled_from((4, 8)))
    targets = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9, unique=True))
    rows = [(at + draw(st.sampled_from((0, 0, 0, 1, -1))) + 20, at) for at in targets]
    return array(rows, -1, 2).T.copy() * nbytes, nbytes


@both
@examples(250)
@given(drawn=neighbours())
def test_chains_are_those_of_the_twin(loop, drawn):
    """Law 8: the loop that chains neighbouring units, against its numpy twin."""
    units, nbytes = drawn
    count = units.shape[1]
    slots, out = np.empty(1 << (2 * count - 1).bit_length(), np.int32), np.zeros((3, count), np.int64)
    left = loop("chain")(units, nbytes, slots, out)
    twin = np.stack(merge_adjacent(*units, np.full(count, nbytes)))
    assert sorted(out[:, :left].T.tolist()) == sorted(twin.T.tolist())


RUNS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=3)
UNITS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), max_size=4)


@examples(250)
@given(runs=RUNS, units=UNITS, before=st.integers(0, 2), tile=st.integers(1, 3))
def test_every_run_of_every_unit_is_written_in_order(runs, units, before, tile):
    """Law 8: the loop that writes every run, as it is written and by tiles of few units."""
    expected = [(src + a, dst + b, nbytes) for a, b, nbytes in runs for src, dst in units]
    whole = loops_numba.TILE
    for fill, size in ((loops_numba.fill, whole), (loops_numba.fill.py_func, whole), (loops_numba.fill.py_func, tile)):
        out = np.full((3, before + len(expected) + 1), -7, np.int64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loops_numba, "TILE", size)
            after = fill(array(units, -1, 2).T.copy(), array(runs, -1, 3).T.copy(), before, out)
        assert after == before + len(expected)
        assert list(map(tuple, out[:, before:after].T.tolist())) == expected
        assert (out[:, :before] == -7).all()
        assert (out[:, after:] == -7).all()


def test_more_units_than_a_tile_holds_are_all_written():
    """Law 8: units beyond one tile of the compiled loop are written too."""
    units = np.arange(2 * (2 * loops_numba.TILE + 3)).reshape(2, -1)
    runs, out = array([(0, 5, 4), (10, 0, 6)], 2, 3).T.copy(), np.zeros((3, 2 * units.shape[1]), np.int64)
    assert loops_numba.fill(units, runs, 0, out) == out.shape[1]
    first, second = np.split(out, 2, axis=1)
    np.testing.assert_array_equal(first, [units[0], units[1] + 5, np.full(units.shape[1], 4)])
    np.testing.assert_array_equal(second, [units[0] + 10, units[1], np.full(units.shape[1], 6)])


@both
@examples(250)
@given(runs=RUNS, chains=RUNS, more=st.integers(0, 2), before=st.integers(0, 2))
def test_every_run_of_every_chain_is_written_in_order(loop, runs, chains, more, before):
    """Law 8: the loop that writes the runs of chains, against plain nested loops."""
    expected = [(src + a, dst + b, nbytes) for a, b, _ in runs for src, dst, nbytes in chains]
    out = np.full((3, before + len(expected) + 1), -7, np.int64)
    held = array([*chains, *[(0, 0, 0)] * more], -1, 3).T.copy()  # more than there are is not read
    after = loop("fill_chains")(held, len(chains), array(runs, -1, 3).T.copy(), before, out)
    assert after == before + len(expected)
    assert list(map(tuple, out[:, before:after].T.tolist())) == expected
    assert (out[:, :before] == -7).all()
    assert (out[:, after:] == -7).all()
