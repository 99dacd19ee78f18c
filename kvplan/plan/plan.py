"""Plans: which bytes one transfer moves, kept factored until somebody asks for descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.base.integers import optional_integer
from kvplan.errors import KVPlanError, OverlapError, PathError
from kvplan.layout.components import touching_seams
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams, StridedRows, flat, strided
from kvplan.plan.loops_numpy import Descriptors

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout
    from kvplan.plan.copy_program import CopyProgram
    from kvplan.plan.nixl_lists import NixlList

NO_SEAMS = Seams(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def direction_of(src: KVLayout, dst: KVLayout) -> str:
    """``"load"`` host to device, ``"store"`` device to host, ``"host"`` or ``"device"`` within one of them."""
    src_host, dst_host = src.device == "cpu", dst.device == "cpu"
    if src_host:
        return "host" if dst_host else "load"
    return "store" if dst_host else "device"


class Plan:
    """The byte moves of one transfer. Made by :meth:`kvplan.CopyProgram.plan` or :func:`join`; never changed.

    Attributes:
        parts: run groups and the addresses of their units; the factored form.
        units: number of units moved, over all joined plans.
        nbytes: bytes moved.
        direction: ``"load"``, ``"store"``, ``"host"`` or ``"device"``.
        layouts: (source, destination) of every joined plan; they keep the memory alive.
        seams: addresses that no descriptor may cross.
        skips: of every part, units of its first source block and of its first destination block that lie before its
            first unit; the others follow in order, so that those of one block can be told.
        programs: what it was planned by; they keep what was compiled alive.
    """

    __slots__ = ("direction", "layouts", "nbytes", "parts", "programs", "seams", "skips", "units")

    def __init__(
        self,
        parts: tuple[Part, ...],
        units: int,
        nbytes: int,
        direction: str,
        layouts: tuple[tuple[KVLayout, KVLayout], ...],
        seams: Seams,
        skips: tuple[tuple[int, int], ...],
        programs: tuple[CopyProgram, ...] = (),
    ) -> None:
        self.parts = parts
        self.units = units
        self.nbytes = nbytes
        self.direction = direction
        self.layouts = layouts
        self.seams = seams
        self.skips = skips
        self.programs = programs

    def __reduce__(self) -> tuple[Any, ...]:
        from kvplan.plan.pickling import facts_of_plan, plan_of_facts

        return plan_of_facts, facts_of_plan(self)

    def descriptors(self, max_nbytes: int | None = None) -> Descriptors:
        """Flat lowering: the fewest contiguous copies, in no promised order.

        Args:
            max_nbytes: bytes that no descriptor may exceed.

        Returns:
            Addresses and bytes as three int64 arrays. No two could be merged, unless a seam or the cap stands between.

        Raises:
            KVPlanError: a cap that is no positive integer.

        >>> import kvplan, numpy as np
        >>> a = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8))
        >>> b = kvplan.KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8))
        >>> kvplan.compile(a, b).plan([3, 4, 6], [0, 1, 2]).descriptors().size
        array([2048, 1024])
        """
        right = "a descriptor moves at least one byte"
        cap = optional_integer("max_nbytes", max_nbytes, least=1, right=right, error=KVPlanError)
        return flat(self.parts, self.seams, cap)

    def strided(self) -> StridedRows:
        """Strided lowering: 2-D copies as rows of (src, dst, width, height, src_pitch, dst_pitch), in bytes.

        No row reaches over a seam. A copy without a loop has height 1.

        >>> import kvplan, numpy as np
        >>> a = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
        >>> b = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
        >>> kvplan.compile(a, b).plan([3], [0]).strided()[:, 2:].tolist()
        [[1024, 4, 8192, 1024]]
        """
        return strided(self.parts, self.seams)

    def nixl(self, side: str, *, strided: bool = False) -> NixlList:
        """One side as a list of NIXL's, for ``prep_xfer_dlist(agent, *plan.nixl("src"))``.

        Row ``k`` of one side goes with row ``k`` of the other: rows come by ascending destination.

        Args:
            side: ``"src"`` or ``"dst"``.
            strided: rows of (address, length, device id, stride, count), which NIXL takes from 1.5 on, in place of
                (address, length, device id).

        Raises:
            KVPlanError: a side that is none.
            PathError: memory of CPU and GPU on one side, or of a device that is neither.

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
        from kvplan.plan.nixl_lists import check_side, nixl_lists

        return nixl_lists(self, strided=strided)[check_side(side)]

    def __repr__(self) -> str:
        return f"Plan({self.direction} of {self.units} units, {self.nbytes} bytes)"


