"""The paths of a GPU: what each of them does, and those that move bytes directly.

``copy_engine`` issues batches of flat descriptors, ``copy_engine_2d`` 2-D copies; they use no SM. ``kernel`` launches
the copy kernel over units and run tables. The path through a ring is in ``staged.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np

from kvplan.cost.policy import HOST_ROUTES, ROUTES, KernelSize
from kvplan.cuda.reach import Facts, ordinal_of, ordinary, route_of
from kvplan.cuda.rows import BATCH, BOX, RECORD, WORDS, boxes, copy_rows, rows_of
from kvplan.errors import HostMemoryError, KVPlanError, PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.gpu_transfer import GpuTransfer
from kvplan.execute.gpu.resources import Resources, Shape, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import exploded, flat, strided
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# A list of more calls, and copies in batches, goes to the issuer: the submitting thread makes one in about 1 us.
INLINE_EFFORT = 96
# Most copies of a batch. The copy engine begins when a call returns, so it waits for the whole first batch; and the
# model's launches wait for the driver's lock, which a call holds. A call of 52,000 copies has crashed driver 580.
BATCH_COPIES = 256
# Copies of fewer bytes from host memory get a call each. If a batch has copies of up to 24 KiB in several sizes, it
# loses bytes, or ends the context or the process: the driver writes these bytes into its queue of commands, and past
# its end. Seen with driver 580 on H100 and H200; the size was the same on every GPU measured.
BATCH_NBYTES = 28 << 10
# If a program has fewer tiles than EVEN_TILES, tiles are smaller, so that all programs end at about the same time.
EVEN_TILES, EVEN_TILE = 16, 64 << 10
MOST_ROWS = 1 << 30  # the kernel counts rows in 32 bits, and adds the step of all programs
# A launch of more rows within a GPU, or between GPUs, reads its units from GPU memory. Within a GPU, to copy them there
# first takes as long as 1,000 reads across the link (H200). Loads and stores cross the link anyway.
NEAR_ROWS = 1024


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


class Path(ABC):
    """One way to move a plan's bytes. An executor makes one object of each class in ``backend.PATHS``.

    The executor calls :meth:`refuse` once for plans of the same run groups, unless their memory may change, and
    :meth:`write` for each submit, while it holds its lock and the GPU is current. No step makes a driver call that
    moves bytes: a path writes its calls down. The executor makes a short list of calls at once. A long list goes to a
    thread that stays in compiled code. In front of the calls it lets the stream on which a transfer begins
    wait for all earlier work that the transfer depends on.

    An exception that :meth:`write` raises is the error of the transfer. The path need not undo anything, if it borrows
    memory and events from the transfer: ``pinned``, ``scratch``, ``event``.

    Attributes:
        name: name of the path in results, in statistics and in ``Policy(path=…)``.
        streams: the stream of a lane on which a load begins, and that on which it ends; of a store, the other way
            round. All work of the transfer must run after the work already issued on the first one, and before any work
            that is issued on the second one later.
        kernels: whether it launches kernels, which do not reach all memory.
    """

    name: str
    streams: tuple[str, str]
    kernels = False

    def __init__(self, backend: Resources) -> None:
        self._backend = backend

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Return the error of a plan that the path cannot serve, or None, whatever its units. Change nothing."""
        del plan
        if sides.by_kernels or not self.kernels:
            return None
        if sides.unreachable:
            return PathError(f"path {self.name!r} cannot serve this plan: {sides.unreachable}")
        if sides.route in HOST_ROUTES and sides.devices != (sides.here,):
            others = ", ".join(sides.devices)
            return PathError(f"path {self.name!r} reaches {sides.here} and pinned memory; the plan is of {others}")
        if sides.pageable:
            text = f"path {self.name!r} reaches pinned memory only: {sides.pageable}; pin it (kvplan.allocate, torch's "
            return HostMemoryError(text + "pin_memory, cudaHostRegister) or take path 'copy_engine'")
        return PathError(f"path {self.name!r} needs Triton, which is not installed: pip install triton")

    def warm_up(self, plan: Plan) -> None:
        """Compile and upload everything that plans of the same programs need, for any number of units; move nothing."""
        return

    @abstractmethod
    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Write down the calls that move a transfer's bytes, or those of a group of its layers; count them.

        Args:
            transfer: the transfer.
            plan: its plan, or that of the next group of layers; it has bytes.
            begin: event to record in front of all; 0 for none.
            end: event to record behind all.

        Returns:
            The calls: (n, 8) int64, see :mod:`kvplan.cuda.rows`. And their effort: calls and copies in batches, about a
            microsecond of CPU time each.
        """


def sides_of(here: str, plan: Plan, facts: Sequence[Facts]) -> Sides:
    """Describe the memory on both sides of a plan.

    Args:
        here: the executor's own GPU.
        plan: the plan.
        facts: the facts of each layout of the plan: of a source, of its destination, of the next source, ...
    """
    devices = {ordinary(fact.device) for fact in facts} - {"cpu:0"}
    pageable = next((fact.pageable for fact in facts if fact.pageable), "")
    reasons = [fact.unreachable for fact in facts] + [destination.unwritable for destination in facts[1::2]]
    unreachable = next(filter(None, reasons), "")
    unserved, route = "", route_of(plan, here)
    if route == "host":
        unserved = "between CPU memories, the executor of device 'cpu' copies"
    elif foreign := [name for name in sorted(devices) if not name.startswith("cuda:")]:
        unserved = f"moves memory of CUDA's GPUs and of the host; {foreign[0]} is no GPU of CUDA"
    elif here not in devices:
        unserved = f"moves memory of {here}; this plan is of {' and '.join(sorted(devices))}: take an executor of that"
    own = route not in HOST_ROUTES or devices == {here}
    by_kernels = own and not pageable and not unreachable and find_spec("triton") is not None
    return Sides(here, tuple(sorted(devices)), pageable, unserved, by_kernels, route, unreachable)


class CopyEnginePath(Path):
    """The path ``"copy_engine"``: cuMemcpyBatchAsync over the flat lowering; before driver 12.8, single copies."""

    name = "copy_engine"
    streams = ("copy", "copy")

    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Lower the plan; see :meth:`Path.write`."""
        stream = transfer.lane.stream("copy")
        front = rows_of([(RECORD, stream, begin)] if begin else [])
        copies, descriptors = self._copies(transfer, plan, stream)
        transfer.copies += descriptors
        transfer.launches += len(copies)
        rows = np.concatenate((front, copies, rows_of([(RECORD, stream, end)])))
        return rows, len(rows) + int(rows[rows[:, 0] == BATCH, 5].sum())

    def _copies(self, transfer: GpuTransfer, plan: Plan, stream: int) -> tuple[Int64Array, int]:
        """Write the copies of a plan's descriptors, and count these."""
        columns = np.stack(flat(plan.moving, self._backend.reach.seams(plan), None))
        return self._rows(transfer, columns, stream), columns.shape[1]

    def _rows(self, transfer: GpuTransfer, columns: Int64Array, stream: int) -> Int64Array:
        transfer.kept += (columns,)
        return copy_rows(columns, stream, least=batched_from(self._backend, transfer.plan.direction), most=BATCH_COPIES)


