"""Time the last layer of a prefill that sends each layer to another process as soon as it is computed.

``python -m benchmarks.gpu.peer.layered [--owner 1] [--blocks 64] [--json FILE]``: a layer is a large product of
matrices; its blocks go to the pool of the other process behind it, with a note. ``tail`` is the time from the end of
the last product, as this process sees it, until the other process has seen the last note. ``alone`` is the time of the
last layer's transfer without compute, from its submit until its note is seen. They take turns; microseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

import kvplan
from kvplan import Agent, Executor, Policy
from kvplan.measure.bench import PEER_BLOCK_RUNS
from kvplan.measure.processes import LOCAL, PoolOwner, pool_name
from kvplan.measure.rig import Compute
from kvplan.measure.workload import Buffers, Geometry, work

TURNS, WARM_TURNS = 30, 3
SIZES = 4096, 4096  # a product takes about 0.2 ms on an H200
RUN_NBYTES = 8192


def measured(device: str, owner: str, blocks: int, turns: int = TURNS) -> dict[str, Any]:
    """Measure; return the medians, and the sizes."""
    geometry = Geometry("push", "contiguous", RUN_NBYTES, blocks * PEER_BLOCK_RUNS, PEER_BLOCK_RUNS)
    nbytes = 2 * geometry.nbytes
    with ExitStack() as stack:
        other = PoolOwner(owner, nbytes, [geometry], LOCAL)
        stack.callback(other.close)
        buffers = Buffers(nbytes, device, peer=owner)
        executor = stack.enter_context(Executor(device, Policy()))
        agent = stack.enter_context(Agent("layered", {}, transports=("cuda_ipc", "shm"), executor=executor))
        peer, moved = agent.meet(other.card()), work(buffers, geometry)
        compute = Compute(device, *SIZES)
        near, pool = moved.src.layout, peer.layouts[pool_name(geometry)]
        plans = [
            kvplan.compile(near.slice(layers=[layer]), pool.slice(layers=[layer])).plan(moved.src_ids, moved.dst_ids)
            for layer in near.layers
        ]
        other.expect_notes((turns + WARM_TURNS) * (len(plans) + 1))
        begun, ended = dict[int, int](), dict[int, int]()
        for turn in range(-WARM_TURNS, turns):
            begun[turn] = time.monotonic_ns()
            peer.submit(plans[-1], note=f"{turn} alone".encode()).synchronize()
            flying = []
            for k, plan in enumerate(plans):
                compute.enqueue()
                mark = compute.mark()
                flying.append(peer.submit(plan, after=compute.stream, note=f"{turn} {k}".encode()))
            while not mark.query():
                pass
            ended[turn] = time.monotonic_ns()
            for transfer in flying:
                transfer.synchronize()
        seen = other.answer()
    last = len(plans) - 1
    return {
        "layers": len(plans), "layer_nbytes": plans[-1].nbytes, "turns": turns,
        "tail_us": median(seen[f"{turn} {last}"] - ended[turn] for turn in range(turns)) / 1e3,
        "alone_us": median(seen[f"{turn} alone"] - begun[turn] for turn in range(turns)) / 1e3,
    }  # fmt: skip


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner", type=int, default=max(torch.cuda.device_count() - 1, 0))
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measured("cuda:0", f"cuda:{given.owner}", given.blocks, given.turns)
    print(f"{found['layers']} layers of {found['layer_nbytes']:,} bytes: the last one is seen {found['tail_us']:.0f} "
          f"us after its compute; alone, {found['alone_us']:.0f} us after its submit")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
