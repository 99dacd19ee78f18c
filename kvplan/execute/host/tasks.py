"""Cut a plan of the host path into independent tasks, and copy the bytes of a task."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvplan.base.process import compiling
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# Bytes of a task: large enough to hide the cost of passing it to a thread, small enough to share work evenly.
TASK_NBYTES = 4 << 20
# Transfers of this size or more bypass the CPU's caches; otherwise they would evict other data.
STREAMING_NBYTES = 16 << 20

Task = Callable[[], object]


def tasks_of(plan: Plan) -> tuple[list[Task], int]:
    """Cut a plan into independent tasks; return them and the number of contiguous copies that they make."""
    runs = [_cut(part.group) for part in plan.moving]
    counts = [sizes.size * part.units.shape[1] for part, (_, _, sizes) in zip(plan.moving, runs, strict=True)]
    loop = copy_loop(sum(counts))
    streaming = plan.nbytes >= STREAMING_NBYTES
    tasks: list[Task] = []
    for part, columns, count in zip(plan.moving, runs, counts, strict=True):
        copy = partial(loop, part.units, *columns)
        copy(0, 0, streaming)  # loads the loop before the copying is timed
        step = max(1, count * TASK_NBYTES // part.nbytes)
        tasks += [partial(copy, first, min(first + step, count), streaming) for first in range(0, count, step)]
    return tasks, sum(counts)


def _cut(group: RunGroup) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the offsets and bytes of the copies of a unit; those longer than a task are cut."""
    src, dst, size = group.packed
    if all(run.nbytes <= TASK_NBYTES for run in group.runs):
        return src, dst, size
    pieces = -(-size // TASK_NBYTES)
    skips = TASK_NBYTES * np.concatenate([np.arange(count) for count in pieces])
    src, dst, size = (column.repeat(pieces) for column in (src, dst, size))
    return src + skips, dst + skips, np.minimum(size - skips, TASK_NBYTES)


def copy_loop(copies: int) -> Any:
    """Return the loop that copies: without numba for few copies in a short process, otherwise compiled."""
    if loops.spares(copies):
        return copy_by_memmove
    with compiling():
        from kvplan.execute.host import memcpy

        return memcpy.copy


def copy_by_memmove(
    units: Int64Array, run_src: Int64Array, run_dst: Int64Array, run_size: Int64Array, first: int, last: int,
    streaming: bool,  # an argument of the compiled loop
) -> None:  # fmt: skip
    """Do as the compiled loop, with a C call per copy: the start of numba would cost more time than it saves."""
    for number in range(first, last):
        unit, run = divmod(number, run_size.size)
        src, dst = units[:, unit].tolist()
        ctypes.memmove(dst + int(run_dst[run]), src + int(run_src[run]), int(run_size[run]))
