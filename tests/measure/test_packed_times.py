"""The cost of kvplan's own protocol: transfers that are timed on a double of NIXL, and the fit to what they took."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import Agent, KVLayout
from kvplan.cost.wire import Crossing, default_wire, from_json, packed_cost
from kvplan.measure import wire_calibration as module
from kvplan.measure.wire_calibration import BLOCK, BLOCKS, CHUNKS, SLOTS, PackedTimes, packed_times, with_protocol
from tests.nixl import double

SHORT, LONG = Crossing(BLOCK, 1, 1, 1, 1), Crossing(BLOCKS * BLOCK, BLOCKS, BLOCKS, BLOCKS, BLOCKS)


def took(wire):
    """The times that the model of a wire gives for small slots."""
    wire = replace(wire, slot_nbytes=SLOTS[1])
    return [
        PackedTimes(*(packed_cost(one, wire, pull=pull).seconds for one in (SHORT, LONG)), SHORT, LONG, pull)
        for pull in (True, False)
    ]


@given(
    memory=st.sampled_from(["DRAM", "VRAM"]), overlaps=st.booleans(), chunk=st.floats(1e-6, 1e-3),
    start=st.floats(0.0, 1e-2), latency=st.floats(0.0, 1e-4),
)  # fmt: skip
def test_a_model_takes_as_long_as_what_was_measured(memory, overlaps, chunk, start, latency):
    wire = replace(default_wire(memory), overlaps=overlaps, latency=latency, chunk=chunk, start=start)
    known = took(wire)
    found = with_protocol(replace(wire, chunk=0.0, start=0.0), known)
    for mine, theirs in zip(took(found), known, strict=True):
        assert (mine.one, mine.many) == pytest.approx((theirs.one, theirs.many))
    assert from_json(found.to_json()) == found


class Near:
    """Two agents with a small ring and pools of as many blocks."""

    def __init__(self) -> None:
        self.network = double.Network()
        self.pools = {name: np.zeros((BLOCKS, BLOCK), np.uint8) for name in ("me", "you")}
        self.pools["you"][:] = np.arange(BLOCKS, dtype=np.uint16)[:, None] % 251
        self.me, self.you = (
            Agent(name, {"pool": KVLayout.from_tensors("block dim", pool)}, transports=("nixl",), slots=SLOTS,
                  agent=double.Agent(self.network, name), progress="thread")
            for name, pool in self.pools.items()
        )  # fmt: skip


def test_pulls_and_pushes_are_timed(monkeypatch):
    monkeypatch.setattr(module, "SHORT_SAMPLES", 2)
    monkeypatch.setattr(module, "LONG_SAMPLES", 2)
    monkeypatch.setattr(module, "REST_SECONDS", 0.0)
    near, ticks = Near(), count()
    peer = near.me.meet(near.you.card())
    found = packed_times(peer, near.me.layouts["pool"], peer.layouts["pool"], clock=lambda: next(ticks) * 1.0)
    assert [one.pull for one in found] == [True, False]
    for one in found:
        assert (one.one, one.many) == (1.0, 1.0)  # a tick between two looks at the clock
        assert (one.few.nbytes, one.all.nbytes) == (BLOCK, BLOCKS * BLOCK)
        assert packed_cost(one.all, replace(default_wire(), slot_nbytes=SLOTS[1])).messages == CHUNKS
    assert near.me.stats().nbytes == 2 * (3 * BLOCKS + 2) * BLOCK
    assert set(near.me.stats().paths) == {"packed"}
    assert (near.pools["me"] > 0).any()
    near.me.close()
    near.you.close()
