"""The staged path: the copy engine moves host extents to and from a ring in GPU memory, and a kernel moves runs.

The copy engine moves contiguous host memory at the speed of the link. The kernel moves scattered runs on the GPU at the
speed of its memory. Chunks go through the slots of a ring, so that both work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cuda.rows import RECORD, rows_of
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.copy_engine import BATCH_COPIES, batched_from
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.kernel_path import ALL, Launches
from kvplan.execute.gpu.path import (
    INLINE_EFFORT,
    Path,
    Sides,
    Work,
    Written,
    marked_in,
    pieces_of,
    refuse_kernels,
    work_of,
    works_of,
)
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.tables import HEADER, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Edges, LayerCuts
from kvplan.plan.plan import Plan
from kvplan.plan.staging import GRAIN, Staging, staging_of
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


class Slots:
    """A part of a ring: slots in GPU memory that the chunks of transfers of one direction use in turn.

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
        self._users: WeakKeyDictionary[GpuTransfer, Int64Array] = WeakKeyDictionary()  # and their `filled`

    def enter(self, transfer: GpuTransfer, granule: int) -> bool:
        """Let a transfer use slots that hold a granule; return whether earlier transfers may still use them.

        The streams of a lane, and the events of the slots, keep the transfers of one lane in order. If other lanes
        use the slots, or did when they were smaller, the transfer follows their end.
        """
        if self.slot_nbytes < granule:
            nbytes = max(self.nbytes // SLOTS // GRAIN * GRAIN, granule)
            events = self._backend.handles.events(2 * (self.nbytes // nbytes))  # transfers in flight use the old ones
            self.filled, self.freed = np.array(events, dtype=np.int64).reshape(2, -1)
            self._next, self.slot_nbytes = 0, nbytes
        users = [(one, used) for one, used in list(self._users.items()) if not one.over]
        transfer.behind = [one for one, used in users if one.lane is not transfer.lane or used is not self.filled]
        self._users[transfer] = self.filled
        return bool(users)

    def reserve(self, chunks: int) -> int:
        """Return the slot of the first of some chunks."""
        first = self._next % self.filled.size
        self._next = first + chunks
        return first


class Extents(NamedTuple):
    """The extents of the first granule of all pieces, then of a middle granule, then of the last.

    Attributes:
        packed: (3, e) int64: host offset, ring offset and bytes, piece by piece.
        at: (3 * pieces + 1,) int64: index of the first extent of each piece.
        counts: number of extents, over all pieces, of first, middle and last granules.
    """

    packed: Int64Array
    at: Int64Array
    counts: tuple[int, int, int]


class Prepared:
    """The data of a run group, or of its pieces by layers, that do not depend on a plan's units.

    Args:
        stagings: the staging of each piece; all have the same number of units per granule.
        tables: the run table of each piece.

    Attributes:
        lines: (pieces, 13) int64: the launches.
        per: units per granule.
        unit_hosts, unit_rings: (pieces, per) int64, see :class:`~kvplan.plan.staging.Staging`.
        granules: (pieces,) int64: bytes of a granule in the ring.
        copies: copies per unit, over all pieces.
    """

    def __init__(self, stagings: Sequence[Staging], tables: Sequence[Table]) -> None:
        self.lines: Int64Array = np.stack([table.line for table in tables])
        self.per = stagings[0].granule_units
        self.unit_hosts: Int64Array = np.stack([one.unit_hosts for one in stagings])
        self.unit_rings: Int64Array = np.stack([one.unit_rings for one in stagings])
        self.granules = np.array([one.nbytes for one in stagings], dtype=np.int64)
        self.copies = sum(table.copies for table in tables)
        self.marks = np.zeros(len(tables), dtype=np.int64)
        self._stagings = stagings
        self._extents: dict[tuple[int, int, int], Extents] = {}

    def extents(self, skip: int, first_end: int, last_end: int) -> Extents:
        """Return the extents of the granules of a plan.

        Args:
            skip, first_end: first unit of the first granule, and the unit after its last.
            last_end: unit after the last of the last granule.
        """
        made = self._extents.get((skip, first_end, last_end))
        if made is None:
            ranges = (skip, first_end), (0, self.per), (0, last_end)
            some = [staging.part(*units) for units in ranges for staging in self._stagings]
            sizes, pieces = [one.shape[1] for one in some], len(self._stagings)
            first, middle, last = (sum(sizes[k * pieces : (k + 1) * pieces]) for k in range(3))
            packed = np.ascontiguousarray(np.concatenate(some, axis=1))
            at = np.cumsum([0, *sizes], dtype=np.int64)
            made = self._extents[skip, first_end, last_end] = Extents(packed, at, (first, middle, last))
        return made


class StagedPath(Path):
    """The path ``"staged"``: copy engine and kernel in a pipeline."""

    name = "staged"

    def __init__(self, backend: Resources) -> None:
        self._backend = backend
        quarter = (backend.policy.staging_bytes or RING_NBYTES) // 4 // GRAIN * GRAIN
        self._parts = 3 * quarter, quarter  # bytes for normal and for urgent transfers
        self._rings: dict[str, list[Slots]] = {}  # by direction
        self._carrying: Launches | None = None
        # One program per SM: compute may hold every SM until it ends, so the programs must end soon after they start.
        processors = backend.device.multiprocessors
        self._programs = min(backend.policy.max_programs or processors, processors)
        self._known: WeakKeyDictionary[RunGroup | LayerCuts, dict[bool, Prepared]] = WeakKeyDictionary()

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Refuse also if a granule is larger than the ring's part for normal transfers; see :meth:`Path.refuse`."""
        if plan.direction == "device":
            text = "path 'staged' is for loads and stores; within a GPU and between GPUs, path 'kernel' copies directly"
            return PathError(text)
        if not sides.by_kernels:
            return refuse_kernels(self.name, sides)
        needed = max((staging_of(part.group, plan.direction).nbytes for part in plan.parts), default=0)
        if needed <= self._parts[False]:
            return None
        given = self._backend.policy.staging_bytes or RING_NBYTES
        least = -(-needed // (3 * GRAIN)) * 4 * GRAIN
        text = f"staging_bytes is {given}; a block here takes {needed} bytes of the ring; give at least {least}"
        return PathError(text)

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        return (lane.copy, lane.kernel) if direction == "load" else (lane.kernel, lane.copy)

    def warm_up(self, plan: Plan, edges: Edges | None) -> None:
        """Compile kernels, upload run tables, and allocate the ring; see :meth:`Path.warm_up`."""
        self._pages()
        for _, piece in pieces_of(plan, edges):
            for work in works_of(piece):
                self._prepared(work, plan.direction)
        with self._backend.inside():
            self._ring(plan.direction)

    def _ring(self, direction: str) -> list[Slots]:
        """Return both parts of a direction's ring. The lock is held."""
        if direction not in self._rings:
            first, nbytes = self._backend.memory.take(sum(self._parts), exact=True).address, self._parts
            self._rings[direction] = [
                Slots(self._backend, address, size)
                for address, size in zip((first, first + nbytes[0]), nbytes, strict=True)
            ]
        return self._rings[direction]

    def write(self, transfer: GpuTransfer) -> Written:
        """Assign units to chunks, and send these through the ring; see :meth:`Path.write`."""
        plan, (enter, leave) = transfer.plan, self.streams(transfer.lane, transfer.plan.direction)
        whole = work_of(plan, transfer.edges)
        if whole is not None and len({staging_of(one, plan.direction).granule_units for one in whole.groups}) > 1:
            whole = None  # host blocks are granules for some pieces only
        pieces = [[whole]] if whole else [works_of(piece) for _, piece in pieces_of(plan, transfer.edges)]
        granule = max(
            staging_of(group, plan.direction).nbytes for works in pieces for one in works for group in one.groups
        )
        normal, urgent = self._ring(plan.direction)
        slots = urgent if transfer.lane.urgent and granule <= urgent.nbytes else normal
        busy = slots.enter(transfer, granule)
        seams = self._backend.reach.seams(plan)[plan.direction == "store"]
        made, effort = [rows_of([(RECORD, enter, transfer.begin)])], 2
        for number, works in enumerate(pieces):
            for work in works:
                rows, more = self._write_work(transfer, work, slots, seams, busy=busy or len(made) > 1)
                made.append(rows)
                effort += more
            if transfer.marks and not whole:
                made.append(rows_of([(RECORD, leave, transfer.marks[number])]))
        made.append(rows_of([(RECORD, leave, transfer.end)]))
        rows = np.concatenate(made)
        return Written(rows, effort, marked_in(rows, transfer.marks))

    def _write_work(
        self, transfer: GpuTransfer, work: Work, slots: Slots, seams: Int64Array, *, busy: bool
    ) -> tuple[Int64Array, int]:
        """Write the calls that move the units of a run group, or of its pieces; return them, and their effort."""
        backend, plan, lane = self._backend, transfer.plan, transfer.lane
        load = plan.direction == "load"
        made = self._prepared(work, plan.direction)
        count, pieces, per = work.units.shape[1], len(work.groups), made.per
        skip = work.skips[0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        total = plan.nbytes if transfer.edges is None else work.nbytes // pieces
        granules = granules_of(total, made.granules, slots.slot_nbytes)
        chunks = int((last // granules + 1).sum())
        found = made.extents(skip, end + 1 if last == 0 else per, end + 1)
        heads, middles, tails = found.counts
        extents = heads + max(last - 1, 0) * middles + (tails if last else 0) + pieces * seams.size

        nbytes = 8 * (HEADER * chunks + 2 * count * pieces)
        slot = transfer.slot(nbytes)
        far = load or chunks > FEW_CHUNKS  # whether the kernels read their units from GPU memory
        base = transfer.scratch(nbytes).address if far else slot.address
        by_layer = transfer.edges is not None
        # Streams that wait for slots while a model computes slow the copy engine down. So the thread that makes the
        # calls of a long list waits in their place. Of a load by layers the model's own stream waits.
        late = not by_layer and slots.filled.size > 2 and chunks > 1 and extents + 5 * chunks > INLINE_EFFORT
        # Two more streams that wait beside the model's would slow the copy engine, too.
        other = lane.other if load and chunks > 1 and not by_layer else lane.kernel
        # Kernels on the other stream run behind those of earlier transfers.
        fork = transfer.event() if other != lane.kernel and lane.last is not None else 0

        columns, rows = np.empty((3, extents), dtype=np.int64), np.empty((extents + 8 * chunks + 8, 8), dtype=np.int64)
        transfer.kept.append(columns)
        marks = made.marks if len(transfer.marks) != pieces else np.array(transfer.marks, dtype=np.int64)
        written, copied, calls = row_loops.write_chunks(
            work.units, work.steps, load, skip, per, made.unit_hosts, made.unit_rings, found.packed, found.at, seams,
            slots.address, slots.slot_nbytes, slots.reserve(chunks), busy, slots.filled, slots.freed, made.granules,
            granules, made.lines, self._programs, slot.address, base, nbytes, slot.words,
            batched_from(backend, plan.direction), LAYER_COPIES if by_layer else BATCH_COPIES,
            lane.copy, lane.kernel, other, fork, late, marks, columns,
            np.empty((chunks + 1, 3), dtype=np.int64), rows,
        )  # fmt: skip
        transfer.count(count * made.copies + copied, calls)
        rows = rows[:written]
        if far and not load:
            rows = np.concatenate((self._carry(transfer, slot.address, base, nbytes), rows))
        # This thread must not wait for slots: it holds the interpreter while it makes calls.
        return rows, written + copied + late * INLINE_EFFORT

    def _carry(self, transfer: GpuTransfer, source: int, base: int, nbytes: int) -> Int64Array:
        """Return the launch that copies headers and units of a store to GPU memory, page by page.

        The copy engine may be busy with the loads of other transfers until these end.
        """
        at = np.arange(0, nbytes, PAGE_NBYTES)  # all memory of arenas is in whole pages
        header, rows = transfer.slot(8 * (HEADER + 2 * at.size)), np.empty((4, 8), dtype=np.int64)
        pages = self._pages()
        row_loops.write_launches(
            np.stack((source + at, base + at)), pages.lines, 1, header.address, header.address, 0,
            transfer.lane.kernel, 0, 0, pages.marks, header.words, rows,
        )  # fmt: skip
        return rows[1:2]

    def _pages(self) -> Launches:
        if self._carrying is None:
            page = np.array([[0], [0], [PAGE_NBYTES]], dtype=np.int64)
            table = self._backend.tables.get(self, page, 16, TILE, key="page", warps=WARPS)
            self._carrying = Launches([(table, 0, 0, ALL, 0, 0)])
        return self._carrying

    def _prepared(self, work: Work, direction: str) -> Prepared:
        load, known = direction == "load", self._known.get(work.owner)
        if known is None:
            known = self._known.setdefault(work.owner, {})
        if load not in known:
            stagings = [staging_of(group, direction) for group in work.groups]
            tables = [self._table(*pair, load=load) for pair in zip(work.groups, stagings, strict=True)]
            known[load] = Prepared(stagings, tables)
        return known[load]

    def _table(self, group: RunGroup, staging: Staging, *, load: bool) -> Table:
        items = staging.runs if load else np.ascontiguousarray(staging.runs[[1, 0, 2]])
        return self._backend.tables.get(group, items, staging.alignment, TILE, key=("ring", load), warps=WARPS)


def granules_of(nbytes: int, granules: Int64Array, slot: int) -> Int64Array:
    """Return the number of granules per chunk of each piece.

    Args:
        nbytes: bytes of a piece, or of the plan.
        granules: (pieces,) bytes per granule; a slot holds at least one of each.
        slot: bytes per slot of the ring.

    >>> [-(-16 // granules_of(16 * granule, np.array([granule]), 21 << 20)) for granule in (147456, 655360, 1310720)]
    [array([1]), array([2]), array([3])]
    """
    few = max(min(nbytes // SMALL_CHUNK_NBYTES, SMALL_CHUNKS), 1)
    return np.minimum(slot // granules, -(-nbytes // (few * granules)))
