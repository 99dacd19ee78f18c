"""Two processes that have met, beside the oracle's caches: what each process must hold."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests import oracle
from tests.contract.peers.process import Process
from tests.contract.peers.transports import Transport
from tests.strategies import Form, unit_of


def form(
    notation: str, *, order: tuple[int, ...] = (), odd: int = 0, heads_from: int = 0, apart: bool = False, **sizes: int
) -> Form:
    """One way to lay a cache out: the memory order of its dims if it is not the usual one, bytes behind each row.

    Nested tensors are views of one allocation, unless they are ``apart``.
    """
    dims = len(re.findall(r"\([^)]*\)|\S+", notation.rpartition(":")[2]))
    none, padding = (0,) * dims, (*(0,) * (dims - 1), odd)
    return Form(notation, sizes, order or tuple(range(dims)), none, padding, not apart, heads_from, 0, 2)


BLOCKS, LAYERS, TOKENS = 16, 3, 4
NEAR = form("layer block token head dim", layer=LAYERS, block=BLOCKS, token=TOKENS, head=2, dim=24)
FAR = form("block layer head token dim", layer=LAYERS, block=BLOCKS, token=TOKENS, head=2, dim=24)


class Pair:
    """A process, `near`, that has met another one, `far`, and what both must hold.

    The transfers of a test go through :meth:`move`, which copies by the oracle, too, or are begun by `near` itself.
    """

    def __init__(
        self, transport: Transport, near: Process, far: Process, forms: tuple[Form, Form] = (NEAR, FAR), seed: int = 1
    ) -> None:
        self.transport, self.near, self.far = transport, near, far
        self.here, self.there = (one.build(seed + k) for k, one in enumerate(forms))
        self.unit_tokens = unit_of(*forms)
        self.near_card = transport.open(near, "near", self.here)
        near.meet(transport.open(far, "far", self.there))

    def submit(self, mine: Any, theirs: Any, *more: Any, **options: Any) -> int:
        return self.near.submit("far", mine, theirs, *more, **self.transport.options, **options)

    def copied(self, mine: Any, theirs: Any, skips: tuple[int, int] = (0, 0), *, reading: bool) -> None:
        """Let the oracle copy what a transfer moves."""
        sides = (self.here, list(mine), skips[0]), (self.there, list(theirs), skips[1])
        (src, src_ids, src_skip), (dst, dst_ids, dst_skip) = reversed(sides) if reading else sides
        units = min(
            len(ids) * cache.block_tokens // self.unit_tokens - skip for cache, ids, skip in sides
        )  # fmt: skip
        oracle.copy(src, dst, src_ids, dst_ids, src_skip, dst_skip, self.unit_tokens, units)

    def move(self, mine: Any, theirs: Any, skips: tuple[int, int] = (0, 0), *, reading: bool, **options: Any) -> None:
        """Move blocks, and wait for the end."""
        self.near.end(self.submit(mine, theirs, skips, reading=reading, **options))
        self.copied(mine, theirs, skips, reading=reading)

    def check(self) -> None:
        """Compare every byte of both processes, those between rows and around tensors among them."""
        for process, cache in ((self.near, self.here), (self.far, self.there)):
            for held, wanted in zip(process.content(), cache.roots, strict=True):
                np.testing.assert_array_equal(np.frombuffer(held, np.uint8), wanted)
