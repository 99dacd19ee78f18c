"""How units pass through a ring: packed there as the host has them, so that the host's side is a few large copies.

The contiguous byte ranges on the host (extents) of one granule, a host block where that can be, else a unit, are laid
one after another. What was a copy between host and cache is then two: an extent between host and ring, and the run
between ring and cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvplan.program import Int64Array, RunGroup

GRAIN = 256  # bytes: extents and granules begin at multiples of it in the ring


@dataclass(frozen=True, eq=False)
class Staging:
    """One run group by way of a ring.

    Attributes:
        group: the run group.
        host_is_src: whether the host is read (a load) or written (a store).
        granule_units: units a granule: those of a host block, or one.
        unit_hosts: bytes from a granule's host address to each of its units' host addresses.
        unit_rings: bytes from its ring address to where each unit's runs are counted from.
        runs: (3, n) int64: of every copy of one unit, the offset in the ring, the offset in the cache, the bytes.
        extents: (3, m) int64: of every extent of a whole granule, bytes from the granule's host address, bytes from its
            ring address, bytes.
        nbytes: of a granule in the ring, padding included.
    """

    group: RunGroup
    host_is_src: bool
    granule_units: int
    unit_hosts: Int64Array
    unit_rings: Int64Array
    runs: Int64Array
    extents: Int64Array
    nbytes: int

    def part(self, first: int, last: int) -> Int64Array:
        """Extents of units ``first`` to ``last`` of a granule, at their places in the whole one; (3, m) int64."""
        if last - first == self.granule_units:
            return self.extents
        made = self._parts.get((first, last))
        if made is None:
            host, _, size = _host_runs(self.group, self.host_is_src)
            starts = (self.unit_hosts[first:last, None] + host).ravel()
            begin, length = _merged(starts, np.tile(size, last - first))
            at = np.searchsorted(self.extents[0], begin, side="right") - 1
            made = self._parts[first, last] = np.stack(
                (begin, self.extents[1, at] + begin - self.extents[0, at], length)
            )
        return made

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Int64Array]:
        return {}

    @cached_property
    def alignment(self) -> int:
        """Largest power of two that divides what the ring's kernel touches, on both sides."""
        axis, base = (
            (self.group.dst, self.group.dst_base) if self.host_is_src else (self.group.src, self.group.src_base)
        )
        common = np.gcd.reduce(np.concatenate([self.runs.ravel(), self.unit_rings, [axis.step(), base, GRAIN]]))
        return int(common & -common)


def stage(group: RunGroup, *, host_is_src: bool) -> Staging:
    """Lay the runs of a group out in a ring.

    A whole host block is one granule if all its units' runs keep their distances there, which they do wherever the
    units of a block are contiguous together, or each by itself.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((2, 2, 64, 64), np.int8))
    >>> made = stage(kvplan.compile(gpu, host).program.groups[0], host_is_src=False)
    >>> made.granule_units, made.extents[2], made.runs.tolist()
    (4, array([8192]), [[0, 4096], [0, 8192], [1024, 1024]])
    """
    axis = group.src if host_is_src else group.dst
    units = np.array(axis.units, dtype=np.int64)
    host, cache, size = _host_runs(group, host_is_src)
    made = _stage(group, host_is_src, units, host, cache, size)
    return made or _stage_units(group, host_is_src, host, cache, size)


def _host_runs(group: RunGroup, host_is_src: bool) -> tuple[Int64Array, Int64Array, Int64Array]:
    src, dst, size = group.offsets
    return (src, dst, size) if host_is_src else (dst, src, size)


def _stage(
    group: RunGroup, host_is_src: bool, units: Int64Array, host: Int64Array, cache: Int64Array, size: Int64Array
) -> Staging | None:
    starts = (units[:, None] + host).ravel()
    at, lengths = _merged(starts, np.tile(size, units.size))
    padded = -(-lengths // GRAIN) * GRAIN
    rings = np.cumsum(padded) - padded
    index = np.searchsorted(at, starts, side="right") - 1
    places = (rings[index] + starts - at[index]).reshape(units.size, -1)
    steps = places[:, 0] - places[0, 0]
    if np.any(places != places[0] + steps[:, None]):
        return None
    runs = np.stack((places[0], cache, size))
    return Staging(
        group, host_is_src, units.size, units, steps, runs, np.stack((at, rings, lengths)), int(padded.sum())
    )


def _stage_units(group: RunGroup, host_is_src: bool, host: Int64Array, cache: Int64Array, size: Int64Array) -> Staging:
    made = _stage(group, host_is_src, np.zeros(1, dtype=np.int64), host, cache, size)
    if made is None:
        raise AssertionError("one unit keeps its distances to itself")
    return made


def _merged(starts: Int64Array, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Ranges, those that touch as one: first bytes and lengths, ascending."""
    order = np.argsort(starts, kind="stable")
    first, last = starts[order], (starts + sizes)[order]
    cuts = np.flatnonzero(first[1:] != last[:-1]) + 1
    begin = np.concatenate((first[:1], first[cuts]))
    return begin, np.concatenate((last[cuts - 1], last[-1:])) - begin
