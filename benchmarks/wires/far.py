"""The two processes of a wire: pools of equal bytes in other orders, and the process that only answers."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.wires.beside import Load
from benchmarks.wires.contents import by_block, fill, same
from benchmarks.wires.limits import BESIDE, Scale, Wire
from benchmarks.wires.paced import pace
from kvplan import Agent, Executor, KVLayout, Policy
from kvplan.agents.by_nixl.nixl_end import NixlWire

NEAR, FAR = "near", "far"
ORDERS = {NEAR: "layer block dim", FAR: "block layer dim"}


class Side:
    """One process of a wire: a pool for each size of rows over one buffer, and an agent.

    Args:
        name: name of the process.
        notation: order of its pools.
        wire: the wire; its transports must be set before NIXL is loaded.
        scale: sizes.
        device: ``"cpu"``, or a GPU.
        plain: whether NIXL is as it comes, with its own thread, and nothing is packed.
        beside: the compute beside transfers, one of ``BESIDE``, which the executor is told; another word means none.
    """

    def __init__(
        self, name: str, notation: str, wire: Wire, scale: Scale, device: str, *, plain: bool = False,
        beside: str = "",
    ) -> None:  # fmt: skip
        os.environ.pop("UCX_TLS", None)
        if wire.transports:
            os.environ["UCX_TLS"] = wire.transports
        self.name, self.wire, self.scale, self.device = name, wire, scale, device
        self.notation, self.other = notation, next(order for order in ORDERS.values() if order != notation)
        if wire.paced:
            pace(NixlWire, wire.paced)
        self.buffer = _buffer(scale.nbytes, device)
        self.pools = {row: self._pool(self.buffer, row, notation) for row in scale.rows}
        layouts = {str(row): KVLayout.from_tensors(notation, pool) for row, pool in self.pools.items()}
        agent = None
        if plain:
            from nixl import nixl_agent, nixl_agent_config

            agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        executor = Executor(device, policy=Policy(overlap=beside)) if beside in BESIDE else None
        self.agent = Agent(name, layouts, transports=("nixl",), executor=executor, agent=agent, slots=scale.slots)

    def _pool(self, buffer: Any, row: int, notation: str) -> Any:
        blocks, layers = self.scale.blocks(row), self.scale.layers
        shape = (blocks, layers, row) if notation.startswith("block") else (layers, blocks, row)
        return buffer[: blocks * layers * row].reshape(shape)

    def fill(self, seed: int) -> None:
        """Write other bytes everywhere."""
        fill(self.buffer, seed)

    def holds(self, row: int, mine: np.ndarray, theirs: np.ndarray, seed: int) -> bool:
        """Return whether blocks of a pool are blocks of the other process's pool, which it filled with a seed."""
        buffer = _buffer(self.scale.nbytes, self.device)
        fill(buffer, seed)
        other = by_block(self._pool(buffer, row, self.other), self.other)
        return same(by_block(self.pools[row], self.notation), mine, other, theirs)


def _buffer(nbytes: int, device: str) -> Any:
    if device == "cpu":
        return np.zeros(nbytes, np.uint8)
    import torch

    torch.cuda.set_device(device)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def serve(wire: Wire, scale: Scale, device: str, pipe: Connection, what: str) -> None:
    """Hold pools, and answer: the card, CPU seconds so far, contents; send back the notes ``echo``.

    After ``spin`` it looks for notes without a pause until it is asked again, as NIXL's own thread does. After
    ``decode`` it computes until it is asked again. ``what`` is that of
    :func:`benchmarks.wires.near.measure`.
    """
    side = Side(FAR, ORDERS[FAR], wire, scale, device, plain=what == "NIXL", beside=what)
    pipe.send(side.agent.card())
    peer = side.agent.meet(pipe.recv())
    spin, load = False, Load(device)
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
            pipe.send(side.holds(*rest))
        elif what == "decode":
            load.begin()
            pipe.send(None)
            load.run(pipe.poll)
        elif what == "decoded":
            pipe.send(load.end(*rest))
    side.agent.close()
    pipe.send("closed")
