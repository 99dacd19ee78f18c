"""Reshard torch caches of a device by a path: four ranks into a pool of no topology, and out of it into two."""

from __future__ import annotations

import torch

import kvplan

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 3, 8, 16, 64, 12
SRC, POOL, DST = "layer: kv block token head dim", "block layer kv head token dim", "layer: block head token (kv dim)"


def settle(device: str) -> None:
    """What torch was asked for is there: transfers wait for nothing that they are not told of."""
    if device != "cpu":
        torch.cuda.synchronize()


def bits(*shape: int, device: str) -> torch.Tensor:
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)


def four_ranks_into_a_pool_and_into_two(device, path):
    truth = bits(LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM, device=device)
    sources = [
        kvplan.KVLayout.from_tensors(SRC, list(truth[..., h : h + 2, :].contiguous()), head_start=h)
        for h in range(0, HEADS, 2)
    ]
    pool = kvplan.allocate(POOL, like=sources[0], heads=range(HEADS), block_tokens=32, num_blocks=8)
    halves = [[torch.full((BLOCKS, HEADS // 2, TOKENS, 2 * DIM), -1, dtype=torch.int16, device=device)
               for _ in range(LAYERS)] for _ in range(2)]  # fmt: skip
    destinations = [kvplan.KVLayout.from_tensors(DST, half, head_start=4 * k) for k, half in enumerate(halves)]
    blocks, pages, back = [7, 2, 9, 0, 4], [5, 1, 6], [3, 8, 1, 11, 0]
    settle(device)
    with kvplan.Executor(device, kvplan.Policy(path=path)) as executor:
        stores = [executor.submit(plan) for plan in kvplan.reshard(sources, pool).plan(blocks, pages).values()]
        loads = kvplan.reshard(pool, destinations).plan(pages, back)
        assert [len(stores), len(loads)] == [4, 2]
        for transfer in stores:
            transfer.synchronize()
        for plan in loads.values():
            executor.submit(plan).synchronize()
    for k, half in enumerate(halves):
        for layer, tensor in enumerate(half):
            wanted = torch.full_like(tensor, -1)
            held = truth[layer, :, blocks, :, 4 * k : 4 * k + 4]  # kv, block, token, head, dim
            wanted[back] = held.permute(1, 3, 2, 0, 4).reshape(len(back), HEADS // 2, TOKENS, 2 * DIM)
            assert torch.equal(tensor, wanted)


def replicas_store_in_turn_and_all_load(device, path):
    truth = bits(LAYERS, BLOCKS, TOKENS, DIM, device=device)
    ranks = [[layer.clone() for layer in truth] for _ in range(3)]
    layouts = [kvplan.KVLayout.from_tensors("layer: block token dim", tensors) for tensors in ranks]
    pool = kvplan.allocate("block layer token dim", like=layouts[0])
    blocks, pages = list(range(BLOCKS)), list(range(BLOCKS))[::-1]
    settle(device)
    with kvplan.Executor(device, kvplan.Policy(path=path)) as executor:
        plans = kvplan.reshard(layouts, pool).plan(blocks, pages)
        assert [plan.units for plan in plans.values()] == [4, 4, 4]
        for plan in plans.values():
            executor.submit(plan).synchronize()
        for tensors in ranks:
            for tensor in tensors:
                tensor.fill_(-1)
        settle(device)
        for plan in kvplan.reshard(pool, layouts).plan(pages, blocks).values():
            executor.submit(plan).synchronize()
    for tensors in ranks:
        assert torch.equal(torch.stack(tensors), truth)


def dealt_tokens_are_gathered_and_dealt_otherwise(device, path):
    """Four ranks of one token in turn, a pool of whole sequences, then two ranks of four tokens in turn."""
    spans = BLOCKS // 2
    truth = bits(LAYERS, spans * TOKENS * 4, DIM, device=device)
    dealt = [[layer.view(spans, TOKENS, 4, DIM)[:, :, k].contiguous() for layer in truth] for k in range(4)]
    sources = [
        kvplan.Shard(kvplan.KVLayout.from_tensors("layer: block token dim", tensors), k, 4, 1)
        for k, tensors in enumerate(dealt)
    ]
    pool = kvplan.allocate("block layer token dim", like=sources[0].layout, block_tokens=64)
    held = [[torch.full((2 * spans, TOKENS, DIM), -1, dtype=torch.int16, device=device) for _ in range(LAYERS)]
            for _ in range(2)]  # fmt: skip
    destinations = [
        kvplan.Shard(kvplan.KVLayout.from_tensors("layer: block token dim", tensors), k, 2, 4)
        for k, tensors in enumerate(held)
    ]
    settle(device)
    with kvplan.Executor(device, kvplan.Policy(path=path)) as executor:
        for plan in kvplan.reshard(sources, pool).plan(range(spans), range(spans)).values():
            executor.submit(plan).synchronize()
        for plan in kvplan.reshard(pool, destinations).plan(range(spans), range(2 * spans)).values():
            executor.submit(plan).synchronize()
    for k, tensors in enumerate(held):
        for layer, tensor in enumerate(tensors):
            wanted = truth[layer].view(-1, 2, 4, DIM)[:, k].reshape(2 * spans, TOKENS, DIM)
            assert torch.equal(tensor, wanted)
