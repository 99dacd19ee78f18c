"""Place units in a ring, packed in the order of the host, so that the host's side is a few large copies.

A granule is a host block if possible, otherwise a unit. Its extents (contiguous byte ranges on the host) follow one
another in the ring. A copy between host and cache becomes two copies: an extent between host and ring, and a run
between ring and cache.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import gcd

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.layout.strides import Int64Array
from kvplan.program.program import RunGroup, merge_ranges

GRAIN = 256  # bytes: extents and granules begin at multiples of this in the ring


@dataclass(frozen=True, eq=False)
class Staging:
    """The places of one run group's units in a ring, and the copies to and from the ring.

    Attributes:
        granule_units: units per granule: all units of a host block, or one.
        unit_hosts: bytes from a granule's host address to the host address of each of its units.
        unit_rings: bytes from a granule's ring address to the address at which each unit's run offsets begin.
        runs: (3, n) int64, for every copy of one unit: offset in the ring, offset in the cache, bytes.
        extents: (3, m) int64, for every extent of a whole granule: bytes from the granule's host address, bytes from
            its ring address, bytes.
        nbytes: bytes of a granule in the ring, padding included.
        alignment: largest power of two that divides every address and size that the ring's kernel uses.
        host: (2, n) int64, for every copy of one unit: offset on the host, bytes.
    """

    granule_units: int
    unit_hosts: Int64Array
    unit_rings: Int64Array
    runs: Int64Array
    extents: Int64Array
    nbytes: int
    alignment: int
    host: Int64Array

    def part(self, first: int, last: int) -> Int64Array:
        """Return the extents (3, m) of units ``first`` to ``last``, at their offsets in the whole granule."""
        if last - first == self.granule_units:
            return self.extents
        made = self._parts.get((first, last))
        if made is None:
            host, size = self.host
            starts = (self.unit_hosts[first:last, None] + host).ravel()
            begin, length = merge_ranges(starts, np.tile(size, last - first))
            at = np.searchsorted(self.extents[0], begin, side="right") - 1
            made = self._parts[first, last] = np.stack(
                (begin, self.extents[1, at] + begin - self.extents[0, at], length)
            )
        return made

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Int64Array]:
        return {}


def stage(group: RunGroup, *, host_is_src: bool) -> Staging:
    """Place the runs of a run group in a ring.

    A host block is one granule if the runs of all its units keep their distances in the ring. That is so if the units
    of a block are contiguous together, or if each unit is contiguous.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((2, 2, 64, 64), np.int8))
    >>> made = stage(kvplan.compile(gpu, host).program.groups[0], host_is_src=False)
    >>> made.granule_units, made.extents[2], made.runs.tolist()
    (4, array([8192]), [[0, 4096], [0, 8192], [1024, 1024]])
    """
    src, dst, size = group.offsets
    host, cache = (src, dst) if host_is_src else (dst, src)
    axis, there = (group.src, group.dst) if host_is_src else (group.dst, group.src)
    steps = gcd(there.step(), group.dst_base if host_is_src else group.src_base, GRAIN)
    units = np.array(axis.units, dtype=np.int64)
    return _stage(steps, units, host, cache, size)


def _stage(steps: int, units: Int64Array, host: Int64Array, cache: Int64Array, size: Int64Array) -> Staging:
    """Place these units in the ring as one granule. If they do not keep their distances, a granule is one unit."""
    starts = (units[:, None] + host).ravel()
    at, lengths = merge_ranges(starts, np.tile(size, units.size))
    padded = -(-lengths // GRAIN) * GRAIN
    rings = np.cumsum(padded) - padded
    index = np.searchsorted(at, starts, side="right") - 1
    places = (rings[index] + starts - at[index]).reshape(units.size, -1)
    moved = places[:, 0] - places[0, 0]
    if np.any(places != places[0] + moved[:, None]):  # never true for one unit
        return _stage(steps, np.zeros(1, dtype=np.int64), host, cache, size)
    runs = np.stack((places[0], cache, size))
    common = int(np.gcd.reduce(np.concatenate([runs.ravel(), moved, [steps]])))
    extents = np.stack((at, rings, lengths))
    return Staging(units.size, units, moved, runs, extents, int(padded.sum()), common & -common, np.stack((host, size)))


_known: weakref.WeakKeyDictionary[RunGroup, dict[bool, Staging]] = weakref.WeakKeyDictionary()


def staging_of(group: RunGroup, direction: str) -> Staging:
    """Return the staging of a run group for a ``"load"`` or another direction. It is kept with the run group.

    >>> import kvplan
    >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 16, 64), np.int8))
    >>> group = kvplan.compile(layout, layout).program.groups[0]
    >>> staging_of(group, "load") is staging_of(group, "load")
    True
    """
    load, made = direction == "load", _known.get(group)
    if made is None:
        made = _known.setdefault(group, {})
    if load not in made:
        made[load] = stage(group, host_is_src=load)
    return made[load]
