"""Algebra of strided axes: tuples of (extent, stride in bytes) factors, outermost first.

A factor list maps a coordinate to a byte offset by its mixed-radix digits. The functions are pure, and take Python
integers, so that nothing overflows. Only :func:`offsets_of` makes an array, of int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.base.files import LIMITS
from kvplan.errors import IncompatibleLayoutsError

Factor = tuple[int, int]  # (extent, stride in bytes)
Factors = tuple[Factor, ...]  # outermost first; () has the one coordinate 0
Int64Array = NDArray[np.int64]
Loop = tuple[int, int, int]  # (count, source stride, destination stride), strides in bytes


def extent(factors: Factors) -> int:
    """Return the number of coordinates of an axis: the product of the extents.

    >>> extent(((4, 100), (16, 2)))
    64
    """
    return prod(count for count, _ in factors)


def normal(factors: Iterable[Factor]) -> Factors:
    """Shorten a factor list to normal form: no extent 1, and no two factors that are one loop.

    >>> normal(((4, 32), (1, 7), (16, 2)))
    ((64, 2),)
    """
    out: list[Factor] = []
    for count, stride in factors:
        if count == 1:
            continue
        if out and out[-1][1] == count * stride:
            out[-1] = (out[-1][0] * count, stride)
        else:
            out.append((count, stride))
    return tuple(out)


def offset(factors: Factors, coordinate: int) -> int:
    """Return the byte offset of a coordinate on an axis with these factors.

    >>> offset(((4, 100), (16, 2)), 17)
    102
    """
    total = 0
    for count, stride in reversed(factors):
        coordinate, digit = divmod(coordinate, count)
        total += digit * stride
    return total


def offsets_of(factors: Factors) -> Int64Array:
    """Return the byte offsets of all coordinates of an axis.

    >>> offsets_of(((2, 100), (3, 8))).tolist()
    [0, 8, 16, 100, 108, 116]
    """
    out = np.zeros(1, dtype=np.int64)
    for count, stride in factors:
        out = (out[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return out


def cut(factors: Factors, at: int) -> tuple[Factors, Factors] | None:
    """Cut an axis into stretches of ``at`` coordinates.

    Return the factors of the stretches, and the factors inside one stretch; None if factors cannot express the cut.

    >>> cut(((4, 100), (16, 2)), 8)
    (((4, 100), (2, 16)), ((8, 2),))
    >>> cut(((4, 100), (16, 2)), 6) is None
    True
    """
    inner: list[Factor] = []
    left = list(factors)
    while at > 1:
        if not left:
            return None
        count, stride = left.pop()
        if at % count == 0:
            inner.insert(0, (count, stride))
            at //= count
        elif count % at == 0:
            inner.insert(0, (at, stride))
            left.append((count // at, stride * at))
            at = 1
        else:
            return None
    return tuple(left), tuple(inner)


def run_of(factors: Iterable[Factor]) -> tuple[int, Factors]:
    """Return the bytes of the longest run at the first coordinate, and the factors that repeat it, widest first.

    >>> run_of(((16, 8), (8, 1), (4, 200)))
    (128, ((4, 200),))
    """
    widest = normal(sorted(factors, key=lambda factor: -factor[1]))
    return (widest[-1][0], widest[:-1]) if widest and widest[-1][1] == 1 else (1, widest)


def span(factors: Factors) -> int:
    """Return the largest offset of any coordinate; strides must not be negative.

    >>> span(((4, 100), (16, 2)))
    330
    """
    return sum((count - 1) * stride for count, stride in factors)


class Piece(NamedTuple):
    """A range of coordinates of two axes: the first offset on each side in bytes, and the loops that begin there."""

    src: int
    dst: int
    loops: tuple[Loop, ...]


def refine(src: Factors, src_start: int, dst: Factors, dst_start: int, count: int) -> list[Piece]:
    """Return the common refinement of ``count`` coordinates of two axes, from ``src_start`` and ``dst_start`` on.

    The pieces together visit every coordinate once. One piece is enough if the radices divide each other. Otherwise
    the range is cut at the boundaries that do not meet.

    >>> refine(((8, 1),), 0, ((2, 100), (4, 1)), 0, 8)
    [Piece(src=0, dst=0, loops=((2, 4, 100), (4, 1, 1)))]
    >>> refine(((8, 1),), 0, ((2, 100), (4, 1)), 2, 4)
    [Piece(src=0, dst=2, loops=((2, 1, 1),)), Piece(src=2, dst=100, loops=((2, 1, 1),))]
    """
    if count == 1:
        return [Piece(offset(src, src_start), offset(dst, dst_start), ())]
    # The largest place value whose boundary the range crosses on a side; place 1 is always crossed.
    place, start = max(
        (place, start)
        for factors, start in ((src, src_start), (dst, dst_start))
        for place in _places(factors)
        if start // place != (start + count - 1) // place
    )
    lead = -start % place  # coordinates before the first boundary
    middle = (count - lead) // place  # whole stretches between boundaries
    pieces: list[Piece] = []
    if lead:
        pieces += refine(src, src_start, dst, dst_start, lead)
    at_src, at_dst = src_start + lead, dst_start + lead
    src_stride = _stride(src, at_src, place, middle)
    dst_stride = _stride(dst, at_dst, place, middle)
    if middle > 1 and src_stride is not None and dst_stride is not None:
        loop = (middle, src_stride, dst_stride)
        for inner in refine(src, at_src, dst, at_dst, place):
            pieces.append(Piece(inner.src, inner.dst, (loop, *inner.loops)))
    else:
        for k in range(middle):
            pieces += refine(src, at_src + k * place, dst, at_dst + k * place, place)
            check_refined(len(pieces))
    tail = count - lead - middle * place
    if tail:
        done = lead + middle * place
        pieces += refine(src, src_start + done, dst, dst_start + done, tail)
    return pieces


def check_refined(pieces: int) -> None:
    """Check the number of pieces of a refinement. It may be large if factors do not divide each other.

    Raises:
        IncompatibleLayoutsError: there are too many pieces.
    """
    if pieces > LIMITS.pieces:
        why = f"axes are split at boundaries that do not meet, into over {LIMITS.pieces:,} pieces"
        raise IncompatibleLayoutsError(f"{why}; give factors that divide each other")


def _places(factors: Factors) -> list[int]:
    """Return the place value of each factor: the coordinates that one step of it skips. The last value is 1."""
    places, value = [1], 1
    for count, _ in reversed(factors[1:]):
        value *= count
        places.append(value)
    return places[::-1]


def _stride(factors: Factors, start: int, step: int, count: int) -> int | None:
    """Return the bytes per ``step`` coordinates, if they are equal for ``count`` steps from ``start``; else None."""
    place = 1
    for size, stride in reversed(factors):
        wrap = place * size
        if step % place == 0 and start % wrap + step * count <= wrap:
            return stride * (step // place)
        place *= size
    return None


def coalesce(nbytes: int, loops: Sequence[Loop]) -> tuple[int, tuple[Loop, ...]]:
    """Bring a strided copy to normal form: the longest run, then the fewest loops, outermost first.

    A loop joins the run if both strides equal the run's bytes. Two loops become one if, on both sides, each step of the
    outer loop begins at the end of the inner loop.

    >>> coalesce(1, [(2, 4096, 512), (16, 256, 256), (256, 1, 1)])
    (4096, ((2, 4096, 512),))
    >>> coalesce(8, [(3, 80, 200), (10, 8, 20)])
    (8, ((30, 8, 20),))
    """
    rest = [loop for loop in loops if loop[0] != 1]
    while run := next((loop for loop in rest if loop[1] == loop[2] == nbytes), None):
        rest.remove(run)
        nbytes *= run[0]
    while pair := next(((outer, inner) for outer in rest for inner in rest if _continues(outer, inner)), None):
        outer, inner = pair
        rest = [loop for loop in rest if loop not in pair] + [(outer[0] * inner[0], inner[1], inner[2])]
    return nbytes, tuple(sorted(rest, key=lambda loop: (abs(loop[2]), abs(loop[1]), loop), reverse=True))


def _continues(outer: Loop, inner: Loop) -> bool:
    return outer[1] == inner[0] * inner[1] and outer[2] == inner[0] * inner[2]
