"""Where the pools are: host memory, or memory of GPUs; and other processes with such a pool."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvplan
from kvplan import Agent, KVLayout
from tests.agents import workers
from tests.agents.processes import Other, answer, shared_pages
from tests.deep.soak import files, resident

SECONDS = 120.0  # for one transfer, and for one end
GROWTH = 64 << 20  # bytes that a process, and each GPU, may grow
NOTATION = "block layer dim"
Bytes = NDArray[np.uint8]


class Host:
    """Pools of host memory, by ``shm``.

    Attributes:
        name: name of the device.
        extents: numbers of blocks, layers and bytes of a row.
        turns: owners take the places of this many kinds in turn.
        in_order: whether transfers of both directions run in the order of their submits.
        batches: batches of transfers with one other process.
        notations: notations of this process's pool.
        ahead: processes that start while a round runs.
    """

    name = "cpu"
    extents = (workers.BLOCKS, workers.LAYERS, workers.DIM)
    turns = 1
    in_order = True
    batches = 20
    ahead = 0
    notations: tuple[str, ...] = ("block layer dim", "layer block dim", "block dim layer")

    def content(self, seed: int) -> Bytes:
        """Bytes of a pool in the order block, layer, dim, which tell their place."""
        return ((np.arange(np.prod(self.extents)) * 7 + seed) % 251).astype(np.uint8).reshape(self.extents)

    def pool(self, seed: int, notation: str = NOTATION, turn: int = 0) -> KVLayout:
        """A pool with this content; owners of different turns are in different places."""
        return workers.pool(seed=seed, notation=notation)

    def seen(self, pool: KVLayout) -> Bytes:
        """The content of this process's pool, by (block, layer, dim)."""
        return in_order(np.array(pool.tensors), pool.notation)

    def clear(self, pool: KVLayout) -> None:
        """Make all bytes of a pool 0."""
        pool.tensors[...] = 0

    def agent(self, name: str, layouts: dict[str, KVLayout], executor: kvplan.Executor | None = None) -> Agent:
        """An agent of this process."""
        return Agent(name, layouts, transports=("shm",), executor=executor)

    def executor(self, rng: random.Random) -> kvplan.Executor | None:
        """An executor with a random policy; None for the agent's own."""
        return None

    def later(self, rng: random.Random) -> Any:
        """An ``after=`` that completes soon, or None."""

    def used(self) -> dict[str, int]:
        """Bytes of memory that this process has, by where."""
        return {"host": resident()}

    def left(self) -> tuple[int, int, int]:
        """Descriptors, mappings of other processes' memory, and threads."""
        gc.collect()
        threads = sum(one.name.startswith("kvplan") for one in threading.enumerate())
        return files(), self.mapped(), threads

    def mapped(self) -> int:
        """Mappings of memory that processes share."""
        gc.collect(0)
        return shared_pages()


def in_order(content: Bytes, notation: str) -> Bytes:
    """Bytes in the order of a notation, by (block, layer, dim)."""
    axes = notation.split()
    return content.transpose([axes.index(axis) for axis in NOTATION.split()])


def settled(place: Host, before: tuple[int, int, int]) -> None:
    """Wait until this process has no more descriptors, mappings and threads than before."""
    until = time.monotonic() + SECONDS
    while True:
        left = place.left()
        if all(now <= then for now, then in zip(left, before, strict=True)):
            return
        assert time.monotonic() < until, f"descriptors, mappings and threads were {before}, and are {left}"
        time.sleep(0.01)


PLACES = ("cpu", "cuda")


def place_of(name: str) -> Host:
    """The place of a device's name."""
    if name == "cpu":
        return Host()
    from tests.deep.agents.gpu_place import Gpus  # it imports torch

    return Gpus()


class Worker:
    """The other process: its pool is in a place."""

    def __init__(self, place: str, seed: int, turn: int) -> None:
        self.place = place_of(place)
        self.pool = self.place.pool(seed, turn=turn)
        self.agent = self.place.agent("other", {"kv": self.pool})
        self.card, self.notes = self.agent.card, self.agent.notes

    def meet(self, card: bytes) -> None:
        self.peer = self.agent.meet(card)

    def push(self, mine: list[int], theirs: list[int], note: bytes) -> None:
        plan = kvplan.compile(self.pool, self.peer.layouts["kv"]).plan(mine, theirs)
        self.peer.submit(plan, note=note).result()

    def holds(self) -> Bytes:
        return self.place.seen(self.pool)

    def used(self) -> dict[str, int]:
        gc.collect()
        return self.place.used()


def serve(place: str, seed: int, turn: int, pipe: Any) -> None:
    """Do what the pipe asks for, until it asks for the end."""
    answer(lambda: Worker(place, seed, turn), pipe)


class Neighbour(Other):
    """Another process with a pool."""

    def __init__(self, place: Host, seed: int, turn: int) -> None:
        super().__init__(serve, place.name, seed, turn)
        self.turn = turn


def neighbours(place: Host, seeds: list[int], *, ahead: int) -> Iterator[Neighbour]:
    """A process for each seed, in turn; the next ones start ahead, since that takes a process with a GPU seconds."""
    begun: list[Neighbour] = []
    try:
        for k in range(len(seeds)):
            while len(begun) <= ahead and k + len(begun) < len(seeds):
                begun.append(Neighbour(place, seeds[k + len(begun)], k + len(begun)))
            yield begun.pop(0)
    finally:
        for one in begun:
            one.end()
