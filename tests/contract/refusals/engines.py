"""Refusals of the documented entry points of engines, as far as they need no engine."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from types import SimpleNamespace
from unittest import mock

import torch

import kvplan
from kvplan import BlockIndexError, IncompatibleLayoutsError, KVPlanError, LayoutError, OverlapError, Policy
from kvplan.backends import lmcache as backend
from kvplan.engines import lmcache, sglang
from kvplan.engines.vllm.specs import policy_of
from tests.backends.sglang.sglang_pools import host_index, host_mha, host_mla, mha_pool, mla_pool
from tests.contract.engines.lmcache_caches import DIM, FLASH, HEADS, flash, objects_of
from tests.contract.refusals.table import REFUSED


def plugin(group, name, variable, value):
    """A plug-in that an environment variable asks for."""
    (point,) = entry_points(group=group, name=name)
    with mock.patch.dict(os.environ, {variable: value}):
        point.load()()


REFUSED["plug-in", plugin, KVPlanError] = [
    ("vllm.general_plugins", "kvplan-lmcache", "KVPLAN_LMCACHE", "yes", "KVPLAN_LMCACHE is 'yes' ... 'auto' ... '0'"),
    ("vllm.general_plugins", "kvplan-nixl", "KVPLAN_NIXL", "yes", "KVPLAN_NIXL is 'yes' ... '1' ... '0'"),
    ("sglang.srt.plugins", "kvplan-lmcache", "KVPLAN_LMCACHE", "yes", "KVPLAN_LMCACHE is 'yes' ... 'auto' ... '0'"),
    ("sglang.srt.plugins", "kvplan-nixl", "KVPLAN_NIXL", "yes", "KVPLAN_NIXL is 'yes' ... '1' ... '0'"),
]


def pools(device, host, verb="", *given):
    with kvplan.Executor(policy=Policy(threads=1)) as executor:
        transfers = sglang.HostTransfers(device, host, executor)
        return getattr(transfers, verb)(*given)


def moved(verb, *given):
    return pools(mha_pool(), host_mha("page_first"), verb, *given)


def having(pool, **attributes):
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


BUILT = mha_pool()
FOUR_LAYERS = (*BUILT.k_buffer, torch.zeros(16, 4, 8))
SCALES = [[torch.zeros(16, 4, 2, dtype=torch.uint8) for _ in range(3)] for _ in "kv"]
SCALED = having(mha_pool(), k_scale_buffer=SCALES[0], v_scale_buffer=SCALES[1])
REFUSED["sglang.HostTransfers", pools, LayoutError] = [
    (mha_pool(), having(host_mha("page_first"), dcp_size=2), "one of 2 ranks"),
    (mha_pool(), having(host_mha("page_first"), shared_allocation_domain=object()), "shared allocation domain"),
    (having(mha_pool(), layer_shard_enabled=True), host_mha("page_first"), "layer sharding"),
    (SCALED, host_mha("page_first"), "1536 bytes ... 1728 ... content differ"),
    (mha_pool(), having(host_mha("page_first"), device_k_buffers=mha_pool().k_buffer), "device_k_buffers ... k_buffer"),
    (BUILT, having(host_mha("page_first", layers=4), device_k_buffers=FOUR_LAYERS), "4 layers, the device pool 3"),
    (mha_pool(), host_mha("page_first", page=2), "pages of 2 tokens, the device pool of 4"),
    (mha_pool(), host_mha("page_first", heads=2), "heads or their content differ"),
    (mha_pool(), host_mla("page_first"), "heads or their content differ"),
    (mla_pool(page=64, size=128), host_index("layer_first"), "nothing"),
]
PAGE = [4, 5, 6, 7]
REFUSED["sglang.HostTransfers.backup", lambda host, device: moved("backup", host, device), BlockIndexError] = [
    ([0, 1, 2], [4, 5, 6], "host_indices ... 3 slots ... pages of 4"),
    ([0, 1, 2, 3], [4, 5, 6, 8], "device_indices[3] is 8 ... another page"),
    ([1, 2, 3, 4], PAGE, "host_indices[0] is 1 ... another page"),
    ([*range(8)], PAGE, "host_indices names 8 slots ... device_indices 4"),
    ([0, 1, 2, -1], PAGE, "host_indices[3] is -1"),
    ([16, 17, 18, 19], PAGE, "dst_blocks[0] is 4 ... 0 to 3"),
    ([0.5, 1, 2, 3], PAGE, "host_indices holds float64"),
]
REFUSED["sglang.HostTransfers.load", lambda layer: moved("load", [0, 1, 2, 3], PAGE, layer), LayoutError] = [
    (layer, f"{wrong!r} ... layers 0 to 2")
    for layer, wrong in ((3, 3), (-1, -1), (True, True), ("1", "1"), (1.0, 1.0), ([0, 7], 7))
]
REFUSED["sglang.HostTransfers.load", OverlapError] = [
    (lambda: moved("load", [*range(4), *range(8, 12)], [*PAGE, *PAGE]), "block 1 more than once")
]


def stored(more):
    given = {"objects": objects_of(1, 8), "starts": [0], "ends": [8], "slot_mapping": range(8)} | more
    with kvplan.Executor(policy=Policy(threads=1)) as executor:
        own = lmcache.Connector(backend.describe(flash(), engine_format=FLASH), executor)
        getattr(own, given.pop("verb", "store"))(given.pop("objects"), **given)


def with_tensor(tensor):
    (memory,) = objects_of(1, 8)
    memory.tensors = [tensor]
    return [memory]


TWICE = {"objects": objects_of(2, 4), "starts": [0, 4], "ends": [4, 8], "slot_mapping": [0, 1, 2, 3] * 2}
WIDE = objects_of(1, 8, width=HEADS * DIM * 2)
REFUSED["lmcache.Connector.store", stored] = [
    ({"slot_mapping": None}, KVPlanError, "slot_mapping is missing"),
    ({"slot_mapping": range(7)}, BlockIndexError, "tokens 0 to 8 ... slot_mapping ... 7 tokens"),
    ({"slot_mapping": [-1, *range(7)]}, BlockIndexError, "slot_mapping[0:8][0] is -1"),
    ({"slot_mapping": range(28, 36)}, BlockIndexError, "src_blocks[1] is 8"),
    ({"starts": [0, 8]}, BlockIndexError, "1 memory objects, 2 starts and 1 ends"),
    ({"slot_mapping": range(16), "ends": [16]}, BlockIndexError, "8 tokens ... 16"),
    ({"objects": [object()]}, LayoutError, "MemoryObj of LMCache"),
    ({"objects": objects_of(1, 8, layers=2)}, LayoutError, "layers"),
    ({"objects": WIDE}, IncompatibleLayoutsError, "16 ... 32"),
    ({"objects": with_tensor(None)}, LayoutError, "has no tensor ... freed"),
    ({"objects": with_tensor(torch.zeros(8, 16))}, LayoutError, "(8, 16) ... layers, tokens, width"),
    (TWICE | {"verb": "load"}, OverlapError, "two of the joined plans write"),
]
REFUSED["engines"] = [
    (lambda: lmcache.Connector([1], None), LayoutError, "caches is [1] ... KVLayout"),
    (lambda: lmcache.connect(SimpleNamespace(gpu_connector=None)), KVPlanError, "without a gpu_connector"),
    (lambda: policy_of({"kvplan": {"path": "fast"}}), kvplan.PathError, "'fast' ... 'auto'"),
    (lambda: policy_of({"kvplan": {"colour": 1}}), kvplan.PathError, "'colour' ... threads"),
]
