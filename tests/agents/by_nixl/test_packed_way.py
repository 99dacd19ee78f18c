"""The packed way of agents over ``nixl``, on a double of NIXL: both directions, notes, layers, refusals and ends."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, PathError, TransferError
from kvplan.cost.wires.wire_profile import default_wire
from tests.agents.by_nixl.far_agents import BLOCKS, DIM, LAYERS, SLOTS, Far, blocks
from tests.agents.by_nixl.known_agents import heard
from tests.nixl import double
from tests.patience import PATIENCE, until


@pytest.fixture
def far():
    made = Far()
    yield made
    made.close()


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


def test_layers_arrive_in_their_order(far):
    a, b = blocks()
    transfer = far.peer.submit(far.load.plan(a, b), by_layer=True, way="packed")
    for layer in range(LAYERS):
        transfer.wait_layer(layer)
        np.testing.assert_array_equal(far.mine[layer, b], far.theirs[a, layer])
    transfer.synchronize(PATIENCE)
    assert [layer for group in transfer.layer_groups for layer in group] == [0, 1, 2]


def test_a_plan_of_more_programs_than_a_line_knows_is_refused(far):
    """Each slice of a layout is a program of its own."""
    sides = far.peer.layouts["kv"], far.me.layouts["kv"]
    plans = [kvplan.compile(*(side.slice(layers=range(1)) for side in sides)).plan([k], [k]) for k in range(64)]
    more = kvplan.compile(*(side.slice(layers=range(1, 2)) for side in sides)).plan([0], [0])
    far.peer.submit(kvplan.join(plans), way="packed").synchronize(PATIENCE)
    with pytest.raises(PathError, match="programs"):
        far.peer.submit(kvplan.join([*plans, more]), way="packed")


def test_after_cancel_and_deadline(far):
    event, never = threading.Event(), threading.Event()
    a, b = blocks()
    transfer = far.peer.submit(far.load.plan(a, b), after=event, way="packed")
    assert not transfer.done()
    assert not far.mine.any()
    event.set()
    transfer.synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))
    waiting = far.peer.submit(far.load.plan(a, b), after=never, way="packed")
    assert waiting.cancel()
    with pytest.raises(TransferError, match="cancelled before it began"):
        waiting.synchronize(PATIENCE)
    late = far.peer.submit(far.load.plan(a, b), after=never, way="packed", deadline=0.01)
    with pytest.raises(TransferError, match="nothing was moved"):
        late.synchronize(PATIENCE)


def test_step_by_step_nobody_but_the_caller_moves_anything():
    far = Far(progress="step", other="step")
    a, b = blocks()
    transfer = far.peer.submit(far.load.plan(a, b), way="packed", note=b"read")
    assert not transfer.done()
    until(lambda: (far.you.poll(), far.me.poll(), transfer.done())[-1])
    transfer.synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))
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


def test_both_peers_may_begin():
    far = Far()
    back = far.you.meet(far.me.card())
    a, b = blocks()
    there = kvplan.compile(far.you.layouts["kv"], back.layouts["kv"])
    plans = [far.load.plan(a[:20], b[:20]), there.plan(a[20:], b[20:])]
    both = [far.peer.submit(plans[0], way="packed"), back.submit(plans[1], way="packed")]
    for one in both:
        one.synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))
    far.close()


def test_a_peer_that_dies_ends_every_transfer(far):
    a, b = blocks()
    far.peer.submit(far.load.plan(a, b), way="packed").synchronize(PATIENCE)
    far.network.frozen = True
    transfer = far.peer.submit(far.load.plan(a, b), way="packed")
    far.network.agents["you"].dead = True
    with pytest.raises(TransferError, match="reading from 'you' failed"):
        transfer.synchronize(PATIENCE)
    far.network.frozen = False
    assert far.me.stats().in_flight == 0
    far.me.close()
    far.network.agents["me"].dead = True  # "you" lives in truth, and is not to wait for an answer


def test_a_forgotten_peer_and_the_next_meeting(far):
    a, b = blocks()
    far.peer.submit(far.load.plan(a, b), way="packed").synchronize(PATIENCE)
    far.me.forget(far.peer)
    with pytest.raises(TransferError, match="no transfer with 'you'"):
        far.peer.submit(far.load.plan(a, b), way="packed")
    peer = far.me.meet(far.you.card())
    far.mine[:] = 0
    load = kvplan.compile(peer.layouts["kv"], far.me.layouts["kv"])
    peer.submit(load.plan(a, b), way="packed").synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))


def test_an_agent_that_is_collected_gives_everything_back(far):
    a, b = blocks()
    far.peer.submit(far.load.plan(a, b), way="packed").synchronize(PATIENCE)
    far.me = far.peer = far.load = far.store = None
    gc.collect()
    mine = far.network.agents["me"]
    until(lambda: not any(mine.memory.values()) and not mine.live)
    until(lambda: not far.network.agents["you"].known)
    far.me = far.you  # which close() closes


def test_notes_that_nobody_takes_are_bounded(far, caplog):
    note, number = bytes(60_000), 1_200
    for _ in range(number):
        far.peer.send(note)
    until(lambda: "notes of me are lost" in caplog.text)
    assert 500 < len(far.you.notes()) < number
    far.peer.send(b"17")
    assert heard(far.you)[-1] == ("me", b"17")


@pytest.mark.parametrize("noticed", [False, True])
def test_a_peer_that_was_killed_is_met_again_in_another_life(noticed):
    """NIXL knows the dead one until its lane has ended, and takes no other metadata of that name meanwhile."""
    far = Far()
    a, b = blocks()
    far.peer.submit(far.load.plan(a, b), way="packed").synchronize(PATIENCE)
    killed = far.network.agents["you"]
    killed.dead = True
    if noticed:
        with pytest.raises(TransferError):
            far.peer.submit(far.load.plan(a, b), way="packed").synchronize(PATIENCE)
    theirs = np.random.default_rng(9).integers(1, 256, far.theirs.shape, dtype=np.uint8)
    again = Agent(
        "you", {"kv": KVLayout.from_tensors("block layer dim", theirs)}, transports=("nixl",), progress="thread",
        agent=double.Agent(far.network, "you", life=1), slots=SLOTS,
    )  # fmt: skip
    peer = far.me.meet(again.card())
    load = kvplan.compile(peer.layouts["kv"], far.me.layouts["kv"])
    for turn in range(2):
        far.mine[:] = 0
        peer.submit(load.plan(a, b), way="packed").synchronize(PATIENCE)
        np.testing.assert_array_equal(far.mine[:, b], theirs[a].swapaxes(0, 1), err_msg=f"turn {turn}")
    far.me.close()
    again.close()
    far.network.agents["me"].dead = True  # the killed one lives in truth, and is not to wait for an answer
    far.you.close()
