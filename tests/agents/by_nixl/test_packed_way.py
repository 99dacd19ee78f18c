"""The packed way of agents over ``nixl``, on a double of NIXL: the choice, layers, notes, refusals and ends."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, PathError, TransferError
from kvplan.cost.wire import default_wire
from tests.agents.by_nixl.far_agents import BLOCKS, DIM, LAYERS, Far, blocks, heard
from tests.nixl import double
from tests.patience import PATIENCE, until


def test_its_transfers_are_counted_once(far):
    a, b = blocks()
    for plan, note in ((far.load.plan(a, b), b""), (far.load.plan(a, b), b"read"), (far.store.plan(a, b), b"wrote")):
        far.peer.submit(plan, way="packed", note=note).synchronize(PATIENCE)
    stats = far.me.stats()
    assert (stats.transfers, stats.nbytes, stats.failed) == (3, 3 * LAYERS * BLOCKS * DIM, 0)
    assert {flow: sums.transfers for flow, sums in stats.flows.items()} == {
        ("packed", "read"): 2,
        ("packed", "write"): 1,
    }
    late = far.peer.submit(far.load.plan(a, b), way="packed", after=threading.Event(), note=b"never", deadline=1e-3)
    with pytest.raises(TransferError):
        late.synchronize(PATIENCE)
    until(lambda: far.me.stats().failed + far.me.stats().cancelled == 1)
    assert far.you.stats().transfers == 0


def test_a_close_waits_for_one_that_was_just_submitted(far):
    a, b = blocks()
    transfer = far.peer.submit(far.load.plan(a, b), way="packed")
    far.me.close()
    transfer.synchronize(PATIENCE)
    assert far.came(a, b)


def test_an_interrupt_within_nixl_is_raised_once():
    far, (a, b) = Far(progress="step"), blocks()
    left = [KeyboardInterrupt]

    def interrupted(call, *_):
        if call == "transfer" and left:
            raise left.pop()

    far.network.hook = interrupted
    transfer = far.peer.submit(far.store.plan(a, b), way="packed")
    with pytest.raises(KeyboardInterrupt):
        until(lambda: (far.me.poll(), far.you.poll()) is None)
    with pytest.raises(TransferError, match="interrupted while it was posted"):
        transfer.synchronize(PATIENCE)
    closing = threading.Thread(target=far.me.close)
    closing.start()
    until(lambda: (far.you.poll(), not closing.is_alive())[-1])
    far.close()


@pytest.fixture
def dear(monkeypatch, tmp_path):
    """A wire whose descriptors cost so much that a hundred are packed."""
    file = tmp_path / "dear.json"
    file.write_text(replace(default_wire("DRAM"), descriptor=1e-4).to_json())
    monkeypatch.setenv("KVPLAN_WIRE", str(file))


def test_auto_packs_many_small_pieces_and_posts_few(dear, far):
    a, b = blocks()
    assert far.peer.submit(far.load.plan(a, b)).result().path == "packed"
    assert far.peer.submit(far.load.plan(a[:2], b[:2])).result().path == "nixl"
    assert far.peer.submit(far.load.plan(a, b), way="direct").result().path == "nixl"


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
    assert heard(far.you) == [("me", b"all")]


def test_step_by_step_nobody_but_the_caller_moves_anything():
    far = Far(progress="step")
    a, b = blocks()
    transfer = far.peer.submit(far.load.plan(a, b), way="packed", note=b"read")
    assert not transfer.done()
    until(lambda: (far.you.poll(), far.me.poll(), transfer.done())[-1])
    transfer.synchronize(PATIENCE)
    assert far.came(a, b)
    assert heard(far.you) == [("me", b"read")]
    closing = threading.Thread(target=far.me.close)
    closing.start()
    until(lambda: (far.you.poll(), not closing.is_alive())[-1])
    far.close()


def test_the_agent_of_a_caller_packs_only_if_progress_is_given():
    network = double.Network()
    pools = [KVLayout.from_tensors("block dim", np.zeros((256, 64), np.uint8)) for _ in range(2)]
    you = Agent("you", {"kv": pools[0]}, transports=("nixl",), agent=double.Agent(network, "you"))
    me = Agent("me", {"kv": pools[1]}, transports=("nixl",), agent=double.Agent(network, "me"), progress="thread")
    assert "packed" not in json.loads(you.card())["offered"]["nixl"]["part"]
    peer = me.meet(you.card())
    plan = kvplan.compile(peer.layouts["kv"], me.layouts["kv"]).plan(range(0, 256, 2), range(128))
    with pytest.raises(PathError, match="the card of 'you' offers no packed transfers"):
        peer.submit(plan, way="packed")
    assert peer.submit(plan).result().path == "nixl"
    back = you.meet(me.card())
    plan = kvplan.compile(back.layouts["kv"], you.layouts["kv"]).plan(range(0, 256, 2), range(128))
    with pytest.raises(PathError, match="this agent packs nothing"):
        back.submit(plan, way="packed")
    me.close()
    you.close()


def test_notes_that_nobody_takes_are_bounded(far, caplog):
    note, number = bytes(60_000), 1_200
    for _ in range(number):
        far.peer.send(note)
    until(lambda: "notes of me are lost" in caplog.text)
    assert 500 < len(far.you.notes()) < number
    far.peer.send(b"17")
    assert heard(far.you)[-1] == ("me", b"17")
