"""The shape of a copy kernel: bytes per word, width of a row, and rows per tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array

WORDS = (16, 8, 4, 2, 1)  # bytes
LANES = 32  # threads per warp
# Words in flight per thread. With an address for each word, registers hold four of them at 32 warps. If all words of a
# thread are of one row, registers hold eight.
IN_FLIGHT, MOST_IN_FLIGHT = 4, 8
MAX_WARPS = 32
MAX_ROWS = 1024


class Shape(NamedTuple):
    """One variant of the kernel.

    Attributes:
        word: bytes per load or store: 16, 8, 4, 2 or 1.
        width: bytes of a row in flight at once; a power of two.
        rows: rows per tile; a power of two.
        warps: warps per program.
        split: number of accesses per width. If each warp has one row, warps never wait for each other.
    """

    word: int
    width: int
    rows: int
    warps: int
    split: int


def shape_of(alignment: int, longest: int, tile: int, max_warps: int = MAX_WARPS) -> Shape:
    """Return the variant of the kernel for items of some size.

    Args:
        alignment: number of bytes that divides every address and size.
        longest: bytes of the longest item.
        tile: bytes that a program should have in flight; a power of two. With small words, fewer are in flight.
        max_warps: most warps per program.

    >>> shape_of(256, 8192, 128 << 10)
    Shape(word=16, width=4096, rows=32, warps=32, split=8)
    >>> shape_of(256, 2048, 32 << 10)
    Shape(word=16, width=2048, rows=16, warps=16, split=4)
    >>> shape_of(16, 512, 64 << 10)
    Shape(word=16, width=512, rows=128, warps=32, split=1)
    >>> shape_of(1, 7, 64 << 10)
    Shape(word=1, width=16, rows=256, warps=32, split=1)
    """
    word = next(word for word in WORDS if alignment % word == 0)
    a_warp = LANES * word  # bytes of one access
    warps = max(1, min(max_warps, tile // (IN_FLIGHT * a_warp)))
    most = MOST_IN_FLIGHT if tile >= MOST_IN_FLIGHT * a_warp * warps else IN_FLIGHT
    width = min(max(_power(longest), word, 16), most * a_warp, tile)
    split = max(1, width // a_warp)
    if split >= IN_FLIGHT:
        return Shape(word, width, warps, warps, split)
    rows = min(tile, IN_FLIGHT * a_warp * warps) // width
    return Shape(word, width, max(1, min(rows, MAX_ROWS)), warps, split)


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def cut(items: Int64Array, longest: int) -> Int64Array:
    """Cut items of more than ``longest`` bytes into pieces. Their lengths are as equal as multiples of 16 bytes allow.

    Args:
        items: (3, n) int64: source offset, destination offset, bytes.

    >>> cut(np.array([[0, 10000], [0, 20000], [100, 3000]]), 2048)
    array([[    0, 10000, 11504],
           [    0, 20000, 21504],
           [  100,  1504,  1496]])
    """
    size = items[2]
    if not size.size or int(size.max()) <= longest:
        return items
    pieces = -(-size // longest)
    each = np.minimum((size + 16 * pieces - 1) // (16 * pieces) * 16, longest)
    pieces = -(-size // each)
    index = np.repeat(np.arange(size.size), pieces)
    at = (np.arange(index.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * each[index]
    return np.stack((items[0, index] + at, items[1, index] + at, np.minimum(each[index], size[index] - at)))
