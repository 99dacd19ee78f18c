"""Statistics of a plan for the cost model: numbers of pieces and their bytes, after merging."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, together
from kvplan.plan.halves import group_halves
from kvplan.plan.loops import loops_for
from kvplan.plan.plan import Plan
from kvplan.plan.staging import staging_of
from kvplan.program.program import RunGroup

# The driver's batch call treats copies of this size and more in another way, on H100, A30 and GB10.
LARGE = 28 << 10
CLOSE = 4  # units that lie within 4 times their bytes may touch in any order
# Marks for each unit, to find repeated distances; and units are not looked up where fewer than 1 in 4 are repeated.
MARKS, FEW_REPEATED = 16, 4


class Pieces(NamedTuple):
    """Contiguous copies of two kinds: below :data:`LARGE` bytes, and from there on.

    Attributes:
        small, large: number of copies.
        small_nbytes, large_nbytes: their bytes.
    """

    small: int = 0
    small_nbytes: int = 0
    large: int = 0
    large_nbytes: int = 0

    @classmethod
    def of(cls, count: int, nbytes: int) -> Pieces:
        """Equal copies.

        >>> Pieces.of(4, 4 * 1024), Pieces.of(2, 2 * 65536).large
        (Pieces(small=4, small_nbytes=4096, large=0, large_nbytes=0), 2)
        """
        return cls(count, nbytes, 0, 0) if nbytes < LARGE * count else cls(0, 0, count, nbytes)

    @property
    def total(self) -> int:
        """Number of copies of both kinds."""
        return self.small + self.large

    @property
    def as_one(self) -> Pieces:
        """The same bytes merged into one copy.

        >>> Pieces(3, 3072, 2, 65536).as_one, Pieces().as_one == Pieces()
        (Pieces(small=0, small_nbytes=0, large=1, large_nbytes=68608), True)
        """
        return Pieces.of(1, self.small_nbytes + self.large_nbytes) if self.total else self

    def plus(self, other: Pieces) -> Pieces:
        """The sum of both."""
        return Pieces(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Pieces:
        """These pieces ``count`` times."""
        return Pieces(*(count * a for a in self))


@dataclass(frozen=True, slots=True)
class Statistics:
    """A plan in numbers.

    Attributes:
        direction: ``"load"``, ``"store"``, ``"host"`` or ``"device"``.
        nbytes: bytes moved.
        groups: run groups, each a launch of its own on the kernel path.
        runs: copies of the factored plan, which the kernel path makes.
        alignment: bytes that divide every address and size of these runs, at most 16.
        copies: flat descriptors, after merging across units.
        calls, rows: 2-D copies, and their rows.
        rowless: single rows, which 2-D copies do not take.
        extents: contiguous pieces on the host, as the staged path copies them; empty where no side is on the host.
        granule_nbytes: the largest piece that the ring of the staged path must hold whole.
    """

    direction: str
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
        runs: copies of a unit.
        copies: the same by size.
        by_size: (bytes of a copy, copies) of a unit.
        calls, rows, rowless: of its 2-D lowering.
        granule_units, granule_nbytes: of the staged path; 1, 0 where no side is the host.
        extents: of a granule.
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


# Units of one run group, and how far they merge: the units; the pieces of one unit; the number of units; units before
# the first one in its block, of source and destination; and the pieces after merging. These are the granules on the
# host, and, where the group's copies can merge, the copies of each size in ``by_size``. A tuple without names, because
# a submit makes one.
Counted = tuple[Part, GroupFacts, int, tuple[int, int], tuple[int, ...]]


_facts: weakref.WeakKeyDictionary[RunGroup, dict[str, GroupFacts]] = weakref.WeakKeyDictionary()


def statistics_of(plan: Plan) -> Statistics:
    """Count the pieces that each path would issue for a plan.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> made = statistics_of(kvplan.compile(gpu, host).plan([1, 3], [3, 4]))
    >>> made.nbytes, made.runs, made.copies.total, made.calls, made.rows
    (8192, 8, 8, 2, 8)
    """
    return total(plan.direction, counted(plan))


def counted(plan: Plan) -> list[Counted]:
    """Look at all units of a plan, and count the merges; joined plans have one part for each group.

    Only this takes time that grows with the number of units.
    """
    if len(plan.parts) == 1:
        return [_count(plan.parts[0], plan.direction, plan.skips[0])]
    skips = {part.group: skip for part, skip in zip(plan.parts, plan.skips, strict=True)}
    parts = together([part for part in plan.parts if part.units.shape[1]])
    return [_count(part, plan.direction, skips[part.group]) for part in parts]


def _count(part: Part, direction: str, skips: tuple[int, int], known: Mapping[int, int] | None = None) -> Counted:
    """Count a part; ``known`` holds the number of copies after merging, by size, as far as known.

    A copy that touches one of another run (the end of the K plane and the start of V) is merged by the flat lowering,
    and counted as apart here: such copies are few.
    """
    group, count = part.group, int(part.units.shape[1])
    facts = facts_of(group, direction)
    granules = -(-count // facts.granule_units)
    if facts.joinable and count > facts.granule_units:
        granules -= follow(part, facts, direction, skips)
    if count < 2 or not group.chainable:
        return part, facts, count, skips, (granules,)
    left = [known[nbytes] if known else chains(part.units, nbytes) for nbytes, _ in facts.by_size]
    return part, facts, count, skips, (granules, *left)


def halves_statistics(direction: str, counts: Iterable[Counted]) -> tuple[Statistics, Statistics] | None:
    """Statistics of a counted plan's large and small runs; None where it has only one kind of them."""
    large: list[Counted] = []
    small: list[Counted] = []
    for part, facts, count, skips, (_, *left) in counts:
        known = dict(zip((nbytes for nbytes, _ in facts.by_size), left, strict=False))  # empty where nothing merges
        for side, group in zip((large, small), group_halves(part.group), strict=True):
            if group is not None and count:
                side.append(_count(Part(group, part.units), direction, skips, known))
    return (total(direction, large), total(direction, small)) if large and small else None


