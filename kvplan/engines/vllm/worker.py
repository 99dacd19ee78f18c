"""The worker of vLLM's CPU offloading: it accepts jobs, moves their blocks with kvplan, and reports the results.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``OffloadingWorker``), ``v1/kv_offload/cpu/gpu_worker.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.startup import prepare
from kvplan.engines.streams import current_stream
from kvplan.engines.vllm.jobs import Jobs
from kvplan.engines.vllm.pages import pages_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan

logger = logging.getLogger("kvplan.engines.vllm")


class JobResult(NamedTuple):
    """The result of a job, with the fields of vLLM's ``TransferResult``.

    Attributes:
        job_id: the scheduler's number of the job.
        success: whether all bytes have arrived.
        transfer_size: bytes that were moved; None if the job failed.
        transfer_time: seconds of copying; None if the job failed.
    """

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None


class FailedJob(NamedTuple):
    """A job that failed.

    Attributes:
        job_id: the scheduler's number of the job.
        block_ids: ids of its device blocks, of all groups; after a failed load, their content is unknown.
    """

    job_id: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _Job:
    job_id: int
    device_spec: Any
    transfers: list[Transfer] = field(default_factory=list)
    error: str = ""  # a text, since an exception's traceback refers to the job, and that cycle would keep tensors alive

    def done(self) -> bool:
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        """Wait until all transfers of the job have ended, whether they succeed or fail."""
        for transfer in self.transfers:
            try:
                transfer.synchronize()
            except Exception as error:  # noqa: BLE001  # as in submit
                self.error = self.error or _told(error)

    def result(self) -> JobResult:
        """Return the result of a job that has ended."""
        try:
            done = [transfer.result() for transfer in self.transfers]
        except Exception as error:  # noqa: BLE001  # as in submit
            self.error = self.error or _told(error)
        if self.error:
            return JobResult(self.job_id, success=False)
        nbytes, seconds = sum(one.nbytes for one in done), sum(one.seconds for one in done)
        return JobResult(self.job_id, success=True, transfer_size=nbytes, transfer_time=seconds)


class _Line:
    """The jobs of one kind, which end in the order of their submits."""

    def __init__(self, what: str, executor: Executor, plan: Callable[[Any, Any], list[Plan]]) -> None:
        self._what = what
        self._executor = executor
        self._plan = plan
        self._jobs: deque[_Job] = deque()

    def submit(self, job_id: int, device_spec: Any, host_spec: Any) -> None:
        """Plan and queue a job. A job that cannot be planned or queued keeps its place in line and fails."""
        job = _Job(job_id, device_spec)
        self._jobs.append(job)
        try:
            # Stores read blocks that the stream writes, and loads overwrite blocks that it has read.
            after = current_stream(self._executor.device)
            for plan in self._plan(device_spec, host_spec):
                job.transfers.append(self._executor.submit(plan, after))
        except Exception as error:  # noqa: BLE001  # any error is this job's; jobs of other requests must go on
            job.error = _told(error)

    def finished(self) -> Iterator[tuple[_Job, JobResult]]:
        """Yield the jobs that have ended since the last call, in order."""
        while self._jobs and self._jobs[0].done():
            job = self._jobs.popleft()
            result = job.result()
            if job.error:
                logger.error("%s job %d failed: %s", self._what, job.job_id, job.error)
            yield job, result

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended; unknown numbers are ignored."""
        for job in self._jobs:
            if job.job_id in job_ids:
                job.wait()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class Worker:
    """A worker that moves blocks between a device and the rows of a host pool, like vLLM's ``CPUOffloadingWorker``.

    Stores, loads and expedited loads have a queue each. Jobs of one queue end in the order of their submits, and no
    queue waits for another. A job reads and writes after all work that the engine's current stream has at its submit.

    Args:
        groups: references of each KV-cache group: vLLM's ``CanonicalKVCacheRef``, or objects with its members.
        device_rows: for each tensor, ``(blocks, page)`` bytes as a torch tensor.
        host_rows: for each tensor, ``(chunks, blocks_per_chunk * page)`` bytes as a torch tensor.
        blocks_per_chunk: number of device blocks in a host chunk.
        canonical: whether the host has canonical pages, by the references' mappings.
        policy: policy of the executors; by default ``Policy(overlap="decode")``. Expedited loads use it with
            ``overlap="idle"``.
        result: function that makes a report from the four fields of :class:`JobResult`.
        release: function that :meth:`shutdown` calls, when the worker no longer uses the rows.

    Raises:
        LayoutError: rows, pages and mappings do not fit together.
        PathError: no path can be used on the device, or the policy's path cannot.

    >>> import torch
    >>> from types import SimpleNamespace as Spec
    >>> caches = [torch.arange(8 * 32, dtype=torch.int16).view(torch.int8).view(8, 64) for layer in range(2)]
    >>> pool = torch.zeros(4, 2 * 64, dtype=torch.int8)
    >>> group = [Spec(tensor_idx=layer, page_size_bytes=64, mapping=None) for layer in range(2)]
    >>> worker = Worker([group], caches, [pool[:, :64], pool[:, 64:]], blocks_per_chunk=1)
    >>> worker.submit_store(1, Spec(block_ids=[5, 6], group_sizes=[2], block_indices=[0]), Spec(block_ids=[3, 0]))
    True
    >>> worker.wait({1})
    >>> [(done.job_id, done.success, done.transfer_size) for done in worker.get_finished()]
    [(1, True, 256)]
    >>> bool((pool[3, 64:] == caches[1][5]).all())
    True
    >>> worker.shutdown()
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Any]],
        device_rows: Sequence[Any],
        host_rows: Sequence[Any],
        blocks_per_chunk: int,
        *,
        canonical: bool = False,
        policy: Policy | None = None,
        result: Callable[..., Any] = JobResult,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._result = result
        pages = [pages_of(references, canonical=canonical) for references in groups]
        # vLLM allows a pool that is too small for one chunk; its scheduler then submits no blocks.
        jobs = Jobs(pages, device_rows, host_rows, blocks_per_chunk) if host_rows[0].shape[0] else None
        policy = BESIDE_COMPUTE if policy is None else policy
        device = str(device_rows[0].device)
        self._executors = [Executor(device, policy)]
        try:
            self._executors.append(Executor(device, replace(policy, overlap="idle")))
        except KVPlanError:
            self._executors[0].close()
            raise
        regular, expedited = self._executors
        if jobs is not None:
            prepare(regular, [*jobs.stores, *jobs.loads])
            prepare(expedited, jobs.loads)
        load, store = (jobs.load, jobs.store) if jobs is not None else (_no_chunks, _no_chunks)
        self._lines = {
            "store": _Line("store", regular, store),
            "load": _Line("load", regular, load),
            "expedited load": _Line("expedited load", expedited, load),
        }
        self._release = release
        self._failed: list[FailedJob] | None = None

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queue a store and return at once.

        Args:
            job_id: the scheduler's number of the job.
            src_spec: device blocks: ``block_ids``, ``group_sizes``, ``block_indices``.
            dst_spec: host chunks: ``block_ids``.

        Returns:
            True: the job is accepted. :meth:`get_finished` reports whether it succeeded.

        Raises:
            TransferError: the worker is shut down.
        """
        self._line("store").submit(job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Queue a load and return at once, like :meth:`submit_store`; its source is the host.

        Args:
            job_id: the scheduler's number of the job.
            src_spec: host chunks.
            dst_spec: device blocks.
            expedited: whether the engine waits for this load, so that it must not wait for other loads.
        """
        self._line("expedited load" if expedited else "load").submit(job_id, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[Any]:
        """Return reports of the jobs that have ended since the last call, without waiting."""
        reports = []
        for line in self._lines.values():
            for job, result in line.finished():
                if self._failed is None or result.success:
                    reports.append(self._result(**result._asdict()))
                else:
                    blocks = tuple(int(block) for block in job.device_spec.block_ids)
                    self._failed.append(FailedJob(job.job_id, blocks))
        return reports

    def keep_failures(self) -> None:
        """Report failed jobs only by :meth:`take_failures` from now on, for a connector that handles them."""
        self._failed = self._failed or []

    def take_failures(self) -> list[FailedJob]:
        """Return the failed jobs since the last call of this method, which :meth:`get_finished` did not report."""
        taken = self._failed or []
        if taken:
            self._failed = []
        return taken

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until these jobs have ended, whether they succeed or fail; unknown numbers are ignored."""
        wanted = set(job_ids)
        for line in self._lines.values():
            line.wait(wanted)

    def shutdown(self) -> None:
        """Finish all jobs in flight, drop every tensor, then release the rows. A second call does nothing."""
        self._stop()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _stop(self) -> None:
        # A function of its own, so that its local references no longer exist when the rows are released.
        for executor in self._executors:
            try:
                executor.close()
            except Exception:
                logger.exception("an executor could not be closed")
        self._lines, self._executors = {}, []

    def _line(self, name: str) -> _Line:
        if name not in self._lines:
            raise TransferError("the offloading worker is shut down; submit before shutdown()")
        return self._lines[name]


def _no_chunks(device_spec: Any, host_spec: Any) -> list[Plan]:
    if len(device_spec.block_ids) or len(host_spec.block_ids):
        raise KVPlanError("the host pool has no chunk; give more cpu_bytes_to_use in kv_connector_extra_config")
    return []
