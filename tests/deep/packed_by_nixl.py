"""Packed transfers between two processes by real NIXL: random pairs of layouts and ranks, and kills.

`python -m tests.deep.packed_by_nixl [--pairs N] [--rounds N] [--seed N]`

*Pairs*: every byte of both pools is compared with what plain numpy indexing says, over shared memory and over TCP.
*Rounds*: one end is killed at a random moment. What was called done must be right, nothing may hang, no slot be lost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time

from tests.agents.by_nixl.packed_pairs import WIRES, kills, pairs
from tests.deep.quiet import quiet

AT_ONCE = 50  # pairs of one process, whose memory would grow otherwise: NIXL keeps what an agent had


@quiet()
def main(arguments: list[str] | None = None) -> int:
    """Run both; 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.deep.packed_by_nixl", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; by default another each time")
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    turn = 0
    for name, what, count in (("pairs", pairs, told.pairs), ("rounds", kills, told.rounds)):
        begun, left = time.monotonic(), count
        while left > 0:
            some = min(left, AT_ONCE)
            process = spawn.Process(target=what, args=(some, seed + turn, WIRES[turn % len(WIRES)]))
            process.start()
            process.join()
            if process.exitcode:
                print(f"{name} failed with seed {seed + turn} over {WIRES[turn % len(WIRES)] or 'shared memory'}")
                return 1
            turn, left = turn + 1, left - some
        print(f"{name}: {count:,} in {time.monotonic() - begun:.0f} s, nothing wrong, nothing left", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
