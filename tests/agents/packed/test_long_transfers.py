"""The law of packed transfers where many chunks are on the way: large rings, long transfers, and a wire that fails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.agents.packed.drawn_pairs import allowed, faults, finished
from tests.agents.packed.pairs import Pair
from tests.agents.packed.simulated_wire import Faults
from tests.profiles import examples

RING = {"slot_nbytes": 256, "slots": 32, "sending": 12, "granted": 16}


@examples(60)
@given(
    blocks=st.integers(1, 80), reading=st.booleans(), by_layer=st.booleans(), wrong=faults(),
    attempts=st.sampled_from((1, 1, 8)), legs=st.sampled_from((2, 7, 1 << 16)), together=st.booleans(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_long_transfers_by_large_rings(executor, blocks, reading, by_layer, wrong, attempts, legs, together, seed):
    """What is called done is right, an error says what the destination holds, and no slot is lost."""
    ring = RING | {"leg_units": legs, "together": together}
    pair = Pair(executor, near=ring, far=ring, blocks=blocks, seed=seed)
    pair.network.faults = replace(wrong, fail=wrong.fail / 8, stuck=wrong.stuck / 8)
    order = np.random.default_rng(seed).permutation(blocks).tolist()
    target = pair.mine if reading else pair.theirs.swapaxes(0, 1)
    before, wanted = target.copy(), target.copy()
    if reading:
        wanted[:, order] = pair.theirs.swapaxes(0, 1)
    else:
        wanted[:] = pair.mine[:, order]
    transfer = pair.submit(order, range(blocks), reading=reading, by_layer=by_layer, attempts=attempts)
    pair.ended(transfer)
    done = finished(transfer)
    pair.network.faults = Faults()
    pair.network.settle()
    allowed([target], [before], [wanted])
    if done:
        np.testing.assert_array_equal(target, wanted)
    pair.check()