def total(direction: str, counts: Iterable[Counted]) -> Statistics:
    """Statistics of a plan whose units have been counted."""
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
    return Statistics(direction, nbytes, groups, runs, alignment, copies, calls, rows, rowless, extents, granule)


def facts_of(group: RunGroup, direction: str) -> GroupFacts:
    """The pieces of one unit of a group, computed once for a group and direction."""
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
    if direction not in ("load", "store"):
        return GroupFacts(group.packed.shape[1], copies, by_size, calls, rows, rowless, 1, 0, Pieces(), joinable=False)
    made = staging_of(group, direction)
    extents = Pieces()
    for nbytes in made.extents[2].tolist():
        extents = extents.plus(Pieces.of(1, nbytes))
    joinable = made.extents.shape[1] == 1 and int(made.extents[2, 0]) == made.nbytes
    fixed = (made.granule_units, made.nbytes, extents, joinable)
    return GroupFacts(group.packed.shape[1], copies, by_size, calls, rows, rowless, *fixed)


def chains(units: Int64Array, nbytes: int) -> int:
    """Count the copies of units (2, n), once units that touch on both sides are merged.

    Blocks are mostly allocated in rising or falling order, and one pass along the plan finds those that touch. Other
    orders are searched only where units lie close together, and many have one distance from source to destination.
    In random order, at most a quarter of the units then merge uncounted.

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


def follow(part: Part, facts: GroupFacts, direction: str, skips: tuple[int, int]) -> int:
    """Count the granules that begin on the host where the one before ends."""
    host = 0 if direction == "load" else 1
    first = -skips[host] % facts.granule_units
    column = part.units[host]
    return int(loops_for(column.size).rising(column, first, facts.granule_units, facts.granule_nbytes))
