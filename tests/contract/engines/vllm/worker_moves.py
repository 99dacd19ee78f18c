"""vLLM's offloading worker over a cache of a device: what the engine writes is stored and loaded elsewhere."""

from __future__ import annotations

import torch

import kvplan
from kvplan.engines.vllm.worker import Worker
from tests.contract.engines.vllm.stand_ins import finish, on_device, on_host, reference

LAYERS, BLOCKS, CHUNKS = 4, 64, 40


def store_and_load_elsewhere(device, path, page, per_chunk, expedited):
    """Store what the engine writes, load it elsewhere, and compare every byte."""
    caches = torch.zeros((LAYERS, BLOCKS, page), dtype=torch.int8, device=device)
    pool = torch.zeros((CHUNKS, LAYERS * per_chunk * page), dtype=torch.int8, pin_memory=device != "cpu")
    host_rows = list(pool.view(CHUNKS, LAYERS, per_chunk * page).unbind(1))
    groups = [[reference(k, page) for k in range(LAYERS)], [reference(k, page) for k in range(2)]]
    worker = Worker(groups, list(caches), host_rows, per_chunk, policy=kvplan.Policy(path=path))
    try:
        blocks = torch.randperm(BLOCKS)[:20].tolist()
        sizes, firsts = [14, 6], [per_chunk - 1, 0]
        counts = [-(-(n + first) // per_chunk) for n, first in zip(sizes, firsts, strict=True)]
        chunks = torch.randperm(CHUNKS)[: sum(counts)].tolist()
        caches.copy_(torch.randint(-128, 128, caches.shape, dtype=torch.int8, device=device))  # nobody waits for it
        worker.submit_store(1, on_device(blocks, sizes, firsts), on_host(chunks))
        assert finish(worker, 1).transfer_size == (14 * LAYERS + 6 * 2) * page
        wanted = caches.clone()
        elsewhere = [block for block in range(BLOCKS) if block not in blocks][:20]
        caches[:, elsewhere] = 1
        worker.submit_load(2, on_host(chunks), on_device(elsewhere, sizes, firsts), expedited=expedited)
        assert finish(worker, 2).success
        wanted[:, elsewhere[:14]] = wanted[:, blocks[:14]]
        wanted[:2, elsewhere[14:]] = wanted[:2, blocks[14:]]
        wanted[2:, elsewhere[14:]] = 1
        assert torch.equal(caches, wanted)
    finally:
        worker.shutdown()
