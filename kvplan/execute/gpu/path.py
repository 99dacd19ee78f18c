"""The Protocol of paths: the methods that the executor calls on each way of moving bytes between a GPU and the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import numpy as np

from kvplan.cost.policy import HOST_ROUTES
from kvplan.cuda.reach import Facts, ordinal_of
from kvplan.cuda.rows import RECORD
from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Edges, LayerCuts, Layers, cuts_of, split_layers
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# A list of more calls, and copies in batches, goes to the issuer: the submitting thread makes one in about 1 us.
INLINE_EFFORT = 96


class Sides(NamedTuple):
    """The memory on both sides of a plan.

    Attributes:
        here: the executor's own GPU, such as ``"cuda:0"``.
        devices: all GPUs with memory in the plan, sorted by name.
        pageable: the reason why some of the host memory is not pinned, or "".
        unserved: the reason why no path serves such a plan, or "".
        by_kernels: whether kernels of the GPU reach all of the memory.
        route: the way of the bytes: one of :data:`kvplan.cost.policy.ROUTES`, or ``"host"``.
        unreachable: the reason why the GPU cannot reach another GPU's memory of the plan, or "".
    """

    here: str
    devices: tuple[str, ...]
    pageable: str
    unserved: str
    by_kernels: bool
    route: str = ""
    unreachable: str = ""

    @property
    def passing(self) -> bool:
        """Return whether the facts may be others for the next plan: memory can be pinned, or mapped for a GPU."""
        return bool(self.pageable or self.unreachable)

    @property
    def peer(self) -> int:
        """Return the number of the first other GPU."""
        return ordinal_of(next(name for name in self.devices if name != self.here))


class Written(NamedTuple):
    """The calls of a transfer.

    Attributes:
        rows: (n, 8) int64, see :mod:`kvplan.cuda.rows`: between two records, of the transfer's begin and end.
        effort: calls and copies in batches, about a microsecond of CPU time each.
        marked: for each group of layers, the number of rows up to the record of its event.
    """

    rows: Int64Array
    effort: int
    marked: Sequence[int] = ()


def marked_in(rows: Int64Array, marks: Sequence[int]) -> Sequence[int]:
    """Return the number of rows up to the record of each mark."""
    if not marks:
        return ()
    records = np.flatnonzero(rows[:, 0] == RECORD)
    events = zip(records.tolist(), rows[records, 2].tolist(), strict=True)
    return [row + 1 for row, event in events if event in marks]


class Path(Protocol):
    """One way to move a plan's bytes. An executor makes one object of each class in ``backend.PATHS``.

    For each submit the executor calls :meth:`refuse`, in the submitting thread, and then :meth:`write`, while it holds
    its lock and the GPU is current. No step makes a driver call that moves bytes: a path writes its calls down. The
    executor makes a short list of calls at once. A long list goes to a thread that stays in compiled code. In front of
    the calls it lets the first stream of :meth:`streams` wait for all earlier work that the transfer depends on.

    An exception that :meth:`write` raises is the error of the transfer. The path need not undo anything, if it borrows
    memory and events from the transfer: ``slot``, ``scratch``, ``event``.

    Attributes:
        name: name of the path in results, in statistics and in ``Policy(path=…)``.
    """

    name: str

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Return the error of a plan that the path cannot serve, or None. The call must not change anything."""

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """Return the stream on which a transfer begins, and the stream on which it ends.

        All work of the transfer must run after the work already issued on the first stream. It must also run before any
        work that is issued on the second stream later.
        """

    def warm_up(self, plan: Plan, edges: Edges | None) -> None:
        """Compile and upload everything that plans of the same programs need, for any number of units; move nothing."""

    def write(self, transfer: GpuTransfer) -> Written:
        """Write down the calls that move a transfer's bytes, of which there is at least one; count them.

        Between the calls are records of the transfer's ``marks``, each behind the bytes of a group of layers.
        """


class Work(NamedTuple):
    """Units of one run group, or of its pieces by layers.

    Attributes:
        owner: the run group, or its cuts: what is prepared for them lives as long.
        groups: the run group, or that of each piece.
        units: (2, n) int64: source and destination address of each unit.
        steps: (2, pieces) int64: bytes from a unit's addresses to those of each piece.
        skips: units that the plan skips in the first source block and in the first destination block.
        nbytes: bytes of all pieces.
    """

    owner: RunGroup | LayerCuts
    groups: tuple[RunGroup, ...]
    units: Int64Array
    steps: Int64Array
    skips: tuple[int, int]
    nbytes: int


