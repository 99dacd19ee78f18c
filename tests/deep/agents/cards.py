"""Cards that lie."""

from __future__ import annotations

import random

from kvplan import KVPlanError
from tests.agents.hostile_cards import lie
from tests.deep.agents.places import SECONDS, Host, settled


def cards(place: Host, seed: int, count: int) -> str:
    """Meet random cards; return how many were refused."""
    rng = random.Random(seed)
    with place.offered() as true, place.agent("visitor", {}) as visitor:
        visitor.forget(visitor.meet(true, timeout=SECONDS), timeout=SECONDS)  # the first one starts threads
        before = place.left()
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
            assert place.mapped() <= before[1], f"card {k} left a mapping"
            if k % 1000 == 999:
                settled(place, before)
                print(f"  {k + 1:,} cards, {refused:,} refused", flush=True)
        settled(place, before)
        assert refused > count // 2
    return f"{refused:,} refused"
