"""One half of a packed transfer: plans between the units of one side and the chunks in slots of a ring."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.cached_property import cached_property
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.components import NOT_HERE
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams
from kvplan.plan.packing.pack_order import GRAIN, Place
from kvplan.plan.plan import Plan, direction_of
from kvplan.program.program import Program, RunGroup

NONE = np.empty(0, dtype=np.int64)
_SKIP = ((0, 0),)
MOST_OFFSETS = 1 << 22  # offsets of units in a chunk that are kept, for all sizes of units: 32 MiB
_offsets: dict[int, Int64Array] = {}  # by the bytes of a unit: where units begin in a chunk


class Slot(NamedTuple):
    """A slot of a ring: memory for one chunk.

    Attributes:
        layout: a layout over the whole ring, such as :func:`kvplan.plan.row_plans.layout_of` makes. All slots of a
            ring have the same one: it keeps the memory, and executors look at it once.
        address: address of the slot's first byte, a multiple of 256.
        nbytes: bytes of the slot.
    """

    layout: KVLayout
    address: int
    nbytes: int


class Span(NamedTuple):
    """Units of one section that lie one behind the other in a slot.

    Attributes:
        first: number of the first unit in its section.
        units: number of units.
        at: address of the first unit in the slot.
    """

    first: int
    units: int
    at: int


class HalfSection(NamedTuple):
    """Units of one size in one half.

    Attributes:
        group: the copies between a unit and its bytes in a chunk.
        unit_nbytes: bytes of a unit in a chunk.
        addresses: (n,) int64: address of each unit.
        place: what the addresses have in common.
    """

    group: RunGroup
    unit_nbytes: int
    addresses: Int64Array
    place: Place


class HalfProgram:
    """The program of a half's plans, between one layout and a ring; see :class:`kvplan.plan.plan.PlannedBy`."""

    def __init__(self, src: KVLayout, dst: KVLayout) -> None:
        self.src = src
        self.dst = dst
        self.program = Program(1, 1, 1, ())

    def of_layers(self, layers: tuple[int, ...]) -> HalfProgram:
        """Return the program: it has no layers."""
        del layers
        return self


class _Shared(NamedTuple):
    """The members that all plans of a half with one ring share."""

    programs: tuple[HalfProgram, ...]
    layouts: tuple[tuple[KVLayout, KVLayout], ...]
    direction: str
    seams: Seams


class HalfFacts(NamedTuple):
    """The copies that a half makes, for a model of its cost.

    Attributes:
        units: number of units.
        copies: number of contiguous copies of all units, before units that touch are merged.
        nbytes: bytes of all copies.
        alignment: largest power of two, at most 256, that divides every address and size.
    """

    units: int
    copies: int
    nbytes: int
    alignment: int


