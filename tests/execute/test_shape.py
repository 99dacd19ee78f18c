"""How a copy kernel's rows are shaped, and how items are cut to them; and what an executor's arena rounds to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.execute.gpu.memory import CARVED, Arena
from kvplan.execute.gpu.shape import MAX_WARPS, WORDS, cut, shape_of
from tests.profiles import examples

KIB = 1 << 10


@pytest.mark.parametrize(("alignment", "word"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (256, 16), (6, 2), (24, 8)])
def test_the_word_is_the_largest_that_divides_everything(alignment, word):
    assert shape_of(alignment, 4096, 64 * KIB).word == word


@pytest.mark.parametrize(
    ("word", "longest", "tile", "width", "rows", "warps"),
    [
        (16, 1, 64 * KIB, 16, 1024, 32),  # no more than 1,024 rows
        (16, 528, 64 * KIB, 1024, 64, 32),
        (16, 2048, 32 * KIB, 2048, 16, 16),
        (16, 2048, 1 * KIB, 1024, 1, 1),  # no wider than the tile
        (4, 132, 64 * KIB, 256, 64, 32),  # 16 KiB in flight: four words a thread
        (1, 1, 64 * KIB, 16, 256, 32),
    ],
)
def test_rows_are_as_wide_as_the_longest_item_and_as_many_as_the_tile_holds(word, longest, tile, width, rows, warps):
    assert shape_of(word, longest, tile)[:4] == (word, width, rows, warps)


@given(
    alignment=st.integers(1, 512),
    longest=st.integers(1, 1 << 21),
    tile=st.sampled_from([KIB << k for k in range(8)]),
    max_warps=st.sampled_from((1, 2, 4, 8, 16, 32)),
)
def test_every_shape_is_one_that_triton_takes_and_registers_hold(alignment, longest, tile, max_warps):
    shape = shape_of(alignment, longest, tile, max_warps)
    assert shape.word in WORDS
    assert alignment % shape.word == 0
    for number in (shape.width, shape.rows, shape.warps):
        assert number > 0
        assert number & (number - 1) == 0
    assert shape.width % shape.word == 0
    assert shape.warps <= min(max_warps, MAX_WARPS)
    assert shape.width * shape.rows <= tile
    assert shape.width * shape.rows <= 8 * shape.word * 32 * shape.warps or shape.width == 16  # words a thread


def test_items_no_longer_than_asked_are_left_alone():
    items = np.array([[0, 100], [7, 300], [16, 32]])
    assert cut(items, 32) is items
    assert cut(items[:, :0], 32).shape == (3, 0)


@pytest.mark.parametrize(
    ("nbytes", "longest", "pieces"),
    [
        (33, 32, [32, 1]),
        (64, 32, [32, 32]),
        (65, 32, [32, 32, 1]),
        (3000, 2048, [1504, 1496]),
        (4096, 2048, [2048, 2048]),
        (8200, 2048, [1648, 1648, 1648, 1648, 1608]),
        (100, 48, [48, 48, 4]),
    ],
)
def test_longer_items_are_cut_evenly(nbytes, longest, pieces):
    src, dst, size = cut(np.array([[5], [1000], [nbytes]]), longest)
    assert size.tolist() == pieces
    starts = np.cumsum([0, *pieces[:-1]])
    assert src.tolist() == (5 + starts).tolist()
    assert dst.tolist() == (1000 + starts).tolist()


@examples(250)
@given(
    items=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(1, 5000)), max_size=6),
    longest=st.integers(1, 200).map(lambda k: 16 * k),
)
def test_pieces_cover_an_item_exactly_in_steps_of_words(items, longest):
    made = cut(np.array(items, np.int64).reshape(-1, 3).T, longest)
    left = made.T.tolist()
    for src, dst, nbytes in items:
        done = 0
        while done < nbytes:
            a, b, size = left.pop(0)
            assert (a, b) == (src + done, dst + done)
            assert 0 < size <= longest
            done += size
            assert size % 16 == 0 or done == nbytes
        assert done == nbytes
    assert not left


class Heap:
    """Allocations by number, none at the address of another."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        address = 1 << 20 if not self.taken else max(at + size for at, size in self.taken.items())
        self.taken[address] = nbytes
        return address

    def free(self, address: int) -> None:
        del self.taken[address]


@pytest.mark.parametrize(
    ("nbytes", "piece"),
    [(1, 4096), (4096, 4096), (4097, 8192), (CARVED, CARVED), (CARVED + 1, 5 << 18), (5 << 20, 5 << 20),
     ((5 << 20) + 1, 6 << 20)],
)  # fmt: skip
def test_pieces_are_rounded_so_that_sizes_stay_few(nbytes, piece):
    heap = Heap()
    arena = Arena(heap.allocate, heap.free, visible=False)
    made = arena.take(nbytes)
    assert made.nbytes == piece
    assert arena.nbytes == sum(heap.taken.values()) == max(piece, CARVED)
    made.free.append(made)
    assert arena.take(nbytes).address == made.address  # the last one given back
    arena.close()
    assert not heap.taken
    assert arena.nbytes == 0


@examples(250)
@given(sizes=st.lists(st.tuples(st.integers(1, 3 << 20), st.booleans(), st.booleans()), max_size=30))
def test_pieces_in_use_never_meet(sizes):
    heap = Heap()
    arena = Arena(heap.allocate, heap.free, visible=False)
    used = []
    for nbytes, keep, exact in sizes:
        piece = arena.take(nbytes, exact=exact and nbytes > 4 * KIB)
        assert piece.nbytes >= nbytes
        end = piece.address + piece.nbytes
        assert any(at <= piece.address and end <= at + size for at, size in heap.taken.items())
        for other in used:
            assert piece.address + piece.nbytes <= other.address or other.address + other.nbytes <= piece.address
        if keep:
            used.append(piece)
        else:
            piece.free.append(piece)
    arena.close()
    assert not heap.taken
