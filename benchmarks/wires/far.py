"""The two processes of a wire: pools of equal bytes in other orders, and the process that only answers."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.wires.limits import Scale, Wire
from kvplan import Agent, KVLayout

NEAR, FAR = "near", "far"


class Side:
    """One process of a wire: a pool for each size of rows over one buffer, and an agent.

    Args:
        name: name of the process.
        notation: order of its pools.
        wire: the wire; its transports must be set before NIXL is loaded.
        scale: sizes.
        device: ``"cpu"``, or a GPU.
        plain: whether NIXL is as it comes, with its own thread, and nothing is packed.
    """

    def __init__(
        self, name: str, notation: str, wire: Wire, scale: Scale, device: str, *, plain: bool = False
    ) -> None:  # fmt: skip
        os.environ.pop("UCX_TLS", None)
        if wire.transports:
            os.environ["UCX_TLS"] = wire.transports
        self.name, self.wire, self.scale, self.device = name, wire, scale, device
        self.buffer = _buffer(scale.nbytes, device)
        self.pools = {row: self._pool(row, notation) for row in scale.rows}
        layouts = {str(row): KVLayout.from_tensors(notation, pool) for row, pool in self.pools.items()}
        agent = None
        if plain:
            from nixl import nixl_agent, nixl_agent_config

            agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.agent = Agent(name, layouts, transports=("nixl",), agent=agent, slots=scale.slots)

    def _pool(self, row: int, notation: str) -> Any:
        blocks, layers = self.scale.blocks(row), self.scale.layers
        shape = (blocks, layers, row) if notation.startswith("block") else (layers, blocks, row)
        return self.buffer[: blocks * layers * row].reshape(shape)

    def fill(self, seed: int) -> None:
        """Write other bytes everywhere."""
        fresh = np.random.default_rng(seed).integers(0, 256, self.scale.nbytes, dtype=np.uint8)
        if self.device == "cpu":
            self.buffer[:] = fresh
        else:
            import torch

            self.buffer.copy_(torch.from_numpy(fresh))
            torch.cuda.synchronize(self.device)

    def holds(self, row: int) -> Any:
        """Return the bytes of a pool, block by block."""
        pool = self.pools[row]
        found = pool if self.device == "cpu" else pool.cpu().numpy()
        return np.ascontiguousarray(found if found.shape[0] == self.scale.blocks(row) else found.swapaxes(0, 1))


def _buffer(nbytes: int, device: str) -> Any:
    if device == "cpu":
        return np.zeros(nbytes, np.uint8)
    import torch

    torch.cuda.set_device(device)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def serve(wire: Wire, scale: Scale, device: str, pipe: Connection, plain: bool) -> None:
    """Hold pools, and answer: the card, CPU seconds so far, contents; send back the notes ``echo``.

    After ``spin`` it looks for notes without a pause until it is asked again, as NIXL's own thread does.
    """
    side = Side(FAR, "block layer dim", wire, scale, device, plain=plain)
    pipe.send(side.agent.card())
    peer = side.agent.meet(pipe.recv())
    spin = False
    while True:
        echo = False
        while not pipe.poll(0.0 if echo or spin else 0.05):
            for _, note in side.agent.notes():
                if note == b"echo":
                    echo = True
                    peer.send(note)
                elif note == b"rest":
                    echo = False
        asked = pipe.recv()
        if asked == "end":
            break
        what, *rest = asked
        spin = what == "spin"
        if what == "cpu":
            pipe.send(time.process_time())
        elif what == "spin":
            pipe.send(None)
        elif what == "fill":
            side.fill(*rest)
            pipe.send(None)
        elif what == "holds":
            pipe.send(side.holds(*rest).tobytes())
    side.agent.close()
    pipe.send("closed")
