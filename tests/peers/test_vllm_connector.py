"""The specs and the connector among vLLM 0.33.0's own: its factory, managers, scheduler side and aggregation."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    OffloadingWorker,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvplan.engines import vllm
from kvplan.engines.vllm.connector import FAILED, SchedulerSide, WorkerSide

pytestmark = pytest.mark.peers

PAGE, BLOCKS, CHUNKS = 64, 12, 4


def config_of(spec, chunks=CHUNKS, **extra):
    """vLLM's own configuration of two layers, of which the one changed line is ``spec_name`` and its module."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=8, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=2 * PAGE,
        enable_kv_cache_events=False,
        extra_config={"spec_name": spec, "spec_module_path": "kvplan.engines.vllm",
                      "cpu_bytes_to_use": chunks * 4096, **extra},
        engine_id="kvplan-test-connector",
        model=OffloadingModelConfig(name="m", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=8, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
        ),
    )  # fmt: skip


def caches():
    rows = [torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(2)]
    tensors = [CanonicalKVCacheTensor(row, PAGE) for row in rows]
    return rows, CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(k, PAGE) for k in range(2)]])


def device(*blocks):
    return GPULoadStoreSpec(list(blocks), [len(blocks)], [0])


def host(*chunks):
    return CPULoadStoreSpec(list(chunks))


@pytest.mark.parametrize("name", ["KVPlanOffloadingSpec", "KVPlanTieringOffloadingSpec"])
def test_the_factory_makes_the_spec_and_the_spec_its_worker(name):
    spec = OffloadingSpecFactory.create_spec(config_of(name, kvplan={"path": "host"}))
    assert (type(spec).__module__, type(spec).__qualname__) == ("kvplan.engines.vllm", name)
    assert spec.num_chunks == CHUNKS
    rows, canonical = caches()
    worker = spec.create_worker(canonical)
    assert isinstance(worker, OffloadingWorker)
    worker.submit_store(1, device(7), host(3))
    worker.submit_load(2, host(3), device(5))
    worker.wait({1, 2})
    assert all(result.success for result in worker.get_finished())
    assert all(torch.equal(row[5], row[7]) for row in rows)
    worker.shutdown()


def test_the_manuals_configuration_names_them():
    """Blocks of the manual, as vLLM's configuration and its factories take them."""
    text = (Path(__file__).parents[2] / "docs" / "start" / "vllm.md").read_text()
    found = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if "kvplan_vllm" in block:
            exec(block, found)
            config = KVTransferConfig(**found["config"])
            spec = OffloadingSpecFactory.get_spec_cls(config.kv_connector_extra_config)
            assert spec is vllm.KVPlanOffloadingSpec
    assert KVConnectorFactory.get_connector_class(config) is vllm.KVPlanOffloadingConnector
    assert KVConnectorFactory.supports_hma_config(config)
    assert config.kv_load_failure_policy == "recompute"


# ---- the connector ----


