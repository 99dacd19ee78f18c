"""Statistics of a plan for the cost model: numbers of pieces and their bytes, after merging."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvplan.cost.policy import HOST_ROUTES
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.loops import loops_for
from kvplan.plan.plan import Plan
from kvplan.plan.staging import staging_of
from kvplan.program.program import RunGroup

# The driver's batch call treats copies of at least this many bytes in another way, on H100, A30 and GB10.
LARGE = 28 << 10
CLOSE = 4  # units within a range of 4 times their bytes may touch in any order
SAMPLE = 32  # units that are looked at, before all units of a plan are counted
# Marks per unit, to find repeated distances. If fewer than 1 distance in 4 is repeated, units are not looked up.
MARKS, FEW_REPEATED = 16, 4


class Pieces(NamedTuple):
    """Numbers and bytes of contiguous copies: small ones of less than :data:`LARGE` bytes, and large ones.

    Attributes:
        small, large: number of copies.
        small_nbytes, large_nbytes: bytes of all these copies.
    """

    small: int = 0
    small_nbytes: int = 0
    large: int = 0
    large_nbytes: int = 0

    @classmethod
    def of(cls, count: int, nbytes: int) -> Pieces:
        """Make the pieces of ``count`` equal copies, of ``nbytes`` in all.

        >>> Pieces.of(4, 4 * 1024), Pieces.of(2, 2 * 65536).large
        (Pieces(small=4, small_nbytes=4096, large=0, large_nbytes=0), 2)
        """
        return cls(count, nbytes, 0, 0) if nbytes < LARGE * count else cls(0, 0, count, nbytes)

    @property
    def total(self) -> int:
        """Return the number of small and large copies."""
        return self.small + self.large

    @property
    def as_one(self) -> Pieces:
        """Return the pieces of one copy that has all these bytes.

        >>> Pieces(3, 3072, 2, 65536).as_one, Pieces().as_one == Pieces()
        (Pieces(small=0, small_nbytes=0, large=1, large_nbytes=68608), True)
        """
        return Pieces.of(1, self.small_nbytes + self.large_nbytes) if self.total else self

    def plus(self, other: Pieces) -> Pieces:
        """Return the sum of these pieces and ``other``."""
        return Pieces(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Pieces:
        """Return ``count`` times these pieces."""
        return Pieces(*(count * a for a in self))


@dataclass(frozen=True, slots=True)
class Statistics:
    """The counts of a plan that the cost model needs.

    Attributes:
        route: one of :data:`kvplan.cost.policy.ROUTES`; or ``"host"``, from host memory to host memory.
        nbytes: bytes that the plan moves.
        groups: number of run groups.
        runs: number of copies of the factored plan, which the kernel path makes.
        alignment: largest power of two, at most 16, that divides every address and size of these runs; bytes.
        copies: flat descriptors, after merging across units.
        calls, rows: number of 2-D copies, and of their rows.
        rowless: single rows, which 2-D copies leave out.
        extents: contiguous pieces on the host, which the staged path copies; empty if no side is on the host.
        granule_nbytes: bytes of the largest granule, which the ring of the staged path must hold whole.
    """

    route: str
    nbytes: int
    groups: int
    runs: int
    alignment: int
    copies: Pieces
    calls: int
    rows: int
    rowless: Pieces
    extents: Pieces
    granule_nbytes: int


class GroupFacts(NamedTuple):
    """The pieces of one unit of a run group.

    Attributes:
        runs: number of copies of a unit.
        copies: these copies as small and large pieces.
        by_size: (bytes of a copy, number of such copies in a unit) for each size.
        calls, rows, rowless: counts of the unit's 2-D lowering, as in :class:`Statistics`.
        granule_units, granule_nbytes: units and bytes of a granule of the staged path; 1, 0 if no side is the host.
        extents: pieces of a granule on the host.
        joinable: whether granules that are contiguous on the host are one piece in the ring, too.
    """

    runs: int
    copies: Pieces
    by_size: tuple[tuple[int, int], ...]
    calls: int
    rows: int
    rowless: Pieces
    granule_units: int
    granule_nbytes: int
    extents: Pieces
    joinable: bool


# Units of one run group, and their number of pieces after merging: the plan part; the facts of one unit; the number of
# units; the skips of source and destination; and the counts. The counts are the granules on the host and, if the
# group's copies can merge, the copies of each size in ``by_size``. A plain tuple, because every submit makes one.
Counted = tuple[Part, GroupFacts, int, tuple[int, int], tuple[int, ...]]


_facts: weakref.WeakKeyDictionary[RunGroup, dict[str, GroupFacts]] = weakref.WeakKeyDictionary()


def statistics_of(plan: Plan, route: str = "") -> Statistics:
    """Count the pieces that each path would copy for a plan.

    Args:
        plan: the plan.
        route: the plan's route, by default its direction. Between GPUs, the route depends on the executor.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> made = statistics_of(kvplan.compile(gpu, host).plan([1, 3], [3, 4]))
    >>> made.nbytes, made.runs, made.copies.total, made.calls, made.rows
    (8192, 8, 8, 2, 8)
    """
    return total(route or plan.direction, counted(plan))


def counted(plan: Plan) -> list[Counted]:
    """Read all units of a plan and count the pieces after merging, per run group.

    Only this function takes time that grows with the number of units.
    """
    if len(plan.parts) == 1:
        return [count_part(plan.parts[0], plan.direction, plan.skips[0])]
    skips = {part.group: skip for part, skip in zip(plan.parts, plan.skips, strict=True)}
    return [count_part(part, plan.direction, skips[part.group]) for part in plan.moving]


def count_part(part: Part, direction: str, skips: tuple[int, int]) -> Counted:
    """Count the pieces of a plan part after merging.

    The flat lowering also merges copies of different runs that touch, such as the end of K and the start of V.
    Here they count as separate copies: they are few.
    """
    group, count = part.group, int(part.units.shape[1])
    facts = facts_of(group, direction)
    granules = -(-count // facts.granule_units)
    if facts.joinable and count > facts.granule_units:
        granules -= follow(part, facts, direction, skips)
    if count < 2 or not group.chainable:
        return part, facts, count, skips, (granules,)
    left = [chains(part.units, nbytes) for nbytes, _ in facts.by_size]
    return part, facts, count, skips, (granules, *left)


def total(route: str, counts: Iterable[Counted]) -> Statistics:
    """Return the statistics of a plan of a route, whose units have been counted."""
    groups = runs = calls = rows = granule = nbytes = 0
    copies = rowless = extents = Pieces()
    alignment = 16
    for part, facts, count, _, (granules, *left) in counts:
        groups += 1
        nbytes += part.nbytes
        runs += facts.runs * count
        alignment = min(alignment, part.group.alignment)
        if left:
            for (size, each), chain in zip(facts.by_size, left, strict=True):
                copies = copies.plus(Pieces.of(chain * each, count * size * each))
        else:
            copies = copies.plus(facts.copies.times(count))
        calls += facts.calls * count
        rows += facts.rows * count
        rowless = rowless.plus(facts.rowless.times(count))
        whole = -(-count // facts.granule_units)
        made = facts.extents.times(whole)
        if granules < whole:  # the ring joins granules that are contiguous on the host and are one piece each
            made = Pieces.of(granules, made.small_nbytes + made.large_nbytes)
        extents = extents.plus(made)
        granule = max(granule, facts.granule_nbytes)
    return Statistics(route, nbytes, groups, runs, alignment, copies, calls, rows, rowless, extents, granule)


def facts_of(group: RunGroup, direction: str) -> GroupFacts:
    """Return the pieces of one unit of a run group, computed once for each group and direction."""
    known = _facts.get(group)
    if known is None:
        known = _facts.setdefault(group, {})
    facts = known.get(direction)
    if facts is None:
        facts = known[direction] = _facts_of(group, direction)
    return facts


def _facts_of(group: RunGroup, direction: str) -> GroupFacts:
    sizes, counts = np.unique(group.packed[2], return_counts=True)
    by_size = tuple(zip(sizes.tolist(), counts.tolist(), strict=True))
    copies = rowless = Pieces()
    for nbytes, count in by_size:
        copies = copies.plus(Pieces.of(count, nbytes * count))
    calls = rows = 0
    for run in group.runs:
        height = max((loop[0] for loop in run.loops if loop[1] > 0 and loop[2] > 0), default=1)
        if height > 1:
            calls += run.copies // height
            rows += run.copies
        else:
            rowless = rowless.plus(Pieces.of(run.copies, run.copies * run.nbytes))
    if direction not in HOST_ROUTES:
        return GroupFacts(group.packed.shape[1], copies, by_size, calls, rows, rowless, 1, 0, Pieces(), joinable=False)
    made = staging_of(group, direction)
    extents = Pieces()
    for nbytes in made.extents[2].tolist():
        extents = extents.plus(Pieces.of(1, nbytes))
    joinable = made.extents.shape[1] == 1 and int(made.extents[2, 0]) == made.nbytes
    fixed = (made.granule_units, made.nbytes, extents, joinable)
    return GroupFacts(group.packed.shape[1], copies, by_size, calls, rows, rowless, *fixed)


def chains(units: Int64Array, nbytes: int) -> int:
    """Count the copies of units (2, n) after units that touch on both sides are merged.

    Blocks are mostly allocated in rising or falling order, and one pass over the plan finds the units that touch.
    Other orders are searched only if units lie close together and many share a distance from source to destination.
    So in random order, at most a quarter of the units merge without being counted.

    >>> chains(np.array([[0, 64, 128, 640], [0, 64, 512, 1024]]), 64)
    3
    >>> chains(np.array([[128, 0, 64], [128, 0, 64]]), 64), chains(np.array([[128, 64, 0], [128, 64, 0]]), 64)
    (1, 1)
    >>> chains(np.empty((2, 0), np.int64), 64)
    0
    """
    count = int(units.shape[1])
    if count < 2:
        return count
    loops = loops_for(count)
    touching, repeated, reach = loops.adjacency(units, nbytes, np.zeros(1 << (MARKS * count).bit_length(), np.uint8))
    left = count - int(touching)
    if left <= 1 or int(reach) >= CLOSE * count * nbytes or int(repeated) * FEW_REPEATED <= count:
        return left
    slots = np.empty(1 << (2 * count - 1).bit_length(), dtype=np.int32)
    return int(loops.chain(units, nbytes, slots, np.empty((3, count), dtype=np.int64)))


def scattered(units: Int64Array) -> bool:
    """Return whether some of many units (2, n) show that at most a quarter of their copies merge.

    Copies of two units merge only if both units have the same distance from source to destination. The sample is the
    first units and units throughout the plan. Fewer units are cheap to count, so the answer for them is False.

    >>> blocks = np.arange(64) * 4096
    >>> scattered(np.stack((blocks, blocks + (1 << 20)))), scattered(np.stack((blocks, blocks[::-1] + (1 << 20))))
    (False, True)
    """
    count = units.shape[1]
    if count < 2 * SAMPLE:
        return False
    for some in (units[:, :SAMPLE], units[:, :: count // SAMPLE]):
        distances = (some[1] - some[0]).tolist()
        if (len(distances) - len(set(distances))) * FEW_REPEATED > len(distances):
            return False
    return True


def follow(part: Part, facts: GroupFacts, direction: str, skips: tuple[int, int]) -> int:
    """Count the granules that begin at the host address where the granule before them ends."""
    host = 0 if direction == "load" else 1
    first = -skips[host] % facts.granule_units
    column = part.units[host]
    return int(loops_for(column.size).rising(column, first, facts.granule_units, facts.granule_nbytes))
