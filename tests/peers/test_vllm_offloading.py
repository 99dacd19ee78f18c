"""vLLM 0.33.0 canonicalises caches, plans jobs and copies by its own code; the same jobs of ours move the same bytes.

Its worker is run whole, on CPU tensors that say they are a GPU's: streams and events are stand-ins, and the operator at
the end is a loop of ``memmove`` that also notes what it was given.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvplan.engines import vllm
from kvplan.engines.vllm import worker as vllm_worker
from kvplan.engines.vllm.jobs import Jobs, pages_of
from tests.peers.vllm_worker import OnDevice, allocated

pytestmark = pytest.mark.peers

BLOCKS, CHUNKS = 24, 10
FULL = {"block_size": 8, "num_kv_heads": 2, "head_size": 4, "dtype": torch.float16}
MLA = {"block_size": 8, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def name(layer):
    return f"model.layers.{layer}.self_attn.attn"


def group_of(layers, spec):
    return KVCacheGroupSpec([name(layer) for layer in layers], spec)


def caches_of(groups, order, rank=0, tp=1, total_heads=2, **parallel):
    """vLLM's plan, its allocation with random bytes, and its canonical form of it."""
    config, plan, caches = allocated(groups, order, BLOCKS, rank=rank, tp=tp, total_heads=total_heads, **parallel)
    raw = whole(next(iter(caches.values())))
    raw.copy_(torch.from_numpy(np.random.default_rng(rank).integers(-128, 128, raw.shape, dtype=np.int8)))
    taken = []
    spec = SimpleNamespace(
        replicated_layout=False, get_worker=taken.append,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=rank)),
    )  # fmt: skip
    OffloadingConnectorWorker(spec, config, plan).register_kv_caches(caches)
    return taken[0]


def whole(tensor):
    """All bytes of a tensor's allocation."""
    return torch.empty(0, dtype=torch.int8).set_(tensor.untyped_storage())


def copy_of(caches, kind=torch.Tensor):
    """The same canonical caches over an allocation of their own."""
    raw = whole(caches.tensors[0].tensor).clone()
    tensors = [
        CanonicalKVCacheTensor(
            torch.as_strided(raw, t.tensor.shape, t.tensor.stride(), t.tensor.storage_offset()).as_subclass(kind),
            t.page_size_bytes,
        )
        for t in caches.tensors
    ]  # fmt: skip
    return CanonicalKVCaches(tensors, caches.group_data_refs), raw


def places(rows):
    """Where rows lie, without holding on to them: address, bytes from one to the next, bytes of one."""
    return [(view.data_ptr(), view.stride(0), view.shape[1]) for view in rows]


def bytes_of(copies, base, pools, store):
    """Each byte moved, by its offset in the cache and by (tensor, row, byte) of the pool; in order of the pool's."""
    src, dst, nbytes = np.array(copies, dtype=np.int64).reshape(-1, 3).T
    within = np.concatenate([np.arange(n) for n in nbytes] or [np.empty(0, np.int64)])
    src, dst = np.repeat(src, nbytes) + within, np.repeat(dst, nbytes) + within
    device, host = (src, dst) if store else (dst, src)
    found = np.full(host.shape, -1)
    for tensor, (address, stride, size) in enumerate(pools):
        row, byte = np.divmod(host - address, stride)
        here = (row >= 0) & (row < CHUNKS) & (byte < size)
        assert (found[here] == -1).all()
        found[here] = (tensor * CHUNKS + row[here]) * (1 << 32) + byte[here]
    assert (found >= 0).all()
    order = np.argsort(found)
    return np.stack([found[order], device[order] - base])


