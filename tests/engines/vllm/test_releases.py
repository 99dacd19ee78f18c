"""The table of vLLM's versions, and the adapters over stand-ins for each row of it."""

from __future__ import annotations

import logging
import re
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest

import kvplan
from kvplan.engines.versions import VLLM
from kvplan.engines.vllm import connector, simple, specs
from kvplan.engines.vllm.releases import (
    COUNTED_BLOCKS,
    LOADS_IN_STEP,
    VARIABLE,
    VERSIONS,
    running_version,
    version_of,
)
from tests.whole_engines.install import RELEASES

torch = pytest.importorskip("torch", reason="vLLM's tensors are torch's")

ROOT = Path(__file__).parents[3]
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
PAGE, BLOCKS = 64, 8
rows = pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.release)


# ---- the table ----


def test_the_last_three_releases_are_supported():
    assert tuple(version.release for version in VERSIONS) == RELEASES == VLLM.versions[::-1]
    assert VERSIONS[0].lacks == (), "the adapters are written for the newest"
    for version in VERSIONS:
        assert set(version.lacks) <= {*LOADS_IN_STEP, *COUNTED_BLOCKS}


def test_the_guide_has_the_table():
    text = (ROOT / "docs" / "guides" / "vllm-offloading.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\d[\d.]*) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    assert [line[0] for line in lines] == list(RELEASES)
    for version, (_, refused, region) in zip(VERSIONS, lines, strict=True):
        assert re.findall(r"`(\w+)`", refused) == list(version.lacks)
        assert region == ("several files" if version.region_segments else "one file")
    assert VARIABLE in text


@rows
def test_a_supported_version_says_nothing(version, caplog):
    assert version_of(version.release) is version_of(f"{version.release}+cpu") is version
    assert caplog.records == []


@pytest.mark.parametrize("running", ["0.33.1", "0.33.0rc2", "0.33.1.dev14+gabc", "0.33.0.post1"])
def test_another_patch_of_a_release_is_warned(running, caplog):
    assert version_of(running) is VERSIONS[0]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("kvplan.engines.vllm", logging.WARNING)
    assert record.message == f"vLLM {running} is running; kvplan was tested with 0.33.0, and takes it for that"


@pytest.mark.parametrize("running", ["0.34.0", "0.30.2", "0.3.0", "0.330.0", "1.33.0", "dev", ""])
def test_another_version_is_refused_with_what_is_supported(running):
    with pytest.raises(kvplan.KVPlanError, match=rf"vLLM {running} is running.*supports 0\.33\.0, 0\.32\.0, 0\.31\.0;"):
        version_of(running)


def test_a_version_can_be_taken_for_another(caplog):
    assert version_of("0.34.0", "0.33.0") is VERSIONS[0]
    assert caplog.messages == [f"vLLM 0.34.0 is taken for 0.33.0, because {VARIABLE} says so"]
    with pytest.raises(kvplan.KVPlanError, match=rf"{VARIABLE} is '0\.34'; give one of 0\.33\.0, 0\.32\.0, 0\.31\.0"):
        version_of("0.34.0", "0.34")


def test_the_running_version_is_that_of_the_package(monkeypatch, caplog):
    engine = ModuleType("vllm")
    engine.__version__ = "0.34.0"
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.delenv(VARIABLE, raising=False)
    read = running_version.__wrapped__  # without its cache, which has a vLLM that is installed
    for module in (connector, simple, specs):
        monkeypatch.setattr(module, "running_version", read)
        with pytest.raises(kvplan.KVPlanError, match=r"vLLM 0\.34\.0 is running"):
            module.classes.__wrapped__()  # before it imports what may not exist
    monkeypatch.setenv(VARIABLE, "0.32.0")
    assert read() is VERSIONS[1]
    assert len(caplog.records) == 1


# ---- the adapters ----


class Region:
    """What is common to the regions of all versions."""

    def __init__(self, engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size, barrier=None, *,
                 creator_memory_check=None):  # fmt: skip
        self.rank, self.barrier, self.closed = rank, barrier, False
        self.rows = torch.zeros((num_chunks, kv_bytes_per_chunk), dtype=torch.int8)

    def create_next_worker_view(self, nbytes):
        return self.rows[:, :nbytes]

    def cleanup(self):
        self.closed = True


class SegmentedRegion(Region):
    def __init__(self, *given, populate_shard=None, num_segments=1, **named):
        super().__init__(*given, **named)
        self.segments = num_segments, populate_shard


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
            self.connector_scheduler = SimpleNamespace(config=Limits(budget), manager=SimpleNamespace())
            self.connector_scheduler.manager.complete_store = self.connector_scheduler._reserve_sync_load = None

    def start_load_kv(self, forward_context, **kwargs):
        self.started.append(self._connector_metadata)


class Simple:
    def __init__(self, vllm_config, role, kv_cache_config):
        self.worker_handler = None


@pytest.fixture
def engine(monkeypatch):
    """Make the adapters' classes over stand-ins for a version of vLLM."""

    def make(version):
        segments = {"_REGION_SEGMENTS": 32} if version.region_segments else {}
        region = SegmentedRegion if version.region_segments else Region
        metadata = type("OffloadingConnectorMetadata", (), {})
        report = type("OffloadingWorkerMetadata", (), {"__slots__": ()})
        modules = {
            "vllm": {"__version__": version.release},
            "vllm.config.compilation": {"CUDAGraphMode": Enum("CUDAGraphMode", "NONE FULL")},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
            "vllm.v1.core.sched.scheduler": {"Scheduler": type("Scheduler", (), {})},
            "vllm.v1.kv_offload.base": {"OffloadingWorker": type("OffloadingWorker", (), {}), "TransferResult": dict},
            "vllm.v1.kv_offload.cpu.gpu_worker": {"pin_mmap_region": None},
            "vllm.v1.kv_offload.cpu.shared_offload_region": {"SharedOffloadRegion": region},
            "vllm.v1.kv_offload.cpu.spec": {"CPUOffloadingSpec": Spec, "_all_workers_barrier": "barrier", **segments},
            "vllm.v1.kv_offload.tiering.spec": {"TieringOffloadingSpec": Spec},
            "vllm.v1.simple_kv_offload.worker": {"SimpleCPUOffloadWorker": object},
            f"{V1}.offloading.common": {"OffloadingConnectorMetadata": metadata, "OffloadingWorkerMetadata": report},
            f"{V1}.offloading.config": {"get_offloading_group_ids": None},
            f"{V1}.offloading_connector": {"OffloadingConnector": Jobs},
            f"{V1}.simple_cpu_offload_connector": {"SimpleCPUOffloadConnector": Simple},
        }
        for name, members in modules.items():
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                path = ".".join(parts[:count])
                if path not in made:
                    made[path] = ModuleType(path)
                    monkeypatch.setitem(sys.modules, path, made[path])
            vars(made[name]).update(members)
        found = {}
        for module in (connector, simple, specs):
            monkeypatch.setattr(module, "running_version", running_version.__wrapped__)
            found |= {kind.__name__: kind for kind in module.classes.__wrapped__()}
        return SimpleNamespace(**found)

    made = {}
    monkeypatch.delenv(VARIABLE, raising=False)
    return make


def config_of(**extra):
    parallel = SimpleNamespace(rank=1, world_size=2)
    return SimpleNamespace(extra_config=extra, engine_id="e", parallel=parallel, canonical_layout=False)


def connected(kind, role="worker", states=False, **extra):
    transfer, limits = SimpleNamespace(kv_connector_extra_config=extra), SimpleNamespace(max_num_batched_tokens=2048)
    config = SimpleNamespace(kv_transfer_config=transfer, scheduler_config=limits)
    return kind(config, role, SimpleNamespace(has_mamba_layers=states))


@rows
def test_a_worker_has_the_region_of_the_version(version, engine, monkeypatch):
    opened = []
    kept = Region.__init__
    monkeypatch.setattr(Region, "__init__", lambda self, *a, **k: (kept(self, *a, **k), opened.append(self))[0])
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=torch.zeros((BLOCKS, PAGE), dtype=torch.int8), page_size_bytes=PAGE)],
        group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE, mapping=None)]],
    )
    made = engine(version)
    for kind in (made.KVPlanOffloadingSpec, made.KVPlanTieringOffloadingSpec):
        worker = kind(config_of()).get_worker(caches)
        region = opened.pop()
        assert isinstance(worker, made.KVPlanOffloadingWorker)
        assert region.rank == 0, "a replicated layout has one slot"
        tiers = kind is made.KVPlanTieringOffloadingSpec
        assert region.barrier == (None if tiers else "barrier")
        if version.region_segments:
            assert region.segments == ((1, None) if tiers else (32, (1, 2)))
        worker.shutdown()
        assert region.closed


