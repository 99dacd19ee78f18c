"""A compiled loop that writes launch headers: for the chunks of the staged path's ring."""

from __future__ import annotations

import numpy as np

from kvplan.plan.jit import compiled as _compiled


@_compiled
def deal(
    units, load, skip, per, unit_hosts, unit_rings,
    head, middle, tail,
    ring, slots, slot_nbytes, first_slot, granule_nbytes, granules,
    template, address, words, made, extra, edges,
):  # fmt: skip
    """Place every granule of a plan part in the ring, and list the copies and launches that move it.

    Args:
        units: (2, n) int64: source and destination address of each unit.
        load: whether the host is the source.
        skip, per: units that the first granule lacks at its start; units per granule.
        unit_hosts, unit_rings: (per,) bytes from a granule's host address, and ring address, to each of its units.
        head, middle, tail: (3, k) extents (host offset, ring offset, bytes) of the first, of any middle, and of the
            last granule. A single granule has the extents ``head``.
        ring, slots, slot_nbytes, first_slot: ring address, number of slots, bytes per slot, slot of the first chunk.
        granule_nbytes, granules: bytes per granule in the ring; granules per chunk.
        template, address, words: launch header (9,); address and memory of the pinned slot. The loop writes a header
            for each chunk, then the source addresses of all units, then their destination addresses.
        made, extra: (3, extra + m): source, destination, bytes of every extent, written from column ``extra`` on.
        edges: (chunks + 1,) written: index of the first extent of each chunk. Extents that touch are merged.
    """
    count = units.shape[1]
    last = (count - 1 + skip) // per
    chunks = last // granules + 1
    header = template.size
    first_unit = header * chunks
    at = extra
    host_row = 0 if load else 1
    for unit in range(count):
        granule, inner = (unit + skip) // per, (unit + skip) % per
        chunk, within = granule // granules, granule % granules
        place = ring + (first_slot + chunk) % slots * slot_nbytes + within * granule_nbytes
        words[first_unit + host_row * count + unit] = place + unit_rings[inner]
        words[first_unit + (1 - host_row) * count + unit] = units[1 - host_row, unit]
        if unit and inner:
            continue
        if not unit or not within:  # the first unit of its chunk
            at_header = header * chunk
            for k in range(header):
                words[at_header + k] = template[k]
            words[at_header + 3] = address + 8 * (first_unit + unit)
            words[at_header + 4] = address + 8 * (first_unit + count + unit)
            words[at_header] = unit
            edges[chunk] = at
        host = units[host_row, unit] - unit_hosts[inner]
        extents = head if granule == 0 else tail if granule == last else middle
        for k in range(extents.shape[1]):
            begin, there, nbytes = host + extents[0, k], place + extents[1, k], extents[2, k]
            if at > edges[chunk] and at > extra:  # merge blocks that are adjacent on the host into one copy
                last_nbytes = made[2, at - 1]
                if made[host_row, at - 1] + last_nbytes == begin and made[1 - host_row, at - 1] + last_nbytes == there:
                    made[2, at - 1] += nbytes
                    continue
            made[host_row, at], made[1 - host_row, at], made[2, at] = begin, there, nbytes
            at += 1
    edges[chunks] = at
    for chunk in range(chunks):  # replace the first unit of each chunk by its number of units
        following = words[header * (chunk + 1)] if chunk + 1 < chunks else count
        words[header * chunk] = following - words[header * chunk]


def load() -> None:
    """Compile the loops for the types of their arguments, or load them from numba's cache, by calls on small arrays."""
    one, extents = np.zeros(1, np.int64), np.zeros((3, 1), np.int64)
    deal(
        np.zeros((2, 1), np.int64), True, 0, 1, one, one, extents, extents, extents, 0, 1, 0, 0, 0, 1,  # noqa: FBT003
        np.zeros(9, np.int64), 0, np.zeros(11, np.int64), np.zeros((3, 2), np.int64), 1, np.zeros(2, np.int64),
    )  # fmt: skip
