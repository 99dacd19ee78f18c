"""Another process with a cache of a GPU and an agent; it does what a pipe asks for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.agents.processes import PATIENCE, Other, answer, shared_pages

LAYERS, BLOCKS, TOKENS, ROW = 4, 64, 16, 1024
NHD, PAGED = "layer kv block token dim", "block layer kv token dim"
SHAPES = {NHD: (LAYERS, 2, BLOCKS, TOKENS, ROW), PAGED: (BLOCKS, LAYERS, 2, TOKENS, ROW)}

spawn = multiprocessing.get_context("spawn")
# A server that has imported torch, and no CUDA, forks processes in a tenth of the time that they take to import it.
forking = multiprocessing.get_context("forkserver")
forking.set_forkserver_preload(["torch", "kvplan", "kvplan.execute.gpu.backend", __name__])


def content(seed: int, device: str, notation: str = NHD) -> Any:
    """Bytes that both processes make alike, in the order of a notation."""
    import torch

    made = torch.randint(0, 256, SHAPES[NHD], dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (made if notation == NHD else made.permute(2, 0, 1, 3, 4).contiguous()).to(device)


class Worker:
    """The state of the process."""

    def __init__(self, name: str, ordinal: int) -> None:
        import torch

        from kvplan import Agent, KVLayout

        self.torch, self.device = torch, f"cuda:{ordinal}"
        torch.cuda.set_device(ordinal)
        self.cache = content(1, self.device)
        torch.cuda.synchronize()
        self.stream = torch.cuda.Stream()
        self.agent = Agent(name, {"kv": KVLayout.from_tensors(NHD, self.cache)}, transports=("cuda_ipc",))

    def card(self) -> bytes:
        return self.agent.card()

    def notes(self) -> list[tuple[str, bytes]]:
        return self.agent.notes()

    def fill(self, seed: int) -> None:
        self.cache.copy_(content(seed, self.device))
        self.torch.cuda.synchronize()

    def holds(self, seed: int) -> bool:
        self.torch.cuda.synchronize()
        return bool(self.torch.equal(self.cache, content(seed, self.device)))

    def busy(self) -> bool:
        """Whether the stream still has work."""
        return not self.stream.query()

    def publish_late(self, seed: int, cycles: int = 200_000_000) -> None:
        """Write other bytes by a stream that is busy for a while, and publish that stream; return at once."""
        new = content(seed, self.device)
        self.torch.cuda.synchronize()
        with self.torch.cuda.stream(self.stream):
            self.torch.cuda._sleep(cycles)
            self.cache.copy_(new)
        self.agent.publish(self.stream)

    def overwrite_behind_visitors(self, seed: int) -> None:
        """Write other bytes by a stream that waits for the visitors' transfers; return at once."""
        new = content(seed, self.device)
        self.torch.cuda.synchronize()
        self.agent.wait_for_visitors(self.stream)
        with self.torch.cuda.stream(self.stream):
            self.cache.copy_(new)

    def publish_behind_a_gate(self, seed: int) -> None:
        """Write other bytes behind a gate that stays closed, and publish the stream; return at once."""
        new = content(seed, self.device)
        self.agent.publish(self.stream)  # the first call makes streams and pins a page
        self.torch.cuda.synchronize()
        self._shut()
        with self.torch.cuda.stream(self.stream):
            self.cache.copy_(new)
        self.agent.publish(self.stream)

    def meet_and_pull_behind_a_gate(self, card: bytes) -> None:
        """Pull blocks behind a gate that stays closed; return at once."""
        import kvplan

        self.there = self.agent.meet(card)
        here = kvplan.KVLayout.from_tensors(NHD, self.cache)
        plan = kvplan.compile(self.there.layouts["kv"], here).plan([0], [1])
        self.there.submit(plan).synchronize(PATIENCE)  # the first one loads kernels
        self._shut()
        self.pull = self.there.submit(plan, after=self.stream)

    def _shut(self) -> None:
        from tests.gpu.gate import Gate

        self.gate = Gate(self.stream, PATIENCE)
        self.gate.__enter__()

    def blocks_behind_notes(self, count: int) -> list[tuple[bytes, int]]:
        """Poll notes; at each, read the first byte of its block by a stream of its own."""
        found: list[tuple[bytes, int]] = []
        while len(found) < count:
            for _, note in self.agent.notes():
                with self.torch.cuda.stream(self.stream):
                    seen = self.cache[0, 0, int(note), 0, 0].clone()
                self.stream.synchronize()
                found.append((note, int(seen)))
        return found

    def left(self) -> tuple[int, int, int]:
        """Descriptors, threads, and pages that are shared with visitors."""
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), shared_pages()

    def close(self, timeout: float) -> None:
        self.agent.close(timeout=timeout)


def serve(name: str, ordinal: int, environment: dict[str, str], pipe: Any) -> None:
    """Do what the pipe asks for, until it asks for the end."""
    os.environ.update(environment)
    answer(lambda: Worker(name, ordinal), pipe)


@contextmanager
def other(ordinal: int, name: str = "other", **environment: str) -> Any:
    """Start the process; afterwards it has ended."""
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    try:
        start = spawn if environment else forking  # torch may read variables while it is imported
        made = Other(serve, name, ordinal, environment, start=start)
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    try:
        yield made
    finally:
        made.end()
