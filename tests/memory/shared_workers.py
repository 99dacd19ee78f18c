"""What other processes do with pools in tests. Imports little: each of them starts anew."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np

import kvplan
from kvplan import KVLayout
from kvplan.memory import shared
from kvplan.memory.shared import share
from tests.patience import PATIENCE

spawn = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def child(target, *arguments):
    """A process that runs ``target(*arguments, pipe)``, its pipe, and what reads its next answer."""
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()

    def answer():
        assert pipe.poll(PATIENCE), "no answer"
        return pipe.recv()

    try:
        yield process, pipe, answer
    finally:
        process.kill()
        process.join()
        pipe.close()


def rows(layers: tuple[int, ...] = (0,)) -> KVLayout:
    """A cache of 8 blocks of 64 bytes."""
    return KVLayout.from_tensors("layer block dim", np.zeros((len(layers), 8, 64), np.uint8), layers=layers)


def pool_of(name, notation: str = "block dim", layers: tuple[int, ...] = (0,)) -> KVLayout:
    """A pool for such a cache."""
    return kvplan.allocate(notation, like=rows(layers), shared=name)


def race(name: str, number: int, barrier: Barrier, connection: Connection) -> None:
    """Make, use and leave pools at the same time as others do; says what went wrong, and which pools were had."""
    many, had = barrier.parties, []
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
        for _ in range(20):  # two geometries at once: one of them has it
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
    """Use a pool, say its pickle, and go on until killed or told to end."""
    pool = pool_of(name)
    pool.tensors[...] = 7
    connection.send(pickle.dumps(pool))
    connection.recv()


def take(pickled: bytes, connection: Connection) -> None:
    """Load a layout, a program and a plan over pools; move bytes through each, and tell what was read."""
    layout, program, plan = pickle.loads(pickled)
    mine = np.full((8, 64), 5, np.uint8)
    cache = KVLayout.from_tensors("block dim", mine)
    with kvplan.Executor() as executor:
        executor.submit(kvplan.compile(layout, cache).plan([1], [0])).synchronize()
        executor.submit(kvplan.compile(cache, layout).plan([2], [3])).synchronize()
        executor.submit(program.plan([0], [6])).synchronize()
        executor.submit(plan).synchronize()
    connection.send((layout.addresses, program.src.addresses, layout.regions[0].pinned, mine[0].tolist()))
    connection.recv()
