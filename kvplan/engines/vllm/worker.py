"""The worker of vLLM's CPU offloading: it accepts jobs, moves their blocks with kvplan, and reports the results.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``OffloadingWorker``), ``v1/kv_offload/cpu/gpu_worker.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from kvplan.cost.policy import BESIDE_COMPUTE, Policy
from kvplan.engines.startup import prepare
from kvplan.engines.vllm.jobs import Jobs
from kvplan.engines.vllm.lines import FailedJob, Job, JobResult, LayerPlan, LayerTransfer, Line, failed
from kvplan.engines.vllm.pages import pages_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.plan.plan import Plan

logger = logging.getLogger("kvplan.engines.vllm")

RATE_BLOCKS = 512  # blocks of the load whose rate is predicted


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
        self._result = result
        self.groups = tuple(tuple(references) for references in groups)
        self.device = str(device_rows[0].device)
        self._blocks = min(device_rows[0].shape[0], host_rows[0].shape[0] * blocks_per_chunk)
        pages = [pages_of(references, canonical=canonical) for references in groups]
        # vLLM allows a pool that is too small for one chunk; its scheduler then submits no blocks.
        jobs = Jobs(pages, device_rows, host_rows, blocks_per_chunk) if host_rows[0].shape[0] else None
        policy = BESIDE_COMPUTE if policy is None else policy
        self._executors = [Executor(self.device, policy)]
        try:
            # A load by layer runs beside the model that waits for it; another expedited load runs before the model.
            expedited_policy = policy if by_layer else replace(policy, overlap="idle")
            self._executors.append(Executor(self.device, expedited_policy))
        except KVPlanError:
            self._executors[0].close()
            raise
        regular, expedited = self._executors
        if jobs is not None:
            prepare(regular, [*jobs.stores, *jobs.loads])
            prepare(expedited, jobs.loads)
            if by_layer:
                prepare(expedited, jobs.loads, by_layer=True)
        self._jobs = jobs
        load, store = (jobs.load, jobs.store) if jobs is not None else (_no_chunks, _no_chunks)
        self._lines = {
            "store": Line("store", regular, store),
            "load": Line("load", regular, load),
            "expedited load": Line("expedited load", expedited, load),
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

    def submit_layers(
        self, loads: Sequence[tuple[int, Any, Any]], whole: Container[int] = ()
    ) -> tuple[list[Job], list[LayerTransfer]]:
        """Queue the expedited loads of one step, whose layers arrive in their order.

        Loads of whole chunks share their transfers: layer by layer, the bytes of all of them arrive. The blocks of
        several KV-cache groups may be moved by several transfers. Layers of a group are numbered in the order in which
        the group's references first name their tensor.

        Args:
            loads: for each load, the scheduler's number of the job, its host chunks and its device blocks.
            whole: KV-cache groups whose layers are not awaited one by one; they are moved first, in one piece.

        Returns:
            The job of each load, and the transfers.

        Raises:
            TransferError: the worker is shut down.
        """

        def plan(places: Sequence[int]) -> Sequence[LayerPlan]:
            some = [(loads[place][2], loads[place][1]) for place in places]
            if self._jobs is None:
                for load in some:
                    _no_chunks(*load)
                return []
            found = self._jobs.load_layers(some, whole)
            return [part._replace(nbytes={places[k]: own for k, own in part.nbytes.items()}) for part in found]

        jobs = [Job(number, device_spec) for number, _, device_spec in loads]
        return jobs, self._line("expedited load").submit_layers(jobs, plan)

    def load_rate(self) -> float | None:
        """Return the bytes per second that the cost model predicts for a long load; None on the CPU.

        >>> import torch
        >>> from types import SimpleNamespace as Spec
        >>> rows = [torch.zeros(4, 64, dtype=torch.int8) for side in range(2)]
        >>> worker = Worker([[Spec(tensor_idx=0, page_size_bytes=64, mapping=None)]], rows[:1], rows[1:], 1)
        >>> worker.load_rate() is None
        True
        >>> worker.shutdown()
        """
        if self._jobs is None or self.device == "cpu":
            return None
        number = min(self._blocks, RATE_BLOCKS)
        chunks = -(-number // self._jobs.blocks_per_chunk)
        try:
            rates = []
            for group in range(len(self.groups)):
                sizes = [number if each == group else 0 for each in range(len(self.groups))]
                blocks = SimpleNamespace(block_ids=range(number), group_sizes=sizes, block_indices=[0] * len(sizes))
                for plan in self._jobs.load(blocks, SimpleNamespace(block_ids=range(chunks))):
                    best = self._line("expedited load").executor.candidates(plan)[0]
                    rates.append(plan.nbytes / best.wall)
            return min(rates)
        except (KVPlanError, ZeroDivisionError, ValueError) as error:
            logger.warning("the rate of loads is not known: %s: %s", type(error).__name__, error)
            return None

    def get_finished(self) -> list[Any]:
        """Return reports of the jobs that have ended since the last call, without waiting."""
        reports = []
        for line in self._lines.values():
            if not line.jobs:  # as in most steps
                continue
            for job, result in line.finished():
                if self._failed is None or result.success:
                    reports.append(self._result(**result._asdict()))
                else:
                    self._failed.append(failed(job))
        return reports

    def give_up(self, job: Job) -> None:
        """Report a load of :meth:`submit_layers` that has an error by :meth:`take_failures` now, not in its turn."""
        told = self._line("expedited load").give_up(job)
        self._failed = [*(self._failed or ()), told]

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
        self._lines, self._executors, self._jobs = {}, [], None

    def _line(self, name: str) -> Line:
        if name not in self._lines:
            raise TransferError("the offloading worker is shut down; submit before shutdown()")
        return self._lines[name]


def _no_chunks(device_spec: Any, host_spec: Any) -> list[Plan]:
    if len(device_spec.block_ids) or len(host_spec.block_ids):
        raise KVPlanError("the host pool has no chunk; give more cpu_bytes_to_use in kv_connector_extra_config")
    return []
