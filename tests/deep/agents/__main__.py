"""Transfers between processes, all bytes compared; and processes that are killed at random moments.

`python -m tests.deep.agents [--device cuda] [--seed N] [--transfers N] [--rounds N]`

*Transfers*: two processes with pools in random layouts read and write each other's blocks. After each batch every byte
of both pools is compared with what plain numpy indexing says, as each process itself sees its memory. The memory of
both processes stays as it is.

*Rounds*: an owner or a visitor is killed at a random moment while blocks move. A transfer that was called done must be
right to the last byte, every other one must have raised a TransferError, nothing may hang, and nothing may be left.

`--device cuda` takes pools of GPUs, by `cuda_ipc`: within one GPU, and between two where there are two. The memory of a
whole GPU is compared then, so no other program may use it meanwhile.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.deep.agents.kills import rounds
from tests.deep.agents.places import PLACES, place_of
from tests.deep.agents.transfers import transfers


@contextmanager
def quiet() -> Iterator[None]:
    """Let kvplan's loggers say errors alone: failed transfers are what this is for."""
    logger = logging.getLogger("kvplan")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@quiet()
def main(arguments: list[str] | None = None) -> int:
    """Run both; 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep.agents", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=PLACES, default="cpu", help="where the pools are")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; by default another each time")
    parser.add_argument("--transfers", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    told = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    place = place_of(told.device)
    for name, what, count in (("transfers", transfers, told.transfers), ("rounds", rounds, told.rounds)):
        if not count:
            continue
        begun = time.monotonic()
        what(place, seed, count)
        print(f"{name}: {count:,} in {time.monotonic() - begun:.0f} s, nothing wrong, nothing left", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
