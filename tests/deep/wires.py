"""Packed transfers over the simulated wire: random pairs of layouts and ranks with faults, and memory that stays flat.

`python -m tests.deep.wires [--pairs N] [--transfers N] [--seconds N] [--seed N]`

*Pairs*: a fifth of the cases have ranks on both sides, and all their pairs move at once. Every byte is compared with
what plain numpy indexing says. What was called done must be right, and no slot may be lost. *Transfers*: two ends move
blocks to and fro over a rough wire; the number of Python's memory blocks must not grow.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import kvplan
from tests.agents.packed.drawn_pairs import faults, manners, move_pair, move_ranks
from tests.agents.packed.pairs import BLOCKS, Pair
from tests.agents.packed.simulated_wire import Faults
from tests.deep.quiet import quiet
from tests.ranks.topologies import reshards
from tests.strategies import cases, neighbour_cases

AT_ONCE = 200  # cases of one run of hypothesis
ROUGH = Faults(late=0.2, twice=0.2, refuse=0.02, fail=0.05, told=0.05, linger=0.2)
GROWTH = 2000  # memory blocks: less than one for four transfers


def drawn(count: int, number: int, of: st.SearchStrategy, move: Callable[..., object]) -> None:
    """Move so many random cases."""

    @seeded(number)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,), derandomize=False,
    )  # fmt: skip
    @given(case=of)
    def moved(case) -> None:
        move(case)

    moved()


def pairs(count: int, seconds: float, number: int, executor: kvplan.Executor) -> int:
    """Move random pairs of layouts, and of ranks; return how many there were."""
    made = {"pairs": 0, "done": 0}

    def pair(case) -> None:
        made["done"] += move_pair(*case, executor)
        made["pairs"] += 1

    def ranks(case) -> None:
        done, every = move_ranks(*case, executor)
        made["done"] += done
        made["pairs"] += every

    alone = st.tuples(st.one_of(cases(), neighbour_cases()), manners(change=True))
    many = st.tuples(reshards(ranks=6), faults(), st.integers(0, 2**32))
    begun, turn = time.monotonic(), 0
    while made["pairs"] < count if not seconds else time.monotonic() - begun < seconds:
        some = min(AT_ONCE, max(5, count - made["pairs"]))
        drawn(some, number + turn, many if turn % 5 == 4 else alone, ranks if turn % 5 == 4 else pair)
        turn += 1
        spent = time.monotonic() - begun
        print(f"pairs: {made['pairs']:,} in {spent:.0f} s, {made['done']:,} of them done, nothing wrong", flush=True)
    return made["pairs"]


def transfers(count: int, number: int, executor: kvplan.Executor) -> int:
    """Move blocks to and fro between two ends; return by how many memory blocks Python grew after a fifth of them."""
    pair = Pair(executor, seed=number, faults=ROUGH)
    rng, first = random.Random(number), 0
    for turn in range(count):
        if turn == count // 5:
            first = blocks_now()
        ids, others = (rng.sample(range(BLOCKS), 4) for _ in range(2))
        reading = rng.random() < 0.5
        transfer = pair.submit(
            ids, others, reading=reading, attempts=50, by_layer=rng.random() < 0.3, deadline=rng.choice((None, 1e9)),
            priority=rng.choice(("high", "normal")), note=b"" if reading else b"note",
        )  # fmt: skip
        pair.ended(transfer)
        transfer.synchronize()
        assert pair.same(ids, others), "a wrong byte"
        pair.far.end.notes()
        if (turn + 1) % max(1, count // 4) == 0:
            print(f"transfers: {turn + 1:,}, {blocks_now():,} memory blocks", flush=True)
    pair.check()
    return blocks_now() - first


def blocks_now() -> int:
    """Return the number of memory blocks that Python holds."""
    gc.collect()
    return sys.getallocatedblocks()


@quiet(logging.CRITICAL)
def main(arguments: list[str] | None = None) -> int:
    """Run both; 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.wires", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=0.0, help="move pairs for so long, however many there are")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; by default another each time")
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    with kvplan.Executor(policy=kvplan.Policy(threads=1)) as executor:
        count = pairs(told.pairs, told.seconds, seed, executor)
        print(f"pairs: {count:,}, nothing wrong, no slot lost", flush=True)
        grown = transfers(told.transfers, seed, executor)
    print(f"transfers: {told.transfers:,}, {grown:+,} memory blocks after a fifth of them", flush=True)
    return int(grown > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
