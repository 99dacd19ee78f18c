"""Launches that are known: a submit of the same run group and number of units writes only the units."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple
from weakref import ref

from kvplan.cost.policy import KernelSize
from kvplan.execute.gpu.shape import Shape
from kvplan.execute.gpu.tables import Kernel, Table
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup


class Ready(NamedTuple):
    """A launch that is ready to be issued.

    Attributes:
        kernel: the kernel.
        programs: number of programs.
        header: address of the first header.
        copied: address and bytes of a pinned slot that is copied to ``header`` first; 0 bytes if it is read in place.
    """

    kernel: Kernel
    programs: int
    header: int
    copied: tuple[int, int]


def programs_of(size: KernelSize, rows: int, shape: Shape) -> int:
    """Return the number of programs of a launch: at most one for each tile of rows, and at least one."""
    return min(size.programs, -(-rows // shape.rows)) or 1


class Recipe(NamedTuple):
    """The launch of plans of one run group with a number of units between two layouts, without its header.

    Attributes:
        held: weak references to the run group and the layouts; the first that dies removes the recipe.
        table: the run table.
        programs: number of programs.
        copied: bytes of the header and the units that are copied to the GPU before the launch; 0 if they are read in
            place.
        room: bytes of the piece of an arena that holds them.
        copies: number of contiguous copies.
    """

    held: tuple[ref[RunGroup], ref[KVLayout], ref[KVLayout]]
    table: Table
    programs: int
    copied: int
    room: int
    copies: int


class Recipes:
    """The recipes of one executor, by the ids of run group and layouts, and the number of units.

    Args:
        most: most recipes that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[int, int, int, int], Recipe] = {}

    def get(self, plan: Plan) -> Recipe | None:
        """Return the recipe of a plan; None if there is none, or its run table may not be uploaded yet."""
        kind = plan.kind
        known = None if kind is None else self._known.get(kind)
        return None if known is None or known.table.fresh else known

    def keep(self, plan: Plan, table: Table, ready: Ready, room: int, copies: int) -> None:
        """Keep the recipe of a plan whose launch was prepared."""
        key = plan.kind
        if key is None:
            return
        group, (src, dst) = plan.parts[0].group, plan.layouts[0]
        if len(self._known) >= self._most:
            self._known.clear()
        forget = partial(self._known.pop, key)  # one C call, before another object can get the id
        held = ref(group, forget), ref(src, forget), ref(dst, forget)
        self._known[key] = Recipe(held, table, ready.programs, ready.copied[1], room, copies)