class CopyEngine2DPath(CopyEnginePath):
    """The path ``"copy_engine_2d"``: one 2-D copy for each run and unit; flat descriptors for bytes without rows."""

    name = "copy_engine_2d"

    def _copies(self, transfer: GpuTransfer, plan: Plan, stream: int) -> tuple[Int64Array, int]:
        """Lower the plan into 2-D rows and flat descriptors, and count the rows' copies."""
        backend = self._backend
        rows = np.asarray(strided(plan.parts, backend.reach.seams(plan)))
        # The largest pitch is about 2 GiB. Layers of a large cache lie further apart.
        single = (rows[:, 3] == 1) | (rows[:, 4:6].max(axis=1, initial=0) > backend.device.max_pitch)
        parameters, columns = boxes(rows[~single]), np.stack(exploded(rows[single]))
        transfer.kept += (parameters,)
        calls = np.zeros((len(parameters), WORDS), dtype=np.int64)
        calls[:, 0], calls[:, 1] = BOX, stream
        calls[:, 2] = parameters.ctypes.data + 128 * np.arange(len(parameters))
        if columns.size:
            calls = np.concatenate((calls, self._rows(transfer, columns, stream)))
        return calls, int(rows[:, 3].sum())


def batched_from(backend: Resources, direction: str) -> int:
    """Return the bytes of the smallest copy that may be in a batch; no copy is, before driver 12.8."""
    if backend.device.driver.cuMemcpyBatchAsync is None:
        return 1 << 62
    return BATCH_NBYTES if direction == "load" else 0