@rows
@pytest.mark.parametrize("key", [*LOADS_IN_STEP, *COUNTED_BLOCKS])
def test_a_key_that_the_version_lacks_is_refused_where_it_is_read(version, key, engine):
    made, value = engine(version), True if key == "load_by_layer" else 7
    if key in COUNTED_BLOCKS:
        places = [lambda **extra: connected(made.KVPlanSimpleOffloadConnector, **extra)]
    else:
        kinds = made.KVPlanOffloadingSpec, made.KVPlanTieringOffloadingSpec
        places = [lambda kind=kind, **extra: kind(config_of(**extra)) for kind in kinds]
        places.append(lambda **extra: connected(made.KVPlanOffloadingConnector, **extra))
    for place in places:
        for nothing in ({}, {key: False}):
            place(**nothing)
        if key not in version.lacks:
            place(**{key: value})
            continue
        told = rf"{key}': {value}, for which vLLM {version.release} has no interface; remove it, or run vLLM 0\.33\.0$"
        with pytest.raises(kvplan.KVPlanError, match=told):
            place(**{key: value})


@rows
def test_jobs_of_a_version_without_loads_in_a_step_have_no_mark(version, engine):
    made = connected(engine(version).KVPlanOffloadingConnector)
    made._connector_metadata = SimpleNamespace(load_jobs={1: SimpleNamespace(req_id="r")})
    made.start_load_kv(None)
    assert made.started == [made._connector_metadata]


@pytest.mark.parametrize("extra", [{"load_by_layer": True}, {"sync_load_budget_bytes": 7},
                                   {"load_by_layer": True, "sync_load_budget_bytes": 7}], ids=" and ".join)  # fmt: skip
def test_states_of_a_model_are_loaded_before_the_step(extra, engine, caplog, monkeypatch):
    """vLLM copies states from block to block before a step loads: a load in the step would come too late."""
    monkeypatch.setattr(connector.start_over, "install", lambda *classes: None)
    kind = engine(VERSIONS[0]).KVPlanOffloadingConnector
    made = connected(kind, "scheduler", states=True, **extra)
    assert made.connector_scheduler.config.sync_load_budget_bytes == 0
    assert made._budget is None
    assert not connected(kind, states=True, **extra)._by_layer
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"hits load asynchronously, and {' and '.join(map(repr, extra))} has no effect" in told
    plain = connected(kind, "scheduler", **extra)
    assert plain._by_layer == ("load_by_layer" in extra)
    assert plain.connector_scheduler.config.sync_load_budget_bytes == extra.get("sync_load_budget_bytes", 0)
