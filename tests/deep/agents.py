"""Transfers between processes, all bytes compared; processes that are killed at random moments; and cards that lie.

`python -m tests.deep.agents [--seed N] [--transfers N] [--rounds N] [--cards N]`

*Transfers*: two processes with pools in random layouts read and write each other's blocks. After each batch every byte
of both pools is compared with what plain numpy indexing says, as each process itself sees its memory.

*Rounds*: an owner or a visitor is killed at a random moment while blocks move. A transfer that was called done must be
right to the last byte, every other one must have raised a TransferError, nothing may hang, and nothing may be left.

*Cards*: random changes of a true card. Each is refused with an error of kvplan, and nothing is mapped; or the change
was of no account, and the meeting works.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, TransferError
from tests.agents.hostile_cards import lie
from tests.agents.processes import Other
from tests.agents.workers import BLOCKS, DIM, LAYERS, content, pool
from tests.deep.soak import files, resident

SECONDS = 120.0  # for one transfer, and for one end
BATCH = 50  # transfers between two comparisons
GROWTH = 64 << 20  # bytes that the process may grow after its first tenth
NOTATIONS = ("block layer dim", "layer block dim", "block dim layer")


def seen(layout: KVLayout) -> np.ndarray:
    """The content of this process's pool, by (block, layer, dim)."""
    axes = layout.notation.split()
    return np.array(layout.tensors).transpose([axes.index(axis) for axis in ("block", "layer", "dim")])


