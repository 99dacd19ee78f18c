"""The public face of compiling: two layouts in, a program that plans transfers out."""

from __future__ import annotations

from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from kvplan.base.integers import optional_integer
from kvplan.errors import KVPlanError, LayoutError
from kvplan.layout.holding import check_held, questions
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.place_words import ADDRESSES
from kvplan.layout.slicing import common_heads
from kvplan.plan.descriptors import Part, Seams
from kvplan.plan.placement import block_ids, count_units, place, sides, skipped_units
from kvplan.plan.plan import Plan, check_not_read, direction_of, shares_memory
from kvplan.program.passes import compile_geometry, passes
from kvplan.program.program import Program

# Programs in use, by the identity of their layouts. A program holds its layouts, so that an identity stays theirs for
# as long as the entry lives; nothing here keeps a tensor alive.
_in_use: WeakValueDictionary[tuple[int, int], CopyProgram] = WeakValueDictionary()


def compile(src: KVLayout, dst: KVLayout) -> CopyProgram:  # noqa: A001  # the contract's name
    """Compile the copy program from one layout to another; cached on the pair.

    Parts are matched by (layer, part), heads by their global numbers, blocks through their common unit of tokens.

    Args:
        src: layout to read.
        dst: layout to write.

    Raises:
        IncompatibleLayoutsError: what one side lacks and is not sliced away, or where the two do not meet.
        LayoutError: a tensor that has other memory than when it was described.

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
    key = (id(src), id(dst))
    program = _in_use.get(key)
    if program is None:
        program = CopyProgram(src, dst)
        _in_use[key] = program
    return program


def _met(layout: KVLayout, other: KVLayout) -> KVLayout:
    """A layout with the heads that the other holds too.

    A rank may have pinned those of a shared pool and no others, and whether a GPU reaches a plan's memory is asked of
    its layouts.
    """
    if layout.heads == other.heads or not all(any(c.form.headed for c in each.components) for each in (layout, other)):
        return layout
    both = common_heads((layout.heads, other.heads))
    if both == layout.heads:
        return layout
    try:
        return layout.slice(heads=both)
    except LayoutError:  # a range across the factors of a split axis, which is no slice
        return layout


class CopyProgram:
    """How to copy one unit of one layout into another. Made by :func:`kvplan.compile`.

    Attributes:
        src, dst: the two layouts.
        program: the compiled run groups, plain integers.
        unit_tokens: token slots a unit: the greatest common divisor of both block sizes, or less where a split token
            axis is cut unevenly by that. Where all content is opaque, sub-blocks a unit.
        unit_nbytes: bytes a unit.
        runs: contiguous copies a unit.
        run_nbytes: bytes of the smallest and of the largest of them.
        alignment: largest power of two that divides every address, stride and size.
        direction: ``"load"``, ``"store"``, ``"host"`` or ``"device"``.
    """

    def __init__(self, src: KVLayout, dst: KVLayout) -> None:
        for layout in (src, dst):
            check_held(layout, layout.holdings)
        self.src = src
        self.dst = dst
        self.program: Program = compile_geometry(src.geometry, dst.geometry)
        self.unit_tokens: int = self.program.unit_tokens
        self.unit_nbytes: int = self.program.unit_nbytes
        self.runs: int = self.program.runs
        self.run_nbytes: tuple[int, int] = self.program.run_nbytes
        self.alignment: int = self.program.alignment
        self.direction: str = direction_of(src, dst)
        self._sides = sides(self.program)
        self._units = (self.program.src_units, self.program.dst_units)
        self._layouts = ((_met(src, dst), _met(dst, src)),)
        self._seams = Seams(np.array(src.seams, dtype=np.int64), np.array(dst.seams, dtype=np.int64))
        self._aliased = shares_memory(src, dst)
        self._of_layers: dict[tuple[int, ...], Program] = {}
        # What a submit looks at, as often as there are submits.
        self.movable = src.addresses == dst.addresses == "memory" and dst.writable
        self.questions = questions(src.holdings, dst.holdings)

    def __copy__(self) -> Self:
        return self  # cached on its layouts, which are not copied either

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return compile, (self.src, self.dst)

    def plan(self, src_blocks: Any, dst_blocks: Any, src_skip: int = 0, dst_skip: int = 0) -> Plan:
        """Plan one transfer: which units go where.

        Args:
            src_blocks: block ids in the source, in order of tokens; int sequence, numpy array or torch CPU tensor.
            dst_blocks: block ids in the destination.
            src_skip: units (not tokens) skipped at the front of the first source block, where a block holds several: to
                begin at token ``t`` of it, ``t // program.unit_tokens``. :meth:`explain` prints both.
            dst_skip: units skipped at the front of the first destination block.

        Raises:
            BlockIndexError: ids that are no blocks, lists that cover different units, a skip of a block or more.
            OverlapError: a destination named twice, or memory both read and written.

        >>> import kvplan, numpy as np
        >>> gpu = kvplan.KVLayout.from_tensors("block token dim", np.zeros((16, 16, 8), np.int8))
        >>> host = kvplan.KVLayout.from_tensors("block token dim", np.zeros((4, 64, 8), np.int8))
        >>> kvplan.compile(gpu, host).plan(range(11), [0, 1, 3], dst_skip=1)
        Plan(host of 11 units, 1408 bytes)
        """
        if type(src_skip) is not int or type(dst_skip) is not int:
            src_skip, dst_skip = skipped_units(src_skip, dst_skip)
        src_ids, dst_ids = block_ids(src_blocks, "src_blocks"), block_ids(dst_blocks, "dst_blocks")
        count = count_units(src_ids, dst_ids, src_skip, dst_skip, self._units, self.program)
        placed = place(*self._sides, src_ids, dst_ids, src_skip, dst_skip, count)
        parts = tuple(map(Part, self.program.groups, placed))
        skips = ((src_skip, dst_skip),) * len(parts)
        nbytes = count * self.unit_nbytes
        plan = Plan(parts, count, nbytes, self.direction, self._layouts, self._seams, skips, (self,))
        if self._aliased and count:
            check_not_read(plan)
        return plan

    def ready(self) -> bool:
        """Whether its plans can be moved: memory of this process, which the tensor whose turn it is still has."""
        return self.movable and (self.questions is None or next(self.questions)())

    def of_layers(self, layers: tuple[int, ...]) -> Program:
        """The program of some layers, by their global numbers, alone; kept."""
        program = self._of_layers.get(layers)
        if program is None:
            program = compile_geometry(self.src.slice(layers=layers).geometry, self.dst.slice(layers=layers).geometry)
            self._of_layers[layers] = program
        return program

    def explain(self, width: int | None = None) -> str:
        """The program after each pass, as text.

        Args:
            width: characters that no line exceeds, at least 40; by default each fact is one line, however long.
        """
        from kvplan.program.explain import explain

        width = optional_integer("width", width, least=1, error=KVPlanError)
        sides = [f"{layout}{ADDRESSES[layout.addresses]}" for layout in (self.src, self.dst)]
        return explain(passes(self.src.geometry, self.dst.geometry), (sides[0], sides[1]), width)

    def diagram(self) -> str:
        """A picture of one unit's runs between source and destination, as SVG text."""
        from kvplan.draw.diagram import diagram

        return diagram(self.program, repr(self), (str(self.src), str(self.dst)))

    def __repr__(self) -> str:
        low, high = self.run_nbytes
        sizes = f"{low}" if low == high else f"{low}-{high}"
        return f"CopyProgram({self.direction}, unit of {self.program.unit_words}, {self.runs} runs of {sizes} bytes)"
