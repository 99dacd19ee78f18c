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
GROUPS = 6  # more run groups than are launched one by one
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


def main() -> None:
    """Run all of it."""
    rng, count = np.random.default_rng(0), 0
    ring = Policy(path="staged", chunk_bytes=RING_NBYTES // 3, staging_bytes=RING_NBYTES)
    narrow = Policy(path="kernel", max_programs=1, tile_bytes=1024)
    with (
        Executor("cuda:0", Policy(path="kernel")) as direct,
        Executor("cuda:0", ring) as staged,
        Executor("cuda:0", narrow) as single,
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
        groups = [kvplan.compile(*pair(512, 0, "page first")) for _ in range(GROUPS)]
        direct.submit(kvplan.join([program.plan([1, 2], [3, 4]) for program in groups])).synchronize()
        count += 2
    print(f"{count} transfers")


if __name__ == "__main__":
    main()
