"""vLLM's offloading connector, extended: a failed transfer does not end the engine, and loads can go layer by layer.

vLLM's ``OffloadingConnector`` asserts that every job succeeds, although its scheduler can handle failures. The
scheduler recomputes or ends a request whose blocks did not load (``kv_load_failure_policy``), and drops a chunk that
was not stored. This connector reports failures to the scheduler, and counts them. If a job fails on one rank, the whole
job failed.

With ``load_by_layer``, a hit of the host runs in the step that found it, and each attention layer waits on the GPU for
its own bytes. vLLM 0.33.0 has such "sync" loads, but its worker waits for them on the CPU before the forward pass.
Piecewise CUDA graphs leave attention out, so its hooks are called. No hook is called in a replayed full graph: there
the stream waits for all loads before the replay. So no mode of graphs is forced, and decode steps may keep full graphs.
Models with state-space layers have no loads in the step (``preprocess_mamba`` in vLLM's ``v1/worker/mamba_utils.py``).

Source: vLLM 0.33.0, ``distributed/kv_transfer/kv_connector/v1/base.py`` (``get_transfer_results``,
``get_block_ids_with_load_errors``), ``.../v1/offloading/worker.py``, ``.../v1/offloading/scheduler.py``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvplan.engines.plugins import show_lines
from kvplan.engines.vllm import start_over
from kvplan.engines.vllm.in_step import LOADS_IN_STEP, StepBudget, bound_loads, layer_options_of
from kvplan.engines.vllm.layer_loads import LayerLoads, places_of
from kvplan.engines.vllm.worker import Worker

FAILED = "vllm:kv_offload_failed_transfers"  # a counter among vLLM's metrics, with the label "kind": load or store
logger = logging.getLogger("kvplan.engines.vllm")


class SchedulerSide:
    """The connector's part in the scheduler: hits that load in their step, and transfers that failed.

    Args:
        scheduler: vLLM's ``OffloadingConnectorScheduler``.
        budget: the bytes that a step may load; None if no load goes by layer.

    Attributes:
        budget: as given.
    """

    def __init__(self, scheduler: Any, budget: StepBudget | None) -> None:
        self._scheduler, self.budget = scheduler, budget
        self._failed_keys: list[Any] = []
        self._spoiled: set[str] = set()  # ended requests, whose last stores may be of wrong blocks
        for kind in ("load", "store"):  # from the start, so that alarms know the counters
            scheduler._connector_stats.increase_counter(FAILED, 0, (kind,))
        complete = scheduler.manager.complete_store

        def complete_store(keys: Any, req_context: Any, success: bool = True) -> Any:
            failed = any(keys is other for other in self._failed_keys)
            return complete(keys, req_context, success and not failed)

        scheduler.manager.complete_store = complete_store  # vLLM's scheduler completes each store as a success
        if budget is not None:
            bound_loads(scheduler, budget)

    def matched(self, request: str, look_up: Callable[[], Any]) -> Any:
        """Return the host's tokens of a request, and whether they load asynchronously; None if the hit waits a step."""
        if self.budget is None:
            return look_up()
        if self.budget.waits_again(request):
            return None, False
        hit = look_up()
        return (None, False) if self.budget.waits(request) else hit

    def end_step(self, jobs: Any, counts: Mapping[str, int]) -> None:
        """Note the jobs of a step, and how many tokens each of its requests computes."""
        if self._spoiled:
            stores = [number for number, job in jobs.store_jobs.items() if job.req_id in self._spoiled]
            self._failed_keys += [self._scheduler._jobs[number].keys for number in stores]
            self._spoiled = set()
        if self.budget is not None:
            self.budget.ran(counts)

    def report(self, output: Any) -> None:
        """Take the workers' reports before vLLM's scheduler does: chunks of failed stores are completed as failed."""
        meta, scheduler = output.kv_connector_worker_meta, self._scheduler
        if self.budget is not None:
            loads = getattr(getattr(meta, "transfer_stats", None), "load", None)
            self.budget.ended(*(() if loads is None else (loads.bytes, loads.time)))
        failed = {kind: getattr(meta, f"failed_{kind}s", ()) for kind in ("load", "store")}
        for kind, numbers in failed.items():
            if numbers:
                scheduler._connector_stats.increase_counter(FAILED, len(numbers), (kind,))
        # A reset of the cache removes its jobs. A rank may report such a job later.
        self._failed_keys += [scheduler._jobs[job].keys for job in failed["store"] if job in scheduler._jobs]
        if getattr(output, "invalid_block_ids", None):
            # Other requests may share its blocks, and the model has computed new tokens from them. The scheduler has
            # the blocks recomputed, but their stores would give later requests the wrong content. A request that has
            # ended is stored in the next step.
            self._failed_keys += [job.keys for job in scheduler._jobs.values() if job.is_store]
            statuses = scheduler._req_status.items()
            self._spoiled = {name for name, status in statuses if status.req.is_finished()}
        for name in getattr(output, "failed_recving", None) or ():
            # It computes its whole prompt: a load that fails always would be tried for ever.
            if (status := scheduler._req_status.get(name)) is not None:
                status.req.skip_reading_prefix_cache = True

    def forget(self) -> None:
        """Forget the failed stores that vLLM's scheduler has completed."""
        waiting = {id(job.keys) for job in self._scheduler._jobs.values()}
        self._failed_keys = [keys for keys in self._failed_keys if id(keys) in waiting]


