"""Lower factored plans: to flat descriptors, to 2-D rows, and to lists for NIXL.

A factored plan is a list of parts: run groups with the addresses of their units. Every lowering copies the same bytes.
The compiler has already merged adjacent runs inside a unit. Copies of the same run that touch from unit to unit are
merged while they are written. Merges of different runs, such as the last row of a block and the first row of the next
block, depend on the program only, not on block ids; most programs have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from types import ModuleType
from typing import NamedTuple

import numpy as np

from kvplan.errors import KVPlanError, PathError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.program.program import BlockAxis, Run, RunGroup, merge_adjacent

# If a program has more candidates or merges than this, it is irregular: sorting its descriptors is faster.
MAX_CANDIDATES = 1 << 20
MAX_MERGES = 256


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


class Descriptors(NamedTuple):
    """A list of contiguous copies: three C-contiguous int64 arrays of equal length.

    Attributes:
        src: source addresses.
        dst: destination addresses.
        size: bytes.
    """

    src: Int64Array
    dst: Int64Array
    size: Int64Array


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
    possible = None if chosen is loops else possible_merges(tuple(part.group for part in parts))
    if possible is None:
        made = by_sorting(parts)
    else:
        made = _expand(parts, chosen)
        if possible:
            made = _stitch(parts, possible, made)
    return cut(made, seams, max_nbytes) if seams.any or max_nbytes is not None else made


def by_sorting(parts: Sequence[Part]) -> Descriptors:
    """Lower any parts, with several times the memory of the descriptors."""
    columns = []
    for group, units in parts:
        src, dst, size = group.packed
        rows = (units[0] + src[:, None]).ravel(), (units[1] + dst[:, None]).ravel(), np.repeat(size, units.shape[1])
        columns.append(rows)
    return Descriptors(*merge_adjacent(*(np.concatenate(column) for column in zip(*columns, strict=True))))


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


def _stitch(parts: Sequence[Part], possible: Sequence[Merge], made: Descriptors) -> Descriptors:
    """Merge copies of different runs if, for this plan's units, one copy ends on both sides where another begins."""
    met: list[Int64Array] = []
    in_order: dict[int, Int64Array] = {}
    for merge in possible:
        before = parts[merge.before].units
        if merge.after not in in_order:
            after = parts[merge.after].units
            in_order[merge.after] = after[:, np.argsort(after[1])]
        src, dst = in_order[merge.after]
        at = np.minimum(np.searchsorted(dst, before[1] + merge.dst), dst.size - 1)
        units = before[1][(dst[at] == before[1] + merge.dst) & (src[at] == before[0] + merge.src)]
        if units.size:
            met.append((units[:, None] + merge.ends).ravel())
    if not met:
        return made
    bounds = np.unique(np.concatenate(met))  # destinations at which one copy ends and another begins
    some = _among(bounds, made.dst) | _among(bounds, made.dst + made.size)
    merged = merge_adjacent(*(column[some] for column in made))
    return Descriptors(*(np.concatenate((column[~some], end)) for column, end in zip(made, merged, strict=True)))


