"""vLLM's offloading connector, extended: a failed transfer does not end the engine, and loads can go layer by layer.

vLLM's ``OffloadingConnector`` asserts that every job succeeds, although its scheduler can handle failures. The
scheduler recomputes or ends a request whose blocks did not load (``kv_load_failure_policy``), and drops a chunk that
was not stored. This connector reports failures to the scheduler. If a job fails on one rank, the whole job failed.

With ``load_by_layer``, a hit of the host runs in the step that found it, and each attention layer waits on the GPU for
its own bytes. vLLM 0.33.0 has such "sync" loads, but its worker waits for them on the CPU before the forward pass.
Models with state-space layers have no loads in the step (``preprocess_mamba`` in vLLM's ``v1/worker/mamba_utils.py``).

Source: vLLM 0.33.0, ``distributed/kv_transfer/kv_connector/v1/base.py`` (``get_transfer_results``,
``get_block_ids_with_load_errors``), ``.../v1/offloading/worker.py``, ``.../v1/offloading/scheduler.py``.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from kvplan.engines.vllm import start_over
from kvplan.engines.vllm.in_step import LOADS_IN_STEP, StepBudget, bound_loads, layer_options_of
from kvplan.engines.vllm.layer_loads import LayerLoads, places_of

logger = logging.getLogger("kvplan.engines.vllm")


@functools.cache
def classes() -> tuple[type[Any], ...]:
    """Return the classes of the connector and of its workers' report; this imports vLLM."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    @dataclass(slots=True)
    class ReportedJobs(OffloadingWorkerMetadata):  # type: ignore[misc]
        """A report of the workers to the scheduler: completed jobs, and the failed stores among them."""

        failed_stores: set[int] = field(default_factory=set)

        def aggregate(self, other: Any) -> Any:
            """Combine the reports of several ranks or steps."""
            both = OffloadingWorkerMetadata.aggregate(self, other)
            failed = self.failed_stores | getattr(other, "failed_stores", set())
            return ReportedJobs(both.completed_jobs, both.transfer_stats, failed)

    class KVPlanOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
        """vLLM's ``OffloadingConnector`` for a spec of :mod:`kvplan.engines.vllm`."""

        _by_layer = False
        _budget: StepBudget | None = None  # of the scheduler
        _layers: LayerLoads | None = None  # of a worker

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
            options = layer_options_of(extra_config)
            super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
            self._watch_failures()
            if kv_cache_config.has_mamba_layers:
                options = None
                self._load_before_steps(extra_config)
            self._by_layer = options is not None
            if options is not None and self.connector_scheduler is not None:
                decoded = 1 + getattr(vllm_config, "num_speculative_tokens", 0)
                most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
                self._budget = StepBudget(options, most_tokens, decoded)
                bound_loads(self.connector_scheduler, self._budget)

        def _load_before_steps(self, extra_config: Any) -> None:
            """Let all hits load asynchronously, since vLLM copies states between blocks before the loads of a step."""
            keys = [key for key in LOADS_IN_STEP if extra_config.get(key)]
            if keys and self.connector_scheduler is not None:
                logger.warning(
                    "this model has state-space layers, whose states vLLM copies before a step loads: hits load "
                    "asynchronously, and %s has no effect", " and ".join(map(repr, keys))
                )  # fmt: skip
                self.connector_scheduler.config = self.connector_scheduler.config._replace(sync_load_budget_bytes=0)

        @classmethod
        def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
            """Return False: no mode of graphs is forced.

            Piecewise graphs leave attention out, so its hooks are called. No hook is called in a replayed full graph.
            There the stream waits for all loads before the replay, so decode steps may keep their full graphs.
            """
            del extra_config
            return False

        def _watch_failures(self) -> None:
            self._invalid_blocks: set[int] = set()
            self._failed_stores: set[int] = set()
            self._failed_keys: list[Any] = []
            self._spoiled: set[str] = set()  # ended requests, whose last stores may be of wrong blocks
            if self.connector_scheduler is not None:
                _tell_failures(self.connector_scheduler.manager, self._is_failed)
                from vllm.v1.core.sched.scheduler import Scheduler  # which imports connectors by itself

                start_over.install(Scheduler, KVPlanOffloadingConnector)

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            """Return the tokens that the host holds beyond those computed, and whether they load asynchronously.

            None tokens: a hit waits for the next step, in which its load goes by layer.
            """
            budget = self._budget
            if budget is None:
                return super().get_num_new_matched_tokens(request, num_computed_tokens)
            if budget.waits_again(request.request_id):
                return None, False
            found = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return (None, False) if budget.waits(request.request_id) else found

        def register_kv_caches(self, kv_caches: Any) -> None:
            super().register_kv_caches(kv_caches)
            keep = getattr(self.connector_worker.worker, "keep_failures", None)
            if keep is None:
                raise TypeError(
                    f"KVPlanOffloadingConnector got a {type(self.connector_worker.worker).__name__}; name a spec of "
                    "kvplan.engines.vllm: spec_name and spec_module_path in kv_connector_extra_config"
                )
            keep()
            if self._by_layer:
                config, worker = self.connector_worker.kv_cache_config, self.connector_worker.worker
                names = [config.kv_cache_groups[group].layer_names for group in get_offloading_group_ids(config)]
                self._layers = LayerLoads(worker, places_of(names, worker.groups, kv_caches))

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            """Submit the loads of a step. Loads that the step itself uses are awaited layer by layer."""
            jobs, now = self._connector_metadata, {}
            if self._layers is not None:
                now = {number: job for number, job in jobs.load_jobs.items() if job.sync}
            if self._layers is None or not now:
                super().start_load_kv(forward_context, **kwargs)
                return
            # The runner of full graphs replays outside of a context with metadata. Two microbatches have two lists.
            hooked = (
                isinstance(forward_context.attn_metadata, dict)
                and bool(forward_context.attn_metadata)
                and getattr(forward_context, "ubatch_slices", None) is None
                and forward_context.cudagraph_runtime_mode != CUDAGraphMode.FULL
            )
            self.connector_worker._load_jobs.update(dict.fromkeys(now))  # their requests run already
            self._layers.load([(number, job.src_spec, job.dst_spec) for number, job in now.items()], hooked=hooked)
            later = {number: job for number, job in jobs.load_jobs.items() if not job.sync}
            self.connector_worker.start_kv_transfers(replace(jobs, load_jobs=later))

        def wait_for_layer_load(self, layer_name: str) -> None:
            """Let the current stream wait for the bytes of a layer; vLLM calls it before each attention layer."""
            if self._layers is not None:
                self._layers.wait_layer(layer_name)

        def finish_forward(self) -> None:
            """Note the end of the forward pass, if the model runner tells it."""
            if self._layers is not None:
                self._layers.leave_forward()

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """Return the results of ended jobs; if blocks of a request did not load, it is among the failed ones."""
            if self._layers is not None:
                self._layers.leave_forward()
                self._layers.settle()
            results = super().get_transfer_results(finished_req_ids)
            worker = self.connector_worker
            for number, blocks in worker.worker.take_failures():
                worker._connector_worker_meta.mark_completed(number)
                if number not in worker._load_jobs:
                    self._failed_stores.add(number)
                    continue
                request = worker._load_jobs.pop(number)
                if request is None:  # the request already runs: the scheduler finds it by its blocks
                    self._invalid_blocks.update(blocks)
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

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            """Return the jobs of a step."""
            jobs = super().build_connector_meta(scheduler_output)
            if self._spoiled:
                pending = self.connector_scheduler._jobs
                self._failed_keys += [
                    pending[number].keys for number, job in jobs.store_jobs.items() if job.req_id in self._spoiled
                ]
                self._spoiled = set()
            if self._budget is not None:
                self._budget.ran(scheduler_output.num_scheduled_tokens)
            return jobs

        def update_connector_output(self, connector_output: Any) -> None:
            """Give the workers' reports to the scheduler; chunks of failed stores are completed as failed."""
            meta = connector_output.kv_connector_worker_meta
            if self._budget is not None:
                loads = getattr(getattr(meta, "transfer_stats", None), "load", None)
                self._budget.ended(*(() if loads is None else (loads.bytes, loads.time)))
            jobs = self.connector_scheduler._jobs
            # A reset of the cache removes its jobs. A rank may report such a job later.
            self._failed_keys += [jobs[job].keys for job in getattr(meta, "failed_stores", ()) if job in jobs]
            if getattr(connector_output, "invalid_block_ids", None):
                self._drop_stores()
            for name in getattr(connector_output, "failed_recving", None) or ():
                # It computes its whole prompt: a load that fails always would be tried for ever.
                if (status := self.connector_scheduler._req_status.get(name)) is not None:
                    status.req.skip_reading_prefix_cache = True
            super().update_connector_output(connector_output)
            waiting = {id(job.keys) for job in jobs.values()}
            self._failed_keys = [keys for keys in self._failed_keys if id(keys) in waiting]

        def _drop_stores(self) -> None:
            """Let all stores of scheduled steps fail, since a load of a step has failed.

            Other requests may share its blocks, and the model has computed new tokens from them. The scheduler has the
            blocks recomputed, but their stores would give later requests the wrong content. A request that has ended is
            stored in the next step.
            """
            scheduler = self.connector_scheduler
            self._failed_keys += [job.keys for job in scheduler._jobs.values() if job.is_store]
            self._spoiled = {name for name, status in scheduler._req_status.items() if status.req.is_finished()}

        def _is_failed(self, keys: Any) -> bool:
            return any(keys is failed for failed in self._failed_keys)

    return KVPlanOffloadingConnector, ReportedJobs


def _tell_failures(manager: Any, failed: Any) -> None:
    """Make a manager complete stores as failed if ``failed(keys)`` is true, since the scheduler never does so."""
    complete = manager.complete_store

    def complete_store(keys: Any, req_context: Any, success: bool = True) -> Any:
        return complete(keys, req_context, success and not failed(keys))

    manager.complete_store = complete_store