def join(plans: Sequence[Plan]) -> Plan:
    """One plan of several, for one submission: the KV-cache groups of a hybrid model, say.

    Args:
        plans: of one direction; plans that move nothing count for nothing.

    Raises:
        KVPlanError: no plans.
        PathError: plans of different directions.
        OverlapError: two plans write the same byte.
    """
    if isinstance(plans, Plan) or not all(isinstance(plan, Plan) for plan in plans):
        raise KVPlanError("join takes a sequence of plans, as CopyProgram.plan makes them")
    plans = list(plans)
    if not plans:
        raise KVPlanError("join of no plans; give at least one")
    joined = together(plans)
    if sum(bool(plan.nbytes) for plan in plans) > 1:
        check_written_once(joined)
        check_not_read(joined)
    return joined


def together(plans: Sequence[Plan]) -> Plan:
    """Join plans that are known to write no byte twice, and none that one of them reads.

    Raises:
        PathError: plans of different directions.
    """
    moving = [plan for plan in plans if plan.nbytes] or plans[:1]
    if len(moving) == 1:  # its layouts tell where their own registrations touch
        return moving[0]
    directions = sorted({plan.direction for plan in moving})
    if len(directions) > 1:
        raise PathError(f"plans of directions {directions} cannot be one submission; submit each by itself")
    parts = tuple(part for plan in moving for part in plan.parts)
    layouts = tuple(dict.fromkeys(pair for plan in moving for pair in plan.layouts))
    seams = Seams(*(_joined_seams(moving, [pair[side] for pair in layouts], side) for side in (0, 1)))
    skips = tuple(skip for plan in moving for skip in plan.skips)
    units, nbytes = (sum(counts) for counts in zip(*((plan.units, plan.nbytes) for plan in moving), strict=True))
    programs = tuple(dict.fromkeys(program for plan in moving for program in plan.programs))
    return Plan(parts, units, nbytes, directions[0], layouts, seams, skips, programs)


def _joined_seams(plans: Sequence[Plan], layouts: Sequence[KVLayout], side: int) -> Int64Array:
    """Seams of one side of all plans, and those between registrations of different layouts that touch."""
    regions = {(region.address, region.nbytes): region for layout in layouts for region in layout.regions}
    touching = np.array(touching_seams(list(regions.values())), dtype=np.int64)
    return np.unique(np.concatenate([touching, *(plan.seams[side] for plan in plans)]))


def check_written_once(plan: Plan) -> None:
    """No two parts of a plan write the same byte.

    Raises:
        OverlapError: the first byte that two parts write.
    """
    hulls = []
    for group, units in plan.parts:
        if units.shape[1]:
            low, high = group.hulls[1]
            hulls.append((int(units[1].min()) + low, int(units[1].max()) + high))
    hulls.sort()
    if all(end <= start for (_, end), (start, _) in pairwise(hulls)):
        return
    made = flat(plan.parts, NO_SEAMS, None)
    order = np.argsort(made.dst)
    start, end = made.dst[order], (made.dst + made.size)[order]
    clash = np.flatnonzero(start[1:] < end[:-1])
    if clash.size:
        address = int(start[clash[0] + 1])
        raise OverlapError(f"two of the joined plans write address {address:#x}; each destination is written once")


def check_not_read(plan: Plan) -> None:
    """A plan writes no byte that it also reads; copies within a plan have no order.

    Raises:
        OverlapError: the first such byte.
    """
    if not any(shares_memory(src, dst) for src, _ in plan.layouts for _, dst in plan.layouts):
        return
    made = flat(plan.parts, NO_SEAMS, None)
    order = np.argsort(made.src)
    starts = made.src[order]
    reach = np.maximum.accumulate((made.src + made.size)[order])
    # The last read that begins before each write ends: does any read up to there reach into the write?
    last = np.searchsorted(starts, made.dst + made.size, side="left") - 1
    clash = np.flatnonzero((last >= 0) & (reach[np.maximum(last, 0)] > made.dst))
    if clash.size:
        address = int(made.dst[clash[0]])
        raise OverlapError(f"the plan both reads and writes memory at {address:#x}; copies within a plan have no order")


def shares_memory(src: KVLayout, dst: KVLayout) -> bool:
    """Whether the allocations of two layouts of this process meet."""
    if src.device != dst.device or {src.addresses, dst.addresses} != {"memory"}:
        return False
    spans = sorted([(r.address, r.end, 0) for r in src.regions] + [(r.address, r.end, 1) for r in dst.regions])
    ends = [0, 0]
    for start, end, side in spans:
        if start < ends[1 - side]:
            return True
        ends[side] = max(ends[side], end)
    return False
