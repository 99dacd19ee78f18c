"""The packed way of agents over ``nixl``, on a double of NIXL: both directions, notes, layers, refusals and ends."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, LayoutError, PathError, TransferError
from kvplan.agents.by_nixl.nixl_packed import PACKED_VERSION, NixlPacked
from kvplan.agents.by_nixl.packed_way import GPU_SLOTS, Slots, allocated, slots_of_a_peer
from kvplan.agents.packed.pack_end import End
from kvplan.cost.wires.wire_profile import default_wire
from kvplan.cost.wires.wire_store import save_wire
from kvplan.plan.row_plans import Memory
from tests.agents.by_nixl.far_agents import BLOCKS, DIM, LAYERS, SLOTS, Far, blocks
from tests.agents.by_nixl.known_agents import heard
from tests.nixl import double
from tests.patience import PATIENCE, until


@pytest.fixture
def far():
    made = Far()
    yield made
    made.close()


def test_a_pull_and_a_push(far):
    a, b = blocks()
    transfer = far.peer.submit(far.load.plan(a, b), note=b"read", way="packed")
    result = transfer.result()
    assert (result.path, result.nbytes) == ("packed", LAYERS * BLOCKS * DIM)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))
    far.mine[:] = np.random.default_rng(3).integers(0, 256, far.mine.shape, dtype=np.uint8)
    far.peer.submit(far.store.plan(b, a), note=b"wrote", way="packed").synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))
    assert heard(far.you, 2) == [("me", b"read"), ("me", b"wrote")]
    far.peer.send(b"alone")
    assert heard(far.you) == [("me", b"alone")]


def test_a_transfer_takes_few_messages(far):
    a, b = blocks()
    result = far.peer.submit(far.load.plan(a, b), way="packed").result()
    units = SLOTS[1] // (LAYERS * DIM)  # of a chunk
    assert result.descriptors == -(-BLOCKS // units)


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
    save_wire(replace(default_wire("DRAM"), descriptor=1e-4), file)
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


def test_cards_of_other_versions(far):
    card = json.loads(far.you.card())
    card["offered"]["nixl"]["part"]["packed"] = PACKED_VERSION + 1
    peer = far.me.meet(json.dumps(card).encode())
    plan = kvplan.compile(peer.layouts["kv"], far.me.layouts["kv"]).plan(*blocks())
    told = f"'you' packs by version {PACKED_VERSION + 1}, and this kvplan by {PACKED_VERSION}"
    with pytest.raises(PathError, match=told):
        peer.submit(plan, way="packed")
    assert peer.submit(plan).result().path == "nixl"
    del card["offered"]["nixl"]["part"]["packed"]
    peer = far.me.meet(json.dumps(card).encode())
    with pytest.raises(PathError, match="offers no packed transfers"):
        peer.submit(kvplan.compile(peer.layouts["kv"], far.me.layouts["kv"]).plan(*blocks()), way="packed")
    for packed in (True, -1, 1.5, "1", None, 1 << 16):
        card["offered"]["nixl"]["part"]["packed"] = packed
        with pytest.raises(LayoutError, match="the card's nixl is"):
            far.me.meet(json.dumps(card).encode())


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


def test_a_ring_that_cannot_be_registered(far):
    far.network.failures = ["register"]
    with pytest.raises(TransferError, match="NIXL cannot register the ring of 'me'"):
        far.peer.submit(far.load.plan(*blocks()), way="packed")
    far.peer.submit(far.load.plan(*blocks()), way="packed").synchronize(PATIENCE)


def test_a_peer_that_refuses():
    far = Far(other="step")
    far.you._core.packed.lanes.refused = "it has no memory left"
    transfer = far.peer.submit(far.load.plan(*blocks()), way="packed")
    far.you.poll()
    with pytest.raises(TransferError, match="it takes no packed transfer: 'it has no memory left'"):
        transfer.synchronize(PATIENCE)
    with pytest.raises(PathError, match="it takes no packed transfer"):
        far.peer.submit(far.load.plan(*blocks()), way="packed")
    assert far.peer.submit(far.load.plan(*blocks())).result().path == "nixl"
    far.close()


def test_arguments_that_are_wrong(far):
    with pytest.raises(PathError, match="unknown way 'parcel'"):
        far.peer.submit(far.load.plan([0], [1]), way="parcel")
    with pytest.raises(KVPlanError, match="progress is 'magic'"):
        Agent("x", {}, progress="magic")
    for slots in ((1, 4096), (8, 100), (8, 4097), 8, (8, 4096, 1)):
        with pytest.raises(KVPlanError, match="slots"):
            Agent("x", {}, slots=slots)


def test_looks_while_transfers_are_in_flight_are_counted(far):
    far.peer.submit(far.load.plan(*blocks()), way="packed").synchronize(PATIENCE)
    progress = far.me._core.packed._progress
    assert progress.looks > 0
    assert 0 < progress.longest <= progress.waited


@pytest.mark.parametrize(("device", "seen", "fast"), [("cuda:0", True, True), ("cuda:0", False, False),
                                                      ("cpu", True, False)])  # fmt: skip
def test_a_ring_of_host_memory_is_never_left_alone(device, seen, fast):
    """Its bytes may be copied by looks, however fast; those of a GPU that come so fast are not."""
    ring = SimpleNamespace(end=SimpleNamespace(fast=seen), memory=Memory(0, 0, device))
    assert NixlPacked._fast(SimpleNamespace(lanes=SimpleNamespace(ring=ring))) == fast
    assert not NixlPacked._fast(SimpleNamespace(lanes=SimpleNamespace(ring=None)))


@pytest.mark.parametrize(
    ("how", "nbytes", "slots"), [("calibrated", 1 << 16, (24, 1 << 16)), ("calibrated", 64 << 20, (16, 8 << 20)),
                                 ("calibrated", 1, (24, 4096)), ("default", 1 << 16, (24, 4 << 20))]
)  # fmt: skip
def test_a_ring_has_slots_of_the_size_that_calibration_has_found(monkeypatch, tmp_path, how, nbytes, slots):
    file = tmp_path / "mine.json"
    save_wire(replace(default_wire("DRAM"), how=how, slot_nbytes=nbytes), file)
    monkeypatch.setenv("KVPLAN_WIRE", str(file))
    far = Far(slots=None)
    a, b = blocks()
    far.peer.submit(far.load.plan(a, b), way="packed").synchronize(PATIENCE)
    np.testing.assert_array_equal(far.mine[:, b], far.theirs[a].swapaxes(0, 1))
    for agent in (far.me, far.you):
        ring = agent._core.packed.lanes.ring.end.ring
        assert (len(ring.slots), ring.slot_nbytes) == slots
    far.close()


def test_a_ring_is_smaller_where_a_gpu_has_little_memory_left():
    def pages(nbytes, device):
        if nbytes > 100 << 20:
            raise PathError(f"{device} has no {nbytes:,} bytes for a ring")
        return nbytes

    assert allocated("cuda:0", GPU_SLOTS, pages, smaller=True) == ((16, 4 << 20), 64 << 20)
    for slots, smaller in ((GPU_SLOTS, False), (Slots(32, 8 << 20), True)):
        with pytest.raises(PathError, match="cuda:0 has no"):
            allocated("cuda:0", slots, pages, smaller=smaller)


@pytest.mark.parametrize("number", [2, 3, 8, 16, 24, 64])
def test_the_slots_of_a_lone_peer_are_those_that_an_end_gives(number):
    memory = np.zeros(number * 4096 + 256, np.uint8)
    start = -memory.ctypes.data % 256
    ring = Memory(memory.ctypes.data + start, number * 4096, "cpu", memory)
    with kvplan.Executor("cpu") as executor:
        end = End("me", ring, 4096, executor, lambda: None)
        assert slots_of_a_peer(Slots(number, 4096)) == end._peers._most
        end.close()


def test_explain_says_why(dear, far):
    a, b = blocks()
    assert far.peer.explain(far.load.plan(a, b)).startswith("by nixl, packed: packed takes")
    assert far.peer.explain(far.load.plan(a[:2], b[:2])).startswith("by nixl, direct: direct takes")
    far.me._core.packed.lanes.refusals["you"] = "it has no memory"
    assert far.peer.explain(far.load.plan(a, b)) == "by nixl, direct: it has no memory"
    with pytest.raises(KVPlanError, match="plan is a int"):
        far.peer.explain(3)
