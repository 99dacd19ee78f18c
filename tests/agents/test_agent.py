"""Transfers between two agents of one process: what they move, what they tell, and what they refuse."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

import kvplan
from kvplan import Agent, KVLayout, KVPlanError, LayoutError, PathError, TransferError
from kvplan.agents.peer_transfer import Order, PeerTransfer
from kvplan.execute import stats
from tests.agents.workers import BLOCKS, DIM, LAYERS, content, pool
from tests.patience import PATIENCE, until


def test_blocks_are_read_under_another_order(both):
    transfer = both.peer.submit(both.load.plan([5, 1, 2], [0, 7, 3]))
    transfer.synchronize(PATIENCE)
    expected = np.zeros_like(both.mine)
    for src, dst in ((5, 0), (1, 7), (2, 3)):
        expected[:, dst] = content()[src]
    np.testing.assert_array_equal(both.mine, expected)
    result = transfer.result()
    assert (result.nbytes, result.path) == (3 * LAYERS * DIM, "host")
    assert transfer.done()
    assert repr(transfer).endswith("done)")
    stats = both.visitor.stats()
    assert (stats.transfers, stats.nbytes, stats.failed, stats.in_flight) == (1, 3 * LAYERS * DIM, 0, 0)
    assert both.owner.stats().transfers == 0


def test_blocks_are_written_with_a_note(both):
    both.mine[:] = 7
    both.peer.submit(both.store.plan([0, 1], [6, 2]), note=b"request 17").synchronize(PATIENCE)
    expected = content()
    expected[[6, 2]] = 7
    np.testing.assert_array_equal(both.theirs, expected)
    assert both.owner.notes() == [("visitor", b"request 17")]
    assert both.owner.notes() == []


def test_notes_come_in_the_order_of_the_submits(both):
    transfers = [both.peer.submit(both.load.plan([k % BLOCKS], [k % BLOCKS]), note=b"%d" % k) for k in range(200)]
    transfers[-1].synchronize(PATIENCE)
    both.peer.send(b"last")
    assert both.owner.notes() == [("visitor", b"%d" % k) for k in range(200)] + [("visitor", b"last")]


def test_sums_of_many_transfers_take_no_more_memory(both, monkeypatch):
    monkeypatch.setattr(stats, "PENDING", 10)
    for _ in range(50):
        both.peer.submit(both.load.plan([1], [1])).synchronize(PATIENCE)
    both.visitor.close()
    assert len(both.visitor._core.tally.ends) <= 11
    assert both.visitor.stats().transfers == 50


def test_a_note_waits_for_the_transfer_that_it_belongs_to(both):
    event = threading.Event()
    transfer = both.peer.submit(both.store.plan([0], [1]), after=event, note=b"stored")
    assert not transfer.done()
    assert both.owner.notes() == []
    assert both.visitor.stats().in_flight == 1
    event.set()
    transfer.synchronize(PATIENCE)
    assert both.owner.notes() == [("visitor", b"stored")]


def test_transfers_wait_for_each_other(both):
    event = threading.Event()
    first = both.peer.submit(both.load.plan([4], [0]), after=event)
    back = both.peer.submit(both.store.plan([0], [9]), after=first)
    assert not back.done()
    event.set()
    back.synchronize(PATIENCE)
    np.testing.assert_array_equal(both.theirs[9], content()[4])


def test_a_chain_of_transfers_does_not_stay_alive(both):
    first = last = both.peer.submit(both.load.plan([4], [0]))
    gone = weakref.ref(first)
    for _ in range(20):
        last = both.peer.submit(both.load.plan([4], [0]), after=last)
    last.synchronize(PATIENCE)
    del first
    until(lambda: gone() is None)


class Fake(kvplan.Transfer):
    """The transfer of a GPU, whose bytes have moved."""

    wait = wait_layer = await_issue = synchronize = result = done = lambda *_: None


class FakeLink:
    why = None

    def __init__(self, why):
        self.lost = lambda _: why
        self.leave_flight = lambda _: None


def test_bytes_that_a_gpu_passed_on_from_a_peer_that_died_are_not_called_done(both):
    """A GPU waits for the bytes of ``after=``; only its end tells whether they were right."""
    plan = both.load.plan([0], [0])
    load = PeerTransfer(Order(plan, "a", reading=True), FakeLink("'a' has ended"), None, stats.Tally(), Fake)
    store = PeerTransfer(Order(plan, "b", reading=False, after=load), FakeLink(None), None, stats.Tally(), Fake)
    for one in (load, store):
        one.submit()
        assert one.settle()
    with pytest.raises(TransferError, match=r"writing to 'b' failed: its after= failed \(.*may hold wrong bytes"):
        store.synchronize()


def test_a_plain_executor_takes_a_peers_layouts(both):
    with kvplan.Executor() as executor:
        transfer = executor.submit(both.load.plan([2], [2]))
        after = both.peer.submit(both.store.plan([2], [3]), after=transfer)
        executor.submit(both.load.plan([3], [5]), after=after).synchronize(PATIENCE)
    np.testing.assert_array_equal(both.mine[:, 5], content()[2])


def test_layers_priorities_and_resharding(both):
    transfer = both.peer.submit(both.load.plan([1], [1]), by_layer=True, priority="high")
    transfer.wait_layer(2)
    assert transfer.layer_groups == ((0, 1, 2),)
    np.testing.assert_array_equal(both.mine[2, 1], content()[1, 2])
    with pytest.raises(LayoutError, match="layer 7 is not moved"):
        transfer.wait_layer(7)
    assert kvplan.verify(both.peer.layouts["kv"], both.here).ok
    np.testing.assert_array_equal(both.theirs, content())


def test_a_cancelled_transfer_moves_and_tells_nothing(both):
    event = threading.Event()
    transfer = both.peer.submit(both.store.plan([0], [1]), after=event, note=b"never")
    behind = both.peer.submit(both.store.plan([0], [2]), note=b"behind")
    assert transfer.cancel()
    assert transfer.cancel()
    with pytest.raises(TransferError, match="cancelled before it began; nothing was moved"):
        transfer.synchronize(PATIENCE)
    behind.synchronize(PATIENCE)
    assert not behind.cancel()
    assert both.owner.notes() == [("visitor", b"behind")]
    np.testing.assert_array_equal(both.theirs[1], content()[1])
    assert both.visitor.stats().cancelled == 1
    event.set()


@pytest.mark.parametrize("deadline", [1e10, float("inf")])
def test_a_deadline_of_centuries_is_one(both, deadline):
    for _ in range(30):
        both.peer.submit(both.store.plan([0], [1]), deadline=deadline, note=b"there").synchronize(PATIENCE)
    event = threading.Event()
    late = both.peer.submit(both.store.plan([0], [1]), after=event, deadline=deadline)
    event.set()
    late.synchronize(PATIENCE)
    both.visitor.close(timeout=float("inf"))


def test_a_deadline_ends_what_has_not_begun(both):
    event = threading.Event()
    transfer = both.peer.submit(both.store.plan([0], [1]), after=event, deadline=0.01)
    with pytest.raises(TransferError, match=r"did not end within its deadline of 0\.01 seconds; it had not begun"):
        transfer.synchronize(PATIENCE)
    np.testing.assert_array_equal(both.theirs[1], content()[1])
    event.set()
    assert both.visitor.stats().failed == 1
    both.peer.submit(both.store.plan([0], [1]), deadline=PATIENCE).synchronize()


def test_a_plan_of_nothing_ends_and_tells(both):
    assert both.peer.submit(both.load.plan([], []), note=b"empty").result().nbytes == 0
    assert both.owner.notes() == [("visitor", b"empty")]


def test_both_directions_at_once(agents):
    a, b = agents("a", seed=1), agents("b", seed=2)
    at_b, at_a = a.meet(b.card()), b.meet(a.card())
    one = at_b.submit(kvplan.compile(a.layouts["kv"], at_b.layouts["kv"]).plan([1], [2]), note=b"to b")
    two = at_a.submit(kvplan.compile(b.layouts["kv"], at_a.layouts["kv"]).plan([3], [4]), note=b"to a")
    one.synchronize(PATIENCE)
    two.synchronize(PATIENCE)
    assert (a.notes(), b.notes()) == ([("b", b"to a")], [("a", b"to b")])
    np.testing.assert_array_equal(a.layouts["kv"].tensors[4], content(2)[3])
    np.testing.assert_array_equal(b.layouts["kv"].tensors[2], content(1)[1])


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"plan": 3}, KVPlanError, "plan is a int"),
        ({"note": "text"}, KVPlanError, "note is a str"),
        ({"note": bytes(60_001)}, KVPlanError, "note has 60,001 bytes"),
        ({"attempts": 0}, KVPlanError, "attempts is 0"),
        ({"deadline": 0}, KVPlanError, "deadline is 0"),
        ({"deadline": True}, KVPlanError, "deadline is True"),
        ({"after": 3}, KVPlanError, "after is a builtins.int"),
        ({"priority": "low"}, KVPlanError, "priority is 'low'"),
    ],
)
def test_wrong_submits(both, given, error, says):
    with pytest.raises(error, match=says):
        both.peer.submit(**{"plan": both.load.plan([0], [0])} | given)
    assert both.visitor.stats().in_flight == 0


def test_plans_that_are_not_with_this_peer(both, agents):
    with pytest.raises(PathError, match="neither side of"):
        both.peer.submit(kvplan.compile(both.here, both.here).plan([0], [1]))
    with pytest.raises(PathError, match="both sides of"):
        both.peer.submit(kvplan.compile(both.peer.layouts["kv"], both.peer.layouts["kv"]).plan([0], [1]))
    other = agents("another", seed=3)
    far = both.visitor.meet(other.card())
    with pytest.raises(PathError, match="neither side of"):
        far.submit(both.load.plan([0], [0]))


def test_private_memory_is_not_offered_and_the_refusal_says_what_helps(agents):
    owner = Agent("private", {"kv": KVLayout.from_tensors("block dim", np.zeros((4, 8), np.uint8))}, transports=["shm"])
    visitor = agents("visitor", layouts={}, transports=["shm", "nixl"])
    with pytest.raises(PathError, match=r"its memory is private .* kvplan.allocate\(..., shared=True\)") as caught:
        visitor.meet(owner.card())
    assert str(caught.value).startswith("no transport serves layout 'kv' of 'private': shm: 'private' does not offer")
    owner.close()


def test_files_on_a_disk_are_not_offered_and_the_refusal_says_what_helps(agents, monkeypatch, tmp_path):
    from kvplan.memory import shared_mappings

    monkeypatch.setattr(shared_mappings, "_file_system", lambda _: 0xEF53)  # the temporary folder may be in memory
    held = np.memmap(tmp_path / "pool", np.uint8, "w+", shape=(4, 4096))
    owner = agents("disk", layouts={"kv": KVLayout.from_tensors("block dim", held)}, transports=["shm"])
    with pytest.raises(PathError, match=r"file system of number 0xef53; .* kvplan.allocate\(..., shared=True\)"):
        agents("visitor", layouts={}).meet(owner.card())


def test_read_only_pools_are_offered_read_only(agents):
    held = pool()
    locked = np.array(held.tensors, copy=False)
    locked.flags.writeable = False
    owner = agents("owner", layouts={"kv": KVLayout.from_tensors("block layer dim", locked)})
    peer = agents("visitor", layouts={}).meet(owner.card())
    mine = KVLayout.from_tensors("block layer dim", np.zeros((BLOCKS, LAYERS, DIM), np.uint8))
    peer.submit(kvplan.compile(peer.layouts["kv"], mine).plan([3], [3])).synchronize(PATIENCE)
    np.testing.assert_array_equal(mine.tensors[3], content()[3])
    with pytest.raises(LayoutError, match="is read-only"):
        peer.submit(kvplan.compile(mine, peer.layouts["kv"]).plan([3], [3]))


def test_torch_tensors_that_are_shared(agents):
    torch = pytest.importorskip("torch")
    tensors = [torch.zeros(BLOCKS, DIM, dtype=torch.uint8).share_memory_() for _ in range(LAYERS)]
    owner = agents("owner", layouts={"kv": KVLayout.from_tensors("layer: block dim", tensors)})
    peer = agents("visitor", layouts={}).meet(owner.card())
    mine = KVLayout.from_tensors("block layer dim", content())
    peer.submit(kvplan.compile(mine, peer.layouts["kv"]).plan([3], [4])).synchronize(PATIENCE)
    for layer in range(LAYERS):
        np.testing.assert_array_equal(tensors[layer][4].numpy(), content()[3, layer])


def test_named_pools_are_offered(agents, tmp_path):
    like = KVLayout.from_tensors("block layer dim", content())
    named = kvplan.allocate("layer block dim", like=like, shared=f"kvplan-test-{tmp_path.name}")
    owner = agents("owner", layouts={"kv": named})
    peer = agents("visitor", layouts={}).meet(owner.card())
    peer.submit(kvplan.compile(like, peer.layouts["kv"]).plan([3], [4])).synchronize(PATIENCE)
    np.testing.assert_array_equal(named.tensors[:, 4], content()[3])


def test_agents_that_are_wrong(agents):
    for given, error, says in [
        ({"name": ""}, LayoutError, "the name of an agent"),
        ({"layouts": []}, LayoutError, "layouts is"),
        ({"layouts": {"kv": 3}}, LayoutError, "layout 'kv' is a int"),
        ({"transports": "shm"}, PathError, "transports is 'shm'"),
        ({"transports": ()}, PathError, "transports is"),
        ({"transports": ["tcp"]}, PathError, "unknown transport 'tcp'; expected one of"),
        ({"executor": 3}, PathError, "executor is 3"),
        ({"users": "root"}, KVPlanError, "users is 'root'"),
        ({"users": ["no such user"]}, KVPlanError, "no user of that name"),
        ({"users": [None]}, KVPlanError, "users name None"),
    ]:
        with pytest.raises(error, match=says):
            Agent(**{"name": "x", "layouts": {}} | given)
    spec = KVLayout.from_spec({"notation": "block dim", "sizes": {"block": 4, "dim": 8}})
    with pytest.raises(LayoutError, match="is not of this process's memory"):
        Agent("x", {"kv": spec})
    me = agents("me")
    with pytest.raises(KVPlanError, match="as this agent"):
        me.meet(me.card())
