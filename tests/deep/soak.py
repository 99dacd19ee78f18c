"""Random transfers of the CPU executor, all bytes compared: `python -m tests.deep.soak [--seed N] [--transfers N]`.

A round makes caches of one logical content in random layouts and moves blocks between them: plans of random blocks, of
both priorities, with ``after=`` an event, an earlier transfer or nothing, some taken back, executors closed, left or
dropped. What must be there at the end follows from the order of the submits, by plain numpy indexing. Then nothing may
be left: no thread, no file, no memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, TransferError

BATCH = 60  # transfers of one executor
PATIENCE = 120.0  # seconds for one transfer
GROWTH = 96 << 20  # bytes that the process may grow after the first rounds
AXES = ("block", "token", "layer", "kv", "head")


@dataclass
class Memory:
    """One cache: its buffer, padding included, and its content by (block, token, layer, kv, head, dim)."""

    root: np.ndarray
    content: np.ndarray
    layout: KVLayout
    block_tokens: int

    def copy(self) -> Memory:
        """The same bytes in another buffer."""
        root, at = self.root.copy(), self.content.ctypes.data - self.root.ctypes.data
        content = np.ndarray(self.content.shape, np.uint8, root, at, self.content.strides)
        return Memory(root, content, self.layout, self.block_tokens)


def memory(rng: random.Random, extents: dict[str, int], tokens: int) -> Memory:
    """A cache in a random layout: any order of dims, layers nested or not, rows padded or not."""
    block_tokens = rng.choice([each for each in (2, 4, 8) if tokens % each == 0])
    sizes = extents | {"token": block_tokens, "block": tokens // block_tokens}
    order = rng.sample(AXES, len(AXES))
    if rng.random() < 0.5:
        order.sort(key=lambda axis: axis != "layer")  # a sequence of tensors, one a layer
    shape = [sizes[axis] for axis in order]
    padding = rng.choice([0, 0, 3, 16])
    root = np.frombuffer(rng.randbytes(int(np.prod(shape)) * (sizes["dim"] + padding)), np.uint8).copy()
    whole = root.reshape(*shape, sizes["dim"] + padding)[..., : sizes["dim"]]
    nested = order[0] == "layer"
    notation = " ".join(("layer:" if nested else order[0], *order[1:], "dim"))
    layout = KVLayout.from_tensors(notation, list(whole) if nested else whole)
    return Memory(root, whole.transpose(*map(order.index, AXES), len(AXES)), layout, block_tokens)


def move(src: Memory, dst: Memory, src_ids: list[int], dst_ids: list[int]) -> None:
    """What a plan is to do: token after token, in the order of the ids."""
    pairs = [
        [(block, token) for block in ids for token in range(one.block_tokens)]
        for one, ids in ((src, src_ids), (dst, dst_ids))
    ]
    for (block, token), (other, its) in zip(*pairs, strict=True):
        dst.content[other, its] = src.content[block, token]


def ids(rng: random.Random, src: Memory, dst: Memory) -> tuple[list[int], list[int]]:
    """Blocks of both sides that hold as many tokens."""
    step = max(src.block_tokens, dst.block_tokens)
    most = min(one.content.shape[0] * one.block_tokens for one in (src, dst)) // step
    tokens = step * rng.randint(0, most)
    found = [rng.sample(range(one.content.shape[0]), tokens // one.block_tokens) for one in (src, dst)]
    return found[0], found[1]


class Round:
    """Caches, what they must hold in the end, and transfers between them."""

    def __init__(self, seed: str) -> None:
        self.rng = rng = random.Random(seed)
        extents = {"layer": rng.randint(1, 3), "kv": 2, "head": rng.randint(1, 3), "dim": rng.choice([4, 32, 100])}
        tokens = 8 * rng.randint(2, 6)
        self.held = [memory(rng, extents, tokens) for _ in range(3)]
        self.wanted = [one.copy() for one in self.held]
        self.programs = {
            (k, n): kvplan.compile(self.held[k].layout, self.held[n].layout)
            for k in range(3) for n in range(3) if k != n
        }  # fmt: skip

    def run(self, transfers: int) -> None:
        """Move, and compare every byte."""
        rng = self.rng
        gates = [threading.Event() for _ in range(3)]
        executor = kvplan.Executor(policy=kvplan.Policy(threads=rng.randint(1, 3)))
        done, priority = [], rng.choice(["normal", "high"])
        for _ in range(transfers):
            way = rng.choice(list(self.programs))
            moved = ids(rng, self.held[way[0]], self.held[way[1]])
            plan = self.programs[way].plan(*moved)
            after = rng.choice([None] * 8 + [rng.choice(gates)] + [one for _, _, one, gone in done[-1:] if not gone])
            transfer = executor.submit(plan, after=after, priority=priority)
            gone = rng.random() < 0.1 and transfer.cancel()
            done.append((way, moved, transfer, gone))
            if rng.random() < 0.05:
                rng.choice(gates).set()
            if rng.random() < 0.02:
                executor.stats()
        for gate in gates:
            gate.set()
        end = rng.choice(["close", "close", "drop", "wait"])
        if end == "close":
            executor.close()
        elif end == "drop":
            del executor
        for way, moved, transfer, gone in done:
            if gone:
                with pytest.raises(TransferError, match="was cancelled before it began"):
                    transfer.synchronize(PATIENCE)
            else:
                transfer.synchronize(PATIENCE)
                move(self.wanted[way[0]], self.wanted[way[1]], *moved)
        for got, want in zip(self.held, self.wanted, strict=True):
            np.testing.assert_array_equal(got.root, want.root, "a byte is wrong")
        if end == "wait":
            assert executor.stats().in_flight == 0
            executor.close()


def soak(seed: int, transfers: int) -> None:
    """All rounds; raises what goes wrong, with the seed of its round."""
    gc.collect()  # what another test has left is not counted
    before, grown_from = (threads(), files()), 0
    for made in range(0, transfers, BATCH):
        name = f"{seed}.{made // BATCH}"
        try:
            Round(name).run(min(BATCH, transfers - made))
        except BaseException as error:
            error.add_note(f"in the round of --only {name}")
            raise
        if not grown_from and made >= transfers // 5:
            gc.collect()
            grown_from = resident()
    gc.collect()
    end = time.monotonic() + PATIENCE
    while _more_than(before) and time.monotonic() < end:  # executors that were dropped end by themselves
        time.sleep(0.01)
    assert not _more_than(before), f"threads and files: {before} before, {threads(), files()} after"
    grown = resident() - grown_from
    assert grown < GROWTH, f"the process grew by {grown} bytes"


def _more_than(before: tuple[int, int]) -> bool:
    """Whether there are more threads or files than before; threads of an earlier test may have ended meanwhile."""
    return threads() > before[0] or files() > before[1]


def threads() -> int:
    """kvplan's, that are alive."""
    return sum(thread.name.startswith("kvplan") for thread in threading.enumerate())


def files() -> int:
    """Open ones."""
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        return 0


def resident() -> int:
    """Bytes of memory that the process has."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> int:
    """Run the soak; 0 where all bytes were right."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; by default another each time")
    parser.add_argument("--transfers", type=int, default=100_000)
    parser.add_argument("--only", metavar="SEED.ROUND", help="one round, as a failure names it")
    told = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {told.only or seed}", flush=True)
    begun = time.monotonic()
    if told.only:
        Round(told.only).run(BATCH)
    else:
        soak(seed, told.transfers)
    print(f"{told.transfers:,} transfers in {time.monotonic() - begun:.0f} s, every byte right, nothing left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
