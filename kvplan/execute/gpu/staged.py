"""The staged path: the copy engine moves host extents to and from a ring in GPU memory, and a kernel moves runs.

The copy engine moves contiguous host memory at the speed of the link. The kernel moves scattered runs on the GPU at the
speed of its memory. Chunks go through the slots of a ring, so that both work at once.
"""

from __future__ import annotations

from weakref import ref

import numpy as np

from kvplan.errors import KVPlanError, PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.paths import BATCH_COPIES, INLINE_EFFORT, Path, Sides, batched_from
from kvplan.execute.gpu.resources import Resources, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.packing import GRAIN, staging_of
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

RING_NBYTES = 84 << 20  # of a direction, if the policy names no number
SLOTS = 3  # of normal transfers in three quarters of the ring, and of urgent ones in the last quarter
TILE, WARPS = 32 << 10, 16
# A small transfer is cut into 3 equal chunks of at least 4 MiB. Each chunk costs 20 to 60 us of CPU time. A kernel for
# fewer bytes takes less than 10 us.
SMALL_CHUNKS, SMALL_CHUNK_NBYTES = 3, 4 << 20
# The kernels of a store of more chunks read their units from GPU memory; across the link they take longer.
FEW_CHUNKS = 3
PAGE_NBYTES = 4 << 10  # of what a kernel copies for a store
LAYER_COPIES = 64  # most copies of a batch while a model's layers are launched


