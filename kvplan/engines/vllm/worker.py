"""The worker of vLLM's CPU offloading: it accepts jobs, moves their blocks with kvplan, and reports the results.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``OffloadingWorker``, ``TransferResult``),
``v1/kv_offload/cpu/gpu_worker.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.shared import current_stream, prepare
from kvplan.engines.vllm.jobs import Jobs, Move, Specs, pages_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer

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


@dataclass(slots=True)
class Job:
    """A job in its queue.

    Attributes:
        job_id: the scheduler's number of the job.
        device_spec: the job's device blocks, with ``block_ids``.
        transfers: the transfers that move its bytes, and the job's own bytes of each; loads of one step share them.
        error: text of the first error, or "".
    """

    job_id: int
    device_spec: Any
    transfers: list[tuple[Transfer, int]] = field(default_factory=list)
    error: str = ""  # a text, since an exception's traceback refers to the job, and that cycle would keep tensors alive

    def fail(self, error: Exception) -> None:
        """Set the error, unless there is one."""
        self.error = self.error or f"{type(error).__name__}: {error}"

    @property
    def failure(self) -> tuple[int, tuple[int, ...]]:
        """Return the number and the device blocks; after a failed load, the content of the blocks is unknown."""
        return self.job_id, tuple(int(block) for block in self.device_spec.block_ids)

    def done(self) -> bool:
        """Return whether all transfers have ended."""
        return all(transfer.done() for transfer, _ in self.transfers)

    def wait(self, *, issued: bool = False) -> None:
        """Wait until all transfers have ended, or until their copies have been given to the device; note an error."""
        for transfer, _ in self.transfers:
            try:
                transfer.await_issue() if issued else transfer.synchronize()
            except Exception as error:  # any error is this job's; jobs of other requests must go on
                self.fail(error)

    def result(self) -> JobResult:
        """Return the result of a job that has ended. Jobs that share a transfer share its time, too, by their bytes."""
        self.wait()
        if self.error:
            return JobResult(self.job_id, success=False)
        results = [(transfer.result(), own) for transfer, own in self.transfers]
        seconds = sum(whole.seconds * own / (whole.nbytes or 1) for whole, own in results)
        nbytes = sum(own for _, own in self.transfers)
        return JobResult(self.job_id, success=True, transfer_size=nbytes, transfer_time=seconds)


class LayerTransfer(NamedTuple):
    """A transfer of one or more loads of a step.

    Attributes:
        transfer: the transfer.
        groups: numbers of the KV-cache groups whose blocks it moves.
        by_layer: whether its layers arrive one by one.
        jobs: the jobs of these loads.
    """

    transfer: Transfer
    groups: tuple[int, ...]
    by_layer: bool
    jobs: tuple[Job, ...]


class Queue:
    """The jobs of one kind, which end in the order of their submits.

    Attributes:
        kind: the kind, as the log names it.
        jobs: the jobs that have not been reported, in order.
    """

    def __init__(self, kind: str, executor: Executor, plan: Callable[..., list[Move]]) -> None:
        self.kind, self._executor, self._plan = kind, executor, plan
        self.jobs: deque[Job] = deque()

    def submit(self, job_ids: Sequence[int], specs: Sequence[Specs], *whole: Any) -> list[LayerTransfer]:
        """Plan and queue jobs. A job that cannot be planned or queued keeps its place in the queue and fails."""
        jobs = [Job(number, device_spec) for number, (device_spec, _) in zip(job_ids, specs, strict=True)]
        self.jobs.extend(jobs)
        transfers = []
        for move in self._moves(jobs, specs, *whole):
            mine = [jobs[place] for place in move.nbytes]
            try:
                # Stores read blocks that the stream writes, and loads overwrite blocks that it has read.
                after = current_stream(self._executor.device)
                transfer = self._executor.submit(move.plan, after, by_layer=move.by_layer)
            except Exception as error:  # as in Job.wait
                for job in mine:
                    job.fail(error)
                continue
            for job, nbytes in zip(mine, move.nbytes.values(), strict=True):
                job.transfers.append((transfer, nbytes))
            transfers.append(LayerTransfer(transfer, move.groups, move.by_layer, tuple(mine)))
        return transfers

    def _moves(self, jobs: Sequence[Job], specs: Sequence[Specs], *whole: Any) -> list[Move]:
        """Plan all jobs together; if that fails, plan each of them alone, so that only a wrong job fails."""
        try:
            return self._plan(specs, *whole)
        except Exception as error:  # as in Job.wait
            if len(jobs) == 1:
                jobs[0].fail(error)
                return []
        alone = ((place, self._moves(jobs[place : place + 1], [pair], *whole)) for place, pair in enumerate(specs))
        return [move._replace(nbytes={place: move.plan.nbytes}) for place, moves in alone for move in moves]

    def report(self, job: Job) -> None:
        """Take a job that has ended out of the queue."""
        self.jobs.remove(job)
        if job.error:
            logger.error("%s job %d failed: %s", self.kind, job.job_id, job.error)


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
            ``overlap="idle"``, unless they go by layer.
        by_layer: whether :meth:`submit_layers` will be called, so that its kernels are made ready, too.
        result: function that makes a report from the four fields of :class:`JobResult`.
        release: function that :meth:`shutdown` calls, when the worker no longer uses the rows.

    Attributes:
        groups: the references of each KV-cache group.
        device: name of the device, such as ``"cuda:0"``.
        queues: the jobs that have not been reported, by kind.

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
        by_layer: bool = False,
        result: Callable[..., Any] = JobResult,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._result, self._release = result, release
        self.groups = tuple(tuple(references) for references in groups)
        self.device = str(device_rows[0].device)
        pages = [pages_of(references, canonical=canonical) for references in groups]
        # vLLM allows a pool that is too small for one chunk; its scheduler then submits no blocks.
        jobs = Jobs(pages, device_rows, host_rows, blocks_per_chunk) if host_rows[0].shape[0] else None
        policy = BESIDE_COMPUTE if policy is None else policy
        # A load by layer runs beside the model that waits for it; another expedited load runs before the model.
        regular = Executor(self.device, policy)
        expedited = Executor(self.device, policy if by_layer else replace(policy, overlap="idle"))
        self._executors = [regular, expedited]
        if jobs is not None:
            prepare(regular, [*(program for turns in jobs.stores for _, program in turns), *jobs.loads])
            prepare(expedited, jobs.loads)
            if by_layer:
                prepare(expedited, jobs.loads, by_layer=True)
        load, store = (jobs.load, jobs.store) if jobs is not None else (_no_chunks, _no_chunks)
        self.queues = {
            "store": Queue("store", regular, store),
            "load": Queue("load", regular, load),
            "expedited load": Queue("expedited load", expedited, load),
        }
        self._failed: list[tuple[int, tuple[int, ...]]] = []
        self._keeps = False  # whether failed jobs are reported by take_failures only

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
        self._queue("store").submit([job_id], [(src_spec, dst_spec)])
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Queue a load and return at once, like :meth:`submit_store`; its source is the host.

        Args:
            job_id: the scheduler's number of the job.
            src_spec: host chunks.
            dst_spec: device blocks.
            expedited: whether the engine waits for this load, so that it must not wait for other loads.
        """
        self._queue("expedited load" if expedited else "load").submit([job_id], [(dst_spec, src_spec)])
        return True

    def submit_layers(self, loads: Sequence[tuple[int, Any, Any]], whole: Container[int] = ()) -> list[LayerTransfer]:
        """Queue the expedited loads of one step, whose layers arrive in their order.

        The loads share their transfers: layer by layer, the bytes of all of them arrive. Layers of a KV-cache group are
        numbered in the order in which the group's references first name their tensor.

        Args:
            loads: for each load, the scheduler's number of the job, its host chunks and its device blocks.
            whole: KV-cache groups whose layers are not awaited one by one; they are moved first, in one piece.

        Raises:
            TransferError: the worker is shut down.
        """
        numbers, specs = [load[0] for load in loads], [(device, host) for _, host, device in loads]
        return self._queue("expedited load").submit(numbers, specs, whole)

    def get_finished(self) -> list[Any]:
        """Return reports of the jobs that have ended since the last call, without waiting."""
        reports = []
        for queue in self.queues.values():
            while queue.jobs and queue.jobs[0].done():
                job = queue.jobs[0]
                result = job.result()
                queue.report(job)
                if result.success or not self._keeps:
                    reports.append(self._result(**result._asdict()))
                else:
                    self._failed.append(job.failure)
        return reports

    def settle(self, job_ids: Iterable[int]) -> None:
        """Report those of these loads that have an error by :meth:`take_failures` now, not in their turn.

        The CPU waits until all copies have been given to the device, not until they have run; but for those of a load
        with an error, until none of them is in flight.
        """
        wanted = set(job_ids)
        for queue in self.queues.values():
            for job in [job for job in queue.jobs if job.job_id in wanted]:
                job.wait(issued=True)
                if job.error:
                    job.wait()
                    queue.report(job)
                    self._failed.append(job.failure)

    def keep_failures(self) -> None:
        """Report failed jobs only by :meth:`take_failures` from now on, for a connector that handles them."""
        self._keeps = True

    def take_failures(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return number and device blocks of jobs that have failed and that :meth:`get_finished` did not report."""
        failed, self._failed = self._failed, []
        return failed

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until these jobs have ended, whether they succeed or fail; unknown numbers are ignored."""
        wanted = set(job_ids)
        for queue in self.queues.values():
            for job in queue.jobs:
                if job.job_id in wanted:
                    job.wait()

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
        self.queues, self._executors = {}, []

    def _queue(self, kind: str) -> Queue:
        if kind not in self.queues:
            raise TransferError("the offloading worker is shut down; submit before shutdown()")
        return self.queues[kind]


def _no_chunks(specs: Sequence[Specs], _whole: Any = None) -> list[Move]:
    if any(len(side.block_ids) for pair in specs for side in pair):
        raise KVPlanError("the host pool has no chunk; give more cpu_bytes_to_use in kv_connector_extra_config")
    return []
