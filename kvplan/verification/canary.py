"""Canaries: bytes that a transfer must not change. They are watched in windows, so that memory use is bounded."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvplan.layout.components import Region
from kvplan.layout.padding import stretches_of
from kvplan.layout.strides import Int64Array
from kvplan.verification.raw_bytes import Bytes, Contents

WINDOW = 64 << 10  # bytes read at once
PAGE = 4 << 10  # bytes that share a checksum
SAVED_NBYTES = 32 << 20  # bytes of the nearest windows: a copy is kept, so every byte can be compared and restored
SUMMED_NBYTES = 128 << 20  # bytes of windows further away, of which checksums are kept


Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Stray:
    """Bytes that changed, although they must not change.

    Attributes:
        address: address of the first changed byte; or of its page, if only a checksum shows the change.
        nbytes: 1; or the bytes of the page, if only a checksum shows the change.
        before, after: the byte's values before and after the transfer; None if only a checksum shows the change.
    """

    address: int
    nbytes: int
    before: int | None
    after: int | None


class Stretches(NamedTuple):
    """Separate stretches of addresses, ascending: addresses of their first bytes, and of the first bytes after them."""

    starts: Int64Array
    ends: Int64Array

    @classmethod
    def joined(cls, several: Iterable[tuple[Int64Array, int]]) -> Stretches:
        """Join stretches, given as arrays of first addresses with one length per array; touching stretches become one.

        >>> Stretches.joined([(np.array([[8, 0], [24, 4]]), 4)])
        Stretches(starts=array([ 0, 24]), ends=array([12, 28]))
        """
        firsts = [(starts.ravel(), starts.ravel() + nbytes) for starts, nbytes in several if starts.size]
        if not firsts:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))
        starts, ends = (np.concatenate(side) for side in zip(*firsts, strict=True))
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.concatenate(([True], starts[1:] > ends[:-1])))
        return cls(starts[first], ends[np.append(first[1:], len(ends)) - 1])

    def free(self, address: int, nbytes: int) -> Bools | None:
        """Return a mask of a window's bytes that are outside all stretches; None if all bytes are outside."""
        low, high = np.searchsorted(self.ends, address, "right"), np.searchsorted(self.starts, address + nbytes)
        if low == high:
            return None
        # Free and taken bytes alternate, from the window's first byte to its last.
        edges = np.empty(2 * (high - low) + 2, np.int64)
        edges[0], edges[-1] = 0, nbytes
        edges[1:-1:2] = np.maximum(self.starts[low:high] - address, 0)
        edges[2:-1:2] = np.minimum(self.ends[low:high] - address, nbytes)
        alternating = np.arange(len(edges) - 1) % 2 == 0
        free: Bools = np.repeat(alternating, np.diff(edges))
        return free


class _Window(NamedTuple):
    """Consecutive bytes, and a mask of the watched bytes; the mask is None if all are watched."""

    address: int
    nbytes: int
    watched: Bools | None

    def seen(self, held: Bytes) -> Bytes:
        """Return the window's bytes, with zeros for bytes that are not watched."""
        return held if self.watched is None else np.where(self.watched, held, np.uint8(0))