def transfers(seed: int, count: int) -> None:
    """Move random blocks between two processes, and compare every byte."""
    rng = random.Random(seed)
    grown = None
    done = 0
    while done < count:
        notation = rng.choice(NOTATIONS)
        first, second = rng.randrange(251), rng.randrange(251)
        mine = pool(seed=first, notation=notation)
        other = Other("other", second)
        expected = {True: content(first), False: content(second)}  # by whether it is this process's
        with Agent("me", {"kv": mine}) as agent:
            peer = agent.meet(other.card())
            theirs = peer.layouts["kv"]
            load, store = kvplan.compile(theirs, mine), kvplan.compile(mine, theirs)
            for _ in range(min(20, -(-(count - done) // BATCH))):
                flying: deque = deque()
                noted = []
                for k in range(BATCH):
                    reading = rng.random() < 0.5
                    number = rng.randint(0, BLOCKS // 2)
                    src, dst = rng.sample(range(BLOCKS), number), rng.sample(range(BLOCKS), number)
                    plan = (load if reading else store).plan(src, dst)
                    note = b"%d" % k if rng.random() < 0.3 else b""
                    event = threading.Event() if rng.random() < 0.1 else None
                    after = event or (flying[-1] if flying and rng.random() < 0.3 else None)
                    transfer = peer.submit(plan, after=after, note=note, by_layer=rng.random() < 0.1)
                    if event is not None and rng.random() < 0.3 and transfer.cancel():
                        event.set()
                        continue
                    if event is not None:
                        event.set()
                    expected[reading][dst] = expected[not reading][src]
                    noted += [("me", note)] * bool(note)
                    flying.append(transfer)
                for transfer in flying:
                    transfer.synchronize(SECONDS)
                np.testing.assert_array_equal(seen(mine), expected[True])
                np.testing.assert_array_equal(other.holds(), expected[False])
                assert other.notes() == noted
                done += BATCH
            assert agent.stats().failed == 0
        other.end()
        del agent, peer, theirs, load, store, plan, mine, flying, transfer
        gc.collect()
        if grown is None and done >= count // 10:
            grown = resident()
        print(f"  {done:,} transfers", flush=True)
    if grown is not None:
        assert resident() - grown < GROWTH, f"the process grew by {resident() - grown:,} bytes"


def rounds(seed: int, count: int) -> None:
    """Kill owners and visitors at random moments."""
    rng = random.Random(seed)
    left = None
    finished = failed = 0
    for k in range(count):
        other = Other("other", k % 251)
        mine = pool(seed=(k + 1) % 251)
        agent = Agent("me", {"kv": mine})
        if rng.random() < 0.5:
            ended, broken = _killed_owner(rng, agent, other, k % 251)
            finished, failed = finished + ended, failed + broken
        else:
            _killed_visitor(rng, agent, other)
        agent.close(timeout=SECONDS)
        other.end()
        del agent, mine, other
        gc.collect()
        now = (files(), _mapped(), sum(one.name.startswith("kvplan") for one in threading.enumerate()))
        left = left or now
        assert now <= left, f"round {k}: descriptors, mappings and threads were {left}, and are {now}"
        if k % 20 == 19:
            print(f"  {k + 1} rounds, {finished} transfers done, {failed} failed", flush=True)
    assert count < 20 or failed, "no transfer was in flight when its owner was killed"


def _killed_owner(rng: random.Random, agent: Agent, other: Other, number: int) -> tuple[int, int]:
    """Read from an owner until it is killed; return how many transfers were called done, and how many failed."""
    peer = agent.meet(other.card())
    told = content(number)
    into = np.zeros((LAYERS, BLOCKS, DIM), np.uint8)
    load = kvplan.compile(peer.layouts["kv"], KVLayout.from_tensors("layer block dim", into))
    killer = threading.Timer(rng.random() * 0.05, other.kill)
    killer.start()
    finished = failed = 0
    begun = time.monotonic()
    while not failed:
        assert time.monotonic() - begun < SECONDS, "the death was never noticed"
        src, dst = rng.sample(range(BLOCKS), 8), rng.sample(range(BLOCKS), 8)
        into[:] = 0
        try:
            peer.submit(load.plan(src, dst), note=b"x").synchronize(SECONDS)
        except TransferError as error:
            if "with 'other'" not in str(error) and "from 'other'" not in str(error):
                raise
            failed += 1
        else:
            np.testing.assert_array_equal(into[:, dst], told[src].transpose(1, 0, 2))
            finished += 1
    killer.join()
    try:
        peer.submit(load.plan([0], [0]))
    except TransferError:
        return finished, failed
    raise AssertionError("a transfer with a dead peer was accepted")


def _killed_visitor(rng: random.Random, agent: Agent, other: Other) -> None:
    """Let a visitor write until it is killed; the owner then closes at once."""
    other.meet("me", agent.card())
    killer = threading.Timer(rng.random() * 0.05, other.kill)
    killer.start()
    for k in range(1_000_000):
        try:
            other.push("me", [k % BLOCKS], [(k + 1) % BLOCKS], b"%d" % k)
        except (EOFError, OSError):
            break
    killer.join()
    heard = [int(note) for _, note in agent.notes()]
    assert heard == list(range(len(heard))), "notes came twice, or out of order"


def cards(seed: int, count: int) -> None:
    """Meet random cards."""
    rng = random.Random(seed)
    with Agent("owner", {"kv": pool(), "more": pool(seed=1)}) as owner, Agent("visitor", {}) as visitor:
        true = owner.card()
        before = _mapped(), files()
        refused = 0
        for k in range(count):
            card = lie(true, rng)
            try:
                peer = visitor.meet(card, timeout=SECONDS)
            except KVPlanError:
                refused += 1
            else:
                visitor.forget(peer, timeout=SECONDS)
                del peer
            assert _mapped() <= before[0], f"card {k} left a mapping"
            if k % 1000 == 999:
                _settled(before)
                print(f"  {k + 1:,} cards, {refused:,} refused", flush=True)
        _settled(before)
        assert refused > count // 2


def _settled(before: tuple[int, int]) -> None:
    until = time.monotonic() + SECONDS
    while (_mapped(), files()) > before:
        assert time.monotonic() < until, f"mappings and files were {before}, and are {_mapped(), files()}"
        gc.collect()
        time.sleep(0.01)


def _mapped() -> int:
    gc.collect(0)
    return sum("/memfd:kvplan" in row for row in Path("/proc/self/maps").read_text().splitlines())


def main(arguments: list[str] | None = None) -> int:
    """Run all three; 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.agents", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; by default another each time")
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--cards", type=int, default=20_000)
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    logging.getLogger("kvplan").setLevel(logging.ERROR)  # failed transfers are what the rounds are for
    for what, count in ((transfers, told.transfers), (rounds, told.rounds), (cards, told.cards)):
        begun = time.monotonic()
        if count:
            what(seed, count)
        print(
            f"{what.__name__}: {count:,} in {time.monotonic() - begun:.0f} s, nothing wrong, nothing left", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