def _among(known: Int64Array, values: Int64Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each value, whether it is one of the known ones, which ascend."""
    found: np.ndarray[tuple[int], np.dtype[np.bool_]]
    found = known[np.minimum(np.searchsorted(known, values), known.size - 1)] == values
    return found


def cut(made: Descriptors, seams: Seams, max_nbytes: int | None) -> Descriptors:
    """Cut descriptors at seams, then into pieces of at most ``max_nbytes`` bytes.

    >>> none = np.array([], dtype=np.int64)
    >>> cut(Descriptors(np.array([0]), np.array([100]), np.array([30])), Seams(np.array([10]), none), 16)
    Descriptors(src=array([ 0, 10, 26]), dst=array([100, 110, 126]), size=array([10, 16,  4]))
    """
    for side, marks in enumerate(seams):
        if marks.size:
            first = np.searchsorted(marks, made[side], side="right")
            counts = np.searchsorted(marks, made[side] + made.size) - first
            some = np.flatnonzero(counts)
            index, number = _numbered(counts[some] + 1)
            index = some[index]
            mark = marks[np.minimum(first[index] + number, marks.size) - 1]
            made = _cut(made, some, index, np.where(number > 0, mark - made[side][index], 0))
    if max_nbytes is not None and made.size.max(initial=0) > max_nbytes:
        some = np.flatnonzero(made.size > max_nbytes)
        index, number = _numbered(-(-made.size[some] // max_nbytes))
        made = _cut(made, some, some[index], number * max_nbytes)
    return made


def _numbered(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return, for each of so many pieces of each thing, the number of the thing, and that of the piece in it."""
    index = np.repeat(np.arange(counts.size), counts)
    return index, np.arange(index.size) - np.repeat(np.cumsum(counts) - counts, counts)


def _cut(made: Descriptors, some: Int64Array, index: Int64Array, start: Int64Array) -> Descriptors:
    """Cut some descriptors into pieces, each given by the number of its descriptor and its first byte there."""
    if not some.size:
        return made
    last = np.append(index[1:] != index[:-1], [True])
    end = np.where(last, made.size[index], np.append(start[1:], [0]))
    pieces = made.src[index] + start, made.dst[index] + start, end - start
    return Descriptors(*(np.append(np.delete(column, some), cut) for column, cut in zip(made, pieces, strict=True)))


class Merge(NamedTuple):
    """All pairs of runs that are adjacent if two units have a given distance.

    Attributes:
        before, after: positions of two run groups: of the runs that end, and of the runs that begin there.
        src, dst: bytes from the unit of ``before`` to the unit of ``after``.
        ends: destination offsets, in the unit of ``before``, at which the runs are adjacent.
    """

    before: int
    after: int
    src: int
    dst: int
    ends: Int64Array


@lru_cache(maxsize=64)
def possible_merges(groups: tuple[RunGroup, ...]) -> tuple[Merge, ...] | None:
    """Return every merge that units of these run groups can have; None if there are too many candidates."""
    steps = gcd(*(group.src.step() for group in groups)), gcd(*(group.dst.step() for group in groups))
    src, dst, size = np.concatenate([group.packed for group in groups], axis=1)
    owner = np.repeat(np.arange(len(groups)), [group.packed.shape[1] for group in groups])
    bases = np.array([(group.src_base, group.dst_base) for group in groups], dtype=np.int64)
    src, dst = src + bases[owner, 0], dst + bases[owner, 1]
    start_keys, end_keys = _keys((src, dst), (src + size, dst + size), steps)
    order = np.argsort(start_keys, kind="stable")
    first = np.searchsorted(start_keys[order], end_keys, side="left")
    last = np.searchsorted(start_keys[order], end_keys, side="right")
    matches = last - first
    if int(matches.sum()) > MAX_CANDIDATES:
        return None
    before = np.repeat(np.arange(src.size), matches)
    within = np.arange(matches.sum()) - np.repeat(np.cumsum(matches) - matches, matches)
    after = order[np.repeat(first, matches) + within]
    # From the unit of the run that ends to the unit of the run that begins.
    src_gap = (src + size)[before] - src[after] + bases[owner[after], 0] - bases[owner[before], 0]
    dst_gap = (dst + size)[before] - dst[after] + bases[owner[after], 1] - bases[owner[before], 1]
    # A run that is adjacent to itself is a chain. Two units of one part never have the same destination.
    own = (before == after) | ((owner[before] == owner[after]) & (dst_gap == 0))
    possible = ~own & _within([(g.src, g.src_base) for g in groups], owner[before], owner[after], src_gap)
    possible &= _within([(g.dst, g.dst_base) for g in groups], owner[before], owner[after], dst_gap)
    before, after, src_gap, dst_gap = (column[possible] for column in (before, after, src_gap, dst_gap))
    ends = (dst + size)[before] - bases[owner[before], 1]
    cases = np.stack((owner[before], owner[after], src_gap, dst_gap), axis=1)
    unique, inverse = np.unique(cases, axis=0, return_inverse=True)
    if not len(unique):
        return ()
    if len(unique) > MAX_MERGES:
        return None
    order = np.lexsort((ends, inverse.ravel()))
    cuts = np.searchsorted(inverse.ravel()[order], np.arange(1, len(unique)))
    return tuple(
        Merge(int(case[0]), int(case[1]), int(case[2]), int(case[3]), met)
        for case, met in zip(unique, np.split(ends[order], cuts), strict=True)
    )


_Pairs = tuple[Int64Array, Int64Array]


def _keys(starts: _Pairs, ends: _Pairs, steps: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
    """Number the (source, destination) address pairs, so that pairs that can be equal have equal numbers.

    Addresses are taken modulo the distance between units. If there is only one unit, they are taken unchanged.
    """
    keys = np.zeros(starts[0].size + ends[0].size, dtype=np.int64)
    for start, end, step in zip(starts, ends, steps, strict=True):
        column = np.concatenate((start, end))
        values, ranks = np.unique(column % step if step else column, return_inverse=True)
        keys = keys * values.size + ranks
    return keys[: starts[0].size], keys[starts[0].size :]


def _reach(axis: BlockAxis, base: int) -> tuple[int, int]:
    """Return the lowest and the highest unit address of a side of a run group."""
    offsets = axis.table or (0, sum((count - 1) * stride for count, stride in axis.factors))
    return base + min(offsets) + min(axis.units), base + max(offsets) + max(axis.units)


def _within(
    sides: Sequence[tuple[BlockAxis, int]], before: Int64Array, after: Int64Array, gap: Int64Array
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each gap, whether units of two run groups can have this distance; sides are their axes and bases."""
    low, high = np.array([_reach(*side) for side in sides], dtype=np.int64).T
    near: np.ndarray[tuple[int], np.dtype[np.bool_]]
    near = (gap >= low[after] - high[before]) & (gap <= high[after] - low[before])
    return near


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
    index, step = _numbered(rows[:, 3])
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
    src, dst, size = pieces
    flattened = np.stack((src, dst, size, np.ones_like(size), size, size), axis=1)
    return np.concatenate((table[~crossing], flattened))


# NIXL, the transport between machines that engines use. Checked against the Python API of NIXL 1.5.1:
# ``prep_xfer_dlist`` takes an (n, 3) array of (address, length, device id), or an (n, 5) array that also has stride and
# count. All memory of a list is of one kind.
SIDES = ("src", "dst")


class NixlList(NamedTuple):
    """The list of one side of a plan, for NIXL's ``prep_xfer_dlist(agent, *made)``.

    Attributes:
        rows: int64, C-contiguous: (n, 3) of address, length and device id; or (n, 5) with stride and count.
        memory: NIXL's name for the kind of memory: ``"DRAM"`` or ``"VRAM"``.
    """

    rows: Int64Array
    memory: str

    @property
    def descriptors(self) -> int:
        """Return the number of descriptors (and so of indices) that NIXL makes of the list: each row ``count`` times.

        >>> NixlList(np.array([[0, 8, 0, 16, 4], [100, 8, 0, 8, 1]]), "DRAM").descriptors
        5
        """
        return int(self.rows[:, 4].sum()) if self.rows.shape[1] == 5 else len(self.rows)


def nixl_lists(
    made: Descriptors | StridedRows, layouts: Sequence[tuple[KVLayout, KVLayout]]
) -> tuple[NixlList, NixlList]:
    """Return the lists of both sides of a plan's copies, in the same order; see :meth:`kvplan.Plan.nixl`.

    Args:
        made: flat descriptors, or strided rows.
        layouts: (source, destination) of every joined plan, from which the device of each address is found.
    """
    order = _by_destination(made.dst)
    sides: list[tuple[Int64Array, ...]]
    if isinstance(made, StridedRows):
        rows = np.asarray(made)[order]
        sides = [(rows[:, k], rows[:, 2], rows[:, 4 + k], rows[:, 3]) for k in (0, 1)]
    else:
        size = made.size[order]
        sides = [(column[order], size) for column in (made.src, made.dst)]
    lists = []
    for k, (address, size, *rest) in enumerate(sides):
        memory, device = _device_ids([pair[k] for pair in layouts], address, SIDES[k])
        table = np.empty((len(address), 3 + len(rest)), dtype=np.int64)
        for column, values in enumerate((address, size, device, *rest)):
            table[:, column] = values
        lists.append(NixlList(table, memory))
    return lists[0], lists[1]


def _by_destination(dst: Int64Array) -> Int64Array | slice:
    """Return the order of rows by destination. All destinations differ, so both sides get the same order."""
    return slice(None) if bool((dst[1:] > dst[:-1]).all()) else np.argsort(dst)


def _device_ids(layouts: list[KVLayout], address: Int64Array, side: str) -> tuple[str, Int64Array | int]:
    """Return the kind of memory of one side, and the number of the GPU of each address."""
    if len(layouts) == 1:  # as in most plans
        return memory_of(layouts[0].device, side)
    numbers = {layout.device: memory_of(layout.device, side) for layout in layouts}
    kinds = {memory for memory, _ in numbers.values()}
    if len(kinds) > 1:
        raise PathError(f"{side} is on {' and '.join(sorted(numbers))}; a NIXL list holds one kind of memory")
    memory = kinds.pop()
    if len(numbers) == 1:
        return memory, next(iter(numbers.values()))[1]
    regions = sorted({(region.address, numbers[region.device][1]) for one in layouts for region in one.regions})
    starts, owners = (np.array(column, dtype=np.int64) for column in zip(*regions, strict=True))
    return memory, owners[np.searchsorted(starts, address, side="right") - 1]


def memory_of(device: str, what: str) -> tuple[str, int]:
    """Return NIXL's name for the memory of a device, and the device's number.

    Raises:
        PathError: the device is neither CPU nor CUDA.

    >>> memory_of("cuda:3", "src")
    ('VRAM', 3)
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise PathError(f"{what} is on {device!r}; NIXL lists are made for memory of the CPU and of CUDA devices")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


def check_side(side: object) -> int:
    """Return 0 for ``"src"``, 1 for ``"dst"``.

    Raises:
        KVPlanError: the side is neither.

    >>> check_side("dst")
    1
    """
    if side not in SIDES:
        raise KVPlanError(f"side is {side!r}; give 'src' or 'dst'")
    return SIDES.index(side)
