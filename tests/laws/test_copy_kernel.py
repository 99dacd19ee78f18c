"""Law 1 for the copy kernel: its own text, in Triton's interpreter, copies what its headers say and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.execute.gpu.resources import WORDS, Shape, shape_of
from tests.profiles import examples
from tests.simulated.kernel import interpret, kernel

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

GUARD = 64


class Copies:
    """A header, and the memory that it copies between: units at ``pitch``, items at offsets within them."""

    def __init__(self, units: int, sizes: list[int], word: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        gap = 3 * word  # between items, so that no two are one
        self.sizes = np.array(sizes, np.int64)
        starts = np.cumsum(self.sizes + gap) - self.sizes - gap
        self.pitch = int((self.sizes + gap).sum()) + word
        nbytes = 2 * GUARD + 16 + max(units, 1) * self.pitch
        self.src, self.dst = rng.integers(0, 256, nbytes, np.uint8), np.full(nbytes, 0xA5, np.uint8)
        self.begin = [GUARD + -(root.ctypes.data + GUARD) % 16 + (word if word < 16 else 0)
                      for root in (self.src, self.dst)]  # fmt: skip
        order = rng.permutation(units)
        self.src_offsets, self.dst_offsets = order * self.pitch, np.arange(units) * self.pitch
        self.src_items, self.dst_items = starts, starts[::-1].copy() if len(set(sizes)) == 1 else starts
        self.arrays = [
            self.src.ctypes.data + self.begin[0] + self.src_offsets,
            self.dst.ctypes.data + self.begin[1] + self.dst_offsets,
            self.src_items,
            self.dst_items,
            self.sizes,
        ]
        self.arrays = [np.ascontiguousarray(array, np.int64) for array in self.arrays]

    def header(self, width: int) -> list[int]:
        chunks = -(-int(self.sizes.max()) // width)
        return [self.src_offsets.size, self.sizes.size, chunks, *(array.ctypes.data for array in self.arrays)]

    def expected(self) -> np.ndarray:
        made = np.full(self.dst.size, 0xA5, np.uint8)
        for src, dst in zip(self.src_offsets, self.dst_offsets, strict=True):
            for src_item, dst_item, size in zip(self.src_items, self.dst_items, self.sizes, strict=True):
                at, to = self.begin[0] + src + src_item, self.begin[1] + dst + dst_item
                made[to : to + size] = self.src[at : at + size]
        return made


def headers_of(several: Sequence[Copies], width: int) -> torch.Tensor:
    """The headers of one launch, one behind another; the first says how many there are."""
    rows = [[*copies.header(width), len(several) if k == 0 else -1] for k, copies in enumerate(several)]
    return torch.tensor(rows, dtype=torch.int64).ravel()


def check(several: Copies | Sequence[Copies], shape: Shape, programs: int) -> None:
    several = [several] if isinstance(several, Copies) else several
    before, want = [one.src.copy() for one in several], [one.expected() for one in several]
    header = headers_of(several, shape.width)
    interpret(header, shape, programs)
    for copies, src, dst in zip(several, before, want, strict=True):
        np.testing.assert_array_equal(copies.dst, dst)
        np.testing.assert_array_equal(copies.src, src)
        copies.dst[:] = 0xA5
    kernel(header.data_ptr(), shape, random.Random(0))  # the stand-in of the simulated GPU
    for copies, dst in zip(several, want, strict=True):
        np.testing.assert_array_equal(copies.dst, dst)


@pytest.mark.parametrize(
    ("word", "size"),
    [(8, 8), (4, 132), (8, 584), (16, 656), (8, 4088), (16, 4096), (8, 8200), (2, 130), (1, 131), (2, 2050), (1, 1033)],
)
@pytest.mark.parametrize("programs", [1, 3])
def test_sizes_that_fill_no_row_leave_guards_alone(word, size, programs):
    """Law 1: bytes behind a row's last word stay as they are."""
    check(Copies(5, [size, size], word), small(word, size), programs)


@pytest.mark.parametrize("whole", [1, 2, 4, 8])
@pytest.mark.parametrize("word", [16, 4])
def test_rows_of_one_and_of_several_accesses_and_of_several_chunks(word, whole):
    """Law 1: ``whole`` is accesses of a warp in a row; items that end before it, at it and after it."""
    access = 32 * word
    shape = shape_of(word, whole * access, max(8, whole) * access, 1)
    assert shape.width == whole * access
    sizes = [word, access, shape.width - word, shape.width, shape.width + word, 3 * shape.width - access // 2]
    check(Copies(2, [size for size in sizes if size > 0], word), shape, 2)


@pytest.mark.parametrize(("units", "sizes"), [(0, [64]), (1, [64]), (7, [64]), (40, [64, 48, 16]), (9, [64] * 7)])
@pytest.mark.parametrize("programs", [1, 2, 8])
def test_more_tiles_than_programs_fewer_and_a_ragged_last_one(units, sizes, programs):
    """Law 1: whatever the number of programs."""
    shape = shape_of(16, 64, 1024, 1)
    assert shape.rows == 16
    check(Copies(units, sizes, 16), shape, programs)


def small(word: int, size: int) -> Shape:
    """A variant of one warp and few rows."""
    return shape_of(word, size, 2048, 1)


@st.composite
def headers(draw):
    word = draw(st.sampled_from(WORDS))
    shape = shape_of(
        word, draw(st.integers(1, 80)) * word, draw(st.sampled_from((1024, 2048))), draw(st.sampled_from((1, 2)))
    )
    most = min(3 * shape.width // word, 100)
    sizes = draw(st.lists(st.integers(1, most).map(lambda count: count * word), min_size=1, max_size=5))
    return Copies(draw(st.integers(0, 9)), sizes, word, draw(st.integers(0, 99))), shape, draw(st.integers(1, 4))


@examples(40)
@given(
    units=st.lists(st.integers(0, 9), min_size=2, max_size=5),
    sizes=st.lists(st.sampled_from((16, 48, 64, 80, 160)), min_size=1, max_size=3),
    programs=st.integers(1, 5),
    rows=st.sampled_from((512, 1024)),
    seed=st.integers(0, 99),
)
def test_several_headers_are_carried_out_by_one_launch(units, sizes, programs, rows, seed):
    """Law 1: several headers of one launch."""
    shape = shape_of(16, 64, rows, 1)
    check([Copies(count, sizes, 16, seed + k) for k, count in enumerate(units)], shape, programs)


@examples(40)
@given(drawn=headers())
def test_any_header_is_carried_out(drawn):
    """Law 1: any header, of any shape."""
    check(*drawn)