class Pair:
    """vLLM's worker and ours, each with its own copy of the caches and of the pool."""

    def __init__(self, caches, per_chunk, copies, monkeypatch, regions=(None, None), canonical=False):
        theirs, self.their_raw = copy_of(caches, OnDevice)
        ours, self.our_raw = copy_of(caches)
        self.per_chunk, self.copies = per_chunk, copies
        options = {"blocks_per_chunk": per_chunk, "num_cpu_chunks": CHUNKS, "canonical_layout": canonical}
        self.theirs = gpu_worker.CPUOffloadingWorker(theirs, mmap_region=regions[0], **options)
        self.their_pools = places(self.theirs._store_handler.dst_tensors)
        init = vllm_worker.Worker.__init__

        def noted(worker, groups, device_rows, host_rows, *args, **kwargs):
            self.our_pools = places(host_rows)
            pages = [pages_of(references, canonical=canonical) for references in groups]
            self.planned = Jobs(pages, device_rows, host_rows, per_chunk)
            init(worker, groups, device_rows, host_rows, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(vllm_worker.Worker, "__init__", noted)
            self.ours = vllm.KVPlanOffloadingWorker(ours, mmap_region=regions[1], **options)

    def run(self, job, device, host, *, store, expedited=False):
        """One job through both: their report is ours, and so is each byte they copy. How many those are."""
        self.copies.clear()
        moves = self.planned.store([(device, host)]) if store else self.planned.load([(device, host)])
        for worker in (self.theirs, self.ours):
            if store:
                assert worker.submit_store(job, device, host) is True
            else:
                how = {"expedited": expedited}
                assert worker.submit_load(job, host, device, **how) is True
            worker.wait({job})
        (their,), (our,) = self.theirs.get_finished(), self.ours.get_finished()
        assert type(our) is type(their)
        assert (our.job_id, our.success, our.transfer_size) == (their.job_id, True, their.transfer_size)
        assert torch.equal(self.our_raw, self.their_raw)
        made = [row for move in moves for row in zip(*move.plan.descriptors(), strict=True)]
        wanted = bytes_of(self.copies, self.their_raw.data_ptr(), self.their_pools, store)
        assert np.array_equal(bytes_of(made, self.our_raw.data_ptr(), self.our_pools, store), wanted)
        assert wanted.shape[1] == our.transfer_size
        return our.transfer_size

    def close(self):
        self.planned = None  # which holds views of the region
        self.theirs.shutdown()
        self.ours.shutdown()


@pytest.fixture
def pair(copies, monkeypatch):
    """Makes pairs of workers, and shuts them down."""
    made = []

    def make(caches, per_chunk, **options):
        made.append(Pair(caches, per_chunk, copies, monkeypatch, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def job_of(rng, groups, per_chunk, most=5):
    """Ids of one job: for each group some blocks, perhaps none, that begin anywhere in the request."""
    sizes = [int(rng.integers(0, most + 1)) for _ in range(groups)]
    firsts = [int(rng.integers(0, 3 * per_chunk)) for _ in range(groups)]
    counts = [
        -(-(size + first % per_chunk) // per_chunk) if size else 0 for size, first in zip(sizes, firsts, strict=True)
    ]
    blocks = rng.permutation(np.arange(1, BLOCKS))[: sum(sizes)].tolist()  # block 0 is the null block
    chunks = rng.permutation(CHUNKS)[: sum(counts)].tolist()
    assert len(blocks) == sum(sizes)
    assert len(chunks) == sum(counts)
    return GPULoadStoreSpec(blocks, sizes, firsts), CPULoadStoreSpec(chunks)


def hold_jobs(both, groups, per_chunk, rounds=6, most=5):
    """Stores, and loads of what was stored into other blocks, each held byte by byte."""
    rng = np.random.default_rng(groups * 100 + per_chunk)
    moved = 0
    for job in range(rounds):
        device, host = job_of(rng, groups, per_chunk, most)
        moved += both.run(3 * job, device, host, store=True)
        blocks = rng.permutation(np.arange(1, BLOCKS))[: len(device.block_ids)].tolist()
        elsewhere = GPULoadStoreSpec(blocks, device.group_sizes, device.block_indices)
        moved += both.run(3 * job + 1, elsewhere, host, store=False)
        moved += both.run(3 * job + 2, device, host, store=False, expedited=True)
    assert moved
    assert moved


def several(spec):
    """Full attention and two windows, each of two layers: groups that lie over one another."""
    window = SlidingWindowSpec(sliding_window=16, **FULL)
    return [group_of((0, 3), spec), group_of((1, 4), window), group_of((2, 5), window)]


MODELS = {
    "one group": lambda: [group_of((0, 1, 2), FullAttentionSpec(**FULL))],
    "several groups": lambda: several(FullAttentionSpec(**FULL)),
    "padded pages": lambda: [group_of((0, 1, 2), FullAttentionSpec(page_size_padded=320, **FULL))],
    "a padded group beside others": lambda: [
        group_of((0, 2), FullAttentionSpec(**FULL)),
        group_of((1, 3), SlidingWindowSpec(sliding_window=16, page_size_padded=256, **FULL | {"head_size": 3})),
    ],
    "mla": lambda: [group_of((0, 1), MLAAttentionSpec(**MLA))],
    "mla of opaque rows": lambda: [
        group_of((0, 1), MLAAttentionSpec(**MLA | {"dtype": torch.uint8, "state_content_bytes": 656}))
    ],
    "layers of several sizes": lambda: [uniform({0: 4, 1: 6, 2: 4})],
    "attention beside states": lambda: [
        group_of((0, 2), FullAttentionSpec(**FULL)),
        group_of((1, 3), MambaSpec(
            block_size=8, shapes=((3, 5), (7,)), dtypes=(torch.float32, torch.float16), page_size_padded=256,
        )),
    ],
}  # fmt: skip


def uniform(sizes):
    specs = {name(layer): FullAttentionSpec(**FULL | {"head_size": size}) for layer, size in sizes.items()}
    return KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=8, kv_cache_specs=specs))


@pytest.mark.parametrize("per_chunk", [1, 2, 3])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("model", MODELS)
def test_jobs(model, order, per_chunk, pair):
    caches = caches_of(MODELS[model](), order)
    groups = len(caches.group_data_refs)
    hold_jobs(pair(caches, per_chunk), groups, per_chunk, most=min(5, (CHUNKS - groups) // groups))


# ---- the shared region, and canonical pages ----


@pytest.fixture
def regions():
    """Makes regions that several ranks map, in pairs: one file for vLLM's workers, one for ours."""
    made = []

    def make(ranks, rank, slot):
        row = -(-slot * ranks // 4096) * 4096
        pair_of = [
            SharedOffloadRegion(f"kvplan-test-{os.getpid()}-{whose}", CHUNKS, rank, row, slot)
            for whose in ("theirs", "ours")
        ]
        made.extend(pair_of)
        return pair_of

    yield make
    for region in made:
        region.cleanup()


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_the_shared_region(per_chunk, pair, regions):
    """Two ranks, each in its slot of every row; rows have a tail that no rank has."""
    caches = [caches_of(several(FullAttentionSpec(**FULL)), "LBHNC", rank, 2, 4) for rank in range(2)]
    slot = sum(tensor.page_size_bytes for tensor in caches[0].tensors) * per_chunk
    both = []
    for rank, held in enumerate(caches):
        maps = regions(2, rank, slot)
        both.append((pair(held, per_chunk, regions=maps), maps))
    for one, _ in both:
        hold_jobs(one, 3, per_chunk, most=2)
    (_, (theirs, ours)), _ = both
    assert theirs.base_tensor.any()
    assert torch.equal(theirs.base_tensor, ours.base_tensor)


def rank_groups(kind, heads):
    """Groups of the ranks of one model: two groups, each with its layers."""
    if kind == "mla":
        return [group_of((0, 1), MLAAttentionSpec(**MLA))]
    full = FULL | {"num_kv_heads": heads}
    return [
        group_of((0, 2), FullAttentionSpec(**full)),
        group_of((1, 3), SlidingWindowSpec(sliding_window=16, **full)),
    ]


DEALT = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 2}
# What, in which storage order, on how many ranks, with how many heads in all, how many of them write a page in turn.
CANONICAL = {
    "one rank": ("heads", "LBHNC", 1, 2, 1, {}),
    "heads of four ranks, NHD": ("heads", "LBNHC", 4, 8, 1, {}),
    "heads of four ranks, HND": ("heads", "LBHNC", 4, 8, 1, {}),
    "replicated heads, NHD": ("heads", "LBNHC", 4, 2, 2, {}),
    "replicated heads, HND": ("heads", "LBHNC", 6, 2, 3, {}),
    "tokens dealt two by two": ("heads", "LBHNC", 4, 2, 1, DEALT),
    "mla on three ranks": ("mla", "LBHNC", 3, 1, 3, {}),
    "mla, tokens dealt one by one": ("mla", "LBNHC", 4, 1, 2, DEALT | {"cp_kv_cache_interleave_size": 1}),
}


@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("case", CANONICAL)
def test_canonical_pages(case, per_chunk, pair, regions):
    """Every rank stores and loads; afterwards the two regions are the same, with bytes of all ranks in each."""
    kind, order, ranks, total, writers, parallel = CANONICAL[case]
    groups = rank_groups(kind, max(1, total // ranks))
    both, maps = [], []
    for rank in range(ranks):
        caches = caches_of(groups, order, rank, ranks, total, **parallel)
        mappings = [ref.mapping for refs in caches.group_data_refs for ref in refs]
        assert {mapping.num_writers for mapping in mappings} == {writers}
        slot = sum(tensor.page_size_bytes for tensor in caches.tensors) * per_chunk
        dealt = parallel.get("decode_context_parallel_size", 1)
        maps.append(regions(ranks * dealt, rank, slot))
        both.append(pair(caches, per_chunk, regions=maps[-1], canonical=True))
    rng = np.random.default_rng(ranks)
    moved = 0
    for job in range(4):
        device, host = job_of(rng, len(groups), per_chunk, most=4)
        moved += sum(one.run(2 * job, device, host, store=True) for one in both)
        moved += sum(one.run(2 * job + 1, device, host, store=False) for one in both)
        theirs, ours = (region.base_tensor for region in maps[0])
        assert torch.equal(theirs, ours)
    assert moved
    assert moved


def test_layers_that_cannot_be_certified_have_places_of_their_own(pair, regions):
    """States have no heads: each rank's page lies whole in its place."""
    groups = MODELS["attention beside states"]()
    both, maps = [], []
    for rank in range(2):
        caches = caches_of(groups, "LBHNC", rank, 2, 4)
        assert not any(ref.mapping.parallelism_agnostic for ref in caches.group_data_refs[1])
        maps.append(regions(2, rank, sum(tensor.page_size_bytes for tensor in caches.tensors)))
        both.append(pair(caches, 1, regions=maps[-1], canonical=True))
    for one in both:
        hold_jobs(one, 2, 1, most=3)
    theirs, ours = (region.base_tensor for region in maps[0])
    assert torch.equal(theirs, ours)