class WorkerSide:
    """The connector's part in a worker: loads by layer, and jobs that failed.

    Args:
        connector: vLLM's ``OffloadingConnectorWorker``, whose worker is made.
        kv_caches: the engine's caches by layer, if loads go by layer.

    Raises:
        TypeError: the worker is not kvplan's.
    """

    def __init__(self, connector: Any, kv_caches: Any = None) -> None:
        self._connector, self._worker = connector, connector.worker
        if not isinstance(self._worker, Worker):
            raise TypeError(
                f"KVPlanOffloadingConnector got a {type(self._worker).__name__}; name a spec of kvplan.engines.vllm: "
                "spec_name and spec_module_path in kv_connector_extra_config"
            )
        self._worker.keep_failures()
        self._failed: dict[str, set[int]] = {"load": set(), "store": set()}
        self._invalid_blocks: set[int] = set()
        self.layers: LayerLoads | None = None
        if kv_caches is not None:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

            config = connector.kv_cache_config
            names = [config.kv_cache_groups[group].layer_names for group in get_offloading_group_ids(config)]
            self.layers = LayerLoads(self._worker, places_of(names, self._worker.groups, kv_caches))

    def start(self, jobs: Any, context: Any) -> Any:
        """Submit the loads that the step itself uses, layer by layer; return the step's other jobs."""
        now = {number: job for number, job in jobs.load_jobs.items() if job.sync}
        if self.layers is None or not now:
            return jobs
        # The runner of full graphs replays outside of a context with metadata. Two microbatches have two lists.
        hooked = (
            isinstance(context.attn_metadata, dict)
            and bool(context.attn_metadata)
            and getattr(context, "ubatch_slices", None) is None
            and context.cudagraph_runtime_mode.name != "FULL"
        )
        self._connector._load_jobs.update(dict.fromkeys(now))  # their requests run already
        self.layers.load([(number, job.src_spec, job.dst_spec) for number, job in now.items()], hooked=hooked)
        return replace(jobs, load_jobs={number: job for number, job in jobs.load_jobs.items() if not job.sync})

    def leave_forward(self) -> None:
        """Note the end of the forward pass."""
        if self.layers is not None:
            self.layers.leave_forward()

    def settle(self) -> None:
        """End the loads of the step, before vLLM asks for results."""
        if self.layers is not None:
            self.layers.leave_forward()
            self.layers.settle()

    def add_failures(self, results: Any) -> None:
        """Add jobs that failed: a request whose blocks did not load is among the failed ones."""
        connector = self._connector
        for number, blocks in self._worker.take_failures():
            connector._connector_worker_meta.mark_completed(number)
            self._failed["load" if number in connector._load_jobs else "store"].add(number)
            request = connector._load_jobs.pop(number, "")
            if request is None:  # the request already runs: the scheduler finds it by its blocks
                self._invalid_blocks.update(blocks)
            elif request:
                results.finished_recving.add(request)
                results.failed_recving.add(request)

    def take_invalid_blocks(self) -> set[int]:
        """Return the blocks of loads in their step that failed since the last call."""
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_failed(self) -> dict[str, set[int]]:
        """Return the jobs that failed since the last call, by kind."""
        failed, self._failed = self._failed, {"load": set(), "store": set()}
        return failed


def _load_before_steps(scheduler: Any, extra_config: Mapping[str, Any]) -> None:
    """Let all hits load asynchronously, since vLLM copies states between blocks before the loads of a step."""
    keys = [key for key in LOADS_IN_STEP if extra_config.get(key)]
    if keys:
        logger.warning(
            "this model has state-space layers, whose states vLLM copies before a step loads: hits load "
            "asynchronously, and %s has no effect", " and ".join(map(repr, keys))
        )  # fmt: skip
        scheduler.config = scheduler.config._replace(sync_load_budget_bytes=0)


