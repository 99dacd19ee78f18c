"""Cut a plan into chunks of a slot's size: one process gathers a chunk, and another one scatters it.

Both processes have the two layouts, so they compile the same program, and cut it by the same rule. Only block ids and
chunks travel between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams
from kvplan.plan.layers import cut_programs, even_edges
from kvplan.plan.packing import Section, sections_of
from kvplan.plan.placement import unit_addresses
from kvplan.plan.plan import Plan, PlannedBy, PlanSource, direction_of, seams_of
from kvplan.plan.row_plans import RowProgram

SIDES = ("src", "dst")


class Outline(NamedTuple):
    """What both processes know of the units of one program, besides their block ids.

    Attributes:
        program: the program.
        skips: units that are skipped in the first block, of each side.
        units: number of units.
    """

    program: PlannedBy
    skips: tuple[int, int]
    units: int


class Piece(NamedTuple):
    """Units of one size.

    Attributes:
        source: number of the outline.
        program: the program; if the transfer is by layer, that of some layers.
        group: number of the run group in the program.
        section: the bytes of each unit: all of them, or those of a part of a large unit.
        units: number of units.
    """

    source: int
    program: PlannedBy
    group: int
    section: Section
    units: int


class Span(NamedTuple):
    """Units of a piece that lie in one chunk, one behind the other.

    Attributes:
        piece: the piece.
        first: number of the first one in its piece.
        units: number of units.
        at: offset of the first one in the chunk.
    """

    piece: Piece
    first: int
    units: int
    at: int


class Chunk(NamedTuple):
    """What lies in one slot.

    Attributes:
        spans: the units.
        nbytes: their bytes.
        group: number of the group of layers.
    """

    spans: tuple[Span, ...]
    nbytes: int
    group: int


class Chunks:
    """A transfer in chunks of whole units, each of them at most a slot.

    Args:
        outlines: the joined programs, one after another.
        most: bytes of a slot. A larger unit than a sixteenth of it is cut, so that chunks fill their slots.
        groups: most groups of layers, which follow one another. A program whose units would change with its layers has
            one group.

    Attributes:
        chunks: the chunks, in order.
        layers: for each group, the global numbers of its layers.
        outlines: as given.

    >>> import kvplan
    >>> a, b = np.arange(64, dtype=np.uint8).reshape(4, 2, 8), np.zeros((2, 4, 8), np.uint8)
    >>> src = kvplan.KVLayout.from_tensors("block layer dim", a)
    >>> dst = kvplan.KVLayout.from_tensors("layer block dim", b)
    >>> plan = kvplan.compile(src, dst).plan([3, 0], [1, 2])
    >>> cut = Chunks(outlines_of(plan), 256)
    >>> [(chunk.nbytes, [span.units for span in chunk.spans]) for chunk in cut.chunks]
    [(32, [2])]
    >>> [cut.ids(sources_of(plan), 0, side).tolist() for side in (0, 1)]
    [[3, 0], [1, 2]]
    """

    def __init__(self, outlines: Sequence[Outline], most: int, groups: int = 1) -> None:
        self.outlines = tuple(outlines)
        cut = layer_pieces(self.outlines, groups)
        self.layers = tuple([layers for layers, _ in cut])
        self.chunks: list[Chunk] = []
        for number, (_, some) in enumerate(cut):
            pieces = [
                Piece(source, program, row, section, self.outlines[source].units)
                for source, program in some
                if self.outlines[source].units
                for row, group in enumerate(program.program.groups)
                for section in sections_of(group, most)
            ]
            pieces.sort(key=lambda piece: -piece.section.grain)  # widest first: all of them stay aligned in a chunk
            self.chunks += _cut(pieces, most, number)
        self._halves: dict[tuple[int, int], _Shared] = {}

    def ids(self, sources: Sequence[PlanSource], number: int, side: int) -> Int64Array:
        """Return the block ids of one side that a chunk touches, span by span."""
        blocks = [
            sources[span.piece.source].ids[side][first:last]
            for span in self.chunks[number].spans
            for first, last, _ in [self._reach(span, side)]
        ]
        return np.concatenate(blocks) if len(blocks) != 1 else blocks[0]

    def _reach(self, span: Span, side: int) -> tuple[int, int, int]:
        """Return the place of a span's blocks among the ids of a side, and the units to skip in the first one."""
        outline = self.outlines[span.piece.source]
        units = span.piece.program.sides[side].units
        first = span.first + outline.skips[side]
        return first // units, (first + span.units - 1) // units + 1, first % units

    def plan(self, number: int, side: int, ids: Int64Array, own: Sequence[KVLayout], ring: KVLayout, slot: int) -> Plan:
        """Plan to gather a chunk to a slot, or to scatter it from there.

        Args:
            number: number of the chunk.
            side: 0: from the source to the slot. 1: from the slot to the destination.
            ids: block ids of the side, as :meth:`ids` returns them.
            own: layouts of this process that hold all units.
            ring: layout of the ring.
            slot: address of the slot, a multiple of 256.

        Raises:
            BlockIndexError: an id is out of range.
            KVPlanError: there are not so many ids in the chunk.
        """
        chunk, parts, at = self.chunks[number], list[Part](), 0
        for span in chunk.spans:
            piece = span.piece
            first, last, skip = self._reach(span, side)
            some, at = ids[at : at + last - first], at + last - first
            if some.size != last - first:
                raise KVPlanError(f"chunk {number} has {ids.size} ids, which are not enough")
            units = np.empty((2, span.units), np.int64)
            place = piece.program.sides[side]
            units[side] = unit_addresses(place, piece.group, some, skip, span.units, SIDES[side])
            start, step = slot + span.at, piece.section.unit_nbytes
            units[1 - side] = np.arange(start, start + span.units * step, step)
            parts.append(Part(piece.section.dst if side else piece.section.src, units))
        shared = self._shared(side, own, ring)
        count = sum([span.units for span in chunk.spans])
        skips = ((0, 0),) * len(parts)
        return Plan(
            tuple(parts), count, chunk.nbytes, shared.direction, shared.layouts, shared.seams, skips, shared.programs
        )

    def _shared(self, side: int, own: Sequence[KVLayout], ring: KVLayout) -> _Shared:
        """Return what all plans of a side share."""
        known = self._halves.get((side, id(ring)))
        if known is None:
            pairs = tuple([(ring, layout) if side else (layout, ring) for layout in own])
            programs = tuple([RowProgram(*pair) for pair in pairs])
            marks = seams_of(own), seams_of([ring])
            seams = Seams(*(marks[::-1] if side else marks))
            known = self._halves[side, id(ring)] = _Shared(programs, pairs, direction_of(*pairs[0]), seams)
        return known


