"""Compiled loops that write headers, unit addresses and driver calls for all layer groups of a transfer."""

from __future__ import annotations

import numpy as np

# If these numbers change, numba's cache must be emptied: numba keeps compiled code until this file changes.
from kvplan.cuda.call_list import BATCH, COPY, LAUNCH, RECORD, WAIT
from kvplan.plan.jit import brief as _compiled


@_compiled
def write_launches(
    units, steps, headers, tile_rows, most, copied, marks, stream, base, words, rows, marked, launches,
):  # fmt: skip
    """Write one launch for each piece, and list the calls: a launch, and behind it the record of the piece's event.

    Args:
        units: (2, n) int64: source and destination address of each unit.
        steps: (2, pieces) int64: bytes from a unit's addresses to those of each piece.
        headers: (pieces, 9) int64: header of each piece's run table, without units.
        tile_rows: (pieces,) rows per tile of each piece's kernel.
        most: most programs of a launch.
        copied: whether the slot is copied to ``base`` first: descriptor 0.
        marks: (pieces,) the event behind each piece.
        stream: handle of the stream.
        base: address at which the kernels read the first byte of the slot.
        words: memory of the slot. The loop writes all headers, then the source and destination addresses of each piece.
        rows: (2 * pieces + copied, 4) int64, written; see :mod:`kvplan.cuda.calls`.
        marked: (pieces,) int64, written: number of rows up to the record of each piece's event.
        launches: (pieces, 8) int64: launch words; the loop writes the number of programs.
    """
    count, (pieces, header) = units.shape[1], headers.shape
    first, at = header * pieces, 0
    if copied:
        at = _put(rows, at, COPY, 0, 0, stream)
    for k in range(pieces):
        for word in range(header):
            words[header * k + word] = headers[k, word]
        words[header * k] = count
        for side in range(2):
            words[header * k + 3 + side] = base + 8 * first
            for unit in range(count):
                words[first + unit] = units[side, unit] + steps[side, k]
            first += count
        programs = min(most, -(-count * headers[k, 1] // tile_rows[k]))
        launches[k, 1] = (1 << 32) + max(programs, 1)
        at = _put(rows, at, LAUNCH, base + 8 * header * k, k, stream)
        marked[k] = at = _put(rows, at, RECORD, marks[k], 0, stream)


@_compiled
def write_chunks(
    units, steps, load, skip, per, unit_hosts, unit_rings,
    extents, extent_at,
    ring, slot_nbytes, first_slot, busy, filled, freed, granule_nbytes, granules,
    headers, base, words, most, least, copy, kernel, marks,
    made, rows, marked,
):  # fmt: skip
    """Send the units of all pieces through the ring of the staged path, piece by piece.

    For each piece the loop writes what ``ring_loops.deal`` and ``calls.schedule`` write for one plan part. The slots
    of the ring go round over all pieces, and a load copies headers and unit addresses to the GPU only once. The calls
    of a piece end with the record of its event, when all of its chunks are done.

    Args:
        units: (2, n) int64: source and destination address of each unit.
        steps: (2, pieces) int64: bytes from a unit's addresses to those of each piece.
        load: whether the host is the source.
        skip, per: units that the first granule lacks at its start; units per granule.
        unit_hosts, unit_rings: (pieces, per) bytes from a granule's host address, and ring address, to its units.
        extents: (3, e) int64: host offset, ring offset and bytes of the extents of each piece's first granule, then of
            any middle granule, then of the last. A single granule counts as the first.
        extent_at: (3 * pieces + 1,) index of the first extent of each piece's first granule, of its middle one, ...
        ring, slot_nbytes, first_slot: address of the ring, bytes per slot, slot of the first chunk.
        busy, filled, freed: (slots,) see ``calls.schedule``.
        granule_nbytes, granules: (pieces,) bytes per granule in the ring; granules per chunk.
        headers: (pieces, 9) int64: header of each piece's run table, without units.
        base: address at which the kernels read the first byte of the slot.
        words: memory of the slot. For each piece the loop writes a header for each chunk, then the source addresses of
            all units, then their destination addresses.
        most: most extents per batch.
        least: an extent of fewer bytes has a call of its own.
        copy, kernel: streams for copies, and for kernels.
        marks: (pieces,) the event behind each piece.
        made: (3, load + m) int64: source, destination and bytes of every extent, written from column ``load`` on.
            Column 0 of a load is the copy of the slot.
        rows: (n, 4) int64, written; see :mod:`kvplan.cuda.calls`. Room for m + 7 rows for each chunk and 4 for each
            piece is enough.
        marked: (pieces,) int64, written: number of rows up to the record of each piece's event.

    Returns:
        The number of rows, of extents, and of the driver calls that count: launches, and batches or single copies.
    """
    count, (pieces, header), slots = units.shape[1], headers.shape, filled.size
    last, end = (count - 1 + skip) // per, (count - 1 + skip) % per
    host_row = 0 if load else 1
    start = at = 1 if load else 0
    row = number = offset = calls = next_there = next_here = 0
    for k in range(pieces):
        chunks = last // granules[k] + 1
        host_step, cache_step = steps[host_row, k], steps[1 - host_row, k]
        first_unit = offset + header * chunks
        hosts, caches = first_unit + host_row * count, first_unit + (1 - host_row) * count
        unit = granule = copies = 0
        for chunk in range(chunks):
            slot = (first_slot + number) % slots
            place = ring + slot * slot_nbytes
            at_header, first, begin = offset + header * chunk, unit, at
            for granule in range(chunk * granules[k], min((chunk + 1) * granules[k], last + 1)):
                inner = skip if granule == 0 else 0
                host = units[host_row, unit] + host_step - unit_hosts[k, inner]
                for each in range(inner, end + 1 if granule == last else per):
                    words[hosts + unit] = place + unit_rings[k, each]
                    words[caches + unit] = units[1 - host_row, unit] + cache_step
                    unit += 1
                which = k if granule == 0 else k + 2 * pieces if granule == last else k + pieces
                for each in range(extent_at[which], extent_at[which + 1]):
                    there, here, nbytes = host + extents[0, each], place + extents[1, each], extents[2, each]
                    if at > begin and there == next_there and here == next_here:  # they touch on both sides
                        made[2, at - 1] += nbytes
                    else:
                        made[host_row, at], made[1 - host_row, at], made[2, at] = there, here, nbytes
                        at += 1
                    next_there, next_here = there + nbytes, here + nbytes
                place += granule_nbytes[k]
            for word in range(header):
                words[at_header + word] = headers[k, word]
            words[at_header] = unit - first
            words[at_header + 3] = base + 8 * (first_unit + first)
            words[at_header + 4] = base + 8 * (first_unit + count + first)
            if number >= slots or busy[number]:
                row = _put(rows, row, WAIT, freed[slot], 0, copy if load else kernel)
            for copying in (load, not load):
                if copying:
                    before = row
                    row = _copies(rows, row, made, begin, at, least, most, copy)
                    copies += row - before
                    if load and number == 0:  # after the extents, so that their copies begin sooner
                        row = _put(rows, row, COPY, 0, 0, copy)
                else:
                    row = _put(rows, row, LAUNCH, base + 8 * at_header, k, kernel)
                if copying == load:
                    row = _put(rows, row, RECORD, filled[slot], 0, copy if load else kernel)
                    row = _put(rows, row, WAIT, filled[slot], 0, kernel if load else copy)
            row = _put(rows, row, RECORD, freed[slot], 0, kernel if load else copy)
            number += 1
        marked[k] = row = _put(rows, row, RECORD, marks[k], 0, kernel if load else copy)
        calls += chunks + copies
        offset = first_unit + 2 * count
    return row, at - start, calls


@_compiled
def _put(rows, at, call, one, end, stream):
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3] = call, one, end, stream
    return at + 1


@_compiled
def _copies(rows, row, made, first, last, least, most, stream):
    """List the calls that copy extents ``first`` to ``last - 1``; return the next row."""
    for k in range(first, last):
        small = made[2, k] < least
        if (small and first < k) or k - first == most:
            row = _put(rows, row, BATCH, first, k, stream)
            first = k
        if small:
            row = _put(rows, row, COPY, k, 0, stream)
            first = k + 1
    if first < last:
        row = _put(rows, row, BATCH, first, last, stream)
    return row


def load() -> None:
    """Compile the loops for the types of their arguments, or load them from numba's cache, by calls on small arrays."""
    one, two = np.ones(1, np.int64), np.ones((2, 1), np.int64)
    words, rows, bounds = np.zeros(32, np.int64), np.zeros((32, 4), np.int64), np.arange(4)
    extents, headers = np.zeros((3, 3), np.int64), np.ones((1, 9), np.int64)
    write_launches(two, two, headers, one, 1, False, one, 0, 0, words, rows, one, np.ones((1, 8), np.int64))  # noqa: FBT003
    write_chunks(
        two, two, True, 0, 1, two[:1], two[:1], extents, bounds,  # noqa: FBT003
        0, 0, 0, np.zeros(1, np.bool_), one, one, one, one, headers, 0, words, 1, 0, 0, 0, one,
        np.zeros((3, 2), np.int64), rows, one,
    )  # fmt: skip
