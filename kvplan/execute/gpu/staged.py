"""The staged path: host extents by the copy engine to and from a ring in GPU memory, runs by a kernel beside it.

The copy engine moves what is contiguous on the host at the speed of the link; the kernel moves what is scattered on the
GPU at the speed of its memory. Chunks go through the slots of a ring, so that both work at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from kvplan.cost.policy import CHUNK_NBYTES, SMALL_CHUNK_NBYTES, SMALL_CHUNKS, Policy
from kvplan.cuda.device import DriverError
from kvplan.errors import PathError
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.copies import SLICE, STEP, alone, copy_all, long_to_issue, pace, refuse
from kvplan.execute.gpu.kernel_path import HEADER, write_flat
from kvplan.execute.gpu.shape import MAX_WIDTH, shape_of
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams, cut
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan
from kvplan.plan.staging import GRAIN, Staging

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Lane
    from kvplan.execute.gpu.tables import Kernel

SLOTS = 4
TILE = 32 << 10  # bytes
WARPS = 16
CARRIER = shape_of(16, MAX_WIDTH, TILE, WARPS)  # of the kernel that brings along what the others read
FEW_CHUNKS = 3
MANY_CHUNKS = 256  # more of them are issued by the lane's own thread: the driver's queue has an end
NOTHING = np.empty(0, dtype=np.int64)

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class Ring:
    """Slots in GPU memory that chunks pass through in turn.

    Args:
        events: two for each slot.

    Attributes:
        piece: the memory.
        slots, slot_nbytes: how many, and their bytes.
        filled, freed: (slots,) int64: of each slot, the event behind what was last put in, and behind what last took
            it out.
        users: of each slot, the last transfer through it, held weakly: it would hold its plan's memory.
    """

    def __init__(self, events: list[int], piece: Piece, slots: int, slot_nbytes: int) -> None:
        self.piece = piece
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self.filled, self.freed = np.array(events, dtype=np.int64).reshape(2, slots)
        self.users: list[Callable[[], DeviceTransfer | None]] = [lambda: None] * slots
        self.next = 0

    @property
    def events(self) -> list[int]:
        """All its events."""
        return [*self.filled.tolist(), *self.freed.tolist()]

    def enter(self, transfer: DeviceTransfer, chunks: int) -> tuple[int, BoolArray]:
        """The next slots are for the chunks of a transfer.

        Returns:
            The first slot; and of each slot from there on, whether something in flight still uses it.
        """
        first, self.next = self.next, (self.next + chunks) % self.slots
        user, busy = ref(transfer), np.zeros(self.slots, dtype=np.bool_)
        for k in range(min(chunks, self.slots)):
            slot = (first + k) % self.slots
            before = self.users[slot]()
            busy[k] = before is not None and not before._over
            self.users[slot] = user
        return first, busy


class StagedPath:
    """Copy engine and kernel in a pipeline."""

    name = "staged"
    capturable = False
    in_order = True

    def __init__(self, runtime: Runtime, policy: Policy) -> None:
        self._runtime = runtime
        self._policy = policy
        self._rings: dict[str, Ring] = {}

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        return (lane.copy, lane.kernel) if direction == "load" else (lane.kernel, lane.copy)

    def slow(self, plan: Plan, groups: int = 1) -> bool:
        """Whether issuing it takes the CPU long, cut into so many groups of layers."""
        del groups
        chunk = self._chunk_nbytes()
        if plan.nbytes > MANY_CHUNKS * chunk:
            return True
        runtime, way = self._runtime, plan.direction
        held = [(part.units.shape[1], runtime.staging(part.group, way).extents[2]) for part in plan.parts]
        return long_to_issue(runtime.device, way, held, SLICE)

    def check(self, plan: Plan) -> None:
        """The ring that the policy allows holds a granule of every part.

        Raises:
            PathError: it does not.
        """
        most = self._policy.staging_bytes
        if most is None:
            return
        for part in plan.parts:
            needed = self._runtime.staging(part.group, plan.direction).nbytes
            if needed > most:
                raise PathError(f"staging_bytes is {most}; a block here takes {needed} bytes of the ring: give as many")

    def make_ready(self, plan: Plan) -> None:
        """Compile kernels and loops, and upload run tables; the ring is taken by the first transfer."""
        tables, host_is_src = self._runtime.tables, plan.direction == "load"
        dealing().load()
        for part in plan.parts:
            items = _ringed(self._runtime.staging(part.group, plan.direction), load=host_is_src)
            tables.make_ready(part.group, *items, TILE, key=("ring", host_is_src), max_warps=WARPS)
        if not host_is_src:
            tables.function(CARRIER)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Lane) -> Callable[[], None]:
        """Deal units out to chunks; what is returned sends them through the ring, on both of the lane's streams."""
        host = self._runtime.seams(plan)[0 if plan.direction == "load" else 1]
        ready = [
            self._prepare_part(transfer, part, skips, plan, host, lane)
            for part, skips in zip(plan.parts, plan.skips, strict=True)
            if part.units.shape[1]
        ]

        def run() -> None:
            for part in ready:
                part()

        return ready[0] if len(ready) == 1 else run

    def _prepare_part(
        self, transfer: DeviceTransfer, part: Part, skips: tuple[int, int], plan: Plan, seams: Int64Array, lane: Lane
    ) -> Callable[[], None]:
        runtime, load = self._runtime, plan.direction == "load"
        staging = runtime.staging(part.group, plan.direction)
        ring = self._ring(transfer, lane.name, staging.nbytes)
        count, per = part.units.shape[1], staging.granule_units
        skip = skips[0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        granules = granules_of(plan.nbytes, staging.nbytes, ring.slot_nbytes)
        chunks = last // granules + 1
        first_slot, busy = ring.enter(transfer, chunks)
        table = runtime.tables.get(
            part.group, *_ringed(staging, load=load), TILE, lane.kernel, key=("ring", load), max_warps=WARPS
        )
        head = staging.part(skip, end + 1 if last == 0 else per)
        tail = staging.part(0, end + 1)
        total = head.shape[1] + max(last - 1, 0) * staging.extents.shape[1] + (tail.shape[1] if last else 0)
        # The kernels of a long transfer find their units in GPU memory: across a busy link, reading them takes longer
        # than the copying. A load brings them along with its first chunk.
        nbytes = 8 * (HEADER * chunks + 2 * count)
        piece = transfer.slot(nbytes)
        many = chunks > FEW_CHUNKS
        carried = transfer.scratch(nbytes) if load or many else piece
        extra = int(load)
        made, edges = np.empty((3, extra + total), dtype=np.int64), np.empty(chunks + 1, dtype=np.int64)
        if load:
            made[:, 0] = (piece.address, carried.address, nbytes)
        dealing().deal(
            part.units, load, skip, per, staging.unit_hosts, staging.unit_rings, head, staging.extents, tail,
            ring.piece.address, ring.slots, ring.slot_nbytes, first_slot, staging.nbytes, granules,
            table.header, carried.address, piece.words, made, extra, edges,
        )  # fmt: skip
        single = alone(runtime.device, plan.direction, made[2, extra : edges[-1]])
        transfer.launches += chunks + max(single, chunks)
        transfer.copies += count * staging.runs.shape[1] + int(edges[-1])
        at_once = not seams.size and not single
        two = load and chunks > 1 and self._policy.streams != 1
        # The other kernels are to run behind those of earlier transfers, and behind the upload of the table.
        fork = transfer.event() if two and (table.fresh or lane.last is not None) else 0
        rows = np.empty((7 * chunks + 4, 4), dtype=np.int64)
        calls, apart = writing().schedule(
            load, edges, SLICE if at_once else 0, first_slot, busy, ring.filled, ring.freed,
            lane.copy, lane.kernel, lane.other if two else lane.kernel, fork,
            carried.address, 8 * HEADER, rows,
        )  # fmt: skip
        leave = self.streams(lane, plan.direction)[1]
        before = self._carry(transfer, piece, carried, nbytes, lane.kernel) if many and not load else None
        if apart:
            copy = partial(self._copy, transfer, made, seams)
            return partial(self._run_apart, transfer, rows[:calls], made, table.kernel, leave, before, copy)
        return partial(self._run, transfer, rows[:calls], made, table.kernel, leave, before)

    def _carry(
        self, transfer: DeviceTransfer, piece: Piece, carried: Piece, nbytes: int, stream: int
    ) -> Callable[[], None]:
        """A launch that copies a slot to GPU memory: the copy engine may be busy for long with what others load."""
        self_made = transfer.slot(8 * (HEADER + 4))
        columns = np.array([[piece.address], [carried.address], [-(-nbytes // 16) * 16]], dtype=np.int64)
        write_flat(self_made, columns, -(-int(columns[2, 0]) // CARRIER.width))
        function, threads, shared = self._runtime.tables.function(CARRIER)
        return partial(self._runtime.device.launch, function, 1, threads, shared, stream, self_made.address)

    def _run(
        self, transfer: DeviceTransfer, rows: Int64Array, made: Int64Array, kernel: Kernel, leave: int,
        before: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        """Send chunks through the ring, to the stream that the transfer leaves by."""
        device = self._runtime.device
        # As many as there are SMs: where compute holds each of them to its end, what counts is to be done soon.
        programs = min(self._policy.max_programs or device.multiprocessors, device.multiprocessors)
        if before is not None:
            before()
        while len(rows):
            step = STEP - transfer._unmarked
            some, rows = rows[:step], rows[step:]
            try:
                device.issue(some, made, kernel, programs)
            except DriverError as error:
                refuse(error, tuple(made), range(made.shape[1]))
            pace(device, transfer, len(some), leave)

    def _run_apart(
        self, transfer: DeviceTransfer, rows: Int64Array, made: Int64Array, kernel: Kernel, leave: int,
        before: Callable[[], None] | None, copy: Callable[[int, int, int], None],
    ) -> None:  # fmt: skip
        """The same where the copies of some chunks cannot be one batch."""
        begun = 0
        for at in np.flatnonzero(rows[:, 0] == writing().APART).tolist():
            self._run(transfer, rows[begun:at], made, kernel, leave, before)
            copy(*rows[at, 1:].tolist())
            begun, before = at + 1, None
        self._run(transfer, rows[begun:], made, kernel, leave, before)

    def _copy(
        self, transfer: DeviceTransfer, columns: Int64Array, seams: Int64Array, first: int, last: int, stream: int
    ) -> None:
        made = Descriptors(*(column[first:last] for column in columns))
        if seams.size:
            load = transfer.plan.direction == "load"
            made = cut(made, Seams(seams, NOTHING) if load else Seams(NOTHING, seams), None)
        copy_all(self._runtime.device, transfer, made, 0, made.size.size, stream)

    def close(self) -> None:
        """Give the rings' events back; nothing is in flight."""
        for ring in self._rings.values():
            self._runtime.events += ring.events
        self._rings.clear()

    def _chunk_nbytes(self) -> int:
        chunk = self._policy.chunk_bytes or CHUNK_NBYTES
        most = self._policy.staging_bytes
        return chunk if most is None else min(chunk, max(most // 2, 1))

    def _ring(self, transfer: DeviceTransfer, lane: str, granule: int) -> Ring:
        """The ring of a lane; a larger one where a granule does not fit."""
        ring = self._rings.get(lane)
        if ring is not None and ring.slot_nbytes >= granule:
            return ring
        runtime = self._runtime
        # Here the compiled loop is loaded: else it would be, first, between a transfer's first event and its copies.
        runtime.device.issue(np.empty((0, 4), dtype=np.int64), np.empty((3, 0), dtype=np.int64), (0, 0, 0), 1)
        slot = max(self._chunk_nbytes() // GRAIN * GRAIN, granule)
        most = self._policy.staging_bytes
        slots = SLOTS if most is None else max(1, min(most // slot, 64))
        events = [transfer.event() for _ in range(2 * slots)]  # its own, until there is a ring; as is the memory
        runtime.memory.take(slots * slot, transfer._pieces, exact=True)
        *pieces, (_, piece) = transfer._pieces
        borrowed = transfer._borrowed[: -len(events)]
        if ring is not None:  # what is in flight on this lane still uses it, and ends before this transfer
            pieces.append(runtime.memory.held(ring.piece))
            borrowed += ring.events
        made = Ring(events, piece, slots, slot)
        self._rings[lane] = made  # from here to the end of the next line no signal is looked at
        transfer._pieces, transfer._borrowed = pieces, borrowed
        return made


def _ringed(staging: Staging, *, load: bool) -> tuple[Int64Array, int]:
    """Items of the kernels between ring and cache, and their alignment."""
    return staging.runs if load else staging.runs[[1, 0, 2]], staging.alignment


def granules_of(nbytes: int, granule: int, slot: int) -> int:
    """Granules of a chunk.

    Args:
        nbytes: of the plan.
        granule, slot: bytes of a granule, and of a slot of the ring, which holds at least one.

    >>> [-(-16 // granules_of(16 * granule, granule, 42 << 20)) for granule in (147456, 655360, 1310720)]
    [1, 2, 3]
    """
    few = max(min(nbytes // SMALL_CHUNK_NBYTES, SMALL_CHUNKS), 1)
    return min(slot // granule, -(-nbytes // (few * granule)))


@cache
def dealing() -> ModuleType:
    """The compiled loop, loaded with the first staged transfer."""
    from kvplan.execute.gpu import ring_loops as loaded

    return loaded


@cache
def writing() -> ModuleType:
    """The loop that writes calls down, loaded likewise."""
    from kvplan.cuda import calls as loaded

    return loaded
