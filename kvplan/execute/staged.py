"""The staged path: host extents by the copy engine to and from a ring in GPU memory, runs by a kernel beside it.

The copy engine moves what is contiguous on the host at the speed of the link; the kernel moves what is scattered on the
GPU at the speed of its memory. Chunks go through the slots of a ring, so that both work at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import PathError
from kvplan.execute.copy_engine import SLICE, copy_all
from kvplan.execute.cuda import Device
from kvplan.execute.kernel_path import HEADER, copies_of
from kvplan.execute.memory import Piece
from kvplan.execute.policy import Policy
from kvplan.lower import Part, Seams, cut
from kvplan.plan import Plan
from kvplan.program import Int64Array
from kvplan.staging import GRAIN, Staging
from kvplan.twin import Descriptors

if TYPE_CHECKING:
    from kvplan.execute.flight import DeviceTransfer
    from kvplan.execute.lane import Lane
    from kvplan.execute.runtime import Runtime

CHUNK_NBYTES = 42 << 20
SLOTS = 4
# A small transfer is cut into this many chunks, of not less than this: each costs the CPU some 20 us.
SMALL_CHUNKS = 4
SMALL_CHUNK_NBYTES = 2 << 20
PROGRAMS = 32
TILE = 32 << 10  # bytes
WARPS = 16
MANY_CHUNKS = 256  # more of them are issued by the lane's own thread: the driver's queue has an end
NOTHING = np.empty(0, dtype=np.int64)


class Ring:
    """Slots in GPU memory that chunks pass through in turn.

    Attributes:
        piece: the memory.
        slots, slot_nbytes: how many, and their bytes.
        filled, freed: of each slot, the event behind what was last put in, and behind what last took it out.
    """

    def __init__(self, device: Device, piece: Piece, slots: int, slot_nbytes: int) -> None:
        self.piece = piece
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self.filled = [device.event() for _ in range(slots)]
        self.freed = [device.event() for _ in range(slots)]
        self.next = 0


@dataclass(frozen=True)
class Chunks:
    """How the granules of a part are dealt out to chunks.

    Attributes:
        count: chunks.
        granules: a chunk.
        host, cache: addresses: of every granule on the host; of every unit in the cache.
        index: granule of each unit.
        inner: unit of its granule, of each unit.
    """

    count: int
    granules: int
    host: Int64Array
    cache: Int64Array
    index: Int64Array
    inner: Int64Array


class StagedPath:
    """Copy engine and kernel in a pipeline."""

    name = "staged"
    capturable = False

    def __init__(self, runtime: Runtime, policy: Policy) -> None:
        self._runtime = runtime
        self._policy = policy
        self._rings: dict[str, Ring] = {}

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        return (lane.copy, lane.kernel) if direction == "load" else (lane.kernel, lane.copy)

    def slow(self, plan: Plan) -> bool:
        """Whether issuing it takes the CPU long."""
        chunk = self._chunk_nbytes()
        if plan.nbytes > MANY_CHUNKS * chunk:
            return True
        extents = sum(
            part.units.shape[1] * self._runtime.staging(part.group, plan.direction).extents.size.size
            for part in plan.parts
        )
        return extents > SLICE

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

    def issue(self, transfer: DeviceTransfer, plan: Plan, lane: Lane) -> None:
        """Put it on the lane's streams."""
        host = self._runtime.seams(plan)[0 if plan.direction == "load" else 1]
        for part, skips in zip(plan.parts, plan.skips, strict=True):
            if part.units.shape[1]:
                self._issue_part(transfer, part, skips, plan, host, lane)

    def _issue_part(
        self, transfer: DeviceTransfer, part: Part, skips: tuple[int, int], plan: Plan, seams: Int64Array, lane: Lane
    ) -> None:
        runtime, load = self._runtime, plan.direction == "load"
        device = runtime.device
        staging = runtime.staging(part.group, plan.direction)
        ring = self._ring(transfer, plan.direction, staging.nbytes)
        chunks = self._deal(part, skips[0 if load else 1], staging, ring, plan.nbytes, load)
        count, first_slot = part.units.shape[1], ring.next
        ring.next = (ring.next + chunks.count) % ring.slots
        # Of every granule and of every unit: where it lies in the ring.
        granule = np.arange(chunks.host.size)
        chunk_of, within = granule // chunks.granules, granule % chunks.granules
        places = ring.piece.address + (first_slot + chunk_of) % ring.slots * ring.slot_nbytes + within * staging.nbytes
        rings = places[chunks.index] + staging.unit_rings[chunks.inner]
        made, edges = _extents(staging, chunks, places, load)
        table = runtime.table(
            part.group, staging.runs if load else staging.runs[[1, 0, 2]], staging.alignment,
            TILE, lane.kernel, key=("ring", load), max_warps=WARPS,
        )  # fmt: skip
        # Units of each chunk: first and one past the last.
        bounds = np.searchsorted(chunks.index, np.arange(chunks.count + 1) * chunks.granules)
        piece = transfer.slot(8 * (HEADER * chunks.count + 2 * count))
        units = HEADER * chunks.count
        piece.words[units : units + count], piece.words[units + count : units + 2 * count] = (
            (rings, chunks.cache) if load else (chunks.cache, rings)
        )
        headers = piece.words[:units].reshape(chunks.count, HEADER)
        headers[:] = table.header
        headers[:, 0] = np.diff(bounds)
        headers[:, 3] = piece.address + 8 * (units + bounds[:-1])
        headers[:, 4] = headers[:, 3] + 8 * count
        programs = min(self._policy.max_programs or PROGRAMS, PROGRAMS)
        for chunk in range(chunks.count):
            slot = (first_slot + chunk) % ring.slots
            first, last = edges[chunk], edges[chunk + 1]
            launch = (table.shape, programs, lane.kernel, piece.address + 8 * HEADER * chunk)
            if load:
                device.wait(lane.copy, ring.freed[slot])
                self._copy(transfer, made, first, last, seams, load, lane.copy)
                device.record(ring.filled[slot], lane.copy)
                device.wait(lane.kernel, ring.filled[slot])
                runtime.launch(*launch)
                device.record(ring.freed[slot], lane.kernel)
            else:
                device.wait(lane.kernel, ring.freed[slot])
                runtime.launch(*launch)
                device.record(ring.filled[slot], lane.kernel)
                device.wait(lane.copy, ring.filled[slot])
                self._copy(transfer, made, first, last, seams, load, lane.copy)
                device.record(ring.freed[slot], lane.copy)
        transfer.launches += chunks.count
        transfer.copies += count * staging.runs.shape[1]

    def _copy(
        self, transfer: DeviceTransfer, made: Descriptors, first: int, last: int, seams: Int64Array, load: bool,
        stream: int,
    ) -> None:  # fmt: skip
        if seams.size:
            pieces = Descriptors(*(column[first:last] for column in made))
            made = cut(pieces, Seams(seams, NOTHING) if load else Seams(NOTHING, seams), None)
            first, last = 0, made.size.size
        copy_all(self._runtime.device, made, first, last, stream)
        transfer.copies += last - first
        transfer.launches += 1

    def _deal(self, part: Part, skip: int, staging: Staging, ring: Ring, total: int, load: bool) -> Chunks:
        host, cache = part.units if load else part.units[::-1]
        count, units = host.size, staging.granule_units
        if units == 1:
            index, inner, hosts = np.arange(count), np.zeros(count, dtype=np.int64), host
        else:
            index, inner = np.divmod(np.arange(skip, skip + count), units)
            starts = np.flatnonzero(np.diff(index, prepend=-1))
            hosts = host[starts] - staging.unit_hosts[inner[starts]]
        fit = ring.slot_nbytes // staging.nbytes
        wanted = max(total // SMALL_CHUNKS, SMALL_CHUNK_NBYTES) // staging.nbytes
        granules = max(1, min(fit, wanted))
        return Chunks(-(-hosts.size // granules), granules, hosts, cache, index, inner)

    def _chunk_nbytes(self) -> int:
        chunk = self._policy.chunk_bytes or CHUNK_NBYTES
        most = self._policy.staging_bytes
        return chunk if most is None else min(chunk, max(most // 2, 1))

    def _ring(self, transfer: DeviceTransfer, direction: str, granule: int) -> Ring:
        """The ring of a direction; a larger one where a granule does not fit."""
        ring = self._rings.get(direction)
        if ring is not None and ring.slot_nbytes >= granule:
            return ring
        runtime = self._runtime
        slot = -(-max(self._chunk_nbytes(), granule) // GRAIN) * GRAIN
        most = self._policy.staging_bytes
        slots = SLOTS if most is None else max(1, min(most // slot, 64))
        with runtime.lock:
            piece = runtime.memory.take(slots * slot)
        if ring is not None:  # what is in flight on this lane still uses it, and ends before this transfer
            transfer._pieces.append((runtime.memory, ring.piece))
            transfer._borrowed += ring.filled + ring.freed
        ring = self._rings[direction] = Ring(runtime.device, piece, slots, slot)
        return ring


def _extents(staging: Staging, chunks: Chunks, places: Int64Array, load: bool) -> tuple[Descriptors, list[int]]:
    """Extents of all granules, host and ring, and where those of each chunk begin."""
    granules = chunks.host.size
    last = granules - 1
    ends = (int(chunks.inner[-1]) + 1) if granules else 0
    first = int(chunks.inner[0])
    if granules == 1:
        kinds = [(0, 1, staging.part(first, ends))]
    else:
        kinds = [
            (0, 1, staging.part(first, staging.granule_units)),
            (1, last, staging.extents),
            (last, granules, staging.part(0, ends)),
        ]
    host = np.concatenate([(chunks.host[a:b, None] + e.host).ravel() for a, b, e in kinds])
    ring = np.concatenate([(places[a:b, None] + e.ring).ravel() for a, b, e in kinds])
    size = np.concatenate([np.tile(e.size, b - a) for a, b, e in kinds])
    counts = np.concatenate([np.full(b - a, e.size.size) for a, b, e in kinds])
    edges = np.concatenate(([0], np.cumsum(counts)))
    at = np.minimum(np.arange(chunks.count + 1) * chunks.granules, granules)
    made = Descriptors(host, ring, size) if load else Descriptors(ring, host, size)
    return made, edges[at].tolist()


__all__ = ["Ring", "StagedPath", "copies_of"]
