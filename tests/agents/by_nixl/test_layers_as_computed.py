"""Packed pushes whose ``after=`` has an object for each layer, by agents on a double of NIXL."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.agents.by_nixl.far_agents import LAYERS, Far, blocks
from tests.patience import PATIENCE, until


@pytest.fixture
def far():
    made = Far()
    yield made
    made.close()


@pytest.mark.parametrize("way", ["auto", "packed"])
def test_each_layer_is_sent_when_it_is_computed(far, way):
    """Also few blocks, which go direct by auto otherwise."""
    far.mine[:] = np.random.default_rng(3).integers(1, 256, far.mine.shape)
    before = far.theirs.copy()
    a, b = (some[:2] for some in blocks())
    computed = {layer: threading.Event() for layer in range(LAYERS)}
    transfer = far.peer.submit(far.store.plan(a, b), after=computed, by_layer=True, way=way, note=b"all")
    for layer in range(LAYERS):
        np.testing.assert_array_equal(far.theirs[:, layer:], before[:, layer:])
        computed[layer].set()
        until(lambda layer=layer: (far.theirs[b, layer] == far.mine[layer, a]).all())
    transfer.synchronize(PATIENCE)
    assert transfer.result().path == "packed"
    until(lambda: [note for _, note in far.you.notes()] == [b"all"])


def test_a_layer_without_an_object_follows_the_one_before_it(far):
    far.mine[:] = 7
    a, b = blocks()
    first = threading.Event()
    transfer = far.peer.submit(far.store.plan(a, b), after={0: first}, by_layer=True)
    other = far.peer.submit(far.store.plan(a[:1], b[:1]), way="direct")
    other.synchronize(PATIENCE)
    assert not transfer.done()
    first.set()
    transfer.synchronize(PATIENCE)
    assert (far.theirs == 7).all()


def test_none_in_a_mapping_is_no_object(far):
    far.mine[:] = 7
    a, b = blocks()
    second = threading.Event()
    transfer = far.peer.submit(far.store.plan(a, b), after={0: None, 1: second, 2: None}, by_layer=True)
    until(lambda: set(far.theirs[:, 0].flat) == {7})
    assert not transfer.done()
    second.set()
    transfer.synchronize(PATIENCE)
    assert (far.theirs == 7).all()
