"""vLLM's offloading connector, extended so that a failed transfer does not end the engine.

``OffloadingConnector`` of vLLM 0.33.0 asserts that every job succeeds, although its scheduler can handle failures. The
scheduler recomputes or ends a request whose blocks did not load (``kv_load_failure_policy``), and drops a chunk that
was not stored. This connector reports failures to the scheduler. If a job fails on one rank, the whole job failed.

Source: vLLM 0.33.0, ``distributed/kv_transfer/kv_connector/v1/base.py`` (``get_transfer_results``,
``get_block_ids_with_load_errors``), ``.../v1/offloading/worker.py``, ``.../v1/offloading/scheduler.py``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any


@functools.cache
def classes() -> tuple[type[Any], ...]:
    """Return the classes of the connector and of its workers' report; this imports vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    @dataclass(slots=True)
    class ReportedJobs(OffloadingWorkerMetadata):  # type: ignore[misc]
        """A report of the workers to the scheduler: the completed jobs, and the failed stores among them."""

        failed_stores: set[int] = field(default_factory=set)

        def aggregate(self, other: Any) -> Any:
            """Combine the reports of several ranks or steps."""
            both = OffloadingWorkerMetadata.aggregate(self, other)
            failed = self.failed_stores | getattr(other, "failed_stores", set())
            return ReportedJobs(both.completed_jobs, both.transfer_stats, failed)

    class KVPlanOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
        """vLLM's ``OffloadingConnector`` for a spec of :mod:`kvplan.engines.vllm`."""

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
            self._watch_failures()

        def _watch_failures(self) -> None:
            self._invalid_blocks: set[int] = set()
            self._failed_stores: set[int] = set()
            self._failed_keys: list[Any] = []
            if self.connector_scheduler is not None:
                _tell_failures(self.connector_scheduler.manager, self._is_failed)

        def register_kv_caches(self, kv_caches: Any) -> None:
            super().register_kv_caches(kv_caches)
            keep = getattr(self.connector_worker.worker, "keep_failures", None)
            if keep is None:
                raise TypeError(
                    f"KVPlanOffloadingConnector got a {type(self.connector_worker.worker).__name__}; name a spec of "
                    "kvplan.engines.vllm: spec_name and spec_module_path in kv_connector_extra_config"
                )
            keep()

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """Return the results of ended jobs; if blocks of a request did not load, it is among the failed ones."""
            results = super().get_transfer_results(finished_req_ids)
            worker = self.connector_worker
            for job in worker.worker.take_failures():
                worker._connector_worker_meta.mark_completed(job.job_id)
                if job.job_id not in worker._load_jobs:
                    self._failed_stores.add(job.job_id)
                    continue
                request = worker._load_jobs.pop(job.job_id)
                if request is None:  # the request already runs: the scheduler finds it by its blocks
                    self._invalid_blocks.update(job.block_ids)
                else:
                    results.finished_recving.add(request)
                    results.failed_recving.add(request)
            return results

        def get_block_ids_with_load_errors(self) -> set[int]:
            """Return the blocks of expedited loads that failed since the last call."""
            invalid, self._invalid_blocks = self._invalid_blocks, set()
            return invalid

        def build_connector_worker_meta(self) -> Any:
            """Return the report of jobs completed since the last call, with failed jobs."""
            meta = super().build_connector_worker_meta()
            if meta is None:
                return None
            failed, self._failed_stores = self._failed_stores, set()
            return ReportedJobs(meta.completed_jobs, meta.transfer_stats, failed)

        def update_connector_output(self, connector_output: Any) -> None:
            """Give the workers' reports to the scheduler; chunks of failed stores are completed as failed."""
            meta = connector_output.kv_connector_worker_meta
            jobs = self.connector_scheduler._jobs
            # A reset of the cache removes its jobs. A rank may report such a job later.
            self._failed_keys += [jobs[job].keys for job in getattr(meta, "failed_stores", ()) if job in jobs]
            super().update_connector_output(connector_output)
            waiting = {id(job.keys) for job in jobs.values()}
            self._failed_keys = [keys for keys in self._failed_keys if id(keys) in waiting]

        def _is_failed(self, keys: Any) -> bool:
            return any(keys is failed for failed in self._failed_keys)

    return KVPlanOffloadingConnector, ReportedJobs


def _tell_failures(manager: Any, failed: Any) -> None:
    """Make a manager complete stores as failed if ``failed(keys)`` is true, since the scheduler never does so."""
    complete = manager.complete_store

    def complete_store(keys: Any, req_context: Any, success: bool = True) -> Any:
        return complete(keys, req_context, success and not failed(keys))

    manager.complete_store = complete_store