class Connector:
    """Both sides of a connector, with vLLM's metadata, managers and scheduler side; their configuration is left out."""

    def __init__(self, ranks=1):
        kind = vllm.KVPlanOffloadingConnector
        self.spec = OffloadingSpecFactory.create_spec(config_of("KVPlanOffloadingSpec"))
        self.manager = self.spec.get_manager()
        self.scheduler = kind.__new__(kind)
        self.scheduler.connector_worker = None
        self.scheduler.connector_scheduler = scheduler_of(self.manager)
        self.scheduler._in_scheduler = SchedulerSide(self.scheduler.connector_scheduler, None)
        self.workers, self.rows = [], []
        for _ in range(ranks):
            rows, canonical = caches()
            worker = kind.__new__(kind)
            worker.connector_scheduler = None
            worker.connector_worker = OffloadingConnectorWorker(self.spec, None, None)
            worker.connector_worker.worker = self.spec.create_worker(canonical)
            worker._in_worker = WorkerSide(worker.connector_worker)
            self.workers.append(worker)
            self.rows.append(rows)
        self.context = ReqContext("r")
        self.manager.on_new_request(self.context)
        self.next = 0

    def job(self, keys, is_store, load=None):
        """A job in flight, as the scheduler notes it."""
        number, self.next = self.next, self.next + 1
        scheduler = self.scheduler.connector_scheduler
        scheduler._jobs[number] = TransferJobStatus(
            req_id="r", pending_count=len(self.workers), keys=set(keys), is_store=is_store
        )
        scheduler._req_status.setdefault("r", request_status(self.context)).transfer_jobs.add(number)
        return number

    def step(self, worker, loads=None, stores=None):
        """One step of a worker: what it reports."""
        worker.connector_worker.start_kv_transfers(OffloadingConnectorMetadata(loads or {}, {}))
        for number, (source, target) in (stores or {}).items():
            worker.connector_worker.worker.submit_store(number, source, target)
        worker.connector_worker.worker.wait({*(loads or {}), *(stores or {})})
        worker._connector_metadata = OffloadingConnectorMetadata({}, {})
        results = worker.get_transfer_results(set())
        return results, worker.get_block_ids_with_load_errors(), worker.build_connector_worker_meta()

    def tell(self, *metas, invalid=()):
        """The scheduler hears of all ranks at once."""
        meta = metas[0]
        for other in metas[1:]:
            meta = meta.aggregate(other)
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=pickle.loads(pickle.dumps(meta)), invalid_block_ids=set(invalid))
        )

    def failures(self):
        """The counter of failed transfers, by its label."""
        return self.scheduler.get_kv_connector_stats().data["data"][FAILED]

    def close(self):
        for worker in self.workers:
            worker.connector_worker.shutdown()


def scheduler_of(manager):
    made = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    made.manager = manager
    made._jobs, made._req_status = {}, {}
    made._stale_job_threshold, made._reset_fence = 0, {}
    made._chunks_being_loaded, made._block_id_to_pending_jobs = set(), {}
    made._step_region = None
    made._connector_stats, made._info_sent = OffloadingConnectorStats(), True
    return made


def request_status(context):
    return SimpleNamespace(req_context=context, transfer_jobs=set(), finished_signaled=False,
                           req=SimpleNamespace(is_finished=lambda: False))  # fmt: skip


@pytest.fixture
def connector():
    made = []

    def make(**options):
        made.append(Connector(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


KEYS = [make_offload_key(bytes([k]) * 8, 0) for k in range(4)]
WRONG = BLOCKS + 5  # no block: a job that names it fails


def hit(connector, key):
    return connector.manager.lookup(key, connector.context) is LookupResult.HIT


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_store_that_failed_on_one_rank_is_not_there_and_its_chunk_is_free(connector, ranks):
    both = connector(ranks=ranks)
    good, bad = both.manager.prepare_store(KEYS[:2], both.context), both.manager.prepare_store(KEYS[2:], both.context)
    jobs = [both.job(KEYS[:2], is_store=True), both.job(KEYS[2:], is_store=True)]
    metas = []
    for rank, worker in enumerate(both.workers):
        blocks = device(3, WRONG if rank == ranks - 1 else 4)
        stores = {jobs[0]: (device(1, 2), good.store_spec), jobs[1]: (blocks, bad.store_spec)}
        results, invalid, meta = both.step(worker, stores=stores)
        assert (results.finished_recving, results.failed_recving, invalid) == (set(), set(), set())
        assert set(meta.completed_jobs) == set(jobs)
        metas.append(meta)
    both.tell(*metas)
    assert [hit(both, key) for key in KEYS] == [True, True, False, False]
    assert not both.scheduler.connector_scheduler._jobs
    assert both.failures() == {("load",): 0, ("store",): 1}
    assert len(both.manager.prepare_store(KEYS[2:], both.context).keys_to_store) == 2
    assert both.workers[0].build_connector_worker_meta() is None


def test_ranks_may_tell_of_a_failure_in_different_steps(connector):
    both = connector(ranks=2)
    spec = both.manager.prepare_store(KEYS[:1], both.context).store_spec
    job = both.job(KEYS[:1], is_store=True)
    metas = [
        both.step(worker, stores={job: (device(blocks), spec)})[2]
        for worker, blocks in zip(both.workers, (WRONG, 1), strict=True)
    ]
    both.tell(metas[0])
    assert not hit(both, KEYS[0])
    both.tell(metas[1])
    assert both.manager.lookup(KEYS[0], both.context) is LookupResult.MISS