class KernelPath(Path):
    """The path ``"kernel"``: a Triton kernel computes the addresses of runs on the GPU, and copies them."""

    name = "kernel"
    streams = ("kernel", "kernel")
    kernels = True

    def __init__(self, backend: Resources) -> None:
        super().__init__(backend)
        sizes = {route: backend.policy.kernel(route, backend.device.multiprocessors) for route in ROUTES}
        self._sizes = {route: (size, EVEN_TILES * size.tile * size.programs) for route, size in sizes.items()}
        self._here = f"cuda:{backend.device.ordinal}"

    def warm_up(self, plan: Plan) -> None:
        """Compile the kernels for plans of these programs with any number of units, and upload their run tables."""
        size, _ = self._sizes[route_of(plan, self._here)]
        for tile in {size.tile, min(size.tile, EVEN_TILE)}:
            for group, _ in plan.parts:
                self._backend.table(group, _items, tile, size.warps)

    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Write headers, units and launches; see :meth:`Path.write`."""
        near = plan.direction in HOST_ROUTES
        size, even = self._sizes[plan.direction if near else route_of(plan, self._here)]
        tile = min(size.tile, EVEN_TILE) if plan.nbytes < even else size.tile
        if len(plan.parts) == 1:
            ((group, units),) = plan.parts
            table = self._backend.table(group, _items, tile, size.warps)
            units, lines, launches, count = np.ascontiguousarray(units), table.lines, 1, units.shape[1]
            total, copies = count * table.items, count * table.copies
        else:
            units, lines, launches, total, copies = self._joined(plan, tile, size)
        if total > MOST_ROWS:
            raise PathError(f"path 'kernel' copies at most {MOST_ROWS:,} runs at once, and this plan has more")
        nbytes, copied = 8 * (row_loops.HEADER * len(lines) + 2 * units.shape[1]), 0
        headers, stream = transfer.pinned(nbytes), transfer.lane.stream("kernel")
        base = headers.address
        if not near and total > NEAR_ROWS:
            base, copied = transfer.scratch(nbytes).address, nbytes
        rows = np.empty((3 + launches, 8), dtype=np.int64)
        written = row_loops.write_launches(
            units, lines, size.programs, headers.address, base, copied, stream, begin, end, headers.words, rows
        )
        transfer.copies += copies
        transfer.launches += launches
        return rows[:written], written

    def _joined(self, plan: Plan, tile: int, size: KernelSize) -> tuple[Int64Array, Int64Array, int, int, int]:
        """Return units, lines, launches, rows and copies of several parts: one launch for those of the same kernel."""
        alike: dict[Shape, list[tuple[Table, Int64Array]]] = {}
        for group, units in plan.moving:
            table = self._backend.table(group, _items, tile, size.warps)
            alike.setdefault(table.shape, []).append((table, units))
        some = [(number, *each) for number, same in enumerate(alike.values()) for each in same]
        lines = np.concatenate([table.lines for _, table, _ in some])
        lines[:, row_loops.LAUNCH_AT :] = [(number, units.shape[1]) for number, _, units in some]
        total = sum(units.shape[1] * table.items for _, table, units in some)
        copies = sum(units.shape[1] * table.copies for _, table, units in some)
        return np.concatenate([units for *_, units in some], axis=1), lines, len(alike), total, copies


def _items(group: RunGroup) -> tuple[Int64Array, int]:
    return group.packed, group.alignment