@functools.cache
def classes() -> tuple[type[Any], ...]:
    """Return the classes of the connector and of its workers' report; this imports vLLM."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    @dataclass(slots=True)
    class ReportedJobs(OffloadingWorkerMetadata):  # type: ignore[misc]
        """A report of the workers to the scheduler: completed jobs, and the failed ones among them."""

        failed_loads: set[int] = field(default_factory=set)
        failed_stores: set[int] = field(default_factory=set)

        def aggregate(self, other: Any) -> Any:
            """Combine the reports of several ranks or steps."""
            both = OffloadingWorkerMetadata.aggregate(self, other)
            loads, stores = (
                getattr(self, name) | getattr(other, name, set()) for name in ("failed_loads", "failed_stores")
            )
            return ReportedJobs(both.completed_jobs, both.transfer_stats, loads, stores)

    class KVPlanOffloadingConnector(OffloadingConnector):  # type: ignore[misc]
        """vLLM's ``OffloadingConnector`` for a spec of :mod:`kvplan.engines.vllm`."""

        _in_scheduler: SchedulerSide  # each in the processes of its role
        _in_worker: WorkerSide

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
            options, states = layer_options_of(extra_config), kv_cache_config.has_mamba_layers
            self._by_layer = options is not None and not states
            super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
            if self.connector_scheduler is None:
                return
            if states:
                _load_before_steps(self.connector_scheduler, extra_config)
            show_lines(logger)
            logger.info("loads by layer: %s", "on" if self._by_layer else "off")
            budget = None
            if options is not None and not states:
                decoded = 1 + getattr(vllm_config, "num_speculative_tokens", 0)
                budget = StepBudget(options, vllm_config.scheduler_config.max_num_batched_tokens, decoded)
            self._in_scheduler = SchedulerSide(self.connector_scheduler, budget)
            from vllm.v1.core.sched.scheduler import Scheduler  # which imports connectors by itself

            start_over.install(Scheduler, KVPlanOffloadingConnector)

        # ---- in the scheduler ----

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
            """Return the tokens that the host holds beyond those computed, and whether they load asynchronously.

            None tokens: a hit waits for the next step, in which its load goes by layer.
            """
            look_up = super().get_num_new_matched_tokens
            return self._in_scheduler.matched(request.request_id, lambda: look_up(request, num_computed_tokens))

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            """Return the jobs of a step."""
            jobs = super().build_connector_meta(scheduler_output)
            self._in_scheduler.end_step(jobs, scheduler_output.num_scheduled_tokens)
            return jobs

        def update_connector_output(self, connector_output: Any) -> None:
            """Give the workers' reports to the scheduler."""
            self._in_scheduler.report(connector_output)
            super().update_connector_output(connector_output)
            self._in_scheduler.forget()

        # ---- in a worker ----

        def register_kv_caches(self, kv_caches: Any) -> None:
            super().register_kv_caches(kv_caches)
            self._in_worker = WorkerSide(self.connector_worker, kv_caches if self._by_layer else None)

        def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
            """Submit the loads of a step. Loads that the step itself uses are awaited layer by layer."""
            del kwargs
            self.connector_worker.start_kv_transfers(self._in_worker.start(self._connector_metadata, forward_context))

        def wait_for_layer_load(self, layer_name: str) -> None:
            """Let the current stream wait for the bytes of a layer; vLLM calls it before each attention layer."""
            if self._in_worker.layers is not None:
                self._in_worker.layers.wait_layer(layer_name)

        def finish_forward(self) -> None:
            """Note the end of the forward pass, if the model runner tells it."""
            self._in_worker.leave_forward()

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            """Return the results of ended jobs; if blocks of a request did not load, it is among the failed ones."""
            self._in_worker.settle()
            results = super().get_transfer_results(finished_req_ids)
            self._in_worker.add_failures(results)
            return results

        def get_block_ids_with_load_errors(self) -> set[int]:
            """Return the blocks of expedited loads that failed since the last call."""
            return self._in_worker.take_invalid_blocks()

        def build_connector_worker_meta(self) -> Any:
            """Return the report of jobs completed since the last call, with failed jobs."""
            meta = super().build_connector_worker_meta()
            if meta is None:
                return None
            failed = self._in_worker.take_failed()
            return ReportedJobs(meta.completed_jobs, meta.transfer_stats, failed["load"], failed["store"])

    return KVPlanOffloadingConnector, ReportedJobs