class Ring:
    """Slots in GPU memory, which the chunks of transfers of one direction use in turn.

    Args:
        backend: the executor.
        address, nbytes: the memory.

    Attributes:
        address, nbytes: as given.
        slot_nbytes: bytes of a slot.
        filled, freed: (slots,) int64: for each slot, the event after its last write, and after its last read.
    """

    def __init__(self, backend: Resources, address: int, nbytes: int) -> None:
        self._backend, self.address, self.nbytes = backend, address, nbytes
        self.slot_nbytes = self._next = 0
        self.filled = self.freed = np.empty(0, dtype=np.int64)
        self._lanes: set[Streams] = set()  # whose transfers use the slots
        self._before: list[ref[GpuTransfer]] = []  # the last ones of each lane that were issued before the slots grew

    def enter(self, transfer: GpuTransfer, granule: int) -> None:
        """Let a transfer use slots that hold a granule.

        The streams of a lane, and the events of the slots, keep the transfers of one lane in order. If other lanes
        use the slots, or any did when they were smaller, the transfer follows the last ones that were issued: this one
        may still fail.
        """
        if self.slot_nbytes < granule:
            self._before += [ref(lane.last) for lane in self._lanes if lane.last is not None]
            nbytes = max(self.nbytes // SLOTS // GRAIN * GRAIN, granule)
            events = [self._backend.event() for _ in range(2 * (self.nbytes // nbytes))]
            self.filled, self.freed = np.array(events, dtype=np.int64).reshape(2, -1)  # the old ones stay in use
            self._next, self.slot_nbytes = 0, nbytes
        self._lanes.add(transfer.lane)
        users = [known() for known in self._before]
        users += [lane.last for lane in self._lanes if lane is not transfer.lane]
        transfer.behind = [user for user in users if user is not None and not user.over]

    def reserve(self, chunks: int) -> int:
        """Return the slot of the first of some chunks."""
        first = self._next % self.filled.size
        self._next = first + chunks
        return first


class StagedPath(Path):
    """The path ``"staged"``: copy engine and kernel in a pipeline."""

    name = "staged"
    streams = ("copy", "kernel")
    kernels = True

    def __init__(self, backend: Resources) -> None:
        super().__init__(backend)
        quarter = (backend.policy.staging_bytes or RING_NBYTES) // 4 // GRAIN * GRAIN
        self._parts = 3 * quarter, quarter  # bytes for normal and for urgent transfers
        self._rings: dict[str, tuple[Ring, Ring]] = {}  # by direction: of normal and of urgent transfers
        # One program per SM: compute may hold every SM until it ends, so the programs must end soon after they start.
        processors = backend.device.multiprocessors
        self._programs = min(backend.policy.max_programs or processors, processors)

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Refuse also if a granule is larger than the ring for normal transfers; see :meth:`Path.refuse`."""
        if plan.direction == "device":
            text = "path 'staged' is for loads and stores; within a GPU and between GPUs, path 'kernel' copies directly"
            return PathError(text)
        needed = max((staging_of(part.group, plan.direction).nbytes for part in plan.parts), default=0)
        if not sides.by_kernels or needed <= self._parts[0]:
            return super().refuse(plan, sides)
        given, least = self._backend.policy.staging_bytes or RING_NBYTES, -(-needed // (3 * GRAIN)) * 4 * GRAIN
        text = f"staging_bytes is {given}; a block here takes {needed} bytes of the ring; give at least {least}"
        return PathError(text)

    def warm_up(self, plan: Plan) -> None:
        """Compile kernels, upload run tables, and allocate the ring; see :meth:`Path.warm_up`."""
        self._pages()
        for group, _ in plan.parts:
            self._table(group, plan.direction)
        with self._backend.inside(), self._backend.lock:
            self._both(plan.direction)

    def _both(self, direction: str) -> tuple[Ring, Ring]:
        """Return the rings of a direction, for normal and for urgent transfers. The lock is held."""
        if direction not in self._rings:
            backend, (normal, urgent) = self._backend, self._parts
            address = backend.memory.take(normal + urgent, exact=True).address
            self._rings[direction] = Ring(backend, address, normal), Ring(backend, address + normal, urgent)
        return self._rings[direction]

    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Assign units to chunks, and send these through the ring; see :meth:`Path.write`."""
        if transfer.ring is None:
            sizes = [staging_of(group, plan.direction).nbytes for _, each in transfer.pieces for group, _ in each.parts]
            normal, urgent = self._both(plan.direction)
            transfer.ring = urgent if transfer.lane.urgent and max(sizes) <= urgent.nbytes else normal
            transfer.ring.enter(transfer, max(sizes))
        moving = [(*part, skips) for part, skips in zip(plan.parts, plan.skips, strict=True) if part.units.size]
        rows, effort = [], 0
        for number, (group, units, skips) in enumerate(moving, 1):
            events = (begin if number == 1 else 0), (end if number == len(moving) else 0)
            some, more = self._write_part(transfer, plan, Part(group, np.ascontiguousarray(units)), skips, events)
            rows.append(some)
            effort += more
        return np.concatenate(rows), effort

    def _write_part(
        self, transfer: GpuTransfer, plan: Plan, part: Part, skips: tuple[int, int], events: tuple[int, int]
    ) -> tuple[Int64Array, int]:
        """Write the calls that move the units of a run group; return them, and their effort."""
        backend, lane, ring, load = self._backend, transfer.lane, transfer.ring, plan.direction == "load"
        group, units, begin, end = *part, *events
        staging, table = staging_of(group, plan.direction), self._table(group, plan.direction)
        seams = backend.reach.seams(plan)[not load]
        count, per = units.shape[1], staging.granule_units
        skip = skips[not load] if per > 1 else 0
        last, rest = divmod(count - 1 + skip, per)
        granules = granules_of(plan.nbytes, staging.nbytes, ring.slot_nbytes)
        chunks = last // granules + 1
        ranges = (skip, rest + 1 if last == 0 else per), (0, per), (0, rest + 1)
        some = [staging.part(*ends) for ends in ranges]
        first, middle, final = (one.shape[1] for one in some)
        extents = first + max(last - 1, 0) * middle + (final if last else 0)
        extents += (last + 1) * seams.size  # a seam may cut each granule, of blocks that are read several times

        nbytes = 8 * (row_loops.HEADER * chunks + 2 * count)
        headers = transfer.pinned(nbytes)
        far = load or chunks > FEW_CHUNKS  # whether the kernels read their units from GPU memory
        base = transfer.scratch(nbytes).address if far else headers.address
        by_layer = len(transfer.pieces) > 1
        # Streams that wait for slots while a model computes slow the copy engine down. So the thread that makes the
        # calls of a long list waits in their place. Of a load by layers the model's own stream waits.
        late = not by_layer and ring.filled.size > 2 and chunks > 1 and extents + 5 * chunks > INLINE_EFFORT
        # Two more streams that wait beside the model's would slow the copy engine, too.
        copy, kernel = lane.stream("copy"), lane.stream("kernel")
        other = lane.stream("other") if load and chunks > 1 and not by_layer else kernel
        # Kernels on the other stream run behind those of earlier transfers.
        fork = transfer.event() if other != kernel and lane.last is not None else 0
        front = []
        if far and not load:
            front, begin = [self._carry(transfer, headers.address, base, nbytes, begin)], 0
        columns, rows = np.empty((3, extents), dtype=np.int64), np.empty((extents + 8 * chunks + 8, 8), dtype=np.int64)
        transfer.kept += (columns,)
        written, copied, calls = row_loops.write_chunks(
            units, load, skip, per, staging.unit_hosts, staging.unit_rings, np.concatenate(some, axis=1),
            np.cumsum([0, first, middle, final]), seams, ring.address, ring.slot_nbytes, ring.reserve(chunks),
            ring.filled, ring.freed, staging.nbytes, granules, table.lines[0], self._programs, headers.address, base,
            nbytes, headers.words, batched_from(backend, plan.direction), LAYER_COPIES if by_layer else BATCH_COPIES,
            copy, kernel, other, fork, late, begin, end, columns, np.empty(chunks + 1, dtype=np.int64), rows,
        )  # fmt: skip
        transfer.copies += count * table.copies + copied
        transfer.launches += calls
        # This thread must not wait for slots: it holds the interpreter while it makes calls.
        return np.concatenate([*front, rows[:written]]), written + copied + late * INLINE_EFFORT

    def _carry(self, transfer: GpuTransfer, source: int, base: int, nbytes: int, begin: int) -> Int64Array:
        """Return the launch that copies headers and units of a store to GPU memory, page by page.

        The copy engine may be busy with the loads of other transfers until these end.
        """
        at = np.arange(0, nbytes, PAGE_NBYTES)  # all memory of arenas is in whole pages
        header, rows = transfer.pinned(8 * (row_loops.HEADER + 2 * at.size)), np.empty((2, 8), dtype=np.int64)
        written = row_loops.write_launches(
            np.stack((source + at, base + at)), self._pages().lines, 1, header.address, header.address, 0,
            transfer.lane.stream("kernel"), begin, 0, header.words, rows,
        )  # fmt: skip
        return rows[:written]

    def _table(self, group: RunGroup, direction: str) -> Table:
        return self._backend.table(group, _out_of_ring if direction == "load" else _into_ring, TILE, WARPS)

    def _pages(self) -> Table:
        return self._backend.table(self, _page, TILE, WARPS)


def _out_of_ring(group: RunGroup) -> tuple[Int64Array, int]:
    staging = staging_of(group, "load")
    return staging.runs, staging.alignment


def _into_ring(group: RunGroup) -> tuple[Int64Array, int]:
    staging = staging_of(group, "store")
    return np.ascontiguousarray(staging.runs[[1, 0, 2]]), staging.alignment


def _page(_: StagedPath) -> tuple[Int64Array, int]:
    return np.array([[0], [0], [PAGE_NBYTES]], dtype=np.int64), 16


def granules_of(nbytes: int, granule: int, slot: int) -> int:
    """Return the number of granules per chunk.

    Args:
        nbytes: bytes of the plan, or of a group of its layers.
        granule: bytes per granule.
        slot: bytes per slot of the ring, which holds at least one granule.

    >>> [-(-16 // granules_of(16 * granule, granule, 21 << 20)) for granule in (147456, 655360, 1310720)]
    [1, 2, 3]
    """
    few = max(min(nbytes // SMALL_CHUNK_NBYTES, SMALL_CHUNKS), 1)
    return min(slot // granule, -(-nbytes // (few * granule)))
