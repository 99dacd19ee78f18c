"""The adapter's classes over a double of vLLM 0.33: regions of a worker, keys, and models with states."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

from kvplan.engines import vllm
from kvplan.engines.vllm import connector, specs

torch = pytest.importorskip("torch", reason="vLLM's tensors are torch's")

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
PAGE, BLOCKS = 64, 8


class Region:
    """vLLM's ``SharedOffloadRegion``."""

    opened: list[Region] = []  # noqa: RUF012

    def __init__(self, engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size, barrier=None, *,
                 populate_shard=None, num_segments=1):  # fmt: skip
        self.rank, self.barrier, self.closed = rank, barrier, False
        self.segments = num_segments, populate_shard
        self.rows = torch.zeros((num_chunks, kv_bytes_per_chunk), dtype=torch.int8)
        Region.opened.append(self)

    def create_next_worker_view(self, nbytes):
        return self.rows[:, :nbytes]

    def cleanup(self):
        self.closed = True


class Spec:
    """vLLM's ``CPUOffloadingSpec``, whose platform has a shared region."""

    replicated_layout, blocks_per_chunk, num_chunks = True, 1, 4
    kv_bytes_per_chunk = cpu_page_size_per_worker = PAGE
    _worker = None

    def __init__(self, config):
        self.config, self.extra_config, self._engine_id = config, config.extra_config, config.engine_id

    def _uses_shared_region(self):
        return True

    def get_worker(self, kv_caches):
        return self._worker


class Limits(NamedTuple):
    sync_load_budget_bytes: int


class Jobs:
    """vLLM's ``OffloadingConnector``, which starts what it is given."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.connector_scheduler, self.connector_worker, self.started = None, None, []
        if role == "scheduler":
            budget = vllm_config.kv_transfer_config.kv_connector_extra_config.get("sync_load_budget_bytes", 0)
            stats = SimpleNamespace(increase_counter=lambda *given: self.started.append(given))
            self.connector_scheduler = SimpleNamespace(
                config=Limits(budget), manager=SimpleNamespace(), _connector_stats=stats
            )
            self.connector_scheduler.manager.complete_store = self.connector_scheduler._reserve_sync_load = None


class Scheduler:
    def _handle_invalid_blocks(self, blocks, counts):
        """Nothing."""

    def _free_request_blocks(self, request):
        """Nothing."""


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """vLLM's modules, as far as the adapter imports them."""
    modules = {
        "vllm": {"__version__": "0.33.0"},
        "vllm.config.compilation": {"CUDAGraphMode": Enum("CUDAGraphMode", "NONE FULL")},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.kv_offload.base": {"OffloadingWorker": type("OffloadingWorker", (), {}), "TransferResult": dict},
        "vllm.v1.kv_offload.cpu.gpu_worker": {"pin_mmap_region": None},
        "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": Region},
        "vllm.v1.kv_offload.cpu.spec": {"CPUOffloadingSpec": Spec, "_all_workers_barrier": "barrier",
                                        "_REGION_SEGMENTS": 32},
        "vllm.v1.kv_offload.tiering.spec": {"TieringOffloadingSpec": Spec},
        f"{V1}.offloading.common": {
            "OffloadingConnectorMetadata": type("OffloadingConnectorMetadata", (), {}),
            "OffloadingWorkerMetadata": type("OffloadingWorkerMetadata", (), {"__slots__": ()})},
        f"{V1}.offloading.config": {"get_offloading_group_ids": None},
        f"{V1}.offloading_connector": {"OffloadingConnector": Jobs},
        "vllm.distributed.kv_transfer.kv_connector.factory": {
            "KVConnectorFactory": SimpleNamespace(register_connector=lambda *given: None)},
    }  # fmt: skip
    made = {}
    for name, members in modules.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            if path not in made:
                made[path] = ModuleType(path)
                monkeypatch.setitem(sys.modules, path, made[path])
        vars(made[name]).update(members)
    for module in (connector, specs):
        module.classes.cache_clear()
    yield
    for module in (connector, specs):
        module.classes.cache_clear()


def connected(role="worker", states=False, **extra):
    transfer, limits = SimpleNamespace(kv_connector_extra_config=extra), SimpleNamespace(max_num_batched_tokens=2048)
    config = SimpleNamespace(kv_transfer_config=transfer, scheduler_config=limits)
    return vllm.KVPlanOffloadingConnector(config, role, SimpleNamespace(has_mamba_layers=states))


@pytest.mark.parametrize("name", ["KVPlanOffloadingSpec", "KVPlanTieringOffloadingSpec"])
def test_a_worker_has_the_region_of_its_spec(name):
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=torch.zeros((BLOCKS, PAGE), dtype=torch.int8), page_size_bytes=PAGE)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE, mapping=None)]],
    )
    parallel = SimpleNamespace(rank=1, world_size=2)
    config = SimpleNamespace(extra_config={}, engine_id="e", parallel=parallel, canonical_layout=False)
    worker = getattr(vllm, name)(config).get_worker(caches)
    region = Region.opened.pop()
    assert isinstance(worker, vllm.KVPlanOffloadingWorker)
    assert region.rank == 0, "a replicated layout has one slot"
    tiers = name == "KVPlanTieringOffloadingSpec"
    assert (region.barrier, region.segments) == ((None, (1, None)) if tiers else ("barrier", (32, (1, 2))))
    worker.shutdown()
    assert region.closed


@pytest.mark.parametrize("extra", [{"load_by_layer": True}, {"sync_load_budget_bytes": 7},
                                   {"load_by_layer": True, "sync_load_budget_bytes": 7}], ids=" and ".join)  # fmt: skip
def test_states_of_a_model_are_loaded_before_the_step(extra, caplog):
    """vLLM copies states from block to block before a step loads: a load in the step would come too late."""
    made = connected("scheduler", states=True, **extra)
    assert made.connector_scheduler.config.sync_load_budget_bytes == 0
    told, loads = [record.getMessage() for record in caplog.records]
    assert loads == "loads by layer: off"
    assert f"hits load asynchronously, and {' and '.join(map(repr, extra))} has no effect" in told
    plain = connected("scheduler", **extra)
    assert plain.connector_scheduler.config.sync_load_budget_bytes == extra.get("sync_load_budget_bytes", 0)


def test_a_key_of_another_type_ends_the_start():
    with pytest.raises(ValueError, match="kv_connector_extra_config has 'load_by_layer': 'yes'; give true or false"):
        connected(load_by_layer="yes")
