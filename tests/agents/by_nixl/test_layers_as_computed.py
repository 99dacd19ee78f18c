"""Packed pushes whose ``after=`` has an object for each layer, by agents on a double of NIXL."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVPlanError, PathError
from kvplan.agents.by_nixl.nixl_progress import prompt
from kvplan.agents.packed.pack_rows import WAITS
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


def test_a_mapping_without_layers_is_none(far):
    """It may be read, and few blocks go direct."""
    a, b = (some[:2] for some in blocks())
    for plan in (far.store.plan(a, b), far.load.plan(b, a)):
        assert far.peer.submit(plan, after={}).result().path == "nixl"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"way": "direct", "by_layer": True}, "after is a mapping of layers.* by the way 'direct', submit each layer"),
        ({"way": "packed"}, "give it with by_layer=True"),
        ({}, "give it with by_layer=True"),
    ],
)
def test_a_mapping_elsewhere_is_refused_before_anything_moves(far, given, problem):
    a, b = blocks()
    before = far.theirs.copy()
    with pytest.raises(KVPlanError, match=problem):
        far.peer.submit(far.store.plan(a, b), after={0: threading.Event()}, **given)
    np.testing.assert_array_equal(far.theirs, before)
    assert far.peer.nixl.in_flight == 0


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        ({"x": threading.Event(), 9: threading.Event()}, r"after has layers \[9, 'x'\], which"),
        ({0: 3}, "after is a .*int"),
    ],
)
def test_layers_and_objects_that_cannot_be_are_refused(far, after, problem):
    a, b = blocks()
    with pytest.raises(KVPlanError, match=problem):
        far.peer.submit(far.store.plan(a, b), after=after, by_layer=True)
    assert far.peer.nixl.in_flight == 0


@pytest.mark.parametrize("way", ["auto", "packed"])
def test_an_agent_that_packs_nothing_takes_no_mapping(way):
    far = Far(progress=None)
    a, b = blocks()
    with pytest.raises(PathError, match=r"this agent packs nothing.*; after is a mapping of layers.*; submit each"):
        far.peer.submit(far.store.plan(a, b), after={0: threading.Event()}, by_layer=True, way=way)
    far.close()


@pytest.mark.parametrize("note", [b"", b"read"])
def test_a_mapping_for_a_pull_is_refused(far, note):
    a, b = blocks()
    with pytest.raises(KVPlanError, match="and to write"):
        far.peer.submit(far.load.plan(a, b), after={0: threading.Event()}, by_layer=True, note=note)
    assert not far.mine.any()
    assert far.peer.nixl.in_flight == 0


def test_a_mapping_over_a_local_transport_is_refused():
    like = kvplan.KVLayout.from_tensors("layer block dim", np.zeros((2, 4, 8), np.int8))
    pool = kvplan.allocate("block layer dim", like=like, shared=True)
    with Agent("pool", {"kv": pool}) as owner, Agent("worker", {}) as worker:
        peer = worker.meet(owner.card())
        plan = kvplan.compile(like, peer.layouts["kv"]).plan([0], [1])
        with pytest.raises(KVPlanError, match="over 'shm', submit each layer by itself"):
            peer.submit(plan, after={0: threading.Event()}, by_layer=True)


def test_the_agents_thread_knows_that_all_its_pushes_wait(far):
    """How long it naps depends on that: what its end tells of transfers reaches the naps."""
    a, b = blocks()
    naps, last = far.me._core.packed._progress.naps, threading.Event()
    asked = naps.fast, naps.resting, lambda: prompt(naps.stages()), lambda: WAITS in naps.stages()
    assert [ask() for ask in asked] == [False] * 4
    transfer = far.peer.submit(far.store.plan(b, a), after={LAYERS - 1: last}, by_layer=True)
    until(lambda: naps.resting() and prompt(naps.stages()) and WAITS in naps.stages())
    last.set()
    transfer.synchronize(PATIENCE)
    assert [ask() for ask in asked] == [False] * 4
