"""Pack a plan: cut it into a gather on the source's side and a scatter on the destination's, which meet in chunks."""

from __future__ import annotations

from typing import Literal

from kvplan.errors import KVPlanError
from kvplan.plan.layers import even_edges, split_layers
from kvplan.plan.packing.chunk_half import Half, HalfSection, Slot
from kvplan.plan.packing.pack_order import SIDES, Order, Section, sections_of
from kvplan.plan.packing.pack_recipe import recipe_of
from kvplan.plan.plan import Plan


class Packing:
    """A plan as two halves. Chunks hold the bytes of units one after another, without gaps.

    Attributes:
        plan: the plan.
        src: the half that gathers units into chunks.
        dst: the half that scatters chunks to units.
        units: number of units; a unit of the plan may be several here, if it is large.
        unit_nbytes: bytes of the largest unit.
        nbytes: bytes of all units: those of the plan.
    """

    def __init__(self, plan: Plan, src: Half, dst: Half) -> None:
        self.plan = plan
        self.src = src
        self.dst = dst
        self.units = src.units
        self.unit_nbytes = src.unit_nbytes
        self.nbytes = src.nbytes

    def chunk_nbytes(self, first: int, last: int) -> int:
        """Return the bytes of a chunk of the units from ``first`` up to, but not including, ``last``."""
        return self.src.chunk_nbytes(first, last)

    def cuts(self, nbytes: int) -> list[int]:
        """Return the unit numbers at which chunks of at most ``nbytes`` bytes begin, and at last the number of units.

        Raises:
            KVPlanError: a unit has more bytes.
        """
        return self.src.cuts(nbytes)

    def gather(self, first: int, last: int, slot: Slot) -> Plan:
        """Plan the copies of some units from the source to a slot; see :meth:`Half.plan`."""
        return self.src.plan(first, last, slot)

    def scatter(self, first: int, last: int, slot: Slot) -> Plan:
        """Plan the copies of some units from a slot to the destination; see :meth:`Half.plan`."""
        return self.dst.plan(first, last, slot)

    def recipe(self, side: Literal["src", "dst"]) -> bytes:
        """Return the recipe of a half, from which the process of that side makes it with :func:`half_of`.

        Args:
            side: ``"src"``: the half that gathers. ``"dst"``: the half that scatters.

        Raises:
            KVPlanError: the side is neither ``"src"`` nor ``"dst"``; or a unit has too many runs for a recipe.
        """
        if side not in SIDES:
            raise KVPlanError(f"side is {side!r}; give 'src', which gathers, or 'dst', which scatters")
        return recipe_of(self.src if side == "src" else self.dst)

    def __repr__(self) -> str:
        return f"Packing({self.units} units, {self.nbytes} bytes)"


def packing_of(plan: Plan, order: Order = "auto", most: int | None = None) -> Packing:
    """Pack a plan.

    Args:
        plan: the plan; one side may be memory of another process.
        order: the side whose bytes keep their order in a chunk, so that its half makes long copies. ``"auto"`` takes,
            for each run group, the side with which both halves together cost least.
        most: bytes of a slot. A unit of over a sixteenth of it is cut, so that chunks fill their slots. None: no unit
            is cut.

    Raises:
        KVPlanError: the order is unknown, or ``most`` is less than 256 bytes.

    >>> import kvplan, numpy as np
    >>> from kvplan.plan.row_plans import Memory, layout_of
    >>> a, b = np.arange(64, dtype=np.uint8).reshape(4, 2, 8), np.zeros((2, 4, 8), np.uint8)
    >>> src = kvplan.KVLayout.from_tensors("block layer dim", a)
    >>> dst = kvplan.KVLayout.from_tensors("layer block dim", b)
    >>> packing = packing_of(kvplan.compile(src, dst).plan([3, 0], [1, 2]))
    >>> packing, packing.unit_nbytes, packing.cuts(16)
    (Packing(2 units, 32 bytes), 16, [0, 1, 2])
    >>> ring = np.zeros(512, np.uint8)
    >>> start = -ring.ctypes.data % 256
    >>> slot = Slot(layout_of([Memory(ring.ctypes.data, 512, "cpu", ring)]), ring.ctypes.data + start, 32)
    >>> with kvplan.Executor() as executor:
    ...     executor.submit(packing.gather(0, 2, slot)).synchronize()
    ...     executor.submit(packing.scatter(0, 2, slot)).synchronize()
    >>> ring[start : start + 32].tolist() == a[3].ravel().tolist() + a[0].ravel().tolist()
    True
    >>> bool((b[:, 1] == a[3]).all() and (b[:, 2] == a[0]).all())
    True
    """
    if order not in (*SIDES, "auto"):
        raise KVPlanError(f"order is {order!r}; give 'src', 'dst' or 'auto'")
    if most is not None and most < 256:
        raise KVPlanError(f"most is {most!r}; a slot has at least 256 bytes")
    sections: list[tuple[Section, int]] = []
    for number, part in enumerate(plan.moving):
        sections += [(section, number) for section in sections_of(part.group, order, most)]
    sections.sort(key=lambda one: -one[0].grain)  # widest first: all of them stay aligned in a chunk
    halves = []
    for side, seams in enumerate(plan.seams):
        held = [
            HalfSection(
                section.dst if side else section.src, section.unit_nbytes, plan.moving[number].units[side],
                section.places[side],
            )
            for section, number in sections
        ]  # fmt: skip
        layouts = tuple(dict.fromkeys(pair[side] for pair in plan.layouts))
        halves.append(Half(SIDES[side], held, layouts, seams))
    return Packing(plan, halves[0], halves[1])


def packings_by_layer(
    plan: Plan, groups: int, order: Order = "auto", most: int | None = None
) -> list[tuple[frozenset[int], Packing]]:
    """Pack a plan by layers: one packing for each of at most ``groups`` groups of layers, in order of layers.

    Args:
        plan: the plan.
        groups: most groups.
        order, most: see :func:`packing_of`.

    Returns:
        For each packing, the global numbers of its layers, and the packing. A plan that cannot be cut is one.

    >>> import kvplan, numpy as np
    >>> a = kvplan.KVLayout.from_tensors("layer block dim", np.zeros((4, 8, 64), np.int8))
    >>> b = kvplan.KVLayout.from_tensors("block layer dim", np.zeros((8, 4, 64), np.int8))
    >>> plan = kvplan.compile(a, b).plan([1], [2])
    >>> [(sorted(layers), packing.nbytes) for layers, packing in packings_by_layer(plan, 2)]
    [([0, 1], 128), ([2, 3], 128)]
    """
    edges = even_edges(len(plan.layers), groups)
    return [(layers, packing_of(piece, order, most)) for layers, piece in split_layers(plan, edges)]
