"""The staged path: the copy engine moves host extents to and from a ring in GPU memory, and a kernel moves runs.

The copy engine moves contiguous host memory at the speed of the link. The kernel moves scattered runs on the GPU at the
speed of its memory. Chunks go through the slots of a ring, so that both work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cuda.rows import ENDED, LAUNCH, PLAYED, RECORD, rows_of
from kvplan.errors import PathError
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.copy_engine import BATCH_COPIES, batched_from
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.kernel_path import kernels_of, write_flat
from kvplan.execute.gpu.memory import Piece
from kvplan.execute.gpu.path import (
    INLINE_EFFORT,
    Path,
    Refusal,
    Sides,
    Work,
    Written,
    pieces_of,
    refuse_kernels,
    work_of,
    works_of,
)
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import MAX_WIDTH, shape_of
from kvplan.execute.gpu.tables import HEADER, Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Edges, LayerCuts
from kvplan.plan.plan import Plan
from kvplan.plan.staging import GRAIN, Staging, staging_of
from kvplan.program.program import RunGroup

RING_NBYTES = 84 << 20  # of a direction, if the policy names no number
SLOTS = 4
TILE, WARPS = 32 << 10, 16
# A small transfer is cut into 3 equal chunks of at least 4 MiB. Each chunk costs 20 to 60 us of CPU time. A kernel for
# fewer bytes takes less than 10 us.
SMALL_CHUNKS, SMALL_CHUNK_NBYTES = 3, 4 << 20
# The kernels of more chunks read their units from GPU memory: across a busy link, that takes longer than the copies.
FEW_CHUNKS = 3
LAYER_COPIES = 64  # most copies of a batch while a model's layers are launched
CARRIER = shape_of(16, MAX_WIDTH, TILE, WARPS)  # of the kernel that copies headers and units to the GPU


class Share(NamedTuple):
    """The slots of a ring that a lane uses.

    Attributes:
        address: address of the first slot.
        slot_nbytes: bytes of a slot.
        filled, freed: (slots,) int64: for each slot, the event after its last write, and after its last read.
    """

    address: int
    slot_nbytes: int
    filled: Int64Array
    freed: Int64Array


class Ring:
    """Slots in GPU memory that the chunks of one direction use in turn. Two lanes have half of them each.

    Args:
        backend: the executor.
        nbytes: bytes of all slots.
    """

    def __init__(self, backend: Resources, nbytes: int) -> None:
        self._backend, self._nbytes = backend, nbytes
        self._piece: Piece | None = None
        self._slot_nbytes = self._slots = 0
        self._events: list[int] = []
        self._lanes: dict[bool, Streams] = {}  # by whether they are urgent
        self._settled: set[bool] = set()  # lanes that follow all earlier users of their slots
        self._state: Int64Array | None = None  # of the last transfer that has a share
        self._next: dict[bool, int] = {}

    def make(self, granule: int) -> None:
        """Allocate the memory, or make the slots larger, so that a granule fits. The lock is held."""
        if self._slot_nbytes >= granule and self._piece is not None:
            return
        if self._piece is None:
            self._piece = self._backend.memory.take(self._nbytes, exact=True)
        slot_nbytes = max(self._nbytes // SLOTS // GRAIN * GRAIN, granule)
        slots = self._nbytes // slot_nbytes
        self._events = [self._backend.handles.event() for _ in range(2 * slots)]  # transfers in flight use the old ones
        self._slot_nbytes, self._slots = slot_nbytes, slots
        self._settled.clear()
        self._next.clear()

    def share(self, transfer: GpuTransfer, granule: int) -> Share:
        """Return the slots of a transfer's lane. Where they change hands, the transfer follows those that use them."""
        mine, state = transfer.lane.urgent, self._state
        self.make(granule)
        self._lanes[mine] = transfer.lane
        if state is not None and state[ENDED] and not state[PLAYED]:
            self._settled.clear()  # it was never issued, so it has followed nobody
        if mine not in self._settled or self._slots == 1:
            transfer.behind = [lane.last for lane in self._lanes.values() if lane.last is not None]
        self._settled.add(mine)
        self._state = transfer.state
        first, count = 0, self._slots
        if len(self._settled) == 2 and count > 1:
            half = count // 2
            first, count = (half, count - half) if mine else (0, half)
        filled, freed = np.array(self._events, dtype=np.int64).reshape(2, self._slots)[:, first : first + count]
        address = self._piece.address if self._piece is not None else 0
        return Share(address + first * self._slot_nbytes, self._slot_nbytes, filled, freed)

    def enter(self, transfer: GpuTransfer, share: Share, chunks: int) -> tuple[int, bool]:
        """Reserve the next slots for the chunks of a transfer; return the first, and whether one may be in use."""
        slots, lane = share.filled.size, transfer.lane
        first = self._next.get(lane.urgent, 0) % slots
        self._next[lane.urgent] = (first + chunks) % slots
        return first, bool(transfer.copies) or (lane.last is not None and not lane.last.over)


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
        headers, kernels: (pieces, 9) and (pieces, 4) int64: the launches.
        per: units per granule.
        unit_hosts, unit_rings: (pieces, per) int64, see :class:`~kvplan.plan.staging.Staging`.
        granules: (pieces,) int64: bytes of a granule in the ring.
        copies: copies per unit, over all pieces.
    """

    def __init__(self, stagings: Sequence[Staging], tables: Sequence[Table]) -> None:
        self.headers: Int64Array = np.stack([table.header for table in tables])
        self.kernels = kernels_of(tables)
        self.fresh = list(tables)
        self.per = stagings[0].granule_units
        self.unit_hosts: Int64Array = np.stack([one.unit_hosts for one in stagings])
        self.unit_rings: Int64Array = np.stack([one.unit_rings for one in stagings])
        self.granules = np.array([one.nbytes for one in stagings], dtype=np.int64)
        self.copies = sum(one.runs.shape[1] for one in stagings)
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
        self._nbytes = backend.policy.staging_bytes or RING_NBYTES
        self._rings = {direction: Ring(backend, self._nbytes // GRAIN * GRAIN) for direction in ("load", "store")}
        # One program per SM: compute may hold every SM until it ends, so the programs must end soon after they start.
        processors = backend.device.multiprocessors
        self._programs = min(backend.policy.max_programs or processors, processors)
        self._known: WeakKeyDictionary[RunGroup | LayerCuts, dict[bool, Prepared | None]] = WeakKeyDictionary()

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """Refuse also if a granule is larger than the ring; see :meth:`Path.refuse`."""
        if plan.direction == "device":
            return (
                PathError,
                "path 'staged' is for loads and stores; within a GPU and between GPUs, path 'kernel' copies directly",
            )
        if not sides.by_kernels:
            return refuse_kernels(self.name, sides)
        needed = max((staging_of(part.group, plan.direction).nbytes for part in plan.parts), default=0)
        if needed > self._nbytes:
            return (
                PathError,
                f"staging_bytes is {self._nbytes}; a block here takes {needed} bytes of the ring; give at least that",
            )
        return None

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        return (lane.copy, lane.kernel) if direction == "load" else (lane.kernel, lane.copy)

    def warm_up(self, plan: Plan, edges: Edges | None) -> None:
        """Compile kernels, upload run tables, and allocate the ring; see :meth:`Path.warm_up`."""
        self._backend.tables.function(CARRIER)
        for _, piece in pieces_of(plan, edges):
            for work in works_of(piece):
                self._prepared(work, plan.direction)
        granule = max(staging_of(part.group, plan.direction).nbytes for part in plan.parts)
        with self._backend.inside():
            self._rings[plan.direction].make(granule)

    def write(self, transfer: GpuTransfer) -> Written:
        """Assign units to chunks, and send these through the ring; see :meth:`Path.write`."""
        plan, (enter, leave) = transfer.plan, self.streams(transfer.lane, transfer.plan.direction)
        whole = work_of(plan, transfer.edges)
        if whole is not None and self._prepared(whole, plan.direction) is None:
            whole = None
        pieces = [[whole]] if whole else [works_of(piece) for _, piece in pieces_of(plan, transfer.edges)]
        made, effort, marked = [rows_of([(RECORD, enter, transfer.begin)])], 2, list[int]()
        groups = [group for works in pieces for work in works for group in work.groups]
        granule = max(staging_of(group, plan.direction).nbytes for group in groups)
        share = self._rings[plan.direction].share(transfer, granule)
        for number, works in enumerate(pieces):
            for work in works:
                rows, more = self._write_work(transfer, work, share)
                made.append(rows)
                effort += more
            if transfer.marks and not whole:
                made.append(rows_of([(RECORD, leave, transfer.marks[number])]))
                marked.append(sum(map(len, made)))
        made.append(rows_of([(RECORD, leave, transfer.end)]))
        rows = np.concatenate(made)
        if whole:
            marked = [int(np.flatnonzero((rows[:, 0] == RECORD) & (rows[:, 2] == mark))[0]) + 1
                      for mark in transfer.marks]  # fmt: skip
        return Written(rows, effort, marked)

    def _write_work(self, transfer: GpuTransfer, work: Work, share: Share) -> tuple[Int64Array, int]:
        """Write the calls that move the units of a run group, or of its pieces; return them, and their effort."""
        backend, plan, lane = self._backend, transfer.plan, transfer.lane
        load = plan.direction == "load"
        made = self._prepared(work, plan.direction)
        if made is None:
            raise PathError("the pieces of this plan have host blocks of several kinds")
        made.fresh = [table for table in made.fresh if not backend.tables.ready(table, lane.kernel)]
        ring, count, pieces, per = self._rings[plan.direction], work.units.shape[1], len(work.groups), made.per
        skip = work.skips[0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        total = plan.nbytes if transfer.edges is None else work.nbytes // pieces
        granules = granules_of(total, made.granules, share.slot_nbytes)
        chunks = int((last // granules + 1).sum())
        found = made.extents(skip, end + 1 if last == 0 else per, end + 1)
        heads, middles, tails = found.counts
        seams = backend.reach.seams(plan)[0 if load else 1]
        extents = heads + max(last - 1, 0) * middles + (tails if last else 0) + pieces * seams.size
        first_slot, busy = ring.enter(transfer, share, chunks)

        nbytes = 8 * (HEADER * chunks + 2 * count * pieces)
        slot, many = transfer.slot(nbytes), chunks > FEW_CHUNKS
        base = transfer.scratch(nbytes).address if load or many else slot.address
        by_layer = transfer.edges is not None
        # Streams that wait for slots while a model computes slow the copy engine down. So the thread that makes the
        # calls of a long list waits in their place. Of a load by layers the model's own stream waits.
        late = not by_layer and share.filled.size > 2 and chunks > 1 and extents + 5 * chunks > INLINE_EFFORT
        # Two more streams that wait beside the model's would slow the copy engine, too.
        other = lane.other if load and chunks > 1 and not by_layer else lane.kernel
        # Kernels on the other stream run behind those of earlier transfers, and behind the upload of the table.
        fork = transfer.event() if other != lane.kernel and (made.fresh or lane.last is not None) else 0

        columns, rows = np.empty((3, extents), dtype=np.int64), np.empty((extents + 8 * chunks + 8, 8), dtype=np.int64)
        transfer.kept.append(columns)
        marks = made.marks if len(transfer.marks) != pieces else np.array(transfer.marks, dtype=np.int64)
        written, copied, calls = row_loops.write_chunks(
            work.units, work.steps, load, skip, per, made.unit_hosts, made.unit_rings, found.packed, found.at, seams,
            share.address, share.slot_nbytes, first_slot, busy, share.filled, share.freed, made.granules, granules,
            made.headers, made.kernels, self._programs, slot.address, base, nbytes, slot.words,
            batched_from(backend, plan.direction), LAYER_COPIES if by_layer else BATCH_COPIES,
            lane.copy, lane.kernel, other, fork, late, marks, columns,
            np.empty((chunks + 1, 3), dtype=np.int64), rows,
        )  # fmt: skip
        transfer.count(count * made.copies + copied, calls)
        rows = rows[:written]
        if many and not load:
            rows = np.concatenate((self._carry(transfer, slot, base, nbytes), rows))
        # This thread must not wait for slots: it holds the interpreter while it makes calls.
        return rows, len(rows) + copied + late * INLINE_EFFORT

    def _carry(self, transfer: GpuTransfer, slot: Piece, base: int, nbytes: int) -> Int64Array:
        """Return the launch that copies headers and units to GPU memory for a store.

        A kernel copies them, because the copy engine may be busy for a long time with the loads of other transfers.
        """
        kernel, header = self._backend.tables.function(CARRIER), transfer.slot(8 * (HEADER + 4))
        columns = np.array([[slot.address], [base], [-(-nbytes // 16) * 16]], dtype=np.int64)
        write_flat(header.words, columns, -(-int(columns[2, 0]) // CARRIER.width), header.address)
        launch = (LAUNCH, transfer.lane.kernel, header.address, kernel.function, 1, kernel.threads, kernel.shared)
        return rows_of([launch])

    def _prepared(self, work: Work, direction: str) -> Prepared | None:
        """Return what is prepared for units; None if host blocks are granules for some pieces only."""
        load, known = direction == "load", self._known.get(work.owner)
        if known is None:
            known = self._known.setdefault(work.owner, {})
        if load not in known:
            stagings = [staging_of(group, direction) for group in work.groups]
            alike = len({one.granule_units for one in stagings}) == 1
            tables = [self._table(*pair, load=load) for pair in zip(work.groups, stagings, strict=True)]
            known[load] = Prepared(stagings, tables) if alike else None
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
