"""Every variant of the kernel in small, for compute-sanitizer.

compute-sanitizer --tool memcheck  python -m benchmarks.gpu.sanitized
compute-sanitizer --tool racecheck python -m benchmarks.gpu.sanitized
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

import kvplan
from kvplan import Executor, KVLayout, Policy

LAYERS, BLOCKS, TOKENS = 3, 12, 4
ROWS = (2, 33, 146, 164, 1022, 1024, 2050)  # bytes of a token's row: words of every width
SHIFTS = (0, 1, 2, 4, 8)  # bytes
RING_NBYTES = 60_000
GROUPS = 6, 20  # run groups that are copied from run tables, and that go as flat descriptors
MANY = 400  # blocks: more rows than a kernel reads the unit addresses of in host memory
ROOM = 64  # bytes behind every buffer

Pair = tuple[KVLayout, KVLayout]


def pair(row: int, shift: int, host: str) -> Pair:
    """A cache of a tensor a layer, and a pinned pool, both ``shift`` bytes off."""
    size = (2, BLOCKS, TOKENS, row)
    caches = [
        torch.randint(0, 256, (prod(size) + ROOM,), dtype=torch.uint8, device="cuda")[shift:][: prod(size)].view(size)
        for _ in range(LAYERS)
    ]
    page = (BLOCKS, LAYERS, 2, TOKENS, row)
    pool = torch.randint(0, 256, (prod(page) + ROOM,), dtype=torch.uint8).pin_memory()[shift:][: prod(page)]
    if host == "page first":
        held = KVLayout.from_tensors("block layer kv token dim", pool.view(page))
    else:
        held = KVLayout.from_tensors("layer kv block token dim", pool.view((LAYERS, *size)))
    return KVLayout.from_tensors("layer: kv block token dim", caches), held


def there_and_back(executor: Any, gpu: KVLayout, host: KVLayout, rng: np.random.Generator) -> int:
    """A store and a load of some blocks; how many transfers that was."""
    ids, others = rng.permutation(BLOCKS)[:7], rng.permutation(BLOCKS)[:7]
    executor.submit(kvplan.compile(gpu, host).plan(ids, others)).synchronize()
    executor.submit(kvplan.compile(host, gpu).plan(others, ids)).synchronize()
    return 2


def between(executor: Any, places: tuple[str, str], rng: np.random.Generator) -> int:
    """Transfers between two caches of GPUs, there and back: of few and of many blocks, and of several sources."""
    count = 0
    for row in ROWS:
        for heads, order in ((1, "token head"), (2, "head token")):
            size = {"token": TOKENS, "head": heads}
            shape = (2, MANY, *(size[axis] for axis in order.split()), row)
            sides = [
                KVLayout.from_tensors(
                    f"layer: kv block {order} dim",
                    [torch.randint(0, 256, shape, dtype=torch.uint8, device=place) for _ in range(LAYERS)],
                )
                for place in places
            ]
            for src, dst in (sides, sides[::-1]):
                program = kvplan.compile(src, dst)
                for blocks in (3, MANY):
                    executor.submit(program.plan(rng.permutation(MANY)[:blocks], range(blocks))).synchronize()
                    count += 1
    ranks = [
        KVLayout.from_tensors(
            "layer: kv block token head dim",
            [torch.randint(0, 256, (2, MANY, TOKENS, 1, 256), dtype=torch.uint8, device=place) for _ in range(LAYERS)],
            head_start=head,
        )
        for head, place in enumerate(places)
    ]
    whole = KVLayout.from_tensors(
        "layer: kv block head token dim",
        [torch.zeros((2, MANY, 2, TOKENS, 256), dtype=torch.uint8, device=places[0]) for _ in range(LAYERS)],
    )
    plans = kvplan.reshard(ranks, whole).plan(rng.permutation(MANY), range(MANY))
    executor.submit(kvplan.join(list(plans.values()))).synchronize()
    return count + 1


def main() -> None:
    """Run all of it."""
    rng, count = np.random.default_rng(0), 0
    ring = Policy(path="staged", chunk_bytes=RING_NBYTES // 3, staging_bytes=RING_NBYTES)
    narrow = Policy(path="kernel", max_programs=1, tile_bytes=1024)
    with (
        Executor("cuda:0", Policy(path="kernel")) as direct,
        Executor("cuda:0", ring) as staged,
        Executor("cuda:0", narrow) as single,
        Executor("cuda:0", Policy(path="kernel", overlap="decode")) as beside,
    ):
        for row in ROWS:
            for shift in SHIFTS:
                for host in ("page first", "layer first"):
                    made = pair(row, shift, host)
                    count += there_and_back(direct, *made, rng) + there_and_back(single, *made, rng)
                    if made[0].block_nbytes <= RING_NBYTES:
                        count += there_and_back(staged, *made, rng)
        within = kvplan.compile(pair(1024, 0, "page first")[0], pair(1024, 0, "page first")[0])
        direct.submit(within.plan([1, 2, 3], [4, 5, 6])).synchronize()
        for some in GROUPS:
            groups = [kvplan.compile(*pair(512, 0, "page first")) for _ in range(some)]
            direct.submit(kvplan.join([program.plan([1, 2], [3, 4]) for program in groups])).synchronize()
        count += 1 + len(GROUPS)
        places = ("cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0")
        for executor in (direct, beside):
            count += between(executor, places, rng)
    print(f"{count} transfers")


if __name__ == "__main__":
    main()
