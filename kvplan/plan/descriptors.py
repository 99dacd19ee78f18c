"""Lower factored plans to flat descriptors or to 2-D rows.

A factored plan is a list of parts: run groups with the addresses of their units. Every lowering copies the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.plan import loops, loops_numpy
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.merges import Merge, possible_merges
from kvplan.program.program import Run, RunGroup

NO_CAP = 2**62  # bytes: larger than any descriptor, and small enough that sums with it stay in int64


class Part(NamedTuple):
    """A run group with the addresses of some of its units.

    Attributes:
        group: the runs of each unit.
        units: (2, n) int64: source and destination address of each unit.
    """

    group: RunGroup
    units: Int64Array

    @property
    def nbytes(self) -> int:
        """Return the bytes that the part moves."""
        return self.group.nbytes * int(self.units.shape[1])

    @property
    def copies(self) -> int:
        """Return the contiguous copies of all units, before those that touch are merged."""
        return int(self.group.packed.shape[1] * self.units.shape[1])


class Seams(NamedTuple):
    """The addresses that no descriptor may cross, in ascending order, for each side."""

    src: Int64Array
    dst: Int64Array

    @property
    def any(self) -> bool:
        """Return whether either side has a seam."""
        return bool(self.src.size or self.dst.size)


def flat(parts: Sequence[Part], seams: Seams, max_nbytes: int | None) -> Descriptors:
    """Lower parts to the fewest descriptors; see :meth:`kvplan.Plan.descriptors`.

    Args:
        parts: parts with units, one for each run group, such as :attr:`kvplan.Plan.moving`.
        seams: addresses that no descriptor may cross.
        max_nbytes: maximum bytes per descriptor.
    """
    if not parts:
        return Descriptors(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    chosen = loops.loaded or loops.loops_for(sum(part.copies for part in parts))
    possible = None if chosen is loops_numpy else possible_merges(tuple(part.group for part in parts))
    if possible is None:
        return loops_numpy.flat([(*part.group.offsets, part.units) for part in parts], seams.src, seams.dst, max_nbytes)
    made = _expand(parts, chosen)
    if possible:
        made = _stitch(parts, possible, made, chosen)
    if seams.any or max_nbytes is not None:
        made = cut(made, seams, max_nbytes)
    return made


def together(parts: Sequence[Part]) -> Sequence[Part]:
    """Join the parts of each run group into one part. Joined plans may have several parts of one run group."""
    held: dict[RunGroup, list[Int64Array]] = {}
    for group, units in parts:
        held.setdefault(group, []).append(units)
    if len(held) == len(parts):
        return parts
    return [Part(group, np.concatenate(units, axis=1)) for group, units in held.items()]


def _expand(parts: Sequence[Part], chosen: ModuleType) -> Descriptors:
    """Return every copy of every unit. Copies of the same run are merged if they touch from one unit to the next."""
    plain: list[tuple[Int64Array, Int64Array]] = []
    chained: list[tuple[Int64Array, int, Int64Array]] = []
    total = 0
    for group, given in parts:
        count = given.shape[1]
        if count > 1 and group.chainable:
            slots = np.empty(1 << (2 * count - 1).bit_length(), dtype=np.int32)
            for nbytes, runs in group.runs_by_size:
                chains = np.empty((3, count), dtype=np.int64)
                left = chosen.chain(given, nbytes, slots, chains)
                if left == count:  # no two units merged
                    plain.append((given, runs))
                else:
                    chained.append((chains, left, runs))
                total += left * runs.shape[1]
        else:
            plain.append((given, group.packed))
            total += count * group.packed.shape[1]
    out = np.empty((3, total), dtype=np.int64)
    at = 0
    for units, runs in plain:
        at = chosen.fill(units, runs, at, out)
    for chains, left, runs in chained:
        at = chosen.fill_chains(chains, left, runs, at, out)
    return Descriptors(out[0], out[1], out[2])


def _stitch(parts: Sequence[Part], possible: Sequence[Merge], made: Descriptors, chosen: ModuleType) -> Descriptors:
    """Merge copies of different runs if, for this plan's units, one copy ends on both sides where another begins."""
    bounds: list[Int64Array] = []
    sorted_dst: dict[int, tuple[Int64Array, Int64Array]] = {}
    for merge in possible:
        before, after = parts[merge.before].units, parts[merge.after].units
        if not chosen.can_meet(before, after, merge.src, merge.dst):
            continue
        src, dst = before[0] + merge.src, before[1] + merge.dst
        if merge.after not in sorted_dst:
            order = np.argsort(after[1])
            sorted_dst[merge.after] = (after[0][order], after[1][order])
        after_src, after_dst = sorted_dst[merge.after]
        at = np.minimum(np.searchsorted(after_dst, dst), after_dst.size - 1)
        met = (after_dst[at] == dst) & (after_src[at] == src)
        if bool(met.any()):
            bounds.append((before[1][met][:, None] + merge.ends).ravel())
    if not bounds:
        return made
    left = chosen.stitch(np.unique(np.concatenate(bounds)), *made)
    return Descriptors(*(column[:left] for column in made))