class Chunks:
    """Units of several sizes, one after another, as both halves number them.

    Args:
        sizes: for each section, its number of units and the bytes of each.

    Attributes:
        units: number of all units.
        unit_nbytes: bytes of the largest unit.
        nbytes: bytes of all units.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        self.sizes = tuple(sizes)
        begins, starts = [0], [0]
        for count, nbytes in self.sizes:
            begins.append(begins[-1] + count)
            starts.append(starts[-1] + count * nbytes)
        self._begins, self._starts = begins, starts
        self.units = begins[-1]
        self.nbytes = starts[-1]
        self.unit_nbytes = max((nbytes for _, nbytes in self.sizes), default=0)

    def _before(self, unit: int) -> int:
        """Return the bytes of all units before this one."""
        if unit >= self.units:
            return self.nbytes
        section = bisect_right(self._begins, unit) - 1
        return self._starts[section] + (unit - self._begins[section]) * self.sizes[section][1]

    def chunk_nbytes(self, first: int, last: int) -> int:
        """Return the bytes of a chunk of the units from ``first`` up to, but not including, ``last``."""
        return self._before(last) - self._before(first)

    def cuts(self, nbytes: int) -> list[int]:
        """Return the unit numbers at which chunks of at most ``nbytes`` bytes begin, and at last the number of units.

        >>> Chunks([(3, 100), (4, 50)]).cuts(250)
        [0, 2, 6, 7]

        Raises:
            KVPlanError: a unit has more bytes.
        """
        if self.unit_nbytes > nbytes:
            raise KVPlanError(
                f"a unit has {self.unit_nbytes:,} bytes and a chunk {nbytes:,}; give packing_of the bytes of a slot, "
                "most=, so that it cuts large units"
            )
        made = [0]
        while made[-1] < self.units:
            end = self._before(made[-1]) + nbytes
            section = bisect_right(self._starts, end) - 1
            if section == len(self.sizes):
                made.append(self.units)
            else:
                made.append(self._begins[section] + (end - self._starts[section]) // self.sizes[section][1])
        return made


class Half(Chunks):
    """One half of a packed transfer; :func:`half_of` and :class:`Packing` make it.

    Args:
        side: ``"src"``: it gathers units into chunks. ``"dst"``: it scatters chunks to units.
        sections: the units, by size.
        layouts: layouts that hold every unit, or that are not this process's memory.
        seams: addresses of the units' memory that no descriptor may cross.
    """

    def __init__(
        self, side: str, sections: Sequence[HalfSection], layouts: Sequence[KVLayout], seams: Int64Array
    ) -> None:
        super().__init__([(section.addresses.size, section.unit_nbytes) for section in sections])
        self.side = side
        self.sections = tuple(sections)
        self.layouts = tuple(layouts)
        self.seams = seams
        self._cache = 0 if side == "src" else 1
        self._rings: dict[int, tuple[KVLayout, _Shared]] = {}

    def part(self, first: int, last: int) -> Half:
        """Return a half of the units ``first`` up to, but not including, ``last``, in their order.

        >>> section = HalfSection(RunGroup, 64, np.arange(0, 640, 64), Place(64, 0))
        >>> part = Half("src", [section, section], [], NONE).part(8, 13)
        >>> [one.addresses.tolist() for one in part.sections], part.nbytes
        ([[512, 576], [0, 64, 128]], 320)
        """
        sections, known = list[HalfSection](), dict[tuple[int, int, int], Int64Array]()
        for begin, section in zip(self._begins, self.sections, strict=False):
            a, b = max(first - begin, 0), min(last - begin, section.addresses.size)
            if a < b:  # sections of the same addresses go on to have the same
                addresses = known.setdefault((id(section.addresses), a, b), section.addresses[a:b])
                sections.append(section._replace(addresses=addresses))
        return Half(self.side, sections, self.layouts, self.seams)

    def plan(self, first: int, last: int, slot: Slot) -> Plan:
        """Plan the copies between the units ``first`` up to, but not including, ``last`` and one slot.

        Args:
            first, last: numbers of units, as :meth:`cuts` returns them.
            slot: the memory of the chunk.

        Raises:
            KVPlanError: there are no such units; or the slot is too small, or not aligned.
            LayoutError: the units are not memory of this process, or they are read-only and would be written.
        """
        return self.plan_all([(first, last, slot)])

    def plan_all(self, chunks: Sequence[tuple[int, int, Slot]]) -> Plan:
        """Plan the copies of several chunks, each with its slot, as one plan.

        Args:
            chunks: the arguments of :meth:`plan` for each, at least one. All slots are of one ring.

        Raises:
            KVPlanError, LayoutError: as for :meth:`plan`.
        """
        layout = chunks[0][2].layout
        ring = self._rings.get(id(layout))
        programs, layouts, direction, seams = self._ring(layout) if ring is None else ring[1]
        spans: dict[int, list[Span]] = {}  # by section
        units = nbytes = 0
        for first, last, slot in chunks:
            if slot.layout is not layout:
                raise KVPlanError("the chunks of one plan have slots of two rings; give slots of one ring")
            nbytes += self._spans(spans, first, last, slot)
            units += last - first
        parts = tuple([self._part(number, some) for number, some in spans.items()])
        return Plan(parts, units, nbytes, direction, layouts, seams, _SKIP * len(parts), programs)

    def _spans(self, spans: dict[int, list[Span]], first: int, last: int, slot: Slot) -> int:
        """Add the units of one chunk to the spans of their sections; return the chunk's bytes."""
        if not 0 <= first <= last <= self.units:
            raise KVPlanError(f"units {first} to {last} of a half of {self.units}; give 0 <= first <= last <= units")
        if slot.address % GRAIN:
            raise KVPlanError(f"a slot begins at {slot.address:#x}; give an address that is a multiple of {GRAIN}")
        at, unit, section = slot.address, first, bisect_right(self._begins, first) - 1
        while unit < last:
            begin = self._begins[section]
            count = min(last, self._begins[section + 1]) - unit
            if count:
                spans.setdefault(section, []).append(Span(unit - begin, count, at))
                at += count * self.sizes[section][1]
                unit += count
            section += 1
        total = at - slot.address
        if total > slot.nbytes:
            raise KVPlanError(f"units {first} to {last} have {total:,} bytes; the slot has {slot.nbytes:,}")
        return total

    def _part(self, number: int, spans: Sequence[Span]) -> Part:
        """Return the copies of some units of one section."""
        group, nbytes, addresses, _ = self.sections[number]
        units = np.empty((2, sum([count for _, count, _ in spans])), np.int64)
        cache, done = self._cache, 0
        for first, count, at in spans:
            units[cache, done : done + count] = addresses[first : first + count]
            np.add(self.offsets_of(nbytes, count), at, units[1 - cache, done : done + count])
            done += count
        return Part(group, units)

    def offsets_of(self, nbytes: int, count: int) -> Int64Array:
        """Return where units of a size begin, one behind the other: all chunks of all halves share one array.

        ``np.arange`` for each chunk would let another thread take the interpreter, whatever the size of the array.
        """
        known = _offsets.get(nbytes)
        if known is None or known.size < count:
            known = np.arange(0, count * nbytes, nbytes, dtype=np.int64)
            known.flags.writeable = False
            if sum([some.size for some in list(_offsets.values())]) + count > MOST_OFFSETS:
                _offsets.clear()
            if count <= MOST_OFFSETS:
                _offsets[nbytes] = known
        return known[:count]

    def _ring(self, ring: KVLayout) -> _Shared:
        """Make what all plans with a ring share."""
        for layout in self.layouts:
            if layout.addresses != "memory":
                raise LayoutError(
                    f"the addresses of {layout!r} are {NOT_HERE[layout.addresses]}; its own process plans this half, "
                    "from the recipe"
                )
        gather = self.side == "src"
        pairs = [(layout, ring) if gather else (ring, layout) for layout in self.layouts]
        programs = tuple([HalfProgram(*pair) for pair in pairs])
        marks = np.array(ring.seams, dtype=np.int64)
        seams = Seams(self.seams, marks) if gather else Seams(marks, self.seams)
        direction = direction_of(*pairs[0]) if pairs else "host"
        shared = _Shared(programs, tuple(pairs), direction, seams)
        self._rings[id(ring)] = ring, shared
        return shared

    @cached_property
    def facts(self) -> HalfFacts:
        """The copies of this half, for a model of its cost."""
        copies = sum(section.addresses.size * section.group.packed.shape[1] for section in self.sections)
        alignment = min((min(section.group.alignment, GRAIN) for section in self.sections), default=GRAIN)
        return HalfFacts(self.units, copies, self.nbytes, alignment)
