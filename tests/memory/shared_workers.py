"""What the processes of tests/memory/test_shared_processes.py run. Imports little: each of them starts anew."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import NamedTuple

import numpy as np

import kvplan
from kvplan.memory import shared
from kvplan.memory.shared import share
from tests.patience import PATIENCE

LAYERS, HEADS, BLOCKS, TOKENS, DIM = range(4), range(8), 40, 4, 16
SLOTS = 16  # blocks of a rank's own cache
POOL = "block layer kv head token dim"
POISON = 0xEE


class Topology(NamedTuple):
    """The part of the model that a rank holds."""

    layers: range
    heads: range


class Write(NamedTuple):
    """Blocks to write, each with a seed for its content."""

    todo: list[tuple[int, int]]


class Read(NamedTuple):
    """Blocks to read, and the seeds of what they must hold."""

    todo: list[tuple[int, int]]


def content(block: int, seed: int) -> np.ndarray:
    """What all ranks together hold of a block: layer, kv, token, head, dim."""
    shape = (len(LAYERS), 2, TOKENS, len(HEADS), DIM)
    return np.random.default_rng((block, seed)).integers(0, 256, shape, np.uint8)


def part_of(topology: Topology, block: int, seed: int) -> np.ndarray:
    layers, heads = topology
    return content(block, seed)[layers.start : layers.stop, :, :, heads.start : heads.stop]


def cache_of(topology: Topology) -> tuple[np.ndarray, kvplan.KVLayout]:
    """A rank's own cache, poisoned: layer, kv, block, token, head, dim."""
    layers, heads = topology
    cache = np.full((len(layers), 2, SLOTS, TOKENS, len(heads), DIM), POISON, np.uint8)
    layout = kvplan.KVLayout.from_tensors("layer: kv block token head dim", list(cache), layers=layers,
                                          head_start=heads.start)  # fmt: skip
    return cache, layout


def pool_of(name: str, like: kvplan.KVLayout) -> kvplan.KVLayout:
    return kvplan.allocate(POOL, like=like, num_blocks=BLOCKS, layers=LAYERS, heads=HEADS, shared=name)


def elsewhere(topology: Topology) -> kvplan.KVLayout:
    """A rank of another process, of which its shape alone is known here."""
    layers, heads = topology
    sizes = {"layer": len(layers), "kv": 2, "block": SLOTS, "token": TOKENS, "head": len(heads), "dim": DIM}
    spec = {"notation": "layer: kv block token head dim", "sizes": sizes, "dtype": "uint8"}
    return kvplan.KVLayout.from_spec(spec | {"layer_start": layers.start, "head_start": heads.start})


def rank(name: str, ranks: list[Topology], number: int, connection: Connection) -> None:
    """One of several ranks: writes and reads blocks as told, and says so after each; "" is a block that is right."""
    topology = ranks[number]
    cache, layout = cache_of(topology)
    pool = pool_of(name, layout)
    side = [layout if k == number else elsewhere(other) for k, other in enumerate(ranks)]
    store, load = kvplan.reshard(side, pool)[number, 0], kvplan.reshard(pool, side)[0, number]
    with kvplan.Executor(policy=kvplan.Policy(threads=1)) as executor:
        connection.send("torch was loaded" if "torch" in sys.modules else "")
        while (order := connection.recv()) is not None:
            for k, (block, seed) in enumerate(order.todo):
                slot, right = k % SLOTS, part_of(topology, block, seed)
                if isinstance(order, Write):
                    cache[:, :, slot] = right
                    executor.submit(store.plan([slot], [block])).synchronize()
                    connection.send("")
                    continue
                cache[...] = POISON
                executor.submit(load.plan([block], [slot])).synchronize()
                wrong = np.count_nonzero(cache[:, :, slot] != right)
                cache[:, :, slot] = POISON
                beside = np.count_nonzero(cache != POISON)
                connection.send(f"block {block}: {wrong} bytes are wrong, {beside} beside it" if wrong + beside else "")


def race(name: str, number: int, barrier: Barrier, connection: Connection) -> None:
    """Make, use and leave pools at the same time as others do; says what went wrong, and which pools were had."""
    many = barrier.parties
    had = []
    try:
        for turn in range(20):
            barrier.wait(PATIENCE)
            pool = share(name, f"turn {turn}", [64 * many])
            pool.tensors[0][64 * number : 64 * number + 64] = number + turn
            barrier.wait(PATIENCE)
            wanted = np.repeat(np.arange(turn, turn + many, dtype=np.uint8), 64)
            assert (pool.tensors[0] == wanted).all(), f"turn {turn}: not one memory"
            del pool
        barrier.wait(PATIENCE)
        for _ in range(100):  # as each goes: files come and go at any moment
            pool = share(name, "any", [64 * many])
            mine = pool.tensors[0][64 * number : 64 * number + 64]
            assert not mine.any(), "this process alone writes here, and leaves zeros"
            mine[:] = 1
            assert (mine == 1).all()
            mine[:] = 0
            del mine, pool
        for _turn in range(20):  # two geometries at once: one of them has it
            barrier.wait(PATIENCE)
            try:
                pool, got = share(name, f"of parity {number % 2}", [100 + number % 2]), number % 2
            except kvplan.LayoutError as error:
                pool, got = None, str(error)
            barrier.wait(PATIENCE)
            del pool
            had.append(got)
        connection.send(("", had))
    except BaseException as error:
        barrier.abort()
        connection.send((f"process {number}: {error!r}", had))
        raise


def die_making(name: str, calls: int, connection: Connection) -> None:
    """Make a pool, and be killed in place of one of the calls that reserve it."""
    reserve, left = os.posix_fallocate, [calls]

    def killed(*arguments: int) -> None:
        if not left[0]:
            connection.send("now")
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        reserve(*arguments)

    os.posix_fallocate, shared.RESERVED = killed, 1 << 20
    share(name, "never whole", [3 << 20])


def hold(name: str, connection: Connection) -> None:
    """Use a pool until killed."""
    pool = pool_of(name, cache_of(Topology(LAYERS, HEADS))[1])
    pool.tensors[...] = 7
    connection.send("up")
    connection.recv()


def take(pickled: bytes, connection: Connection) -> None:
    """Load a layout, a program and a plan over pools; move bytes through each, and tell what was read."""
    layout, program, plan = pickle.loads(pickled)
    mine = np.full((8, 64), 5, np.uint8)
    cache = kvplan.KVLayout.from_tensors("block dim", mine)
    with kvplan.Executor() as executor:
        executor.submit(kvplan.compile(layout, cache).plan([1], [0])).synchronize()
        executor.submit(kvplan.compile(cache, layout).plan([2], [3])).synchronize()
        executor.submit(program.plan([0], [6])).synchronize()
        executor.submit(plan).synchronize()
    connection.send((layout.addresses, program.src.addresses, layout.regions[0].pinned, mine[0].tolist()))
    connection.recv()


def take_later(pickled: bytes, connection: Connection) -> None:
    """Load a layout each time when told to, tell whose its addresses are, and let it go."""
    connection.send("up")
    while connection.recv() is not None:
        connection.send(pickle.loads(pickled).addresses)
