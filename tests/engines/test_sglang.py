"""SGLang's host transfers through kvplan: bytes against the tensors' own indexing, and what the engine is left with."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.engines import sglang as engine
from kvplan.engines.sglang import plugin as sglang_plugin

torch = pytest.importorskip("torch", reason="the engine's pools are torch's")

from tests.backends.sglang import sglang_pools as pools  # noqa: E402
from tests.profiles import examples  # noqa: E402

PAGE, LAYERS = 4, 3


def slots(pages, page=PAGE):
    """The token slots of pages, as the engine lists them."""
    return torch.tensor([page * number + k for number in pages for k in range(page)], dtype=torch.int64)


def fill(pool, seed):
    """Noise in every buffer of a pool."""
    made = torch.Generator().manual_seed(seed)
    for name in ("k_buffer", "v_buffer", "kv_buffer", "index_k_with_scale_buffer"):
        held = getattr(pool, name, None)
        for buffer in [] if held is None else held if isinstance(held, list) else [held]:
            raw = buffer.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=made))
    return pool


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def mha_rows(device, host, layout):
    """``(layer, kv, device page, host page, token, head)`` -> the two rows."""
    row = pools.mha_row(layout, host.kv_buffer)
    halves = device.k_buffer, device.v_buffer
    for layer in range(LAYERS):
        for kv in range(2):
            yield lambda at, to, token, head, k=layer, h=kv: (
                halves[h][k][at * PAGE + token, head], row(k, h, to, token, head)
            )  # fmt: skip


@pytest.mark.parametrize("layout", pools.MHA_LAYOUTS)
def test_pages_of_every_host_layout(layout, executor):
    """Device pages 3 and 1 become host pages 0 and 2, and come back as device pages 2 and 3."""
    device, host = fill(pools.mha_pool(), 1), fill(pools.host_mha(layout), 2)
    before = host.kv_buffer.clone()
    transfers = engine.HostTransfers(device, host, executor)
    assert (transfers.page_size, transfers.layers) == (4, (0, 1, 2))
    stored = transfers.backup(slots([0, 2]), slots([3, 1]))
    assert stored.result().nbytes == 2 * 3 * 2 * 4 * 4 * 8 * 2  # pages, layers, K and V, tokens, heads, dim, bytes
    kept = pools.mha_row(layout, before)
    now = pools.mha_row(layout, host.kv_buffer)
    for pair in mha_rows(device, host, layout):
        for at, to in ((3, 0), (1, 2)):
            assert all(same(*pair(at, to, token, head)) for token in range(PAGE) for head in range(4))
    for layer in range(LAYERS):
        for page in (1, 3):  # neighbours are as they were
            assert all(same(kept(layer, kv, page, t, 0), now(layer, kv, page, t, 0)) for kv in (0, 1) for t in range(4))
    first = device.k_buffer[2][:PAGE].clone()
    transfers.load(slots([0, 2]), slots([2, 3])).synchronize()
    for pair in mha_rows(device, host, layout):
        for at, to in ((2, 0), (3, 2)):
            assert all(same(*pair(at, to, token, head)) for token in range(PAGE) for head in range(4))
    assert same(first, device.k_buffer[2][:PAGE])  # page 0, of padding


@pytest.mark.parametrize("layout", pools.MLA_LAYOUTS)
def test_latents(layout, executor):
    device, host = fill(pools.mla_pool(start=5), 3), fill(pools.host_mla(layout, start=5), 4)
    transfers = engine.HostTransfers(device, host, executor)
    assert transfers.layers == (5, 6, 7)
    transfers.backup(slots([1]), slots([2])).synchronize()
    row = pools.mla_row(layout, host.kv_buffer)
    for layer in range(LAYERS):
        assert all(same(device.kv_buffer[layer][8 + token, 0], row(layer, 0, 1, token, 0)) for token in range(PAGE))


def test_one_layer_moves_alone(executor):
    device, host = pools.mha_pool(start=10), pools.host_mha("page_first", start=10)
    host.kv_buffer.fill_(2.5)
    transfers = engine.HostTransfers(device, host, executor)
    loading = transfers.load(slots([1]), slots([2]), 1)
    transfers.wait_layer(loading, 1)
    assert [float(buffer.sum()) for buffer in device.k_buffer] == [0.0, 2.5 * 4 * 4 * 8, 0.0]
    assert device.v_buffer[1][8:12].min() == 2.5
    assert device.v_buffer[1][:8].max() == 0
    with pytest.raises(kvplan.LayoutError, match="layer 10 is not moved"):
        transfers.wait_layer(loading, 0)
    some = transfers.load(slots([1]), slots([1]), [2, 0])
    transfers.wait_layer(some, 2)
    some.synchronize()
    assert [float(buffer[4:8].min()) for buffer in device.v_buffer] == [2.5, 0.0, 2.5]


def test_index_keys_have_a_host_pool_of_their_own(executor):
    device = fill(pools.dsa_pool(), 5)
    latents, index = pools.host_mla("page_first", page=64, dim=656, dtype=torch.uint8), pools.host_index("layer_first")
    engine.HostTransfers(device, latents, executor).backup(slots([1], 64), slots([2], 64)).synchronize()
    assert not index.index_k_with_scale_buffer.any()
    keys = engine.HostTransfers(device, index, executor)
    keys.backup(slots([3], 64), slots([1], 64)).synchronize()
    for layer in range(LAYERS):
        assert same(device.kv_buffer[layer][128:192, 0], latents.kv_buffer[64:128, layer, 0])
        assert same(device.index_k_with_scale_buffer[layer][1], index.index_k_with_scale_buffer[layer, 3])
    assert not index.index_k_with_scale_buffer[:, :3].any()


@examples(250)
@given(st.permutations(range(1, 8)), st.integers(1, 7), st.sampled_from(pools.MHA_LAYOUTS), st.integers(0, 99))
def test_what_was_stored_comes_back(executor, order, count, layout, seed):
    """Through any host layout into other pages: the bytes are those that were stored, and other pages are untouched."""
    device = fill(pools.mha_pool(size=28, layers=2), seed)
    whole = [buffer.clone() for buffer in (*device.k_buffer, *device.v_buffer)]
    transfers = engine.HostTransfers(device, pools.host_mha(layout, pages=8, layers=2), executor)
    there, back = slots(order[:count]), slots(sorted(order)[:count])
    transfers.backup(there, there).synchronize()
    for buffer in (*device.k_buffer, *device.v_buffer):
        buffer.view(torch.uint8)[PAGE:] = 0
    transfers.load(there, back).synchronize()
    for buffer, was in zip((*device.k_buffer, *device.v_buffer), whole, strict=True):
        assert same(buffer[back], was[there])
        rest = np.setdiff1d(np.arange(PAGE, 32), back.numpy())
        assert not buffer.view(torch.uint8)[rest].any()
        assert same(buffer[:PAGE], was[:PAGE])


@pytest.mark.parametrize("of", [list, np.array, torch.tensor, lambda ids: torch.tensor(ids, dtype=torch.int32)])
def test_indices_of_any_kind(of, executor):
    device, host = fill(pools.mha_pool(), 6), pools.host_mha("layer_first")
    transfers = engine.HostTransfers(device, host, executor)
    transfers.backup(of([4, 5, 6, 7]), of([8, 9, 10, 11])).synchronize()
    assert same(host.kv_buffer[0, 2, 4:8], device.k_buffer[2][8:12])


@pytest.mark.parametrize(
    ("host", "device", "says"),
    [
        ([0, 1, 2], [4, 5, 6], "host_indices names 3 slots; give whole pages of 4"),
        ([0, 1, 2, 3], [4, 5, 6, 8], r"device_indices\[3\] is 8, in the middle of another page"),
        ([1, 2, 3, 4], [4, 5, 6, 7], r"host_indices\[0\] is 1, in the middle of another page"),
        ([0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7], "host_indices names 8 slots and device_indices 4"),
        ([0, 1, 2, -1], [4, 5, 6, 7], r"host_indices\[3\] is -1"),
        ([16, 17, 18, 19], [4, 5, 6, 7], r"dst_blocks\[0\] is 4; dst blocks are 0 to 3"),
        ([0.5, 1, 2, 3], [4, 5, 6, 7], "host_indices holds float64"),
    ],
)
def test_slots_that_are_no_pages(host, device, says, executor):
    transfers = engine.HostTransfers(pools.mha_pool(), pools.host_mha("page_first"), executor)
    with pytest.raises(kvplan.BlockIndexError, match=says):
        transfers.backup(host, device)


def test_a_page_named_twice(executor):
    transfers = engine.HostTransfers(pools.mha_pool(), pools.host_mha("page_first"), executor)
    with pytest.raises(kvplan.KVPlanError, match="block 1 more than once"):
        transfers.load(slots([0, 2]), slots([1, 1]))


@pytest.mark.parametrize("layer", [3, -1, True, "1", 1.0, [0, 7]])
def test_layers_that_the_pools_have_not(layer, executor):
    transfers = engine.HostTransfers(pools.mha_pool(), pools.host_mha("page_first"), executor)
    with pytest.raises(kvplan.LayoutError, match="the pools hold layers 0 to 2, counted within the pools"):
        transfers.load(slots([0]), slots([1]), layer)


class Wrong(NamedTuple):
    device: Any
    host: Any
    says: str


def wrong_pools():
    device, host = pools.mha_pool, pools.host_mha
    other, sharded, dealt, shared, built = (
        host("page_first"),
        device(),
        host("page_first"),
        host("page_first"),
        device(),
    )
    other.device_k_buffers = device().k_buffer
    sharded.layer_shard_enabled = True
    dealt.dcp_size = 2
    shared.shared_allocation_domain = object()
    drafted = host("page_first", layers=4)
    drafted.device_k_buffers = (*built.k_buffer, torch.zeros(16, 4, 8))
    scaled = device()
    scaled.k_scale_buffer = scaled.v_scale_buffer = [torch.zeros(16, 4, 2, dtype=torch.uint8) for _ in range(LAYERS)]
    return {
        "built beside another": Wrong(device(), other, "its device_k_buffers are not this one's k_buffer"),
        "draft layers": Wrong(built, drafted, "holds 4 layers, the device pool 3"),
        "other pages": Wrong(device(), host("page_first", page=2), "has pages of 2 tokens, the device pool of 4"),
        "other heads": Wrong(device(), host("page_first", heads=2), "heads or their content differ"),
        "latents": Wrong(device(), pools.host_mla("page_first"), "heads or their content differ"),
        "dealt": Wrong(device(), dealt, "one of 2 ranks"),
        "shared": Wrong(device(), shared, "shared allocation domain"),
        "sharded": Wrong(sharded, host("page_first"), "layer sharding"),
        "scales": Wrong(scaled, host("page_first"), "k_scale"),
        "no index": Wrong(pools.mla_pool(page=64, size=128), pools.host_index("layer_first"), "nothing"),
    }


@pytest.mark.parametrize("name", wrong_pools())
def test_pools_that_do_not_belong_together(name, executor):
    wrong = wrong_pools()[name]
    with pytest.raises(kvplan.KVPlanError, match=wrong.says):
        engine.HostTransfers(wrong.device, wrong.host, executor)


# ---- in the place of the engine's own ----------------------------------------------------------------------------


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


def test_transfers_are_made_ready_at_the_start(prepared):
    pools_of = {"mem_pool_host": pools.host_mha("page_first"), "mem_pool_device": pools.mha_pool()}
    made = engine.attach(controller_of(**pools_of))
    assert prepared == [(None, False), ("host", False), (None, True), ("host", True)]
    assert made.transfers_of(*pools_of.values()) is made.transfers_of(*pools_of.values())
    assert len(prepared) == 4
    made.detach()


def test_each_pool_of_a_group_is_made_ready(prepared, caplog):
    entry = SimpleNamespace(host_pool=pools.host_mha("page_first"), device_pool=pools.mha_pool())
    group = SimpleNamespace(entries=[entry, SimpleNamespace(host_pool=object(), device_pool=None)])
    with caplog.at_level(logging.INFO, "kvplan.engines.sglang"):
        engine.attach(controller_of(mem_pool_host=group, mem_pool_device=entry.device_pool)).detach()
    assert len(prepared) > 0
    assert "kvplan moves the pages of" in caplog.text
    assert "left to SGLang's own transfers" not in caplog.text


def test_the_engine_in_its_place(attached):
    """The engine's loop asks layer by layer; each is there when it says so."""
    device, host = fill(pools.mha_pool(), 7), pools.host_mha("page_head")
    whole = [buffer.clone() for buffer in device.k_buffer]
    there = attached._controller.l2_transfer_engine
    assert there is attached
    transfer = L2Transfer(host, device, slots([1, 0]), slots([2, 3]))
    assert there.submit_device_to_host([transfer]) == "stored"
    for buffer in device.k_buffer:
        buffer.zero_()
    came = []

    def done(layer):
        came.append(layer)
        assert same(device.k_buffer[layer][8:16], whole[layer][8:16])

    assert there.submit_host_to_device([transfer], transfer_layer_id_max=3, on_layer_done=done) == "loaded"
    assert came == [0, 1, 2]
    stats = attached.executor.stats()
    assert (stats.transfers, stats.nbytes) == (2, 2 * 2 * 3 * 2 * 4 * 4 * 8 * 2)
    assert attached.device_to_host_stream is attached._own.device_to_host_stream


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


