"""Compiled loops that write the headers of launches and the rows of driver calls (:mod:`kvplan.cuda.rows`)."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvplan.cuda.rows import BATCH, COPY, LAUNCH, RECORD, SYNC, WAIT
from kvplan.plan.jit import brief as _brief
from kvplan.plan.jit import compiled as _compiled

HEADER: Final = 9  # words of a launch's header
LAUNCH_AT: Final = 13  # column of a line, behind its header and its kernel


@_compiled
def _put(rows, at, kind, stream, one, two, three, four):
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3] = kind, stream, one, two
    rows[at, 4], rows[at, 5], rows[at, 6], rows[at, 7] = three, four, 0, 0
    return at + 1


@_compiled
def _launch(rows, at, stream, header, kernel, programs):
    at = _put(rows, at, LAUNCH, stream, header, kernel[0], programs, kernel[1])
    rows[at - 1, 6] = kernel[2]
    return at


@_brief
def write_launches(units, lines, most, source, base, nbytes, stream, begin, end, words, rows):
    """Write launches with their headers and units. A header is a run group's; a launch has one or several.

    Args:
        units: (2, n) int64: source and destination addresses, header by header.
        lines: (headers, 15): of each header its 9 words; its kernel: function, threads of a program, bytes of shared
            memory, and rows per tile; its launch; and its number of units, all if negative.
        most: most programs of a launch.
        source, base: addresses of the headers' memory, and at which the kernels read it.
        nbytes: bytes that are copied from ``source`` to ``base`` first; 0 if the kernels read them in place.
        stream: handle of the stream.
        begin, end: events before and behind all; 0 for none.
        words: memory of the headers: the loop writes all headers, then the units of each.
        rows: (n, 8), written: at most 1 for each launch, and 3.

    Returns:
        The number of rows.
    """
    row = k = first = 0
    at = HEADER * lines.shape[0]
    if begin:
        row = _put(rows, row, RECORD, stream, begin, 0, 0, 0)
    if nbytes:
        row = _put(rows, row, COPY, stream, base, source, nbytes, 0)
    while k < lines.shape[0]:
        total, opening = 0, k
        while k < lines.shape[0] and lines[k, LAUNCH_AT] == lines[opening, LAUNCH_AT]:
            header, count = HEADER * k, lines[k, LAUNCH_AT + 1]
            if count < 0:
                count = units.shape[1]
            for word in range(HEADER):
                words[header + word] = lines[k, word]
            words[header] = count
            for side in range(2):
                words[header + 3 + side] = base + 8 * at
                for unit in range(first, first + count):
                    words[at] = units[side, unit]
                    at += 1
            first += count
            total += count * lines[k, 1]
            k += 1
        words[HEADER * opening + 8] = k - opening
        kernel = lines[opening, HEADER:LAUNCH_AT]
        programs = max(min(most, -(-total // kernel[3])), 1)
        row = _launch(rows, row, stream, base + 8 * HEADER * opening, kernel, programs)
    if end:
        row = _put(rows, row, RECORD, stream, end, 0, 0, 0)
    return row


@_brief
def write_chunks(
    units, load, skip, per, unit_hosts, unit_rings, extents, extent_at, seams,
    ring, slot_nbytes, first_slot, filled, freed, granule_nbytes, granules,
    line, programs, source, base, nbytes, words, least, most,
    copy, kernel, other, fork, late, begin, end, columns, chunks, rows,
):  # fmt: skip
    """Send the units of a run group through the ring of the staged path.

    One stream fills a slot, and another one empties it. Chunks use the slots in turn.

    Args:
        units: (2, n) int64: source and destination address of each unit.
        load: whether the host is the source.
        skip, per: units that the first granule lacks at its start; units per granule.
        unit_hosts, unit_rings: (per,) bytes from a granule's host address, and ring address, to its units.
        extents: (3, e): host offset, ring offset and bytes of the extents of the first granule, then of any middle
            granule, then of the last. A single granule counts as the first.
        extent_at: (4,) index of the first extent of the first granule, of a middle one, of the last; and their number.
        seams: host addresses that no copy may cross, ascending.
        ring, slot_nbytes, first_slot: address of the slots, bytes per slot, slot of the first chunk.
        filled, freed: (slots,) for each slot, the event after its last write, and after its last read.
        granule_nbytes, granules: bytes per granule in the ring; granules per chunk.
        line: (13,) or more: of the run table its header, without units, and its kernel, as in :func:`write_launches`.
        programs: programs of a launch.
        source, base, nbytes: address of the headers, that at which the kernels read them, and their bytes. The first
            chunk of a load copies them.
        words: memory of the headers: the header of each chunk, all source addresses, all destinations.
        least, most: an extent of fewer bytes has a call of its own; most extents per batch.
        copy, kernel, other: streams: for copies, for kernels, and for the kernels of every second chunk.
        fork: event after which ``other`` begins, recorded on ``kernel``; 0 if ``other`` need not wait.
        late: whether the player waits for slots in place of the streams of kernels, so that no kernel is in the GPU's
            queue before it can run. The copies of two more chunks are ahead of a load's kernel.
        begin, end: events before and behind all; 0 for none.
        columns: (3, m), written: source, destination and bytes of every extent.
        chunks: (c + 1,), written: for each chunk, its first extent.
        rows: (n, 8), written: at most 7 for each chunk, one for each extent, and 6.

    Returns:
        The number of rows, of extents, and of the calls that copy or launch.
    """
    extent = _deal(
        units, load, skip, per, unit_hosts, unit_rings, extents, extent_at, seams, ring, slot_nbytes, first_slot,
        filled.size, granule_nbytes, granules, line, base, words, columns, chunks,
    )  # fmt: skip
    row = calls = 0
    slots, count = filled.size, chunks.size - 1
    wait, behind = SYNC if late else WAIT, min(2, slots - 1) if late and load else 0
    if begin:
        row = _put(rows, row, RECORD, copy if load else kernel, begin, 0, 0, 0)
    for turn in range(count + behind):
        for filling in (True, False):
            k = turn if filling else turn - behind
            if not 0 <= k < count:
                continue
            slot, copying = (first_slot + k) % slots, filling == load
            before, after = (freed[slot], filled[slot]) if filling else (filled[slot], freed[slot])
            stream = copy if copying else other if k % 2 else kernel
            if fork and not copying and k == 0:
                row = _put(rows, row, RECORD, kernel, fork, 0, 0, 0)
                row = _put(rows, row, WAIT, other, fork, 0, 0, 0)
            row = _put(rows, row, WAIT if copying else wait, stream, before, 0, 0, 0)
            start = row
            if copying:
                row = _copies(rows, row, columns, chunks[k], chunks[k + 1], least, most, copy)
                calls += row - start
                if load and k == 0:  # after the extents, so that their copies begin sooner
                    row = _put(rows, row, COPY, copy, base, source, nbytes, 0)
            else:
                row = _launch(rows, row, stream, base + 8 * HEADER * k, line[HEADER:LAUNCH_AT], programs)
                calls += 1
            row = _put(rows, row, RECORD, stream, after, 0, 0, 0)
    if other != kernel:  # behind the last chunk of the other stream
        last = count - 1 if count % 2 == 0 else count - 2
        row = _put(rows, row, WAIT, kernel, freed[(first_slot + last) % slots], 0, 0, 0)
    if end:
        row = _put(rows, row, RECORD, kernel if load else copy, end, 0, 0, 0)
    return row, extent, calls


@_compiled
def _deal(
    units, load, skip, per, unit_hosts, unit_rings, extents, extent_at, seams, ring, slot_nbytes, first_slot,
    slots, granule_nbytes, granules, line, base, words, columns, chunks,
):  # fmt: skip
    """Place every granule in the ring; write headers, units and extents; return the number of extents."""
    count, cut = units.shape[1], chunks.size - 1
    last, end = (count - 1 + skip) // per, (count - 1 + skip) % per
    host_row = 0 if load else 1
    first_unit = HEADER * cut
    hosts, caches = first_unit + host_row * count, first_unit + (1 - host_row) * count
    at = unit = next_there = next_here = 0
    for chunk in range(cut):
        place = ring + (first_slot + chunk) % slots * slot_nbytes
        header, first, begin = HEADER * chunk, unit, at
        chunks[chunk] = at
        for granule in range(chunk * granules, min((chunk + 1) * granules, last + 1)):
            inner = skip if granule == 0 else 0
            host = units[host_row, unit] - unit_hosts[inner]
            for each in range(inner, end + 1 if granule == last else per):
                words[hosts + unit] = place + unit_rings[each]
                words[caches + unit] = units[1 - host_row, unit]
                unit += 1
            which = 0 if granule == 0 else 2 if granule == last else 1
            for each in range(extent_at[which], extent_at[which + 1]):
                there, here, left = host + extents[0, each], place + extents[1, each], extents[2, each]
                while left:
                    nbytes = left
                    if seams.size:
                        seam = np.searchsorted(seams, there, side="right")
                        if seam < seams.size:
                            nbytes = min(left, seams[seam] - there)
                    if at > begin and there == next_there and here == next_here and not seams.size:
                        columns[2, at - 1] += nbytes  # they touch on both sides
                    else:
                        columns[host_row, at], columns[1 - host_row, at], columns[2, at] = there, here, nbytes
                        at += 1
                    there, here, left = there + nbytes, here + nbytes, left - nbytes
                    next_there, next_here = there, here
            place += granule_nbytes
        for word in range(HEADER):
            words[header + word] = line[word]
        words[header] = unit - first
        words[header + 3] = base + 8 * (first_unit + first)
        words[header + 4] = base + 8 * (first_unit + count + first)
    chunks[cut] = at
    return at


@_compiled
def _copies(rows, row, columns, first, last, least, most, stream):
    """Write the calls that copy extents ``first`` to ``last - 1``; return the next row."""
    src, dst, size = columns[0].ctypes.data, columns[1].ctypes.data, columns[2].ctypes.data
    for k in range(first, last + 1):
        small = k < last and columns[2, k] < least
        if first < k and (small or k == last or k - first == most):
            row = _put(rows, row, BATCH, stream, dst + 8 * first, src + 8 * first, size + 8 * first, k - first)
            first = k
        if small:
            row = _put(rows, row, COPY, stream, columns[1, k], columns[0, k], columns[2, k], 0)
            first = k + 1
    return row


def load() -> None:
    """Compile the loops for the types of their arguments, or load them from numba's cache, by calls on small arrays."""
    one, two, rows = np.ones(1, np.int64), np.ones((2, 1), np.int64), np.zeros((32, 8), np.int64)
    words, none, bounds, line = np.zeros(32, np.int64), np.empty(0, np.int64), np.arange(4), np.ones(15, np.int64)
    write_launches(two, line[None], 1, 0, 0, 0, 0, 0, 0, words, rows)
    write_chunks(
        two, True, 0, 1, one, one, np.ones((3, 3), np.int64), bounds, none,
        0, 0, 0, one, one, 1, 1, line, 1, 0, 0, 0, words, 0, 1,
        0, 0, 0, 0, False, 0, 0, np.zeros((3, 4), np.int64), np.zeros(2, np.int64), rows,
    )  # fmt: skip
