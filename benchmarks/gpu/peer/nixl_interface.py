"""Measure NIXL's interface between two processes with GPU memory, called as vLLM's connector calls it.

``python -m benchmarks.gpu.peer.nixl_interface [--owner 1] [--rows 40960] [--nbytes 8192] [--json FILE]``: a list has
one strided row for each layer, and the blocks are random. It shows the times of ``make_prepped_xfer``, of ``transfer``
(the post), and until ``check_xfer_state`` answers ``DONE``; beside them one large copy of the same bytes between both
GPUs. ``gbps`` counts from the make to ``DONE``, and ``gbps_after_make`` from the post, after the lists are prepared.
``gbps_to_last_byte`` counts from the post to the begin of the question that finds the last byte moved: this question
then sends the notification. ``gbps_again`` is of a handle that is posted again. ``gbps_in_flight`` is of four transfers
in flight, makes included: the median of five series, and the slowest one. Behind each stands its part of the large
copy's. NIXL's own agents make the same transfers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.environment import gpu
from benchmarks.record import versions
from kvplan.engines.nixl import Agent
from kvplan.engines.nixl.interface import agent_class
from kvplan.measure.rig import Line, timed
from kvplan.measure.workload import COPY, large_copy

LAYERS, TURNS, IN_FLIGHT, SERIES = 80, 30, 4, 5


def made(kind: str, name: str):
    """Make an agent, kvplan's or NIXL's."""
    return Agent(name) if kind == "kvplan" else agent_class()(name)


def caches(gpu: int, blocks: int, nbytes: int):
    """Allocate a cache for each layer."""
    held = [torch.randint(0, 256, (blocks, nbytes), dtype=torch.uint8, device=f"cuda:{gpu}") for _ in range(LAYERS)]
    torch.cuda.synchronize(gpu)
    return held


def strided(addresses, gpu: int, blocks: int, nbytes: int):
    """Return a descriptor list as vLLM makes it: a row for each layer."""
    return np.array([[address, nbytes, gpu, nbytes, blocks] for address in addresses], dtype=np.uint64)


def own(kind: str, gpu: int, blocks: int, nbytes: int, pipe) -> None:
    """Be the process whose caches are read and written."""
    torch.cuda.set_device(gpu)
    agent, held = made(kind, "prefill"), caches(gpu, blocks, nbytes)
    agent.register_memory([(layer.data_ptr(), layer.nbytes, gpu, "") for layer in held], "VRAM")
    pipe.send((agent.get_agent_metadata(), [layer.data_ptr() for layer in held]))
    pipe.recv()


def measured(kind: str, gpu: int, rows: int, nbytes: int) -> dict[str, dict[str, float]]:
    """Measure reads and writes by one kind of agent; medians in microseconds, and GB/s."""
    blocks, count = 4 * rows // LAYERS, rows // LAYERS
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=own, args=(kind, gpu, blocks, nbytes, theirs), daemon=True)
    process.start()
    torch.cuda.set_device(0)
    agent, held = made(kind, "decode"), caches(0, blocks, nbytes)
    agent.register_memory([(layer.data_ptr(), layer.nbytes, 0, "") for layer in held], "VRAM")
    metadata, addresses = pipe.recv()
    name = agent.add_remote_agent(metadata)
    here = agent.prep_xfer_dlist("NIXL_INIT_AGENT", strided([x.data_ptr() for x in held], 0, blocks, nbytes), "VRAM")
    there = agent.prep_xfer_dlist(name, strided(addresses, gpu, blocks, nbytes), "VRAM")
    rng, first = np.random.default_rng(0), np.arange(LAYERS)[:, None] * blocks

    def chosen():
        return (first + rng.permutation(blocks)[:count]).ravel()

    found = {}
    for operation in ("READ", "WRITE"):
        times = []
        for _ in range(TURNS if kind == "kvplan" else 5):
            mine, its = chosen(), chosen()
            begun = time.perf_counter()
            handle = agent.make_prepped_xfer(operation, here, mine, there, its, b"done")
            ready = time.perf_counter()
            agent.transfer(handle)
            posted = time.perf_counter()
            asked = time.perf_counter()
            while agent.check_xfer_state(handle) == "PROC":
                asked = time.perf_counter()
            ended = again = time.perf_counter()
            if kind == "kvplan":
                agent.transfer(handle)
                while agent.check_xfer_state(handle) == "PROC":
                    pass
                again = time.perf_counter()
            times.append((ready - begun, posted - ready, asked - ready, ended - ready, ended - begun, again - ended))
            agent.release_xfer_handle(handle)
        make, post, bytes_moved, moving, whole, again = (median(column) for column in zip(*times, strict=True))
        moved = count * LAYERS * nbytes
        found[operation] = {
            "make_us": make * 1e6, "post_us": post * 1e6, "done_us": moving * 1e6,
            "gbps": moved / whole / 1e9, "gbps_after_make": moved / moving / 1e9,
            "gbps_to_last_byte": moved / bytes_moved / 1e9,
        }  # fmt: skip
        if kind == "kvplan":
            found[operation]["gbps_again"] = moved / again / 1e9
            rates = [in_flight(agent, operation, here, there, chosen, moved) for _ in range(1 + SERIES)]
            found[operation]["gbps_in_flight"] = median(rates[1:])  # the first series allocates memory for several
            found[operation]["gbps_in_flight_least"] = min(rates[1:])
    pipe.send(None)
    process.join(30)
    process.kill()
    return found


def in_flight(agent, operation: str, here, there, chosen, nbytes: int) -> float:
    """Return GB/s while the next transfers are posted before the last has ended, as requests come."""
    lists = [(chosen(), chosen()) for _ in range(TURNS)]
    flying = []
    begun = time.perf_counter()
    for mine, its in lists:
        handle = agent.make_prepped_xfer(operation, here, mine, there, its)
        agent.transfer(handle)
        flying.append(handle)
        if len(flying) == IN_FLIGHT:
            while agent.check_xfer_state(flying[0]) == "PROC":
                pass
            agent.release_xfer_handle(flying.pop(0))
    while any(agent.check_xfer_state(handle) == "PROC" for handle in flying):
        pass
    return TURNS * nbytes / (time.perf_counter() - begun) / 1e9


def one_large_copy(gpu: int, nbytes: int) -> float:
    """Return GB/s of one large copy between both GPUs, in this process."""
    src, dst = (torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{k}") for k in (gpu, 0))
    begin = large_copy(Line("cuda:0", f"cuda:{gpu}"), src, dst)
    return nbytes / timed({COPY: begin}, seconds=inf, most=TURNS)[COPY].seconds / 1e9


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owner", type=int, default=torch.cuda.device_count() - 1, help="GPU of the other process")
    parser.add_argument("--rows", type=int, default=40960)
    parser.add_argument("--nbytes", type=int, default=8192, help="bytes of a row")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {
        "machine": {"gpu": gpu() | {"owner": given.owner}},
        "versions": versions(("torch", "nixl", "nixl-cu12", "nixl-cu13")),
        "rows": given.rows, "nbytes": given.nbytes, "layers": LAYERS,
        "large_copy_gbps": one_large_copy(given.owner, given.rows * given.nbytes),
    }  # fmt: skip
    print(f"one large copy: {result['large_copy_gbps']:.0f} GB/s")
    for kind in ("kvplan", "nixl"):
        result[kind] = measured(kind, given.owner, given.rows, given.nbytes)
        for operation, row in result[kind].items():
            copy = result["large_copy_gbps"]
            shares = {name: f" ({value / copy:.3f})" for name, value in row.items() if "gbps" in name}
            print(f"{kind:7} {operation:6}",
                  *(f"{name} {value:,.1f}{shares.get(name, '')}" for name, value in row.items()))  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
