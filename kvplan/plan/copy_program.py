"""Copy programs: compile a pair of layouts once, then plan transfers between them by block ids."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from kvplan.base.files import LIMITS
from kvplan.base.process import cached_property
from kvplan.base.values import optional_integer
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.tensors import check_held
from kvplan.plan.descriptors import Part, Seams
from kvplan.plan.placement import Side, count_units, own_block_ids, place, sides, skipped_units
from kvplan.plan.plan import Plan, PlanSource, check_not_read, direction_of, shares_memory
from kvplan.program.matching import UnwrittenHeads, check_element_types, first_retyped, match, unwritten_heads
from kvplan.program.passes import check_copies, compile_geometry, passes
from kvplan.program.program import Program

log = logging.getLogger("kvplan.plan")

# Programs in use, by the ids of their layouts. A program keeps its layouts alive, so Python does not reuse their ids
# while the entry exists. The references are weak, so this cache keeps no tensor alive.
_in_use: WeakValueDictionary[tuple[int, int], CopyProgram] = WeakValueDictionary()


def compile(src: KVLayout, dst: KVLayout, *, reinterpret: bool = False) -> CopyProgram:  # the contract's name
    """Compile the copy program from one layout to another. The program is cached for this pair of layouts.

    Components are matched by (layer, part), heads by their global numbers, and blocks by their common unit of tokens.

    Args:
        src: layout to read.
        dst: layout to write.
        reinterpret: whether bytes of one number format (bf16, fp16, an fp8 format, fp32) may be read as another one. A
            copy converts no numbers. Integers and unknown types are plain bytes, which go with everything.

    Raises:
        IncompatibleLayoutsError: one side lacks a layer or part, no head is common, block sizes have no common unit,
            or number formats differ without ``reinterpret``.
        LayoutError: the memory of a tensor has changed since the layout was made from it.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block kv head token dim", np.zeros((8, 2, 2, 64, 64), np.int8))
    >>> program = kvplan.compile(gpu, host)
    >>> program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes
    (16, 4096, 64, (64, 64))
    """
    for name, value in (("src", src), ("dst", dst)):
        if not isinstance(value, KVLayout):
            raise TypeError(f"{name} is a {type(value).__name__}; compile takes two KVLayouts")
    program = compile_quietly(src, dst, reinterpret=reinterpret)
    if not program.told:
        program.told = True
        for heads in program.unwritten:
            log.warning(
                "%s: %s; if that is meant, compile to a slice of the destination: dst.slice(heads=...)",
                str(program),  # text, because a record that is kept must keep no memory
                heads,
                extra={"kvplan_layers": heads.layers, "kvplan_heads": heads.heads},
            )
    return program


def compile_quietly(src: KVLayout, dst: KVLayout, *, reinterpret: bool = False) -> CopyProgram:
    """Compile as :func:`compile` does, but log nothing about heads that no unit writes."""
    key = (id(src), id(dst))
    program = _in_use.get(key)
    if program is None:
        program = _in_use[key] = CopyProgram(src, dst, reinterpret=reinterpret)
    elif program.reinterprets and not reinterpret:
        check_element_types(src.geometry, dst.geometry)
    return program


def _with_heads_of(layout: KVLayout, other: KVLayout) -> KVLayout:
    """Slice a layout to the heads that the other layout also holds.

    A rank may have pinned only these heads of a shared pool. The executor checks the layouts of a plan to see whether
    its memory is reachable, so they must contain only memory that the plan touches.
    """
    if layout.heads == other.heads or not all(any(c.form.headed for c in each.components) for each in (layout, other)):
        return layout
    both = tuple(sorted({*layout.heads}.intersection(other.heads)))
    if both == tuple(layout.heads):
        return layout
    try:
        return layout.slice(heads=both)
    except LayoutError:  # the range cuts the factors of a split axis, so no slice holds exactly these heads
        return layout


class CopyProgram:
    """A compiled pair of layouts, which knows how to copy one unit. :func:`kvplan.compile` makes it.

    Attributes:
        src, dst: the two layouts.
        program: the compiled run groups, as plain integers.
        unit_tokens: token slots per unit: the greatest common divisor of both block sizes, or less if that would
            cut a split token axis unevenly. If all content is opaque, sub-blocks per unit.
        unit_nbytes: bytes per unit.
        runs: number of contiguous copies per unit.
        run_nbytes: bytes of the smallest and of the largest run.
        alignment: largest power of two that divides every address, stride and size.
        direction: ``"load"``, ``"store"``, ``"host"`` or ``"device"``.
        reinterprets: whether bytes of one number format are read as another one.
        sides: both sides as arrays, for the loop that places units.
    """

    def __init__(self, src: KVLayout, dst: KVLayout, *, reinterpret: bool = False) -> None:
        for layout in (src, dst):
            check_held(layout, layout.holdings)
        self.src = src
        self.dst = dst
        self.program: Program = compile_geometry(src.geometry, dst.geometry)
        if not reinterpret:
            check_element_types(src.geometry, dst.geometry)
        self.reinterprets: bool = reinterpret and first_retyped(src.geometry, dst.geometry) is not None
        self.told = False  # whether heads that it does not write were logged
        self.unit_tokens: int = self.program.unit_tokens
        self.unit_nbytes: int = self.program.unit_nbytes
        self.runs: int = self.program.runs
        if "memory" not in (src.addresses, dst.addresses):  # two files: nothing moves, and all copies may be listed
            check_copies(self.runs, LIMITS.listed)
        self.run_nbytes: tuple[int, int] = self.program.run_nbytes
        self.alignment: int = self.program.alignment
        self.direction: str = direction_of(src, dst)
        self.sides: tuple[Side, Side] = sides(self.program)
        self._units = (self.program.src_units, self.program.dst_units)
        self._layouts = ((_with_heads_of(src, dst), _with_heads_of(dst, src)),)
        self._seams = Seams(np.array(src.seams, dtype=np.int64), np.array(dst.seams, dtype=np.int64))
        self._aliased = shares_memory(src, dst)
        self._of_layers: dict[tuple[int, ...], CopyProgram] = {}

    def __copy__(self) -> Self:
        return self  # cached on its layouts, which are not copied either

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(compile, reinterpret=True) if self.reinterprets else compile, (self.src, self.dst)

    @cached_property
    def unwritten(self) -> tuple[UnwrittenHeads, ...]:
        """Heads that the destination holds, and that no unit of this program writes; ``str`` says it in words.

        Such a program is legal: it may be one of several, each of which fills its own heads of a pool. To fill a pool
        from several ranks, :func:`kvplan.reshard` checks that each byte has one writer.

        >>> import kvplan, numpy as np
        >>> rank, pool = (kvplan.KVLayout.from_tensors("block token head dim", np.zeros((4, 16, heads, 64), np.int8))
        ...               for heads in (2, 8))
        >>> print(*kvplan.compile(rank, pool).unwritten)
        6 of 8 heads of the destination (2-7) are never written by this program
        """
        return unwritten_heads(self.dst.geometry, match(self.src.geometry, self.dst.geometry))

    def plan(self, src_blocks: Any, dst_blocks: Any, src_skip: int = 0, dst_skip: int = 0) -> Plan:
        """Plan one transfer: find the source and the destination address of every unit.

        Args:
            src_blocks: source block ids in order of tokens: a sequence of int, numpy array or torch CPU tensor.
            dst_blocks: destination block ids, likewise.
            src_skip: units (not tokens) to skip at the front of the first source block. To begin at token ``t`` of that
                block, pass ``t // program.unit_tokens``. :meth:`explain` prints the unit and the range of skips.
            dst_skip: units to skip at the front of the first destination block.

        Raises:
            BlockIndexError: an id is out of range, the lists cover different units, or a skip is a block or more.
            OverlapError: a destination is named twice, or the plan writes memory that it also reads.

        >>> import kvplan, numpy as np
        >>> gpu = kvplan.KVLayout.from_tensors("block token dim", np.zeros((16, 16, 8), np.int8))
        >>> host = kvplan.KVLayout.from_tensors("block token dim", np.zeros((4, 64, 8), np.int8))
        >>> kvplan.compile(gpu, host).plan(range(11), [0, 1, 3], dst_skip=1)
        Plan(host of 11 units, 1408 bytes)
        """
        if type(src_skip) is not int or type(dst_skip) is not int:
            src_skip, dst_skip = skipped_units(src_skip, dst_skip)
        src_ids, dst_ids = own_block_ids(src_blocks, "src_blocks"), own_block_ids(dst_blocks, "dst_blocks")
        count = count_units(src_ids, dst_ids, src_skip, dst_skip, self._units, self.program)
        placed = place(*self.sides, src_ids, dst_ids, src_skip, dst_skip, count)
        parts = tuple(map(Part, self.program.groups, placed))
        skips = ((src_skip, dst_skip),) * len(parts)
        nbytes = count * self.unit_nbytes
        source = PlanSource(self, (src_ids, dst_ids), (src_skip, dst_skip), count)
        plan = Plan(parts, count, nbytes, self.direction, self._layouts, self._seams, skips, (self,), (source,))
        if self._aliased and count:
            check_not_read(plan)
        return plan

    def of_layers(self, layers: tuple[int, ...]) -> CopyProgram:
        """Return the program of some layers, which plans and moves only these. It is kept for the next call.

        Args:
            layers: global numbers of the layers.

        Raises:
            LayoutError: a layer is not in the layouts, or none is named.

        >>> import kvplan, numpy as np
        >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
        >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
        >>> program = kvplan.compile(gpu, host)
        >>> program.of_layers((0, 1)).plan([1, 2], [3, 4])
        Plan(host of 2 units, 4096 bytes)
        """
        layers = tuple(layers)
        program = self._of_layers.get(layers)
        if program is None:
            sides = (side.slice(layers=layers) for side in (self.src, self.dst))
            program = self._of_layers[layers] = CopyProgram(*sides, reinterpret=True)
        return program

    def explain(self, width: int | None = None) -> str:
        """Describe the program after each pass, as text.

        Args:
            width: maximum characters per line, at least 40; by default each fact is one line of any length.
        """
        from kvplan.program.explain import explain

        width = optional_integer("width", width, least=1, error=KVPlanError)
        sides = [f"{layout}{ADDRESSES[layout.addresses]}" for layout in (self.src, self.dst)]
        made = passes(self.src.geometry, self.dst.geometry)
        return explain(made, (sides[0], sides[1]), width, list(map(str, self.unwritten)))

    def diagram(self) -> str:
        """Draw the runs of one unit between source and destination, and return the picture as SVG text.

        Each band is a run, with the layer, part, tokens and heads that it holds. Of many runs, the first and the last
        of each loop are drawn, and the others are counted.
        """
        from kvplan.draw.copies import program_picture
        from kvplan.draw.svg import svg

        return svg(program_picture(self.program, self.src, self.dst, repr(self)))

    def _repr_html_(self) -> str:
        from kvplan.draw.svg import text_html

        return text_html(self.explain(), self.diagram())

    def __repr__(self) -> str:
        low, high = self.run_nbytes
        sizes = f"{low}" if low == high else f"{low}-{high}"
        return f"CopyProgram({self.direction}, unit of {self.program.unit_words}, {self.runs} runs of {sizes} bytes)"
