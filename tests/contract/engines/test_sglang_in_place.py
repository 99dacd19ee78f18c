"""kvplan in the place of the host transfers of SGLang's engine, and what the engine is left with."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

import kvplan
from kvplan.engines import sglang as engine
from kvplan.engines.sglang import hicache as sglang_plugin

torch = pytest.importorskip("torch", reason="the engine's pools are torch's")

from tests.backends.sglang import sglang_pools as pools  # noqa: E402
from tests.contract.engines.sglang_slots import fill, same, slots  # noqa: E402


class L2Transfer(NamedTuple):
    """The engine's record, by its fields."""

    host_pool: Any
    device_pool: Any
    host_indices: Any
    device_indices: Any
    layer_mapper: Any = None
    is_draft: bool = False


class OwnEngine:
    """What SGLang's engine does of a submission: ask each host pool for all layers, or layer by layer."""

    def __init__(self):
        self.device_to_host_stream = object()

    def submit_device_to_host(self, transfers):
        for each in transfers:
            each.host_pool.backup_from_device_all_layer_physical(*each[1:4], "direct")
        return "stored"

    def submit_host_to_device(self, transfers, *, transfer_layer_id_max, start_event=None, on_layer_done=None):
        for layer in range(transfer_layer_id_max):
            for each in transfers:
                own = layer if each.layer_mapper is None else each.layer_mapper(layer)
                if own is not None:
                    more = {"is_draft": each.is_draft}
                    each.host_pool.load_to_device_per_layer_physical(*each[1:4], own, "direct", **more)
            on_layer_done(layer)
        return "loaded"


class UnknownPool:
    """A host pool of states, which kvplan does not describe; it notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def backup_from_device_all_layer_physical(self, *given):
        self.asked.append("store")

    def load_to_device_per_layer_physical(self, device_pool, host, device, layer, backend, *, is_draft=False):
        self.asked.append((layer, is_draft))


def controller_of(**more):
    given = {"l2_transfer_engine": OwnEngine(), "device": "cpu", "has_inflight_device_transfers": lambda: False}
    return SimpleNamespace(**{**given, **more})


@pytest.fixture
def attached():
    controller = controller_of()
    made = engine.attach(controller)
    yield made
    made.detach()


def test_the_engine_in_its_place(attached):
    """The engine's loop asks layer by layer; each is there when it says so."""
    device, host = fill(pools.mha_pool(), 7), pools.host_mha("page_head")
    whole = [buffer.clone() for buffer in device.k_buffer]
    transfer = L2Transfer(host, device, slots([1, 0]), slots([2, 3]))
    assert attached.submit_device_to_host([transfer]) == "stored"
    for buffer in device.k_buffer:
        buffer.zero_()
    came = []

    def done(layer):
        came.append(layer)
        assert same(device.k_buffer[layer][8:16], whole[layer][8:16])

    assert attached.submit_host_to_device([transfer], transfer_layer_id_max=3, on_layer_done=done) == "loaded"
    assert came == [0, 1, 2]
    stats = attached.executor.stats()
    assert (stats.transfers, stats.nbytes) == (2, 2 * 2 * 3 * 2 * 4 * 4 * 8 * 2)


@pytest.mark.parametrize("loads", [False, True])
def test_pages_are_there_when_the_engine_says_so(attached, loads):
    """Also where the executor has to wait for another transfer first."""
    device, host = fill(pools.mha_pool(), 7), fill(pools.host_mha("page_first"), 8)
    transfer, happened = L2Transfer(host, device, slots([1]), slots([3])), threading.Event()
    memory = kvplan.KVLayout.from_tensors("block dim", torch.zeros(2, 8))
    attached.submit_device_to_host([transfer._replace(host_indices=slots([]), device_indices=slots([]))])

    def there(layer):
        assert same(host.kv_buffer[0, 4:8, layer], device.k_buffer[layer][12:16])

    attached.executor.submit(kvplan.compile(memory, memory).plan([0], [1]), after=happened)
    threading.Timer(0.3, happened.set).start()
    if loads:
        attached.submit_host_to_device([transfer], transfer_layer_id_max=3, on_layer_done=there)
    else:
        attached.submit_device_to_host([transfer])
    for layer in range(3):
        there(layer)


