"""The copy-engine paths: batches of flat descriptors, and 2-D copies. They use no SM."""

from __future__ import annotations

import numpy as np

from kvplan.cuda.rows import BATCH, BOX, RECORD, WORDS, copy_rows, rows_of
from kvplan.errors import KVPlanError
from kvplan.execute.gpu.gpu_transfer import GpuTransfer, Streams
from kvplan.execute.gpu.path import Path, Sides
from kvplan.execute.gpu.resources import Resources
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import exploded, flat, strided
from kvplan.plan.plan import Plan

UNIFIED = 4  # CUmemorytype: the driver finds the kind of memory by the address
# Most copies of a batch. The copy engine begins when a call returns, so it waits for the whole first batch; and the
# model's launches wait for the driver's lock, which a call holds. A call of 52,000 copies has crashed driver 580.
BATCH_COPIES = 256
# Copies of fewer bytes from host memory get a call each. If a batch has copies of up to 24 KiB in several sizes, it
# loses bytes, or ends the context or the process: the driver writes these bytes into its queue of commands, and past
# its end. Seen with driver 580 on H100 and H200; the size was the same on every GPU measured.
BATCH_NBYTES = 28 << 10


class CopyEnginePath(Path):
    """The path ``"copy_engine"``: cuMemcpyBatchAsync over the flat lowering; before driver 12.8, single copies."""

    name = "copy_engine"

    def __init__(self, backend: Resources) -> None:
        self._backend = backend

    def refuse(self, plan: Plan, sides: Sides) -> KVPlanError | None:
        """Refuse nothing; see :meth:`Path.refuse`."""
        del plan, sides
        return None

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.copy, lane.copy

    def warm_up(self, plan: Plan) -> None:
        """See :meth:`Path.warm_up`."""
        del plan

    def write(self, transfer: GpuTransfer, plan: Plan, begin: int, end: int) -> tuple[Int64Array, int]:
        """Lower the plan; see :meth:`Path.write`."""
        stream = transfer.lane.copy
        front = rows_of([(RECORD, stream, begin)] if begin else [])
        rows = np.concatenate((front, self._copies(transfer, plan), rows_of([(RECORD, stream, end)])))
        return rows, len(rows) + int(rows[rows[:, 0] == BATCH, 5].sum())

    def _copies(self, transfer: GpuTransfer, plan: Plan) -> Int64Array:
        """Write the copies of a plan's descriptors."""
        columns = np.stack(flat(plan.moving, self._backend.reach.seams(plan), None))
        transfer.keep(columns)
        least = batched_from(self._backend, transfer.plan.direction)
        rows = copy_rows(columns, transfer.lane.copy, least=least, most=BATCH_COPIES)
        transfer.count(columns.shape[1], len(rows))
        return rows


class CopyEngine2DPath(CopyEnginePath):
    """The path ``"copy_engine_2d"``: one 2-D copy for each run and unit; flat descriptors for bytes without rows."""

    name = "copy_engine_2d"

    def _copies(self, transfer: GpuTransfer, plan: Plan) -> Int64Array:
        """Lower the plan into 2-D rows and flat descriptors."""
        backend, stream = self._backend, transfer.lane.copy
        rows = np.asarray(strided(plan.parts, backend.reach.seams(plan)))
        # The largest pitch is about 2 GiB. Layers of a large cache lie further apart.
        single = (rows[:, 3] == 1) | (rows[:, 4:6].max(axis=1, initial=0) > backend.device.max_pitch)
        parameters, columns = boxes(rows[~single]), np.stack(exploded(rows[single]))
        transfer.keep(parameters, columns)
        made = np.zeros((len(parameters), WORDS), dtype=np.int64)
        made[:, 0], made[:, 1] = BOX, stream
        made[:, 2] = parameters.ctypes.data + 128 * np.arange(len(parameters))
        if columns.size:
            least = batched_from(backend, transfer.plan.direction)
            made = np.concatenate((made, copy_rows(columns, stream, least=least, most=BATCH_COPIES)))
        transfer.count(int(rows[:, 3].sum()), len(made))
        return made


def boxes(rows: Int64Array) -> Int64Array:
    """Return the CUDA_MEMCPY2D of every row, as (n, 16) int64: the words of the structure.

    >>> boxes(np.array([[1, 2, 3, 4, 5, 6]])).tolist()
    [[0, 0, 4, 0, 1, 0, 5, 0, 0, 4, 0, 2, 0, 6, 3, 4]]
    """
    made = np.zeros((len(rows), 16), dtype=np.int64)
    made[:, (2, 9)] = UNIFIED
    made[:, (4, 11, 14, 15, 6, 13)] = rows
    return made


def batched_from(backend: Resources, direction: str) -> int:
    """Return the bytes of the smallest copy that may be in a batch; no copy is, before driver 12.8."""
    if backend.device.driver.cuMemcpyBatchAsync is None:
        return 1 << 62
    return BATCH_NBYTES if direction == "load" else 0
