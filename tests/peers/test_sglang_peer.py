"""SGLang 0.5.23: its own pools and its own transfer engine, on the CPU, moved by kvplan and read back by SGLang."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from kvplan.engines import sglang as engine
from kvplan.engines.sglang import hicache as sglang_plugin

with warnings.catch_warnings():  # its imports use what others deprecate
    warnings.simplefilter("ignore")
    try:
        from sglang.srt.managers import cache_controller
        from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
        from sglang.srt.plugins.hook_registry import HookRegistry
    except ModuleNotFoundError as missing:
        pytest.skip(f"SGLang's pools import {missing.name}", allow_module_level=True)

LAYERS, PAGE, HEADS, DIM = 3, 4, 2, 8
MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = ("layer_first", "page_first", "page_first_direct")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def noise(buffers):
    made = torch.Generator().manual_seed(0)
    for buffer in buffers:
        buffer.copy_(torch.randint(-(2**15), 2**15, buffer.shape, dtype=torch.int16, generator=made).view(buffer.dtype))


def mha(layout):
    device = MHATokenToKVPool(size=28, page_size=PAGE, dtype=torch.float16, head_num=HEADS, head_dim=DIM,
                              layer_num=LAYERS, device="cpu", enable_memory_saver=False)  # fmt: skip
    noise([*device.k_buffer, *device.v_buffer])
    info = device.get_device_pool_infos()[0].buffer_info
    host = MHATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=28, start_layer=0,
                                end_layer=LAYERS)  # fmt: skip
    return device, host


def mla(layout):
    device = MLATokenToKVPool(size=28, page_size=PAGE, dtype=torch.float16, kv_lora_rank=16, qk_rope_head_dim=8,
                              layer_num=LAYERS, device="cpu", enable_memory_saver=False)  # fmt: skip
    noise(device.kv_buffer)
    info = device.get_device_pool_infos()[0].buffer_info
    host = MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=28, start_layer=0,
                                end_layer=LAYERS, target_layer_num=LAYERS)  # fmt: skip
    return device, host


def page_of(device, page):
    """A page's content in logical order: (K and V, layer, token, head, dim), or (layer, token, 1, dim) of latents."""
    rows = slice(page * PAGE, (page + 1) * PAGE)
    if hasattr(device, "k_buffer"):
        return torch.stack([torch.stack([b[rows] for b in half]) for half in (device.k_buffer, device.v_buffer)])
    return torch.stack([buffer[rows] for buffer in device.kv_buffer])


def ordered(flat, layout, *, latent):
    """What SGLang reads of a host page, ``get_data_page``, in the same order."""
    if latent:
        if layout == "page_first":
            return flat.view(PAGE, LAYERS, 1, -1).transpose(0, 1)
        return flat.view(LAYERS, PAGE, 1, -1)
    if layout == "page_first":
        return flat.view(2, PAGE, LAYERS, HEADS, DIM).transpose(1, 2)
    if layout == "page_head":
        return flat.view(2, HEADS, PAGE, LAYERS, DIM).permute(0, 3, 2, 1, 4)
    return flat.view(2, LAYERS, PAGE, HEADS, DIM)


def attached():
    own = L2TransferEngine("direct")
    return engine.attach(
        SimpleNamespace(l2_transfer_engine=own, device="cpu", has_inflight_device_transfers=lambda: False)
    )


@pytest.mark.parametrize(("make", "layout"), [*((mha, layout) for layout in MHA), *((mla, layout) for layout in MLA)])
def test_its_engine_its_pools_and_its_reading(make, layout):
    device, host = make(layout)
    there = attached()
    host_slots = host.alloc(3 * PAGE)
    pages = [5, 1, 6]
    slots = torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])
    before = [page_of(device, page).clone() for page in range(8)]
    there.submit_device_to_host([L2Transfer(host, device, host_slots, slots)])
    for k, page in enumerate(pages):
        read = host.get_data_page(int(host_slots[k * PAGE]), flat=True)
        assert torch.equal(ordered(read, layout, latent=make is mla).view(torch.int16), before[page].view(torch.int16))
    came = []
    order = torch.cat([slots[2 * PAGE :], slots[: 2 * PAGE]])  # into other pages: 6, 5, 1
    there.submit_host_to_device(
        [L2Transfer(host, device, host_slots, order)], transfer_layer_id_max=LAYERS, on_layer_done=came.append
    )
    assert came == list(range(LAYERS))
    moved = dict(zip((6, 5, 1), pages, strict=True))
    for page in range(8):
        assert torch.equal(page_of(device, page).view(torch.int16), before[moved.get(page, page)].view(torch.int16))
    assert there.executor.stats().transfers == 2
    there.detach()


class Slots:
    """What a controller asks of the allocator of device slots."""

    def __init__(self, device, given):
        self.device, self.given, self.events = device, given, []

    def get_kvcache(self):
        return self.device

    def alloc(self, count):
        return self.given[:count]

    def set_hicache_transfer_done_event(self, key, event):
        self.events.append(key[1])


def test_its_controller_built_with_the_plugin(monkeypatch):
    """SGLang's own controller, hooked by SGLang's own registry: write-through, and loading back layer by layer."""
    monkeypatch.setenv("KVPLAN_SGLANG", "auto")
    monkeypatch.setattr(cache_controller.HiCacheController, "__init__", cache_controller.HiCacheController.__init__)
    sglang_plugin.plugin()
    HookRegistry.apply_hooks()
    device, host = mha("page_first_direct")
    slots = torch.arange(2 * PAGE, 4 * PAGE)
    allocator = Slots(device, torch.arange(5 * PAGE, 7 * PAGE))
    try:
        controller = cache_controller.HiCacheController(
            allocator, host, PAGE, None, threading.Event(), write_policy="write_through", io_backend="direct"
        )
        there = controller.l2_transfer_engine
        assert isinstance(there, engine.TransferEngine)
        whole = [page_of(device, page).clone() for page in (2, 3)]
        host_slots = controller.write(slots)
        for buffer in (*device.k_buffer, *device.v_buffer):
            buffer[2 * PAGE : 4 * PAGE] = 0
        assert torch.equal(controller.load(host_slots), allocator.given)
        assert controller.start_loading() == 0
        for page, was in zip((5, 6), whole, strict=True):
            assert torch.equal(page_of(device, page).view(torch.int16), was.view(torch.int16))
        assert allocator.events == ["write", "load"]
        assert [ack.num_tokens for ack in (*controller.ack_write_queue, *controller.ack_load_queue)] == [8, 8]
        stats = there.executor.stats()
        assert (stats.transfers, stats.nbytes) == (2, 2 * host.size_per_token * 2 * PAGE)
        there.detach()
    finally:
        HookRegistry.reset()
