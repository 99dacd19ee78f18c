"""NIXL's interface between two processes with GPU memory: on one GPU, and where there are two, on two."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kvplan.engines.nixl import Agent
from tests.nixl.double import LoneAgent

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
PATIENCE = 120.0  # seconds
LAYERS, BLOCKS, BLOCK = 5, 256, 8192
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "owner",
        [0, pytest.param(1, marks=pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices"))],
        ids=["same GPU", "other GPU"],
    ),
]


def caches(seed, device):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 256, (BLOCKS, BLOCK), dtype=torch.uint8, generator=generator) for _ in range(LAYERS)]
    found = [layer.to(device) for layer in made]
    torch.cuda.synchronize(device)
    return found


def lists(addresses, gpu):
    return np.array([[address, BLOCK, gpu, BLOCK, BLOCKS] for address in addresses], dtype=np.uint64)


def prefill(gpu, pipe, folder):
    """The other process: it says where its caches are, and what notifications and bytes have come."""
    torch.cuda.set_device(gpu)
    agent, held = Agent(agent=LoneAgent(folder, "prefill")), caches(2, f"cuda:{gpu}")
    agent.register_memory([(layer.data_ptr(), layer.nbytes, gpu, "") for layer in held], "VRAM")
    pipe.send((agent.get_agent_metadata(), [layer.data_ptr() for layer in held]))
    while (asked := pipe.recv()) is not None:
        if asked == "notes":
            pipe.send([note for notes in agent.get_new_notifs().values() for note in notes])
        else:
            torch.cuda.synchronize()
            pipe.send([layer.cpu().numpy() for layer in held])


@contextmanager
def peer(gpu, folder):
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=prefill, args=(gpu, theirs, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        assert pipe.poll(PATIENCE)
        yield pipe, process
        if process.is_alive():
            pipe.send(None)
            process.join(PATIENCE)
    finally:
        process.kill()
        process.join(PATIENCE)


class Decode:
    def __init__(self, pipe, gpu, folder):
        self.agent, self.caches = Agent(agent=LoneAgent(folder, "decode")), caches(1, "cuda:0")
        self.agent.register_memory([(layer.data_ptr(), layer.nbytes, 0, "") for layer in self.caches], "VRAM")
        metadata, addresses = pipe.recv()
        name = self.agent.add_remote_agent(metadata)
        self.lists = [
            self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", lists([x.data_ptr() for x in self.caches], 0), "VRAM"),
            self.agent.prep_xfer_dlist(name, lists(addresses, gpu), "VRAM"),
        ]

    def move(self, operation, here, there, note=b""):
        rows = np.arange(LAYERS)[:, None] * BLOCKS
        chosen = [(rows + np.asarray(blocks)).ravel() for blocks in (here, there)]
        handle = self.agent.make_prepped_xfer(operation, self.lists[0], chosen[0], self.lists[1], chosen[1], note)
        self.agent.transfer(handle)
        end = time.monotonic() + PATIENCE
        while self.agent.check_xfer_state(handle) != "DONE":
            assert time.monotonic() < end
        self.agent.release_xfer_handle(handle)
        torch.cuda.synchronize()


def test_blocks_of_a_gpu_are_read_and_written(owner, tmp_path):
    rng = np.random.default_rng(owner)
    with peer(owner, tmp_path) as (pipe, _):
        decode = Decode(pipe, owner, tmp_path)
        here, there = ([layer.cpu().numpy() for layer in caches(seed, "cuda:0")] for seed in (1, 2))
        for turn in range(20):
            mine, theirs = (rng.permutation(BLOCKS)[: 1 + 12 * turn] for _ in range(2))
            src, dst = (there, here) if turn % 2 else (here, there)
            decode.move("READ" if turn % 2 else "WRITE", mine, theirs, b"%d" % turn)
            for layer in range(LAYERS):
                dst[layer][mine if turn % 2 else theirs] = src[layer][theirs if turn % 2 else mine]
        pipe.send("bytes")
        for mine, theirs, layer, told in zip(decode.caches, pipe.recv(), range(LAYERS), there, strict=True):
            np.testing.assert_array_equal(mine.cpu().numpy(), here[layer])
            np.testing.assert_array_equal(theirs, told)
        pipe.send("notes")
        assert pipe.recv() == [b"%d" % turn for turn in range(20)]