class Guard:
    """A watch over the bytes of a layout's regions that a transfer must not change, the nearest first.

    Args:
        contents: memory of the layout.
        regions: regions of the layout.
        taken: stretches that the transfer may write, or that are checked elsewhere.
        poison: whether :meth:`poison` may overwrite the nearest bytes.

    Attributes:
        nbytes: number of watched bytes.
    """

    def __init__(self, contents: Contents, regions: Sequence[Region], taken: Stretches, *, poison: bool) -> None:
        self._contents, self._poisoned = contents, poison
        self._saved: list[tuple[_Window, Bytes]] = []
        self._summed: list[tuple[_Window, list[int]]] = []
        self._poison: int | None = None
        self.nbytes = 0
        windows, left = _nearest(regions, taken), SAVED_NBYTES + SUMMED_NBYTES
        for address, nbytes in windows:
            if nbytes > left:
                break
            window = _Window(address, nbytes, taken.free(address, nbytes))
            left -= nbytes
            watched = nbytes if window.watched is None else int(np.count_nonzero(window.watched))
            if not watched:
                continue
            self.nbytes += watched
            if left >= SUMMED_NBYTES:
                self._saved.append((window, contents.stretch(address, nbytes)))
            else:
                self._summed.append((window, _sums(window.seen(contents.seen(address, nbytes)))))

    def poison(self, value: int) -> None:
        """Overwrite all saved bytes with one value, if the guard was made with ``poison``."""
        if self._poisoned:
            self._poison = value
            for window, _ in self._saved:
                self._write(window, np.uint8(value))

    def check(self, *, sums: bool) -> tuple[Stray | None, int]:
        """Return the first byte that changed, and the number of changed bytes; with checksums, whole pages count.

        Args:
            sums: whether to compare checksums, too. Their bytes are never overwritten, so a check at the end suffices.
        """
        strays: list[Stray] = []
        total = 0
        for window, saved in self._saved:
            held = self._contents.seen(window.address, window.nbytes)
            differs = held != (saved if self._poison is None else np.uint8(self._poison))
            changed = np.flatnonzero(differs if window.watched is None else differs & window.watched)
            if len(changed):
                at, total = int(changed[0]), total + len(changed)
                before = int(saved[at]) if self._poison is None else self._poison
                strays.append(Stray(window.address + at, 1, before, int(held[at])))
        for window, known in self._summed if sums else ():
            now = _sums(window.seen(self._contents.seen(window.address, window.nbytes)))
            for k in (k for k, (one, other) in enumerate(zip(now, known, strict=True)) if one != other):
                nbytes = min(PAGE, window.nbytes - k * PAGE)
                total += nbytes
                strays.append(Stray(window.address + k * PAGE, nbytes, None, None))
        return min(strays, key=lambda stray: stray.address, default=None), total

    def put_back(self) -> None:
        """Restore the nearest bytes, if they were overwritten."""
        if self._poisoned:
            self._poison = None
            for window, saved in self._saved:
                self._write(window, saved)

    def _write(self, window: _Window, values: Bytes | np.uint8) -> None:
        every = np.broadcast_to(values, window.nbytes)
        if window.watched is not None:
            every = np.where(window.watched, every, self._contents.stretch(window.address, window.nbytes))
        self._contents.write_stretch(window.address, every)


def _sums(seen: Bytes) -> list[int]:
    """Return the checksum of each page."""
    return [crc32(seen[at : at + PAGE]) for at in range(0, len(seen), PAGE)]


def _nearest(regions: Sequence[Region], taken: Stretches) -> list[tuple[int, int]]:
    """Return address and bytes of each window to watch, the nearest to taken stretches first.

    It returns at most as many windows as can be watched.
    """
    edges = sorted({edge for region in regions for edge in (region.address, region.end)})
    most = (SAVED_NBYTES + SUMMED_NBYTES) // WINDOW
    found: list[tuple[int, int, int]] = []
    untouched: list[tuple[int, int]] = []
    for stretch in stretches_of(regions):
        # No window spans two regions, since one read cannot cross regions.
        inner = edges[bisect_left(edges, stretch.start) : bisect_right(edges, stretch.stop)]
        for first, end in pairwise(inner):
            low, high = np.searchsorted(taken.ends, first, "right"), np.searchsorted(taken.starts, end)
            if low == high:
                untouched.append((first, end))
                continue
            near = _numbers(taken.starts[low:high] - first, np.minimum(taken.ends[low:high], end) - 1 - first)
            for number, away in _around(near, -(-(end - first) // WINDOW), most):
                address = first + number * WINDOW
                found.append((away, address, min(WINDOW, end - address)))
    found = sorted(found)[:most]
    for first, end in untouched:  # after all windows near taken stretches
        if len(found) >= most:
            break
        found += [(0, address, min(WINDOW, end - address)) for address in range(first, end, WINDOW)[:most]]
    return [(address, nbytes) for _, address, nbytes in found]


def _numbers(starts: Int64Array, lasts: Int64Array) -> Int64Array:
    """Return the numbers of the windows that contain stretches."""
    low, high = np.maximum(starts, 0) // WINDOW, lasts // WINDOW
    spread = [np.arange(a, b + 1) for a, b in zip(low.tolist(), high.tolist(), strict=True) if b > a + 1]
    return np.unique(np.concatenate([low, high, *spread])).astype(np.int64)


def _around(near: Int64Array, count: int, most: int) -> list[tuple[int, int]]:
    """Return at most ``most`` window numbers below ``count``, each with its distance from the nearest of ``near``.

    >>> _around(np.array([0, 3]), 6, 5)
    [(0, 0), (3, 0), (1, 1), (2, 1), (4, 1)]
    """
    found = dict.fromkeys(near[:most].tolist(), 0)
    edge, away = list(found), 0
    while edge and len(found) < min(most, count):
        away += 1
        edge = sorted({n for at in edge for n in (at - 1, at + 1) if 0 <= n < count and n not in found})
        found |= dict.fromkeys(edge, away)
    return list(found.items())[:most]
