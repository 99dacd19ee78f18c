"""kvplan in the place of LMCache's own GPU connector: what LMCache is asked for, and unknown engines."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import kvplan
from kvplan.engines import lmcache as engine
from tests.contract.engines.lmcache_caches import DIM, FLASH, HEADS, LAYERS, flash, hold, noise, objects_of

torch = pytest.importorskip("torch", reason="the engine's tensors are torch's")


class VLLMPagedMemGPUConnectorV2:
    """LMCache's own, by what is looked at."""

    def __init__(self, hints=None):
        self.layout_hints = hints

    def batched_from_gpu(self, *given, **more):
        raise AssertionError("kvplan's is asked")

    def initialize_kvcaches_ptr(self, **given):
        self.kvcaches = given["kvcaches"]


@pytest.fixture
def discovery(monkeypatch):
    """LMCache's functions that find a cache's format, which here is the one that is put in."""
    found = SimpleNamespace(asked=[], fmt=SimpleNamespace(name=FLASH))

    def discover(tensors, serving, layout_hints=None):
        found.asked.append((serving, layout_hints))
        return found.fmt, tensors

    modules = {
        "lmcache": {}, "lmcache.v1": {}, "lmcache.v1.gpu_connector": {}, "lmcache.v1.gpu_connector.kv_format": {},
        "lmcache.utils": {"EngineType": {"VLLM": "vllm", "SGLANG": "sglang"}},
        "lmcache.v1.gpu_connector.kv_format.contiguity": {"attempt_permute_to_contiguous_view": lambda kv: kv},
        "lmcache.v1.gpu_connector.utils": {"normalize_kv_and_discover_format": discover},
    }  # fmt: skip
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def engine_of(own):
    return SimpleNamespace(gpu_connector=own, metadata=SimpleNamespace(local_worker_id=0))


def test_the_connector_in_its_place(discovery):
    there = engine_of(VLLMPagedMemGPUConnectorV2({"kv_layout": "NHD"}))
    made = engine.connect(there, device="cpu", policy=kvplan.Policy(threads=1))
    assert there.gpu_connector is made
    cache, (memory,) = flash(), objects_of(1, 8)
    mapping = [12, 13, 14, 15, 0, 1, 2, 3]
    there.gpu_connector.batched_from_gpu([memory], [0], [8], kvcaches=cache, slot_mapping=mapping)
    hold(cache, [memory], [0], [8], mapping)
    assert discovery.asked == [("vllm", {"kv_layout": "NHD"})]
    with pytest.raises(kvplan.KVPlanError, match="connector already"):
        engine.connect(there)
    made.executor.close()


def test_flat_slots_in_pages_that_are_told(discovery):
    """SGLang's: whole pages of 4 slots move as such."""
    own = type("SGLangGPUConnector", (VLLMPagedMemGPUConnectorV2,), {})()
    discovery.fmt = SimpleNamespace(name="TWO_X_NL_X_NBBS_NH_HS")
    made = engine.connect(engine_of(own), page_size=4, device="cpu")
    cache = [[noise((32, HEADS, DIM), 10 * half + layer) for layer in range(LAYERS)] for half in range(2)]
    (memory,) = objects_of(1, 8)
    stored = made.store([memory], [0], [8], kvcaches=cache, slot_mapping=[20, 21, 22, 23, 4, 5, 6, 7])
    stored.synchronize()
    assert stored.plan.units == 2
    for layer in range(LAYERS):
        expected = cache[1][layer][[20, 21, 22, 23, 4, 5, 6, 7]].view(8, -1)
        assert torch.equal(memory.tensor[1, layer].view(torch.int16), expected.view(torch.int16))
    assert discovery.asked == [("sglang", None)]
    made.executor.close()


def test_engines_that_cannot_be_connected():
    layerwise = type("VLLMPagedMemLayerwiseGPUConnector", (VLLMPagedMemGPUConnectorV2,), {})()
    other = type("TRTLLMGPUConnector", (VLLMPagedMemGPUConnectorV2,), {"register_kv_caches": None})()
    for own, says in ((layerwise, "run without use_layerwise"), (other, "is a TRTLLMGPUConnector"),
                        (None, "without a gpu_connector")):  # fmt: skip
        with pytest.raises(kvplan.KVPlanError, match=says):
            engine.connect(engine_of(own), device="cpu")