def test_layers_are_those_that_the_mapper_names(attached):
    """A hybrid model's layers 1 and 3 are the pool's 0 and 2; its layer 1 is not asked for."""
    device, host = pools.mha_pool(), pools.host_mha("page_first")
    host.kv_buffer.fill_(1.0)
    transfer = L2Transfer(host, device, slots([0]), slots([1]), {1: 0, 3: 2}.get)
    attached.submit_host_to_device([transfer], transfer_layer_id_max=4, on_layer_done=lambda layer: None)
    assert [float(buffer[4:8].min()) for buffer in device.k_buffer] == [1.0, 0.0, 1.0]
    nowhere = transfer._replace(layer_mapper=lambda layer: None, device_indices=slots([2]))
    attached.submit_host_to_device([nowhere], transfer_layer_id_max=4, on_layer_done=lambda layer: None)
    assert not any(buffer[8:12].any() for buffer in device.k_buffer)


def test_what_is_not_known_is_left_to_the_engine(attached, caplog):
    unknown, drafts, device = UnknownPool(), UnknownPool(), pools.mha_pool()
    mine = L2Transfer(pools.host_mha("page_first"), device, slots([0]), slots([1]))
    transfers = [mine, L2Transfer(unknown, device, None, None), L2Transfer(drafts, device, None, None, is_draft=True)]
    with caplog.at_level(logging.WARNING, logger="kvplan.engines.sglang"):
        attached.submit_device_to_host(transfers)
        attached.submit_device_to_host(transfers)
        attached.submit_host_to_device(transfers, transfer_layer_id_max=2, on_layer_done=lambda layer: None)
    assert unknown.asked == ["store", "store", (0, False), (1, False)]
    assert drafts.asked == ["store", "store", (0, True), (1, True)]
    assert len(caplog.records) == 1  # once a pool; drafts are the engine's by themselves
    assert "left to SGLang's own transfers" in caplog.text
    assert attached.executor.stats().transfers == 3


def test_attaching_and_detaching():
    controller = controller_of()
    own = controller.l2_transfer_engine
    made = engine.attach(controller, policy=kvplan.Policy(threads=1))
    with pytest.raises(kvplan.KVPlanError, match="attached to this controller already"):
        engine.attach(controller)
    made.detach()
    assert controller.l2_transfer_engine is own
    with pytest.raises(kvplan.TransferError, match="closed"):
        made.executor.prepare()
    with pytest.raises(kvplan.KVPlanError, match="controller is a SimpleNamespace; give a HiCacheController"):
        engine.attach(SimpleNamespace())
    with pytest.raises(kvplan.KVPlanError, match="in flight"):
        engine.attach(controller_of(has_inflight_device_transfers=lambda: True))


def test_the_plugin(monkeypatch):
    """It registers nothing unless the environment asks; then every controller that is built is attached to."""
    registry, hooks = ModuleType("sglang.srt.plugins.hook_registry"), []
    registry.HookType = SimpleNamespace(AFTER="after")
    registry.HookRegistry = SimpleNamespace(register=lambda *given: hooks.append(given))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setenv("KVPLAN_SGLANG", "0")
    sglang_plugin.plugin()
    assert not hooks
    monkeypatch.setenv("KVPLAN_SGLANG", "host")
    sglang_plugin.plugin()
    ((target, hook, kind),) = hooks
    assert (target, kind) == ("sglang.srt.managers.cache_controller.HiCacheController.__init__", "after")
    controller = controller_of()
    hook(None, controller, "what", it="was built with")
    assert controller.l2_transfer_engine.executor.policy.path == "host"
    controller.l2_transfer_engine.detach()
