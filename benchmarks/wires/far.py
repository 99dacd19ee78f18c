"""The two processes of a wire: pools of equal bytes in other orders, and the process that only answers."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.wires.beside import Load
from benchmarks.wires.paced import pace
from benchmarks.wires.sizes import DECODE, NIXL, NO_THREAD, Scale, Wire
from kvplan import Agent, Executor, KVLayout, Policy
from kvplan.agents.by_nixl.nixl_end import NixlWire

NEAR, FAR = "near", "far"
ORDERS = {NEAR: "layer block dim", FAR: "block layer dim"}
COMPARED = 256 << 20  # bytes that are compared at once


class Side:
    """One process of a wire: a pool for each size of rows over one buffer, and an agent.

    Args:
        name: name of the process, one of ``ORDERS``.
        wire: the wire; its transports must be set before NIXL is loaded.
        scale: sizes.
        device: ``"cpu"``, or a GPU.
        what: what is measured; NIXL as it comes has its own thread, and beside decode the executor knows of it.
    """

    def __init__(self, name: str, wire: Wire, scale: Scale, device: str, what: str) -> None:
        os.environ.pop("UCX_TLS", None)
        if wire.transports:
            os.environ["UCX_TLS"] = wire.transports
        self.name, self.wire, self.scale, self.device = name, wire, scale, device
        if wire.paced:
            pace(NixlWire, wire.paced)
        self.buffer = _buffer(scale.nbytes, device)
        self.pools = {row: self.pool(self.buffer, row, name) for row in scale.rows}
        layouts = {str(row): KVLayout.from_tensors(ORDERS[name], pool) for row, pool in self.pools.items()}
        agent = None
        if what == NIXL:
            from nixl import nixl_agent, nixl_agent_config

            agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        executor = Executor(device, policy=Policy(overlap=what)) if what == DECODE else None
        self.agent = Agent(name, layouts, transports=("nixl",), executor=executor, agent=agent, slots=scale.slots)

    def pool(self, buffer: Any, row: int, name: str) -> Any:
        """Return the pool of a process over the first bytes of a buffer."""
        blocks, layers = self.scale.blocks(row), self.scale.layers
        shape = (layers, blocks, row) if name == NEAR else (blocks, layers, row)
        return buffer[: blocks * layers * row].reshape(shape)

    def holds(self, row: int, mine: np.ndarray, theirs: np.ndarray, seed: int) -> bool:
        """Return whether blocks of a pool are blocks of the other process's pool, which it filled with a seed."""
        buffer = _buffer(self.scale.nbytes, self.device)
        fill(buffer, seed)
        pools = {self.name: self.pools[row]}
        (other,) = ORDERS.keys() - pools.keys()
        pools[other] = self.pool(buffer, row, other)
        blocks = {name: pool.swapaxes(0, 1) if name == NEAR else pool for name, pool in pools.items()}
        return same(blocks[self.name], mine, blocks[other], theirs)


def _buffer(nbytes: int, device: str) -> Any:
    if device == "cpu":
        return np.zeros(nbytes, np.uint8)
    import torch

    torch.cuda.set_device(device)
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def fill(buffer: Any, seed: int) -> None:
    """Write random bytes that both processes can make from a seed, so that a comparison moves none of them.

    >>> one, two = np.zeros(32, np.uint8), np.zeros(32, np.uint8)
    >>> fill(one, 1), fill(two, 1), bool((one == two).all()), len(set(one.tolist())) > 16
    (None, None, True, True)
    """
    if isinstance(buffer, np.ndarray):
        buffer[:] = np.frombuffer(np.random.default_rng(seed).bytes(buffer.size), np.uint8)
        return
    import torch

    words = buffer.view(torch.int64)  # GPUs of one model make the same numbers
    words.random_(generator=torch.Generator(device=buffer.device).manual_seed(seed))
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def same(mine: Any, here: np.ndarray, theirs: Any, there: np.ndarray) -> bool:
    """Return whether blocks of one pool are those of another, in order; both are by block, and on one device.

    >>> pool = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    >>> same(pool, np.array([0, 2]), pool[::-1], np.array([2, 0])), same(pool, np.array([0]), pool, np.array([1]))
    (True, False)
    """
    step = max(COMPARED // (mine.shape[1] * mine.shape[2]), 1)
    for start in range(0, len(here), step):
        a, b = here[start : start + step], there[start : start + step]
        if not isinstance(mine, np.ndarray):
            import torch

            a, b = (torch.as_tensor(ids, device=mine.device) for ids in (a, b))
        if not bool((mine[a] == theirs[b]).all()):
            return False
    return True


def serve(wire: Wire, scale: Scale, device: str, pipe: Connection, what: str) -> None:
    """Hold pools, and answer: the card, CPU seconds so far, contents; send back the notes ``echo``.

    A wire of named transports needs this process's help if NIXL has no thread: then it looks without a pause. After
    ``decode`` it computes until it is asked again.
    """
    side = Side(FAR, wire, scale, device, what)
    pipe.send(side.agent.card())
    peer = side.agent.meet(pipe.recv())
    spin, load = what == NO_THREAD and bool(wire.transports), Load(device)
    while True:
        echo = False
        while not pipe.poll(0.0 if echo or spin else 0.05):
            for _, note in side.agent.notes():
                if note == b"echo":
                    echo = True
                    peer.send(note)
                elif note == b"rest":
                    echo = False
        question, *given = pipe.recv()
        match question:
            case "end":
                break
            case "cpu":
                pipe.send(time.process_time())
            case "fill":
                pipe.send(fill(side.buffer, *given))
            case "holds":
                pipe.send(side.holds(*given))
            case "decode":
                pipe.send(load.begin())
                load.run(pipe.poll)
            case "decoded":
                pipe.send(load.end(*given))
    side.agent.close()
    pipe.send("closed")