class _Shared(NamedTuple):
    programs: tuple[RowProgram, ...]
    layouts: tuple[tuple[KVLayout, KVLayout], ...]
    direction: str
    seams: Seams


def sources_of(plan: Plan) -> tuple[PlanSource, ...]:
    """Return the programs and block ids that a plan was made from; () if it does not know them.

    The ids of rows are their addresses, divided by what divides all of them.
    """
    if plan.sources or not all(isinstance(program, RowProgram) for program in plan.programs):
        return plan.sources
    src, dst = plan.layouts[0]
    rows = []
    for group, units in plan.parts:
        program = RowProgram(src, dst, group)
        step = group.src.step()
        rows.append(PlanSource(program, (units[0] // step, units[1] // step), (0, 0), units.shape[1]))
    return tuple(rows)


def outlines_of(plan: Plan) -> list[Outline]:
    """Return what both processes know of a plan."""
    return [Outline(source.program, source.skips, source.units) for source in sources_of(plan)]


_Programs = list[tuple[int, PlannedBy]]


def layer_pieces(outlines: Sequence[Outline], groups: int) -> list[tuple[frozenset[int], _Programs]]:
    """Cut the programs by layers; return each group's layers, and its programs, each with its outline's number."""
    programs = [outline.program for outline in outlines]
    layers = sorted({layer for program in programs for layer in program.src.layers})
    edges = even_edges(len(layers), groups)
    pieces = cut_programs(programs, layers, edges) if len(edges) > 2 else None
    return pieces or [(frozenset(layers), list(enumerate(programs)))]


def _cut(pieces: Sequence[Piece], most: int, group: int) -> Iterator[Chunk]:
    """Cut units of several sizes, one behind the other, into chunks of whole units."""
    spans, at = list[Span](), 0
    for piece in pieces:
        first, nbytes = 0, piece.section.unit_nbytes
        if nbytes > most:
            raise KVPlanError(f"a unit has {nbytes:,} bytes, and a slot {most:,}")
        while first < piece.units:
            units = min((most - at) // nbytes, piece.units - first)
            if units:
                spans.append(Span(piece, first, units, at))
                first, at = first + units, at + units * nbytes
            else:
                yield Chunk(tuple(spans), at, group)
                spans, at = [], 0
    if spans:
        yield Chunk(tuple(spans), at, group)
