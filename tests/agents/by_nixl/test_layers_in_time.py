"""Pushes by layer beside compute: the last layer arrives soon, however far apart layers are; by a clock of the test."""

from __future__ import annotations

import pytest

import kvplan
from kvplan.agents.by_nixl.nixl_progress import MOST_BUSY_NAP
from kvplan.agents.packed.pack_rows import only_last_left, rows_of
from kvplan.plan.packing.packing import packings_by_layer
from tests.agents.by_nixl.virtual_wire import COPY, EMPTY, FOUND, Two

LAYERS = 16
# The steps behind a layer's compute: it is seen, gathered, written, and scattered, each of which a look finds and the
# next step follows; and the word of its end. Naps come at most twice between two looks that matter to the last layer.
STEPS = 4 * (FOUND + EMPTY) + 2 * COPY


@pytest.mark.parametrize("compute", [2.5e-3, 16e-3, 40e-3])
@pytest.mark.parametrize(("chunks", "seconds"), [(1, 1.34e-3), (2, 0.67e-3), (1, 0.17e-3)])
def test_the_last_layer_arrives_as_soon_whatever_a_layer_takes(chunks, seconds, compute):
    two = Two(seconds, patient=True, together=True, layers=LAYERS)
    tails = [two.push_by_layer(chunks, [compute * (1 + k % 3 / 50) for k in range(LAYERS)]) for _ in range(4)]
    assert max(tails) < chunks * seconds + STEPS + 3 * MOST_BUSY_NAP


def test_layers_before_the_last_ones_are_looked_for_rarely():
    """A layer of 40 ms has 400 naps of 0.1 ms."""
    two = Two(1.34e-3, patient=True, together=True, layers=LAYERS)
    two.push_by_layer(1, [40e-3] * LAYERS)
    assert max(two.near.looks, two.far.looks) < 200 * LAYERS


def test_only_the_last_layer_is_looked_for_often():
    """By the rows of the chunks; not of a plan that is one piece."""
    two = Two(1e-3, patient=True, layers=3)
    plan = kvplan.compile(two.here, two.there).plan(range(32), range(32))
    rows, more = (rows_of([packing.src for _, packing in packings_by_layer(plan, 3)], 4096) for _ in range(2))
    assert [row.piece for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [only_last_left(rows, done) for done in range(7)] == [False] * 4 + [True] * 3
    legs = [*rows, *more[:4]]  # a leg of an order counts from 0
    assert [only_last_left(legs, done) for done in range(11)] == [False] * 8 + [True] * 3
    assert not any(only_last_left(rows[:2], done) for done in range(3))
    assert not only_last_left([], 0)


def test_short_naps_for_the_last_layer_end_when_its_compute_is_late():
    """A second has 10,000 naps of 0.1 ms. A layer that takes three times as long as those before it is seen soon."""
    two = Two(1.34e-3, patient=True, together=True, layers=LAYERS)
    two.push_by_layer(1, [16e-3] * (LAYERS - 1) + [1.0])
    assert max(two.near.looks, two.far.looks) < 3600
    assert two.push_by_layer(1, [16e-3] * (LAYERS - 1) + [48e-3]) < 1.34e-3 + STEPS + 3 * MOST_BUSY_NAP