def test_more_layers_than_the_pool_has_are_passed_over(attached):
    device, host = pools.mha_pool(), pools.host_mha("page_first")
    host.kv_buffer.fill_(1.0)
    transfer = L2Transfer(host, device, slots([0]), slots([1]))
    attached.submit_host_to_device([transfer], transfer_layer_id_max=5, on_layer_done=lambda layer: None)
    assert all(buffer[4:8].min() == 1 for buffer in device.k_buffer)


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


def test_what_is_served_is_logged_once(attached, caplog):
    transfer = L2Transfer(pools.host_mha("page_first"), pools.mha_pool(), slots([0]), slots([1]))
    with caplog.at_level(logging.INFO, logger="kvplan.engines.sglang"):
        attached.submit_device_to_host([transfer])
        attached.submit_device_to_host([transfer])
    (line,) = caplog.messages
    names = type(transfer.host_pool).__name__, type(transfer.device_pool).__name__
    assert line.startswith("kvplan moves the pages of {} and {}: ".format(*names))
    assert "layer=" in line


def test_no_slots_move_nothing(attached):
    device, host = pools.mha_pool(), pools.host_mha("page_first")
    transfer = L2Transfer(host, device, slots([]), slots([]))
    attached.submit_device_to_host([transfer])
    attached.submit_host_to_device([transfer], transfer_layer_id_max=3, on_layer_done=lambda layer: None)
    assert attached.executor.stats().nbytes == 0


def test_attaching_and_detaching():
    controller = controller_of()
    own = controller.l2_transfer_engine
    made = engine.attach(controller, policy=kvplan.Policy(threads=1))
    with pytest.raises(kvplan.KVPlanError, match="attached to this controller already"):
        engine.attach(controller)
    made.detach()
    assert controller.l2_transfer_engine is own
    with pytest.raises(kvplan.TransferError, match="closed"):
        made.executor.submit(None)
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
    for nothing in (None, "", "0"):
        if nothing is None:
            monkeypatch.delenv("KVPLAN_SGLANG", raising=False)
        else:
            monkeypatch.setenv("KVPLAN_SGLANG", nothing)
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
    monkeypatch.setenv("KVPLAN_SGLANG", "yes")
    with pytest.raises(kvplan.KVPlanError, match="KVPLAN_SGLANG is 'yes'; give 'auto' or a path"):
        sglang_plugin.plugin()
