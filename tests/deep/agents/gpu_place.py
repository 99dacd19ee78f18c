"""Pools of GPUs, by ``cuda_ipc``: the owners' on each of two GPUs in turn, this process's on the first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import kvplan
from kvplan import Agent, KVLayout
from tests.deep.agents import places
from tests.gpu.mappings import mappings


class Gpus(places.Host):
    """Pools of GPUs. Within one GPU both directions run in one order; between two, each has its own."""

    name = "cuda"
    extents = (64, 4, 2048)
    in_order = False
    batches = 50
    ahead = 2  # a process with a GPU takes seconds to start
    notations = ("block layer dim", "layer block dim")  # and none of runs of one byte: the copy engine takes seconds

    def __init__(self) -> None:
        self.turns = min(torch.cuda.device_count(), 2)

    def pool(self, seed: int, notation: str = places.NOTATION, turn: int = 0) -> KVLayout:
        """See :meth:`places.Host.pool`."""
        axes = places.NOTATION.split()
        content = self.content(seed).transpose([axes.index(axis) for axis in notation.split()])
        device = f"cuda:{turn % self.turns}"
        torch.cuda.set_device(device)
        tensor = torch.from_numpy(np.ascontiguousarray(content)).to(device)
        torch.cuda.synchronize()
        return KVLayout.from_tensors(notation, tensor)

    def seen(self, pool: KVLayout) -> places.Bytes:
        """See :meth:`places.Host.seen`."""
        torch.cuda.synchronize()
        return places.in_order(pool.tensors.cpu().numpy(), pool.notation)

    def clear(self, pool: KVLayout) -> None:
        """See :meth:`places.Host.clear`."""
        pool.tensors.zero_()
        torch.cuda.synchronize()

    def agent(self, name: str, layouts: dict[str, KVLayout], executor: kvplan.Executor | None = None) -> Agent:
        """See :meth:`places.Host.agent`."""
        return Agent(name, layouts, transports=("cuda_ipc",), executor=executor)

    def executor(self, rng: random.Random) -> kvplan.Executor | None:
        """See :meth:`places.Host.executor`."""
        path = rng.choice(["auto", "kernel", "copy_engine", "copy_engine_2d"])
        return kvplan.Executor("cuda:0", kvplan.Policy(path=path))

    def later(self, rng: random.Random) -> Any:
        """See :meth:`places.Host.later`. It is a stream that is busy for a while."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(rng.randrange(1, 1_000_000))
        return rng.choice([stream, stream.record_event()])

    def used(self) -> dict[str, int]:
        """See :meth:`places.Host.used`. The GPUs' memory is that of all processes."""
        gpus = {f"cuda:{k}": torch.cuda.mem_get_info(k) for k in range(self.turns)}
        return super().used() | {name: total - free for name, (free, total) in gpus.items()}

    def mapped(self) -> int:
        """See :meth:`places.Host.mapped`."""
        return super().mapped() + mappings()