def cut(made: Descriptors, seams: Seams, max_nbytes: int | None) -> Descriptors:
    """Cut descriptors at seams, and into pieces of at most ``max_nbytes`` bytes."""
    chosen = loops.loops_for(made.size.size)
    if chosen is loops_numpy:
        return loops_numpy.cut(made, *seams, max_nbytes)
    cap = NO_CAP if max_nbytes is None else min(max_nbytes, NO_CAP)
    none = np.empty(0, dtype=np.int64)
    count = int(chosen.split(*seams, cap, *made, none, none, none, write=False))
    if count == made.size.size:
        return made
    out = Descriptors(*(np.empty(count, dtype=np.int64) for _ in range(3)))
    chosen.split(*seams, cap, *made, *out, write=True)
    return out


def _column(number: int) -> property:
    return property(lambda rows: np.asarray(rows)[:, number])


class StridedRows(np.ndarray[tuple[int, int], np.dtype[np.int64]]):
    """2-D copies as an (n, 6) int64 array with named columns.

    Attributes:
        src, dst: addresses of the first row of each copy.
        width: bytes per row.
        height: number of rows.
        src_pitch, dst_pitch: bytes from the start of a row to the start of the next.

    >>> rows = np.array([[0, 64, 8, 4, 32, 16]]).view(StridedRows)
    >>> int(rows.height[0]), int(rows.src_pitch[0])
    (4, 32)
    """

    src, dst, width, height, src_pitch, dst_pitch = map(_column, range(6))


def strided(parts: Sequence[Part], seams: Seams) -> StridedRows:
    """Lower parts to one 2-D copy per run and unit. Its rows are the run's longest loop; seams cut it to flat rows."""
    blocks = [np.empty((0, 6), dtype=np.int64)]
    for group, units in parts:
        count = units.shape[1]
        for run in (piece for whole in group.runs for piece in two_dimensional(whole)):
            (height, src_pitch, dst_pitch), *_ = (*run.loops, (1, run.nbytes, run.nbytes))
            rows = np.empty((count, 6), dtype=np.int64)
            rows[:, 0], rows[:, 1] = units[0] + run.src, units[1] + run.dst
            rows[:, 2:] = (run.nbytes, height, src_pitch, dst_pitch)
            blocks.append(rows)
    table = np.concatenate(blocks)
    if seams.any:
        table = _cut_rows(table, seams)
    return table.view(StridedRows)


def two_dimensional(run: Run) -> list[Run]:
    """Split a run into 2-D copies: keep its longest forward loop, and unroll all other loops."""
    forward = [loop for loop in run.loops if loop[1] > 0 and loop[2] > 0]
    kept = max(forward, key=lambda loop: loop[0], default=None)
    pieces = [Run(run.src, run.dst, run.nbytes, (kept,) if kept else ())]
    rest = list(run.loops)
    if kept:
        rest.remove(kept)
    for count, src_step, dst_step in rest:
        pieces = [p._replace(src=p.src + k * src_step, dst=p.dst + k * dst_step) for p in pieces for k in range(count)]
    return pieces


def exploded(rows: Int64Array) -> Descriptors:
    """Return the flat descriptors of 2-D copies.

    >>> [column.tolist() for column in exploded(np.array([[0, 100, 8, 2, 16, 8], [50, 60, 4, 1, 4, 4]]))]
    [[0, 16, 50], [100, 108, 60], [8, 8, 4]]
    """
    height = rows[:, 3]
    index = np.repeat(np.arange(len(rows)), height)
    step = np.arange(index.size) - np.repeat(np.cumsum(height) - height, height)
    src, dst = (rows[index, side] + step * rows[index, 4 + side] for side in (0, 1))
    return Descriptors(src, dst, np.ascontiguousarray(rows[index, 2]))


def _cut_rows(table: Int64Array, seams: Seams) -> Int64Array:
    """Replace every 2-D copy that crosses a seam by flat rows, and cut these at the seam."""
    reach = (table[:, 3] - 1)[:, None] * table[:, 4:6] + table[:, 2:3]
    crossing = np.zeros(len(table), dtype=np.bool_)
    for side, marks in enumerate(seams):
        start = table[:, side]
        crossing |= np.searchsorted(marks, start, side="right") < np.searchsorted(marks, start + reach[:, side])
    if not crossing.any():
        return table
    pieces = cut(exploded(table[crossing]), seams, None)
    flattened = np.stack(
        (pieces.src, pieces.dst, pieces.size, np.ones_like(pieces.size), pieces.size, pieces.size), axis=1
    )
    return np.concatenate((table[~crossing], flattened))
