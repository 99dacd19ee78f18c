"""The kernel path of a transfer by layer: a launch for each piece, all of them written at once."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cost.policy import HOST_ROUTES, KernelSize
from kvplan.cuda.call_list import NO_COLUMNS, Segment, launch_words
from kvplan.execute.gpu.by_layer.pieces import PieceTables, Written, layer_loops
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.tables import Table
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.layers import LayerCuts
from kvplan.plan.plan import Plan


class _Prepared:
    """The data of all pieces that do not depend on a plan's units.

    Attributes:
        tables: the run tables of the pieces.
        tile_rows: (pieces,) int64: rows per tile of each kernel.
        launches: (pieces, 8) int64: launch words, for one program.
        copies: copies per unit, over all pieces.
        rows, most_rows: rows per unit, over all pieces, and of the piece that has most.
    """

    def __init__(self, cuts: LayerCuts, tables: list[Table]) -> None:
        self.tables = PieceTables(tables)
        self.tile_rows = np.array([table.shape.rows for table in tables], dtype=np.int64)
        self.launches: Int64Array = np.stack([launch_words(table.kernel, 1) for table in tables])
        self.copies = sum(group.packed.shape[1] for group in cuts.groups)
        self.rows = sum(table.items for table in tables)
        self.most_rows = max(table.items for table in tables)


class KernelLayers:
    """Writes transfers by layer for the path ``"kernel"``.

    Args:
        resources: resources of the executor.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        # With the cuts, as the run tables themselves: both live as long as the run group of the plan.
        self._prepared: WeakKeyDictionary[LayerCuts, dict[tuple[int, int], _Prepared]] = WeakKeyDictionary()

    def write(
        self, transfer: DeviceTransfer, plan: Plan, cuts: LayerCuts, stream: int, size: KernelSize, tile: int,
        marks: Sequence[int],
    ) -> Written | None:  # fmt: skip
        """Write headers, unit addresses and calls of all pieces, and count them (``transfer.count``).

        Args:
            transfer: lends memory.
            plan: the transfer's plan, of one part that has units.
            cuts: its cuts.
            stream: the stream of the launches.
            size: size of the launches.
            tile: bytes in flight per program; all pieces have the same number.
            marks: for each piece, the event to record behind it.

        Returns:
            The calls; None if the pieces must be prepared one by one: a launch has too many rows for one header,
            or the process spares numba.
        """
        limits, units = self._resources.limits, np.ascontiguousarray(plan.parts[0].units)
        if loops.loaded is None:
            return None
        made, count = self._prepared_for(cuts, stream, tile, size.warps), units.shape[1]
        if count * made.most_rows > limits.launch_rows:
            return None
        headers = made.tables.headers
        pieces, header = headers.shape
        nbytes = 8 * pieces * (header + 2 * count)
        slot = transfer.slot(nbytes)
        base, copied, columns = slot.address, False, NO_COLUMNS
        if plan.direction not in HOST_ROUTES and count * made.rows > limits.near_rows:  # see KernelPath._base
            base, copied = transfer.scratch(nbytes).address, True
            columns = np.array([[slot.address], [base], [nbytes]], dtype=np.int64)
        rows, marked = np.empty((2 * pieces + copied, 4), dtype=np.int64), np.empty(pieces, dtype=np.int64)
        launches = made.launches.copy()
        layer_loops().write_launches(
            units, cuts.steps, headers, made.tile_rows, size.programs, copied, np.array(marks, dtype=np.int64), stream,
            base, slot.words, rows, marked, launches,
        )  # fmt: skip
        transfer.count(count * made.copies, pieces)
        return Written(Segment(rows, columns, launches), marked.tolist())

    def _prepared_for(self, cuts: LayerCuts, stream: int, tile: int, warps: int) -> _Prepared:
        known = self._prepared.get(cuts)
        if known is None:
            known = self._prepared.setdefault(cuts, {})
        made = known.get((tile, warps))
        if made is None or made.tables.fresh:
            get = self._resources.tables.get
            tables = [
                get(group, group.packed, group.alignment, tile, stream, key="direct", max_warps=warps)
                for group in cuts.groups
            ]
            if made is None:
                made = known[tile, warps] = _Prepared(cuts, tables)
        return made
