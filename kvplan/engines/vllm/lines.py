"""Queues of jobs of vLLM's offloading. A job is submitted as transfers, and is reported in its turn.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``TransferResult``).
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvplan.engines.streams import current_stream
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


class LayerPlan(NamedTuple):
    """A plan of some KV-cache groups, for one or more loads of a step.

    Attributes:
        plan: the plan.
        groups: numbers of the KV-cache groups whose blocks it moves.
        by_layer: whether the plan is submitted layer by layer.
        nbytes: for each load that it serves, by the load's place in the step, the bytes that it moves for this load.
    """

    plan: Plan
    groups: tuple[int, ...]
    by_layer: bool
    nbytes: Mapping[int, int]


@dataclass(slots=True)
class Job:
    """A job in its queue.

    Attributes:
        job_id: the scheduler's number of the job.
        device_spec: the job's device blocks, with ``block_ids``.
        transfers: the transfers that move its bytes; loads of one step may share a transfer.
        nbytes: for each transfer, the job's own bytes.
        error: text of the first error, or "".
    """

    job_id: int
    device_spec: Any
    transfers: list[Transfer] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    error: str = ""  # a text, since an exception's traceback refers to the job, and that cycle would keep tensors alive

    def fail(self, error: Exception) -> None:
        """Set the error, unless there is one."""
        self.error = self.error or f"{type(error).__name__}: {error}"

    def add(self, transfer: Transfer, nbytes: int) -> None:
        """Add a transfer that moves so many of the job's bytes."""
        self.transfers.append(transfer)
        self.nbytes.append(nbytes)

    def done(self) -> bool:
        """Return whether all transfers have ended."""
        return all(transfer.done() for transfer in self.transfers)

    def wait(self) -> None:
        """Wait until all transfers of the job have ended, whether they succeed or fail."""
        self._each(lambda transfer: transfer.synchronize())

    def await_issue(self) -> None:
        """Wait until every copy has been given to the device, not until it has run; note the first error."""
        self._each(lambda transfer: transfer.await_issue())

    def _each(self, wait: Callable[[Transfer], object]) -> None:
        """Call a method of every transfer, whether one raises or not."""
        for transfer in self.transfers:
            try:
                wait(transfer)
            except Exception as error:  # noqa: BLE001  # as in submit
                self.fail(error)

    def result(self) -> JobResult:
        """Return the result of a job that has ended. Jobs that share a transfer share its time, too, by their bytes."""
        try:
            done = [transfer.result() for transfer in self.transfers]
        except Exception as error:  # noqa: BLE001  # as in submit
            self.fail(error)
        if self.error:
            return JobResult(self.job_id, success=False)
        seconds = sum(one.seconds * own / (one.nbytes or 1) for one, own in zip(done, self.nbytes, strict=True))
        return JobResult(self.job_id, success=True, transfer_size=sum(self.nbytes), transfer_time=seconds)


class LayerTransfer(NamedTuple):
    """A transfer of one or more loads of a step.

    Attributes:
        transfer: the transfer.
        groups: numbers of the KV-cache groups whose blocks it moves.
        jobs: the jobs of these loads.
    """

    transfer: Transfer
    groups: tuple[int, ...]
    jobs: tuple[Job, ...]


class Line:
    """The jobs of one kind, which end in the order of their submits.

    Attributes:
        executor: the executor of its transfers.
        jobs: the jobs that have not been reported, in order.
    """

    def __init__(self, what: str, executor: Executor, plan: Callable[[Any, Any], list[Plan]]) -> None:
        self._what = what
        self.executor = executor
        self._plan = plan
        self.jobs: deque[Job] = deque()

    def submit(self, job_id: int, device_spec: Any, host_spec: Any) -> None:
        """Plan and queue a job. A job that cannot be planned or queued keeps its place in line and fails."""
        job = Job(job_id, device_spec)
        self.jobs.append(job)
        try:
            # Stores read blocks that the stream writes, and loads overwrite blocks that it has read.
            after = current_stream(self.executor.device)
            for plan in self._plan(device_spec, host_spec):
                job.add(self.executor.submit(plan, after), plan.nbytes)
        except Exception as error:  # noqa: BLE001  # any error is this job's; jobs of other requests must go on
            job.fail(error)

    def submit_layers(
        self, jobs: Sequence[Job], plan: Callable[[Sequence[int]], Sequence[LayerPlan]],
    ) -> list[LayerTransfer]:  # fmt: skip
        """Plan and queue the loads by layer of one step. Their transfers overtake whole loads of the same line.

        Args:
            jobs: a new job for each load.
            plan: function that plans some of the loads, given their places in ``jobs``.
        """
        self.jobs.extend(jobs)
        found = []
        for part in _planned(jobs, plan):
            mine = [jobs[place] for place in part.nbytes]
            try:
                after = current_stream(self.executor.device)
                transfer = self.executor.submit(part.plan, after, by_layer=part.by_layer, priority="high")
            except Exception as error:  # noqa: BLE001  # as in submit
                for job in mine:
                    job.fail(error)
                continue
            for job, nbytes in zip(mine, part.nbytes.values(), strict=True):
                job.add(transfer, nbytes)
            found.append(LayerTransfer(transfer, part.groups, tuple(mine)))
        return found

    def finished(self) -> Iterator[tuple[Job, JobResult]]:
        """Yield the jobs that have ended since the last call, in order."""
        while self.jobs and self.jobs[0].done():
            job = self.jobs.popleft()
            result = job.result()
            if job.error:
                self._tell(job)
            yield job, result

    def give_up(self, job: Job) -> FailedJob:
        """Take a failed job out of the line, when none of its copies is in flight."""
        job.wait()
        self.jobs.remove(job)
        self._tell(job)
        return failed(job)

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended; unknown numbers are ignored."""
        for job in self.jobs:
            if job.job_id in job_ids:
                job.wait()

    def _tell(self, job: Job) -> None:
        logger.error("%s job %d failed: %s", self._what, job.job_id, job.error)


def _planned(jobs: Sequence[Job], plan: Callable[[Sequence[int]], Sequence[LayerPlan]]) -> list[LayerPlan]:
    """Plan all jobs together; if that fails, plan each of them alone, so that only a wrong job fails."""
    places = range(len(jobs))
    with contextlib.suppress(Exception):
        return list(plan(places))
    found: list[LayerPlan] = []
    for place in places:
        try:
            found += plan([place])
        except Exception as error:  # noqa: BLE001  # as in submit
            jobs[place].fail(error)
    return found


def failed(job: Job) -> FailedJob:
    """Return the number and the blocks of a failed job."""
    return FailedJob(job.job_id, tuple(int(block) for block in job.device_spec.block_ids))
