"""The staged path: the copy engine moves host extents to and from a ring in GPU memory, and a kernel moves runs.

The copy engine moves contiguous host memory at the speed of the link. The kernel moves scattered runs on the GPU at the
speed of its memory. Chunks go through the slots of a ring, so that both work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import NamedTuple

import numpy as np

from kvplan.cuda.call_list import APART, BATCH, CallList, Segment, copy_rows, launch_words
from kvplan.errors import PathError
from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.by_layer.ring import SLOTS, TILE, WARPS, Ring, granules_of, ringed
from kvplan.execute.gpu.by_layer.staged_layers import StagedLayers
from kvplan.execute.gpu.copy_engine import alone, batched_from
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.launches.headers import HEADER, write_flat
from kvplan.execute.gpu.path import Path, Refusal, Sides, Streams, refuse_kernels
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.shape import MAX_WIDTH, shape_of
from kvplan.execute.gpu.tables import Kernel
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams, cut
from kvplan.plan.layers import LayerCuts
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan
from kvplan.plan.staging import GRAIN, staging_of

CARRIER = shape_of(16, MAX_WIDTH, TILE, WARPS)  # shape of the kernel that copies headers and unit addresses to the GPU
NOTHING = np.empty(0, dtype=np.int64)


class Chunks(NamedTuple):
    """The driver calls that move one plan part through the ring.

    Attributes:
        rows: (n, 4) int64: the calls, one per row, in the format of :mod:`kvplan.cuda.calls`.
        made: (3, m) int64: source, destination and bytes of the descriptors that the calls copy.
        kernel: the kernel that the calls launch.
        carry: address of the header of a launch that copies headers and unit addresses to the GPU; 0 if there is none.
        kernels: the stream of that launch.
    """

    rows: Int64Array
    made: Int64Array
    kernel: Kernel
    carry: int
    kernels: int


class StagedPath(Path):
    """The path ``"staged"``: copy engine and kernel in a pipeline."""

    name = "staged"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._rings: dict[str, Ring] = {}
        policy, most = resources.policy, resources.policy.staging_bytes
        chunk = policy.chunk_bytes or resources.limits.chunk_nbytes
        self._chunk_nbytes = chunk if most is None else min(chunk, max(most // 2, 1))
        # One program per SM: compute may hold every SM until it ends, so the programs must end soon after they start.
        processors = resources.device.multiprocessors
        self._programs = min(policy.max_programs or processors, processors)
        self._layers = StagedLayers(resources, self._programs)

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """Refuse also if a granule is larger than the ring that the policy allows; see :meth:`Path.refuse`."""
        if plan.direction == "device":
            return (
                PathError,
                "path 'staged' is for loads and stores; within a GPU and between GPUs, path 'kernel' copies directly",
            )
        if not sides.by_kernels:
            return refuse_kernels(self.name, sides)
        most = self._resources.policy.staging_bytes
        if most is None:
            return None
        for part in plan.parts:
            needed = staging_of(part.group, plan.direction).nbytes
            if needed > most:
                return (
                    PathError,
                    f"staging_bytes is {most}; a block here takes {needed} bytes of the ring; give at least that",
                )
        return None

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        return (lane.copy, lane.kernel) if direction == "load" else (lane.kernel, lane.copy)

    def warm_up(self, plan: Plan) -> None:
        """Compile kernels and loops, and upload run tables. The first transfer allocates the ring."""
        tables, host_is_src = self._resources.tables, plan.direction == "load"
        ring_loops().load()
        for part in plan.parts:
            items = ringed(staging_of(part.group, plan.direction), load=host_is_src)
            tables.warm_up(part.group, *items, TILE, key=("ring", host_is_src), max_warps=WARPS)
        if not host_is_src:
            tables.function(CARRIER)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> list[Chunks]:
        """Assign units to chunks; see :meth:`Path.prepare`."""
        host = self._resources.reach.seams(plan)[0 if plan.direction == "load" else 1]
        return [
            self._prepare_part(transfer, part, skips, plan, host, lane)
            for part, skips in zip(plan.parts, plan.skips, strict=True)
            if part.units.shape[1]
        ]

    def write(self, transfer: DeviceTransfer, prepared: list[Chunks], calls: CallList) -> None:
        """Send chunks through the ring, on the lane's streams; see :meth:`Path.write`."""
        del transfer
        for chunks in prepared:
            if chunks.carry:
                calls.launch(self._resources.tables.function(CARRIER), 1, chunks.carry, chunks.kernels)
            calls.extend(Segment(chunks.rows, chunks.made, launch_words(chunks.kernel, self._programs)[None]))

    def write_layers(
        self, transfer: DeviceTransfer, cuts: LayerCuts, lane: Streams, marks: Sequence[int], calls: CallList
    ) -> list[int] | None:  # fmt: skip
        """Send the chunks of all pieces through the ring; see :meth:`Path.write_layers`."""
        ring_of = partial(self._ring, transfer, lane.name)
        written = self._layers.write(transfer, transfer.plan, cuts, lane, ring_of, marks)
        if written is None:
            return None
        if written.carried is not None:
            carry = self._carry(transfer, *written.carried)
            calls.launch(self._resources.tables.function(CARRIER), 1, carry, lane.kernel)
        before = calls.count
        calls.extend(written.calls)
        return [before + rows for rows in written.marked]

    def _prepare_part(
        self, transfer: DeviceTransfer, part: Part, skips: tuple[int, int], plan: Plan, seams: Int64Array,
        lane: Streams,
    ) -> Chunks:  # fmt: skip
        resources, load = self._resources, plan.direction == "load"
        limits, staging = resources.limits, staging_of(part.group, plan.direction)
        ring = self._ring(transfer, lane.name, staging.nbytes)
        count, per = part.units.shape[1], staging.granule_units
        skip = skips[0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        granules = granules_of(plan.nbytes, staging.nbytes, ring.slot_nbytes, limits)
        chunks = last // granules + 1
        first_slot, busy = ring.enter(transfer, chunks)
        table = resources.tables.get(
            part.group, *ringed(staging, load=load), TILE, lane.kernel, key=("ring", load), max_warps=WARPS
        )
        head = staging.part(skip, end + 1 if last == 0 else per)
        tail = staging.part(0, end + 1)
        total = head.shape[1] + max(last - 1, 0) * staging.extents.shape[1] + (tail.shape[1] if last else 0)
        # The kernels of a long transfer read their unit addresses from GPU memory: across a busy link, reading them
        # takes longer than the copies. A load copies the addresses to the GPU with its first chunk.
        nbytes = 8 * (HEADER * chunks + 2 * count)
        piece = transfer.slot(nbytes)
        many = chunks > limits.few_chunks
        carried = transfer.scratch(nbytes) if load or many else piece
        extra = int(load)
        made, edges = np.empty((3, extra + total), dtype=np.int64), np.empty(chunks + 1, dtype=np.int64)
        if load:
            made[:, 0] = (piece.address, carried.address, nbytes)
        ring_loops().deal(
            part.units, load, skip, per, staging.unit_hosts, staging.unit_rings, head, staging.extents, tail,
            ring.piece.address, ring.slots, ring.slot_nbytes, first_slot, staging.nbytes, granules,
            table.header, carried.address, piece.words, made, extra, edges,
        )  # fmt: skip
        batched = not seams.size and not alone(resources, plan.direction, made[2, extra : edges[-1]])
        most = limits.batch_copies if batched else 0
        # Of a load by layers, the model's own stream waits, too: two more streams that wait would slow the copy engine.
        two = load and chunks > 1 and resources.policy.streams != 1 and not transfer.by_layer
        # Kernels on the other stream must run after those of earlier transfers, and after the upload of the table.
        fork = transfer.event() if two and (table.fresh or lane.last is not None) else 0
        # Streams that wait for slots while a model computes slow the copy engine down. So the thread that makes the
        # calls of a long list waits in their place.
        late = batched and ring.slots > 2 and chunks > 1 and total + 5 * chunks > limits.inline_effort
        rows = np.empty((7 * chunks + 4 + (total // most if most else 0), 4), dtype=np.int64)
        written, copies = calls().schedule(
            load, edges, most, first_slot, busy, ring.filled, ring.freed,
            lane.copy, lane.kernel, lane.other if two else lane.kernel, fork,
            carried.address, 8 * HEADER, late, rows,
        )  # fmt: skip
        rows = rows[:written]
        if not batched:
            others = written - copies
            rows, made = self._taken_apart(plan.direction, rows, made, seams)
            copies = len(rows) - others
        transfer.count(count * staging.runs.shape[1] + int(edges[-1]), chunks + copies)
        carry = self._carry(transfer, piece, carried, nbytes) if many and not load else 0
        return Chunks(rows, made, table.kernel, carry, lane.kernel)

    def _carry(self, transfer: DeviceTransfer, piece: Piece, carried: Piece, nbytes: int) -> int:
        """Prepare a kernel launch that copies a pinned slot to GPU memory, and return the address of its header.

        A kernel copies it, because the copy engine may be busy for a long time with the loads of other transfers.
        """
        self._resources.tables.function(CARRIER)
        header = transfer.slot(8 * (HEADER + 4))
        columns = np.array([[piece.address], [carried.address], [-(-nbytes // 16) * 16]], dtype=np.int64)
        write_flat(header, columns, -(-int(columns[2, 0]) // CARRIER.width))
        return header.address

    def _taken_apart(
        self, direction: str, rows: Int64Array, columns: Int64Array, seams: Int64Array
    ) -> tuple[Int64Array, Int64Array]:  # fmt: skip
        """Return rows and columns in which each chunk has the calls that its copies need; none crosses a seam."""
        least, most = batched_from(self._resources, direction), self._resources.limits.batch_copies
        made_rows, made_columns, width, begun = list[Int64Array](), [columns], columns.shape[1], 0
        for at in np.flatnonzero(rows[:, 0] == APART).tolist():
            _, first, last, stream = rows[at].tolist()
            made = Descriptors(*(column[first:last] for column in columns))
            if seams.size:
                made = cut(made, Seams(seams, NOTHING) if direction == "load" else Seams(NOTHING, seams), None)
            some = np.stack(made)
            apart = copy_rows(some, 0, some.shape[1], stream, least, most)
            apart[:, 1] += width
            apart[:, 2] += width * (apart[:, 0] == BATCH)
            made_rows += [rows[begun:at], apart]
            made_columns.append(some)
            begun, width = at + 1, width + some.shape[1]
        return np.concatenate([*made_rows, rows[begun:]]), np.concatenate(made_columns, axis=1)

    def _ring(self, transfer: DeviceTransfer, lane: str, granule: int) -> Ring:
        """Return the ring of a lane. Make a new one if there is none, or if a granule does not fit in a slot."""
        ring = self._rings.get(lane)
        if ring is not None and ring.slot_nbytes >= granule:
            return ring
        resources = self._resources
        slot = max(self._chunk_nbytes // GRAIN * GRAIN, granule)
        most = resources.policy.staging_bytes
        slots = SLOTS if most is None else max(1, min(most // slot, 64))
        # Transfers in flight on this lane still use the old ring. They end before this transfer.
        if old := self._rings.pop(lane, None):
            transfer.inherit(old.events, old.piece)
        piece = resources.memory.take(slots * slot, exact=True)
        events = [resources.handles.event() for _ in range(2 * slots)]
        made = self._rings[lane] = Ring(events, piece, slots, slot)
        return made


@cache
def ring_loops() -> ModuleType:
    """Import the module of the loop that assigns units to chunks. Only staged transfers need it."""
    from kvplan.execute.gpu import ring_loops as loaded

    return loaded


@cache
def calls() -> ModuleType:
    """Import the module of the loop that lists the driver's calls. Only staged transfers need it."""
    from kvplan.cuda import calls as loaded

    return loaded
