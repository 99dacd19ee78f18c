"""Two ends on a simulated wire, each with a cache of its own form."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import KVLayout
from kvplan.agents.packed.pack_orders import Ordered, order_pieces
from tests.agents.packed.simulated_wire import Faults, Network, meet, slots_back

LAYERS, BLOCKS, DIM = 3, 10, 64


class Pair:
    """`near` has layers outside, `far` has blocks outside."""

    def __init__(
        self, executor, *, seed=0, faults=None, near=None, far=None, most_note=1 << 16, kv=None, blocks=BLOCKS
    ) -> None:  # fmt: skip
        self.network = Network(seed, most_note=most_note)
        self.near = self.network.place("near", executor, **(near or {}))
        self.far = self.network.place("far", executor, **(far or {}))
        rng = np.random.default_rng(seed)
        self.mine = rng.integers(0, 256, (LAYERS, blocks, DIM), dtype=np.uint8)
        self.theirs = rng.integers(0, 256, (blocks, LAYERS, DIM), dtype=np.uint8)
        self.here = KVLayout.from_tensors("layer block dim", self.mine)
        self.there = KVLayout.from_tensors("block layer dim", self.theirs)
        self.push = kvplan.compile(self.here, self.there)
        self.pull = kvplan.compile(self.there, self.here)
        if kv is None:
            meet(self.network, "near", "far", ([self.here], [self.there]))
        self.network.faults = faults or Faults()

    def submit(self, ids=None, others=None, *, reading, **kw):
        """Move blocks `ids` of near to or from blocks `others` of far; by default all."""
        ids, others = (list(range(len(self.theirs)) if some is None else some) for some in (ids, others))
        plan = self.pull.plan(others, ids) if reading else self.push.plan(ids, others)
        return self.near.end.submit("far", plan, reading=reading, **kw)

    def ended(self, *transfers) -> None:
        """Go on until transfers have ended."""
        self.network.run(lambda: all(transfer.over for transfer in transfers))

    def same(self, ids=None, others=None) -> bool:
        """Whether the blocks hold the same bytes; by default all."""
        ids, others = (range(len(self.theirs)) if some is None else some for some in (ids, others))
        return bool((self.mine[:, list(ids)].swapaxes(0, 1) == self.theirs[list(others)]).all())

    def check(self) -> None:
        """Nothing is left."""
        slots_back(self.network)


def order_bytes(order: Ordered) -> bytes:
    """The bytes of a leg of an order, with its recipes."""
    return b"".join(order_pieces(order, [[recipe] for recipe in order.recipes]))
