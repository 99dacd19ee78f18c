"""Plans: the bytes that one transfer moves. A plan stays factored until the caller lowers it to descriptors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from kvplan.base.process import cached_property
from kvplan.base.values import optional_integer
from kvplan.errors import KVPlanError, OverlapError, PathError
from kvplan.layout.components import touching_seams
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import find
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import (
    Descriptors,
    NixlList,
    Part,
    Seams,
    StridedRows,
    check_side,
    flat,
    nixl_lists,
    strided,
    together,
)
from kvplan.plan.placement import Side
from kvplan.program.program import Program, RunGroup, merge_ranges

NO_SEAMS = Seams(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def direction_of(src: KVLayout, dst: KVLayout) -> str:
    """Return ``"load"`` (host to device), ``"store"`` (device to host), or ``"host"`` or ``"device"`` (within one)."""
    src_host, dst_host = src.device == "cpu", dst.device == "cpu"
    if src_host:
        return "host" if dst_host else "load"
    return "store" if dst_host else "device"


class PlannedBy(Protocol):
    """The program that made a plan, as plans and executors use it; :class:`kvplan.CopyProgram` implements it.

    Attributes:
        src, dst: layouts to read and to write; the program moves the layers of ``src``.
        program: the run groups of the plan's parts.
    """

    src: KVLayout
    dst: KVLayout
    program: Program

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both sides as arrays: where the block of each id lies."""

    def of_layers(self, layers: tuple[int, ...]) -> PlannedBy:
        """Return the program of these layers only; the layers are global numbers."""


class PlanSource(NamedTuple):
    """A program, and the block ids that it made a plan from; another process makes the same plan from them.

    Attributes:
        program: the program.
        ids: block ids of the source, and of the destination.
        skips: units that are skipped in the first block, of each side.
        units: number of units.
    """

    program: PlannedBy
    ids: tuple[Int64Array, Int64Array]
    skips: tuple[int, int]
    units: int


