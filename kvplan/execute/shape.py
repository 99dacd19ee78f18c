"""How the rows of a copy kernel are cut: which word, how wide, how many at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvplan.program import Int64Array

WORDS = (16, 8, 4, 2, 1)  # bytes
MAX_WIDTH = 2048  # bytes of a row in flight: one warp's four loads of 16 bytes a lane
MAX_TILE = 64 << 10  # bytes in flight a program: 1,024 threads, 64 bytes each
MIN_TILE = 1 << 10
MAX_ROWS = 1024
MAX_ELEMENTS = 8  # words a thread holds: with their addresses, what fits its registers at 32 warps
MAX_WARPS = 32


class Shape(NamedTuple):
    """One variant of the kernel.

    Attributes:
        word: bytes a load or store, 16, 8, 4, 2 or 1.
        width: bytes of a row in flight at once; a power of two.
        rows: of a tile; a power of two.
        warps: of a program.
        depth: chunks of a row in flight at once, 1 or 2.
    """

    word: int
    width: int
    rows: int
    warps: int
    depth: int = 1


def shape_of(alignment: int, longest: int, tile: int, max_warps: int = MAX_WARPS, depth: int = 1) -> Shape:
    """The variant for items of some size.

    Args:
        alignment: bytes; divides every address and size.
        longest: bytes of the longest item.
        tile: bytes that a program should have in flight; a power of two.
        max_warps: of a program.
        depth: chunks in flight, where rows have several and the word is one of which registers hold so many.

    >>> shape_of(256, 8192, 65536, depth=2)
    Shape(word=16, width=2048, rows=32, warps=32, depth=2)
    >>> shape_of(4, 132, 65536)
    Shape(word=4, width=256, rows=128, warps=32, depth=1)
    >>> shape_of(1, 7, 65536)
    Shape(word=1, width=16, rows=512, warps=32, depth=1)
    """
    word = next(word for word in WORDS if alignment % word == 0)
    width = min(max(_power(longest), word, 16), MAX_WIDTH, tile)
    tile = min(tile, MAX_ELEMENTS * 32 * max_warps * word)
    rows = max(1, min(tile // width, MAX_ROWS))
    warps = max(1, min(max_warps, rows * width // (32 * min(MAX_ELEMENTS * word, 64))))
    return Shape(word, width, rows, warps, depth if word == WORDS[0] and longest > width else 1)


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def cut(items: Int64Array, longest: int) -> Int64Array:
    """Items of at most ``longest`` bytes: longer ones in equal pieces, as far as words of 16 bytes allow.

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