NO_STEPS = np.zeros((2, 1), dtype=np.int64)


def work_of(plan: Plan, edges: Edges | None) -> Work | None:
    """Return the units of a plan of one part, whole or cut by layers; None if it has several, or is cut otherwise."""
    if len(plan.parts) != 1:
        return None
    (group, units), skips = plan.parts[0], plan.skips[0]
    units = np.ascontiguousarray(units)
    if edges is None:
        return Work(group, (group,), units, NO_STEPS, skips, plan.nbytes)
    cuts = cuts_of(plan, edges)
    return None if cuts is None else Work(cuts, cuts.groups, units, cuts.steps, skips, plan.nbytes)


def works_of(plan: Plan) -> list[Work]:
    """Return the units of each part of a plan that has units, without cuts by layers."""
    parts = [
        (part, np.ascontiguousarray(part.units), skips) for part, skips in zip(plan.parts, plan.skips, strict=True)
    ]
    return [Work(part.group, (part.group,), units, NO_STEPS, skips, part.nbytes)
            for part, units, skips in parts if units.size]  # fmt: skip


def pieces_of(plan: Plan, edges: Edges | None) -> list[tuple[Layers, Plan]]:
    """Return the plans of the groups of layers, or the plan itself."""
    return [(frozenset(), plan)] if edges is None else split_layers(plan, edges)


def refuse_kernels(name: str, sides: Sides) -> KVPlanError | None:
    """Return the error of a plan whose memory kernels do not reach, or of a machine without Triton; else None."""
    if sides.by_kernels:
        return None
    if sides.unreachable:
        return PathError(f"path {name!r} cannot serve this plan: {sides.unreachable}")
    if sides.route in HOST_ROUTES and sides.devices != (sides.here,):
        others = ", ".join(sides.devices)
        return PathError(f"path {name!r} reaches {sides.here} and pinned memory; the plan is of {others}")
    if sides.pageable:
        text = f"path {name!r} reaches pinned memory only: {sides.pageable}; pin it (kvplan.allocate, torch's "
        return HostMemoryError(text + "pin_memory, cudaHostRegister) or take path 'copy_engine'")
    return PathError(f"path {name!r} needs Triton, which is not installed: pip install triton")


def route_of(plan: Plan, here: str) -> str:
    """Return the way of a plan's bytes, as the executor of the GPU ``here`` sees it.

    Between GPUs it is ``"pull"`` if some of the sources are another GPU's memory, otherwise ``"push"``.
    """
    if plan.direction != "device":
        return plan.direction
    for side, route in ((0, "pull"), (1, "push")):
        for pair in plan.layouts:
            if pair[side].device != here and _ordinary(pair[side].device) != here:
                return route
    return "device"


def _ordinary(device: str) -> str:
    return device if ":" in device else f"{device}:0"


def sides_of(here: str, plan: Plan, facts: Sequence[Facts]) -> Sides:
    """Describe the memory on both sides of a plan.

    Args:
        here: the executor's own GPU.
        plan: the plan.
        facts: the facts of each layout of the plan: of a source, of its destination, of the next source, ...
    """
    devices = {_ordinary(fact.device) for fact in facts} - {"cpu:0"}
    pageable = next((fact.pageable for fact in facts if fact.pageable), "")
    reasons = [fact.unreachable for fact in facts] + [destination.unwritable for destination in facts[1::2]]
    unreachable = next(filter(None, reasons), "")
    unserved, route = "", route_of(plan, here)
    if route == "host":
        unserved = "between CPU memories, the executor of device 'cpu' copies"
    elif foreign := [name for name in sorted(devices) if not name.startswith("cuda:")]:
        unserved = f"moves memory of CUDA's GPUs and of the host; {foreign[0]} is no GPU of CUDA"
    elif here not in devices:
        names = sorted(devices)
        unserved = (
            f"moves memory of {here}, and this plan is of {', '.join(names)}; take an executor of {' or '.join(names)}"
        )
    own = route not in HOST_ROUTES or devices == {here}
    by_kernels = own and not pageable and not unreachable and triton_is_there()
    return Sides(here, tuple(sorted(devices)), pageable, unserved, by_kernels, route, unreachable)


@cache
def triton_is_there() -> bool:
    """Return whether Triton is installed. The paths that launch kernels need it."""
    return find_spec("triton") is not None
