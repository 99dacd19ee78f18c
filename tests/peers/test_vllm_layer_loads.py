"""Loads by layer among vLLM 0.33.0's own classes: metadata, forward contexts, the scheduler side, and several ranks."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    SchedulerOffloadConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

import kvplan
from kvplan.engines import vllm
from kvplan.engines.vllm.in_step import LayerOptions, StepBudget, bound_loads
from kvplan.engines.vllm.layer_loads import LayerLoads
from kvplan.engines.vllm.step_time import Pace
from kvplan.engines.vllm.worker import Worker
from tests.peers.vllm_worker import loads_in_step

pytestmark = [pytest.mark.peers, loads_in_step]

NAMES = ["model.layers.0.attn", "model.layers.1.attn"]
PAGE, BLOCKS = 64, 12


def device(*blocks):
    return GPULoadStoreSpec(list(blocks), [len(blocks)], [0])


def host(*chunks):
    return CPULoadStoreSpec(list(chunks))


def context(mode=CUDAGraphMode.NONE, metadata=True, slices=None):
    return SimpleNamespace(
        attn_metadata=dict.fromkeys(NAMES, object()) if metadata else None,
        cudagraph_runtime_mode=mode,
        ubatch_slices=slices,
    )


class Rank:
    """A worker's side of the connector, with vLLM's own worker side; its caches are rows of bytes."""

    def __init__(self):
        self.rows = [torch.zeros((BLOCKS, PAGE), dtype=torch.int8) for _ in NAMES]
        self.pool = [torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8) for _ in NAMES]
        group = [SimpleNamespace(tensor_idx=k, page_size_bytes=PAGE, mapping=None) for k in range(len(NAMES))]
        spec = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=2, dtype=torch.int8)
        config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)])
        kind = vllm.KVPlanOffloadingConnector
        self.connector = kind.__new__(kind)
        self.connector.connector_scheduler = None
        side = OffloadingConnectorWorker(SimpleNamespace(replicated_layout=False), None, config)
        side.worker = Worker([group], self.rows, self.pool, 1)
        side.worker.keep_failures()
        self.connector.connector_worker = side
        self.connector._watch_failures()
        self.connector._watch_layers(dict(zip(NAMES, self.rows, strict=True)))

    def step(self, jobs=None, given=None, hooks=NAMES, tokens=0):
        """One step as the model runners make it; returns what the worker reports."""
        connector, given = self.connector, given or context()
        connector.bind_connector_metadata(vllm.StepJobs(jobs or {}, {}, None, tokens))
        if jobs:
            connector.start_load_kv(given)
        for name in hooks:
            connector.wait_for_layer_load(name)
        connector.finish_forward()
        results = connector.get_transfer_results(set())
        return results, connector.get_block_ids_with_load_errors(), connector.build_connector_worker_meta()


@pytest.fixture
def ranks():
    made = [Rank(), Rank()]
    for one in made:
        one.step()
    yield made
    for one in made:
        one.connector.connector_worker.shutdown()


def sync(source, target):
    return TransferJob("r", source, target, sync=True)


@pytest.mark.parametrize(
    ("given", "hooked"),
    [
        (context(), True),
        (context(CUDAGraphMode.PIECEWISE), True),
        (context(CUDAGraphMode.FULL), False),
        (context(metadata=False), False),  # a full graph of the newer runner
        (context(slices=[object(), object()]), False),
    ],
)
def test_a_forward_pass_with_hooks_loads_by_layer(ranks, monkeypatch, given, hooked):
    seen, load = [], LayerLoads.load

    def loads(self, jobs, *, hooked, beside_seconds):
        seen.append((hooked, beside_seconds))
        load(self, jobs, hooked=hooked, beside_seconds=beside_seconds)

    monkeypatch.setattr(LayerLoads, "load", loads)
    rank = ranks[0]
    jobs = {1: sync(host(3, 4), device(7, 8)), 2: TransferJob("q", host(5), device(2))}
    results, invalid, first = rank.step(jobs, given, NAMES if hooked else [])
    assert seen == [(hooked, None)]  # no step was measured
    assert invalid == set()
    assert all(torch.equal(row[[7, 8]], pool[[3, 4]]) for row, pool in zip(rank.rows, rank.pool, strict=True))
    rank.connector.connector_worker.worker.wait({1, 2})
    later, _, second = rank.step()
    assert results.finished_recving | later.finished_recving == {"q"}  # r runs already
    assert {number for meta in (first, second) if meta for number in meta.completed_jobs} == {1, 2}
    assert jobs[1].sync  # the scheduler's object is not changed


def test_a_step_tells_its_loads_the_compute_that_hides_them(ranks):
    rank, told = ranks[0], []
    for tokens in (60, 70, 80):
        rank.step(tokens=tokens)
    submit = rank.connector.connector_worker.worker.submit_layers
    rank.connector.connector_worker.worker.submit_layers = lambda *given: told.append(given[-1]) or submit(*given)
    expected = rank.connector._step_pace.expected(80)
    rank.step({1: sync(host(3), device(7))}, tokens=80)
    assert told == [expected]
    assert expected > 0
    rank.step({2: sync(host(4), device(8))})
    assert told[1:] == [None]
    rank.connector.connector_worker.worker.wait({1, 2})


def test_no_mode_of_graphs_is_forced():
    assert vllm.KVPlanOffloadingConnector.requires_piecewise_for_cudagraph({"load_by_layer": True}) is False


def test_a_failure_of_one_rank_is_told_in_the_step(ranks):
    good, _, done = ranks[0].step({1: sync(host(3), device(7))})
    bad, invalid, failed = ranks[1].step({1: sync(host(99), device(7))})
    assert good.finished_recving == bad.finished_recving == set()
    assert invalid == {7}
    assert failed.completed_jobs == {1: 1}
    if done is None:
        ranks[0].connector.connector_worker.worker.wait({1})
        _, _, done = ranks[0].step()
    assert failed.aggregate(done).completed_jobs == {1: 2}
    assert failed.failed_stores == set()


def test_a_preempted_request_waits_for_its_load(ranks):
    rank = ranks[0]
    rank.step({1: sync(host(3), device(7))})
    rank.connector.handle_preemptions(OffloadingConnectorMetadata({}, {}, {1}))
    assert all(torch.equal(row[7], pool[3]) for row, pool in zip(rank.rows, rank.pool, strict=True))


def test_a_measured_step_is_reported_with_or_without_jobs(ranks):
    rank = ranks[0]
    _, _, meta = rank.step(tokens=100)
    assert isinstance(meta, vllm.ReportedJobs)
    assert meta.completed_jobs == {}
    assert meta.pace.token_seconds > 0
    slow = vllm.ReportedJobs(pace=Pace(1.0, 1.0, 1.0))
    both = pickle.loads(pickle.dumps(slow.aggregate(meta)))
    assert both.pace == Pace(meta.pace.step_seconds, meta.pace.token_seconds, 1.0)
    assert slow.aggregate(vllm.ReportedJobs()).pace == slow.pace
    jobs = vllm.StepJobs({}, {}, {3}, 7)
    assert pickle.loads(pickle.dumps(jobs)) == jobs


def scheduler():
    made = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    made.config = SchedulerOffloadConfig(
        kv_group_configs=(SimpleNamespace(tokens_per_block=16),), blocks_per_chunk=1, tokens_per_hash=16,
        num_workers=1, offload_prompt_only=False, supports_partial_tail=False, kv_bytes_per_token=1000,
    )  # fmt: skip
    made._current_batch_sync_loads, made._current_batch_sync_load_bytes = set(), 0
    return made


def test_vllms_own_reservation_follows_the_budget():
    made, budget = scheduler(), StepBudget(LayerOptions(0.005, 1 << 40), most_tokens=2048)
    bound_loads(made, budget)
    budget.learn(Pace(0.0, 1e-5, 1e9))

    def asks(name, tokens, hit):
        status = SimpleNamespace(req=SimpleNamespace(request_id=name, num_tokens=tokens))
        return made._reserve_sync_load(status, 0, hit)

    assert asks("a", 16100, 16000)  # 16 MB; alone, there is no limit
    assert not asks("b", 1100, 1008)  # beside it: 7 MB for both
    budget.ran({"a"})
    made._current_batch_sync_loads, made._current_batch_sync_load_bytes = set(), 0
    assert asks("c", 6000, 5008)  # 5 MB of (10 + 5) ms
    assert asks("d", 5100, 5008)
    assert not asks("e", 8000, 7904)
    assert made._current_batch_sync_loads == {"c", "d"}
    assert not asks("f", 32, 32)  # vLLM needs a token to compute
    assert not asks("g", 100, None)


def test_wrong_keys_are_refused_before_anything_is_made():
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"load_by_layer": "on"}))
    with pytest.raises(kvplan.KVPlanError, match="'load_by_layer': 'on'; give true or false"):
        vllm.KVPlanOffloadingConnector(config, None, None)