@dataclass(eq=False, repr=False)  # not frozen: a frozen object takes twice the time to make
class Plan:
    """The bytes that one transfer moves, made by :meth:`kvplan.CopyProgram.plan` or :func:`join`. A plan never changes.

    Attributes:
        parts: run groups with the addresses of their units; the factored form.
        units: number of units moved, over all joined plans.
        nbytes: bytes moved.
        direction: ``"load"``, ``"store"``, ``"host"`` or ``"device"``.
        layouts: (source, destination) of every joined plan; these references keep the memory alive.
        seams: addresses that no descriptor may cross.
        skips: for every part, the units that the plan skips in the first source block and in the first destination
            block. The units follow in order, so these numbers determine which units share a block.
        programs: the programs that made the plan; these references keep compiled data alive.
        sources: the block ids that each of them made it from; empty if the plan moves only a part of that.
    """

    parts: tuple[Part, ...]
    units: int
    nbytes: int
    direction: str
    layouts: tuple[tuple[KVLayout, KVLayout], ...]
    seams: Seams
    skips: tuple[tuple[int, int], ...]
    programs: tuple[PlannedBy, ...] = ()
    sources: tuple[PlanSource, ...] = ()

    @cached_property
    def moving(self) -> Sequence[Part]:
        """Return the parts that have units, joined to one part per run group, for lowering and counting."""
        if len(self.parts) == 1 and self.parts[0].units.shape[1]:
            return self.parts
        return together([part for part in self.parts if part.units.shape[1]])

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Return the global numbers of the layers that the plan moves, in ascending order.

        >>> import kvplan, numpy as np
        >>> a = kvplan.KVLayout.from_tensors("layer block dim", np.zeros((3, 8, 64), np.int8), layer_start=4)
        >>> b = kvplan.KVLayout.from_tensors("block layer dim", np.zeros((8, 3, 64), np.int8), layer_start=4)
        >>> kvplan.compile(a, b).plan([5], [1]).layers
        (4, 5, 6)
        """
        return tuple(sorted({layer for src, _ in self.layouts for layer in src.layers}))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.nbytes and not self.sources:
            raise TypeError("only a whole plan of compiled programs is copied or pickled, not a piece of one")
        return _planned, (self.sources,)

    def descriptors(self, max_nbytes: int | None = None) -> Descriptors:
        """Lower the plan to the fewest descriptors, in no particular order.

        Args:
            max_nbytes: maximum bytes per descriptor; None for no limit.

        Returns:
            Source addresses, destination addresses and bytes, as three int64 arrays. Descriptors that touch on both
            sides are merged, except across a seam or beyond ``max_nbytes``.

        Raises:
            KVPlanError: ``max_nbytes`` is not a positive integer.

        >>> import kvplan, numpy as np
        >>> a = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8))
        >>> b = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8))
        >>> kvplan.compile(a, b).plan([3, 4, 6], [0, 1, 2]).descriptors().size
        array([2048, 1024])
        """
        right = "a descriptor moves at least one byte"
        cap = optional_integer("max_nbytes", max_nbytes, least=1, right=right, error=KVPlanError)
        return flat(self.moving, self.seams, cap)

    def strided(self) -> StridedRows:
        """Lower the plan to 2-D copies: rows of (src, dst, width, height, src_pitch, dst_pitch), in bytes.

        No row crosses a seam. A copy without a loop has height 1.

        >>> import kvplan, numpy as np
        >>> a = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
        >>> b = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
        >>> kvplan.compile(a, b).plan([3], [0]).strided()[:, 2:].tolist()
        [[1024, 4, 8192, 1024]]
        """
        return strided(self.parts, self.seams)

    def nixl(self, side: str, *, strided: bool = False) -> NixlList:
        """Return the list of one side for NIXL: ``prep_xfer_dlist(agent, *plan.nixl("src"))``.

        Row ``k`` of ``"src"`` belongs to row ``k`` of ``"dst"``: both lists are in ascending order of destination.

        Args:
            side: ``"src"`` or ``"dst"``.
            strided: whether rows are (address, length, device id, stride, count), which NIXL accepts from 1.5 on;
                otherwise they are (address, length, device id).

        Raises:
            KVPlanError: the side is neither ``"src"`` nor ``"dst"``.
            PathError: one side has both CPU and GPU memory, or memory of another kind of device.

        >>> import kvplan, numpy as np
        >>> mine = kvplan.KVLayout.from_tensors("layer block dim", np.zeros((4, 8, 64), np.int8))
        >>> peers = kvplan.KVLayout.from_spec({"notation": "block layer dim", "dtype": "uint8", "address": 1 << 20,
        ...     "device": "cuda:1", "sizes": {"layer": 4, "block": 8, "dim": 64}})
        >>> plan = kvplan.compile(mine, peers).plan([5], [1])
        >>> plan.nixl("dst")
        NixlList(rows=array([[1048832,      64,       1],
               [1048896,      64,       1],
               [1048960,      64,       1],
               [1049024,      64,       1]]), memory='VRAM')
        >>> plan.nixl("dst", strided=True).rows.tolist()
        [[1048832, 64, 1, 64, 4]]
        """
        number = check_side(side)
        return nixl_lists(self.strided() if strided else self.descriptors(), self.layouts)[number]

    def __repr__(self) -> str:
        return f"Plan({self.direction} of {self.units} units, {self.nbytes} bytes)"


def _planned(sources: tuple[PlanSource, ...]) -> Plan:
    """Plan again what was pickled: the layouts of the programs may have other addresses in this process."""
    plans: list[Plan] = [cast(Any, source.program).plan(*source.ids, *source.skips) for source in sources]
    return unite(plans)


def join(plans: Sequence[Plan]) -> Plan:
    """Join several plans into one plan, for example the plans of a hybrid model's KV-cache groups.

    Args:
        plans: plans of one direction; plans without bytes are left out.

    Raises:
        KVPlanError: there are no plans.
        PathError: the plans have different directions.
        OverlapError: two plans write the same byte, or one plan writes a byte that another plan reads.
    """
    if isinstance(plans, Plan) or not all(isinstance(plan, Plan) for plan in plans):
        raise KVPlanError("join takes a sequence of plans, as CopyProgram.plan makes them")
    plans = list(plans)
    if not plans:
        raise KVPlanError("join got no plans; give at least one")
    joined = unite(plans)
    if sum(bool(plan.nbytes) for plan in plans) > 1:
        check_written_once(plans)
        check_not_read(joined)
    return joined


def unite(plans: Sequence[Plan]) -> Plan:
    """Join plans. The caller knows that no byte is written twice, and that no byte is both read and written.

    Raises:
        PathError: the plans have different directions.
    """
    moving = [plan for plan in plans if plan.nbytes] or plans[:1]
    if len(moving) == 1:  # its own seams are complete
        return moving[0]
    directions = sorted({plan.direction for plan in moving})
    if len(directions) > 1:
        raise PathError(f"plans of directions {directions} cannot be one submission; submit each by itself")
    parts = tuple(part for plan in moving for part in plan.parts)
    layouts = tuple(dict.fromkeys(pair for plan in moving for pair in plan.layouts))
    src, dst = (
        np.unique(np.concatenate([seams_of([pair[side] for pair in layouts]), *(plan.seams[side] for plan in moving)]))
        for side in (0, 1)
    )
    seams = Seams(src, dst)
    skips = tuple(skip for plan in moving for skip in plan.skips)
    units, nbytes = (sum(counts) for counts in zip(*((plan.units, plan.nbytes) for plan in moving), strict=True))
    programs = tuple(dict.fromkeys(program for plan in moving for program in plan.programs))
    complete = all(plan.sources for plan in moving)
    sources = tuple(source for plan in moving for source in plan.sources) if complete else ()
    return Plan(parts, units, nbytes, directions[0], layouts, seams, skips, programs, sources)


def seams_of(layouts: Sequence[KVLayout]) -> Int64Array:
    """Return the seams of layouts, and the seams between touching regions of different ones."""
    own = [np.array(layout.seams, dtype=np.int64) for layout in layouts]
    if len(own) == 1:
        return own[0]
    regions = {(region.address, region.nbytes): region for layout in layouts for region in layout.regions}
    touching = np.array(touching_seams(list(regions.values())), dtype=np.int64)
    return np.unique(np.concatenate([touching, *own]))


def check_written_once(plans: Sequence[Plan]) -> None:
    """Check that no two plans write the same byte. Units are compared as they were asked for, before any merge.

    Raises:
        OverlapError: two plans write the same byte; the message names the block and the plans.
    """
    written = [_Written(*part, number) for number, plan in enumerate(plans) for part in plan.parts if part.nbytes]
    for near in _near(written):
        # Two units of one run group are equal, or have no byte in common: their addresses are enough.
        alike = all(each.group is near[0].group for each in near)
        starts, sizes = zip(*((each.units[1], 1) if alike else each.ranges() for each in near), strict=True)
        start, end = np.concatenate(starts), np.concatenate(list(map(add, starts, sizes)))
        order = np.argsort(start, kind="stable")
        clash = np.flatnonzero(start[order[1:]] < end[order[:-1]])
        if clash.size:
            both = order[clash[0] : clash[0] + 2]
            numbers = np.repeat([each.plan for each in near], [first.size for first in starts])
            one, other = sorted(numbers[both].tolist())
            address = int(start[both[1]])
            raise OverlapError(
                f"two of the joined plans write address {address:#x}: plans {one} and {other} both write "
                f"{_block_at(plans[one], address)}; each destination is written once"
            )


class _Written(NamedTuple):
    """The units of one run group that one plan writes."""

    group: RunGroup
    units: Int64Array
    plan: int

    def hull(self) -> tuple[int, int]:
        """Return the lowest address, and the address after the highest."""
        low, high = self.group.hulls[1]
        return int(self.units[1].min()) + low, int(self.units[1].max()) + high

    def ranges(self) -> tuple[Int64Array, Int64Array]:
        """Return first byte and length of each stretch of each unit."""
        start, size = merge_ranges(*self.group.packed[1:])
        return (self.units[1][:, None] + start).ravel(), np.tile(size, self.units.shape[1])


def _near(written: Sequence[_Written]) -> Iterator[list[_Written]]:
    """Yield those that lie between common addresses, together; what is apart from all others is left out."""
    near: list[_Written] = []
    reach = 0
    for (start, end), each in sorted(((each.hull(), each) for each in written), key=itemgetter(0)):
        if start >= reach:
            if len(near) > 1:
                yield near
            near = []
        near.append(each)
        reach = max(reach, end)
    if len(near) > 1:
        yield near


def _block_at(plan: Plan, address: int) -> str:
    """Return the block that a plan writes at an address, and its layout, in words."""
    held = ((layout, find(layout.components, address)) for _, layout in plan.layouts)
    layout, (component, (block, *_)) = next((layout, place) for layout, place in held if place is not None)
    return f"block {block} of layer {component.layer} {component.part} in {layout}"


def check_not_read(plan: Plan) -> None:
    """Check that a plan writes no byte that it also reads: copies within a plan have no order.

    Raises:
        OverlapError: the plan writes such a byte; the message names the block.
    """
    if not any(shares_memory(src, dst) for src, _ in plan.layouts for _, dst in plan.layouts):
        return
    made = flat(plan.moving, NO_SEAMS, None)
    order = np.argsort(made.src)
    starts = made.src[order]
    reach = np.maximum.accumulate((made.src + made.size)[order])
    # For each write: the last read that begins before the write ends. Check whether a read up to it overlaps the write.
    last = np.searchsorted(starts, made.dst + made.size, side="left") - 1
    clash = np.flatnonzero((last >= 0) & (reach[np.maximum(last, 0)] > made.dst))
    if clash.size:
        where = _block_at(plan, int(made.dst[clash[0]]))
        raise OverlapError(f"the plan both reads and writes {where}; copies within a plan have no order")


def shares_memory(src: KVLayout, dst: KVLayout) -> bool:
    """Return whether two layouts describe memory of this process, and their allocations overlap."""
    if src.device != dst.device or {src.addresses, dst.addresses} != {"memory"}:
        return False
    spans = sorted([(r.address, r.end, 0) for r in src.regions] + [(r.address, r.end, 1) for r in dst.regions])
    ends = [0, 0]
    for start, end, side in spans:
        if start < ends[1 - side]:
            return True
        ends[side] = max(ends[side], end)
    return False
