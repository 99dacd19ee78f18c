"""The model of a wire: direct and packed times by hand, the choice and its reason, and the size of a slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.cost.wire import (
    MIB,
    CopyCosts,
    Crossing,
    WireProfile,
    best_slot,
    default_wire,
    direct_at_once,
    direct_cost,
    packed_cost,
)

# Seconds that are easy to add: 1 for a post, 0.1 a descriptor, 0.01 a message of the wire, 0.001 a byte.
WIRE = WireProfile("a wire", "VRAM", "calibrated", "a test", latency=5.0, post=1.0, descriptor=0.1, message=0.01,
                   byte=0.001, overlaps=True, gather=CopyCosts(2.0, 0.0, 0.0), scatter=CopyCosts(3.0, 0.0, 0.0),
                   chunk=0.5, slots=4, slot_nbytes=1000)  # fmt: skip


def crossing(nbytes=4000, units=4, descriptors=40, gather=40, scatter=4):
    return Crossing(nbytes, units, descriptors, gather, scatter)


def test_direct_is_the_longer_of_posting_and_wire():
    found = direct_cost(4000, 40, WIRE)
    assert found.posting == pytest.approx(1 + 40 * 0.1)
    assert found.seconds == pytest.approx(5 + max(1 + 40 * 0.1, 40 * 0.01 + 4000 * 0.001))
    assert found.messages == 40


def test_few_pieces_go_direct_without_a_look_at_the_rest_of_the_plan():
    """By hand, direct takes 5 + 1 + 0.1 a piece; nothing packed moves before the start and one or two latencies."""
    wire = replace(WIRE, start=2.0)
    assert [direct_at_once(10, pieces, wire) for pieces in (59, 61)] == [True, False]
    assert [direct_at_once(10, pieces, wire, pull=False) for pieces in (9, 11)] == [True, False]
    assert not direct_at_once(0, 0, wire)


def test_packed_passes_all_stages_once_and_then_takes_the_slowest():
    wire = 0.01 + 1000 * 0.001  # of a chunk; a scatter takes 3 seconds, so it is the slowest stage
    first = 2.0 + (1 + 0.1 + 0.5) + wire + 3.0 + 0.5
    ring = (first + 2 * 5) / 4  # but a slot's round trip takes longer
    found = packed_cost(crossing(), WIRE)
    assert found.seconds == pytest.approx(2 * 5 + first + 3 * ring)
    assert found.messages == 4
    many = packed_cost(crossing(), replace(WIRE, slots=100))
    assert many.seconds == pytest.approx(2 * 5 + first + 3 * 3.0)


@pytest.mark.parametrize(
    ("nbytes", "units", "chunks"),
    [(4000, 4, 4), (4000, 8, 4), (4000, 3, 6), (4000, 1, 4), (1, 1, 1), (0, 0, 0)],
)
def test_chunks_hold_whole_units_or_pieces_of_large_ones(nbytes, units, chunks):
    assert packed_cost(crossing(nbytes, units), WIRE).messages == chunks


@given(mib=st.integers(1, 8192), unit=st.integers(12, 22), memory=st.sampled_from(["DRAM", "VRAM"]))
def test_a_slot_is_within_3_percent_of_the_best_and_needs_few_messages(mib, unit, memory):
    wire, nbytes = default_wire(memory), mib * MIB
    cross = Crossing(nbytes, max(nbytes >> unit, 1), nbytes >> 13, nbytes >> 13, nbytes >> unit or 1)
    costs = {one: packed_cost(cross, one) for one in (replace(wire, slot_nbytes=MIB << k) for k in range(7))}
    best = best_slot(cross, costs)
    assert costs[best].seconds <= min(cost.seconds for cost in costs.values()) * 1.03
    few = nbytes // (8 * MIB) + 1
    alike = [one for one in costs if costs[one].seconds <= min(c.seconds for c in costs.values()) * 1.03]
    if any(costs[one].messages <= few for one in alike):
        assert costs[best].messages <= few
