"""The staged path of a transfer by layer: the chunks of all pieces, and their calls, written at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cuda.call_list import Segment, launch_words
from kvplan.execute.gpu.by_layer.pieces import PieceTables, Written, layer_loops
from kvplan.execute.gpu.by_layer.ring import TILE, WARPS, Ring, granules_of, ringed
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.path import Streams
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import LayerCuts
from kvplan.plan.plan import Plan
from kvplan.plan.staging import Staging, staging_of


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


class _Prepared:
    """The data of all pieces that do not depend on a plan's units.

    Args:
        cuts: the cuts.
        stagings: the staging of each piece; all have the same number of units per granule.
        tables: the run table of each piece.
        programs: programs of a launch.

    Attributes:
        tables: the run tables of the pieces.
        launches: (pieces, 8) int64: launch words.
        per: units per granule.
        unit_hosts, unit_rings: (pieces, per) int64, see :class:`~kvplan.plan.staging.Staging`.
        granule_nbytes: (pieces,) int64: bytes of a granule in the ring; ``granule`` is the largest of them.
        kinds: different pairs (bytes per unit, bytes per granule); ``kind`` has the pair's index for each piece.
        copies: copies per unit, over all pieces.
    """

    def __init__(self, cuts: LayerCuts, stagings: list[Staging], tables: list[Table], programs: int) -> None:
        self.tables = PieceTables(tables)
        self.launches: Int64Array = np.stack([launch_words(table.kernel, programs) for table in tables])
        self.per = stagings[0].granule_units
        self.unit_hosts: Int64Array = np.stack([one.unit_hosts for one in stagings])
        self.unit_rings: Int64Array = np.stack([one.unit_rings for one in stagings])
        self.granule_nbytes = np.array([one.nbytes for one in stagings], dtype=np.int64)
        self.granule = max(one.nbytes for one in stagings)
        sizes = [(group.nbytes, one.nbytes) for group, one in zip(cuts.groups, stagings, strict=True)]
        self.kinds = list(dict.fromkeys(sizes))
        self.kind = np.array([self.kinds.index(size) for size in sizes])
        self.shares = [sizes.count(kind) for kind in self.kinds]
        self.copies = sum(one.runs.shape[1] for one in stagings)
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
            sizes = [one.shape[1] for one in some]
            first, middle, last = (sum(sizes[k * len(sizes) // 3 : (k + 1) * len(sizes) // 3]) for k in range(3))
            packed = np.ascontiguousarray(np.concatenate(some, axis=1))
            at = np.cumsum([0, *sizes], dtype=np.int64)
            made = self._extents[skip, first_end, last_end] = Extents(packed, at, (first, middle, last))
        return made


class StagedLayers:
    """Writes transfers by layer for the path ``"staged"``.

    Args:
        resources: resources of the executor.
        programs: programs of a launch.
    """

    def __init__(self, resources: Resources, programs: int) -> None:
        self._resources = resources
        self._programs = programs
        # With the cuts, as the run tables themselves: both live as long as the run group of the plan.
        self._prepared: WeakKeyDictionary[LayerCuts, dict[bool, _Prepared]] = WeakKeyDictionary()

    def write(
        self, transfer: DeviceTransfer, plan: Plan, cuts: LayerCuts, lane: Streams, ring_of: Callable[[int], Ring],
        marks: Sequence[int],
    ) -> Written | None:  # fmt: skip
        """Write headers, unit addresses and calls of all pieces, and count them (``transfer.count``).

        Args:
            transfer: lends memory and events.
            plan: the transfer's plan, of one part that has units.
            cuts: its cuts.
            lane: the streams.
            ring_of: returns the lane's ring with slots of at least this number of bytes.
            marks: for each piece, the event to record behind it.

        Returns:
            The calls; None if the pieces must be prepared one by one: the host memory has seams, the driver has no
            batched copies, or host blocks are granules for some pieces only.
        """
        resources, load = self._resources, plan.direction == "load"
        if resources.device.driver.cuMemcpyBatchAsync is None or resources.reach.seams(plan)[0 if load else 1].size:
            return None
        made = self._prepared_for(cuts, plan.direction, lane.kernel)
        if made is None:
            return None
        limits, per, headers = resources.limits, made.per, made.tables.headers
        units = np.ascontiguousarray(plan.parts[0].units)
        ring = ring_of(made.granule)
        (pieces, header), count = headers.shape, units.shape[1]
        skip = plan.skips[0][0 if load else 1] if per > 1 else 0
        last, end = divmod(count - 1 + skip, per)
        granules = [granules_of(count * unit, granule, ring.slot_nbytes, limits) for unit, granule in made.kinds]
        cut = [last // each + 1 for each in granules]  # chunks of a piece
        chunks = sum([share * each for share, each in zip(made.shares, cut, strict=True)])
        found = made.extents(skip, end + 1 if last == 0 else per, end + 1)
        heads, middles, tails = found.counts
        most = heads + max(last - 1, 0) * middles + (tails if last else 0)
        nbytes = 8 * (header * chunks + 2 * count * pieces)
        slot = transfer.slot(nbytes)
        many = chunks > limits.few_chunks
        carried = transfer.scratch(nbytes) if load or many else slot
        columns = np.empty((3, load + most), dtype=np.int64)
        if load:
            columns[:, 0] = slot.address, carried.address, nbytes
        rows, marked = np.empty((most + 7 * chunks + 4 * pieces, 4), dtype=np.int64), np.empty(pieces, dtype=np.int64)
        first_slot, busy = ring.enter(transfer, chunks)
        written, extents, calls = layer_loops().write_chunks(
            units, cuts.steps, load, skip, per, made.unit_hosts, made.unit_rings, found.packed, found.at,
            ring.piece.address, ring.slot_nbytes, first_slot, busy, ring.filled, ring.freed, made.granule_nbytes,
            np.array(granules, dtype=np.int64)[made.kind], headers, carried.address, slot.words,
            min(limits.batch_copies, limits.layer_batch_copies),
            limits.batch_nbytes if load else 0, lane.copy, lane.kernel,
            np.array(marks, dtype=np.int64), columns, rows, marked,
        )  # fmt: skip
        transfer.count(count * made.copies + extents + load * pieces, calls)
        segment = Segment(rows[:written], columns, made.launches)
        return Written(segment, marked.tolist(), (slot, carried, nbytes) if many and not load else None)

    def _prepared_for(self, cuts: LayerCuts, direction: str, stream: int) -> _Prepared | None:
        load, known = direction == "load", self._prepared.get(cuts)
        if known is None:
            known = self._prepared.setdefault(cuts, {})
        made = known.get(load)
        if made is None or made.tables.fresh:
            stagings = [staging_of(group, direction) for group in cuts.groups]
            if len({one.granule_units for one in stagings}) > 1:
                return None
            get, key = self._resources.tables.get, ("ring", load)
            tables = [
                get(group, *ringed(one, load=load), TILE, stream, key=key, max_warps=WARPS)
                for group, one in zip(cuts.groups, stagings, strict=True)
            ]
            if made is None:
                made = known[load] = _Prepared(cuts, stagings, tables, self._programs)
        return made
