"""The host path: CPU memory to CPU memory, by threads that hold no interpreter lock while they copy."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from kvplan.errors import PathError
from kvplan.execute.transfer import Stopwatch, Transfer, TransferResult, wait_for
from kvplan.plan import Plan

# Bytes a task: large enough that handing it to a thread costs nothing beside it, small enough to share evenly.
TASK_NBYTES = 4 << 20
MAX_THREADS = 8
# Transfers from here on bypass the CPU's caches: they would only push out what others keep there.
STREAMING_NBYTES = 16 << 20

Task = Callable[[], None]


def refusal(plan: Plan) -> str | None:
    """Why the host path cannot serve a plan, or None."""
    if plan.direction != "host":
        return f"copies between CPU memories only, and this plan is a {plan.direction!r}"
    return None


def tasks(plan: Plan) -> tuple[list[Task], int]:
    """The plan as independent pieces of work, and how many contiguous copies they make in all.

    Runs are copied as the program has them; where they are longer than a task, as flat descriptors cut to size.
    """
    from kvplan.execute import memcpy

    work: list[Task] = []
    copies = 0
    streaming = plan.nbytes >= STREAMING_NBYTES
    if any(run.nbytes > TASK_NBYTES for group, _ in plan.parts for run in group.runs):
        made = plan.descriptors(max_nbytes=TASK_NBYTES)
        copies = made.size.size
        per_task = max(1, copies * TASK_NBYTES // max(plan.nbytes, 1))
        for first, last in _ranges(copies, per_task):
            work.append(partial(memcpy.copy_flat, *made, first, last, streaming))
        return work, copies
    for part in plan.parts:
        count = part.group.offsets[0].size * part.units.shape[1]
        copies += count
        per_task = max(1, count * TASK_NBYTES // max(part.nbytes, 1))
        for first, last in _ranges(count, per_task):
            work.append(partial(memcpy.copy_units, part.units, *part.group.offsets, first, last, streaming))
    return work, copies


def _ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, count)) for first in range(0, count, step))


class _Job(NamedTuple):
    transfer: Transfer
    after: Any


class HostPath:
    """Runs transfers one after another, in the order of their submits, each on all threads.

    Args:
        threads: CPU threads; by default one a core, at most 8.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(os.cpu_count() or 1, MAX_THREADS)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="kvplan-copy") if self.threads > 1 else None
        self._runner = threading.Thread(target=_serve, args=(self._jobs, self._pool), name="kvplan-host", daemon=True)
        self._runner.start()

    def submit(self, plan: Plan, after: Any) -> Transfer:
        """Queue a plan; returns at once.

        Raises:
            PathError: the plan touches memory that is not the CPU's.
        """
        why_not = refusal(plan)
        if why_not:
            raise PathError(f"path 'host' {why_not}")
        transfer = Transfer(plan)
        self._jobs.put(_Job(transfer, after))
        return transfer

    def close(self) -> None:
        """Finish what was submitted, then stop the threads."""
        self._jobs.put(None)
        if threading.current_thread() is not self._runner:
            self._runner.join()
        if self._pool is not None:
            self._pool.shutdown()


def _serve(jobs: queue.SimpleQueue[_Job | None], pool: ThreadPoolExecutor | None) -> None:
    while (job := jobs.get()) is not None:
        try:
            wait_for(job.after)
            job.transfer._finish(_run(job.transfer.plan, pool))
        except BaseException as error:  # noqa: BLE001  # it belongs to the transfer; the next one must still run
            job.transfer._finish(None, error)
        del job  # else the last transfer's memory would live until the next one comes


def _run(plan: Plan, pool: ThreadPoolExecutor | None) -> TransferResult:
    work, copies = tasks(plan) if plan.nbytes else ([], 0)
    watch = Stopwatch()
    if pool is None or len(work) < 2:
        for task in work:
            task()
    else:
        for pending in [pool.submit(task) for task in work]:
            pending.result()
    return TransferResult(plan.nbytes, watch.seconds(), "host", copies, len(work))
