"""Packed transfers between two ends, case by case, with numbers computed by hand."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan.agents.packed.pack_rows import Copier
from kvplan.errors import KVPlanError, TransferError
from tests.agents.packed.pairs import BLOCKS, LAYERS, Pair
from tests.agents.packed.simulated_wire import Faults


def test_a_pull_and_a_push(pair):
    """10 blocks of 3 rows of 64 bytes are 1,920 bytes: 2 chunks of at most 1,024."""
    transfer = pair.submit([3, 1, 4], [1, 5, 9], reading=True)
    assert not transfer.done()
    pair.ended(transfer)
    assert pair.same([3, 1, 4], [1, 5, 9])
    assert transfer.result()[:1] + transfer.result()[2:5] == (576, "packed", 1, 1)
    pair.mine[:] = 7
    transfer = pair.submit(reading=False, note=b"wrote")
    pair.ended(transfer)
    assert pair.same()
    assert transfer.result()[:1] + transfer.result()[2:5] == (1920, "packed", 2, 2)
    assert pair.far.end.notes() == [("near", b"wrote")]
    assert pair.near.end.notes() == pair.far.end.notes() == []
    pair.check()
    assert pair.near.end.stats().transfers == 2


def test_messages_of_a_transfer(pair):
    """A push takes a write a chunk, the answer, and slots that are given back; a pull, the order and the writes."""
    near, far = pair.network.wires
    before = near.posted, near.sent, far.posted, far.sent
    pair.ended(pair.submit(reading=False))
    assert (near.posted, near.sent, far.posted, far.sent) == tuple(np.add(before, (2, 0, 0, far.sent - before[3])))
    assert far.sent - before[3] <= 3  # DONE, and at most two messages of slots
    before = near.posted, near.sent, far.posted, far.sent
    pair.ended(pair.submit(reading=True))
    assert (near.posted, far.posted) == (before[0], before[2] + 2)
    pair.check()


def test_the_note_comes_after_the_last_byte(executor):
    for seed in range(20):
        pair = Pair(executor, seed=seed, faults=Faults(late=0.5, twice=0.5))
        transfer = pair.submit(reading=False, note=b"end")
        told = []
        while not told:
            pair.network.step()
            told = pair.far.end.notes()
        assert told == [("near", b"end")]
        assert pair.same()
        pair.ended(transfer)


def test_a_push_of_nothing_but_a_note(pair):
    pair.ended(pair.submit([], [], reading=False, note=b"alone"))
    assert pair.far.end.notes() == [("near", b"alone")]
    transfer = pair.submit([], [], reading=True)
    pair.ended(transfer)
    assert transfer.result().nbytes == 0
    pair.check()


@pytest.mark.parametrize("seed", range(6))
def test_parts_out_of_order_and_doubled(executor, seed):
    """The order of 512 units has 512 numbers or more: over 8 parts of 512 bytes. They come in any order, some twice."""
    pair = Pair(executor, seed=seed, most_note=512, faults=Faults(late=0.6, twice=0.6))
    mine = np.random.default_rng(seed).integers(0, 256, (512, 4), dtype=np.uint8)
    theirs = np.zeros((512, 4), np.uint8)
    here, there = (kvplan.KVLayout.from_tensors("block dim", one) for one in (mine, theirs))
    pair.near.meet("third", [here])
    third = pair.network.place("third", executor)
    third.meet("near", [there])
    wire = pair.network.wires[-2]
    ids, others = (np.random.default_rng(seed + k).permutation(512) for k in (1, 2))
    for _ in range(2):
        theirs[:] = 0
        before = wire.sent
        plan = kvplan.compile(here, there).plan(ids, others)
        transfer = pair.near.end.submit("third", plan, reading=False, note=b"n")
        pair.ended(transfer)
        np.testing.assert_array_equal(theirs[others], mine[ids])
        assert third.end.notes() == [("near", b"n")]
        assert wire.sent - before >= 3
    pair.check()


def test_layers_arrive_one_after_another(executor):
    pair = Pair(executor, seed=3)
    transfer = pair.submit(reading=True, by_layer=True)
    assert transfer.layer_groups == ((0,), (1,), (2,))
    for layer in range(LAYERS):
        pair.network.run(lambda layer=layer: transfer._arrived(layer))
        np.testing.assert_array_equal(pair.mine[layer], pair.theirs[:, layer])
    pair.ended(transfer)
    for layer in range(LAYERS):
        transfer.wait_layer(layer)
    with pytest.raises(KVPlanError, match="layer 3 is not moved"):
        transfer.wait_layer(3)
    pair.check()


def test_layers_are_sent_when_they_are_ready(pair):
    events = {layer: threading.Event() for layer in range(LAYERS)}
    before = pair.theirs.copy()
    transfer = pair.submit(reading=False, by_layer=True, after=events)
    for layer in range(LAYERS):
        for _ in range(50):
            pair.network.step()
        np.testing.assert_array_equal(pair.theirs[:, layer:], before[:, layer:])
        events[layer].set()
        pair.network.run(lambda layer=layer: (pair.theirs[:, layer] == pair.mine[layer]).all())
    pair.ended(transfer)
    assert pair.same()
    pair.check()


def test_each_end_expects_the_next_layer_while_it_is_computed(pair, monkeypatch):
    """Both ends do from the second layer on, since a transfer begins with its first one. Pulls are not waited for."""
    expected = []
    monkeypatch.setattr(Copier, "expect", lambda self, row, slot: expected.append((row.half.side, row.piece)))
    events = {layer: threading.Event() for layer in range(LAYERS)}
    transfer, seen = pair.submit(reading=False, by_layer=True, after=events), []
    for layer in range(LAYERS):
        for _ in range(50):
            pair.network.step()
        seen.append(set(expected))
        expected.clear()
        events[layer].set()
        pair.network.run(lambda layer=layer: (pair.theirs[:, layer] == pair.mine[layer]).all())
    pair.ended(transfer)
    assert seen == [set(), {("src", 1), ("dst", 1)}, {("src", 2), ("dst", 2)}]
    expected.clear()
    pair.ended(pair.submit(reading=True, by_layer=True))
    assert not expected
    pair.check()


def test_a_push_of_one_piece_expects_none_of_its_chunks(executor, monkeypatch):
    """Though each is scattered before the next one comes, as by a peer that grants one slot."""
    expected = []
    monkeypatch.setattr(Copier, "expect", lambda self, row, slot: expected.append(row))
    pair = Pair(executor, near={"slot_nbytes": 256}, far={"slot_nbytes": 256, "granted": 1})
    transfer = pair.submit(reading=False)
    pair.ended(transfer)
    assert transfer.chunks > 3
    assert pair.same()
    assert not expected
    pair.check()


def test_a_transfer_that_waits_delays_no_other(pair):
    event = threading.Event()
    waiting = pair.submit([0], [0], reading=False, after=event)
    other = pair.submit([1], [1], reading=False)
    pair.ended(other)
    assert not waiting.over
    event.set()
    pair.ended(waiting)
    assert pair.same([0, 1], [0, 1])
    pair.check()


def test_an_after_that_fails(pair):
    class Failed:
        def query(self):
            if ready:
                raise RuntimeError("no event")
            return False

        def synchronize(self):
            raise RuntimeError("no event")

    ready = [True]

    before = pair.theirs.copy()
    transfer = pair.submit(reading=False, after=Failed())
    pair.ended(transfer)
    with pytest.raises(TransferError, match=r"its after= failed.*no event.*nothing was moved"):
        transfer.synchronize()
    np.testing.assert_array_equal(pair.theirs, before)
    ready.clear()
    later = {0: threading.Event(), 1: Failed()}
    later[0].set()
    transfer = pair.submit(reading=False, by_layer=True, after=later)
    pair.network.run(lambda: bool((pair.theirs[:, 0] == pair.mine[0]).all()))
    ready.append(True)
    pair.ended(transfer)
    with pytest.raises(TransferError, match=r"its after= failed.*the peer's memory may hold"):
        transfer.synchronize()
    pair.check()


def test_high_priority_first(executor):
    """Two slots to gather into: chunks of a later transfer of high priority begin before the rest of the first."""
    pair = Pair(executor, near={"sending": 1, "slots": 4, "slot_nbytes": 256}, far={"slot_nbytes": 256, "granted": 1})
    pair.near.mover.keeps = True
    normal = pair.submit([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], reading=False)
    pair.network.run(lambda: len(pair.near.mover.submitted) == 1)
    high = pair.submit([5], [5], reading=False, priority="high")
    pair.ended(normal, high)
    kinds = [priority for _, priority in pair.near.mover.submitted]
    assert kinds[0] == "normal"
    assert kinds[1] == "high"
    assert kinds[-1] == "normal"
    assert pair.same([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    pair.check()


@pytest.mark.parametrize("reading", [True, False])
def test_cancel_before_it_begins(pair, reading):
    before = pair.mine.copy(), pair.theirs.copy()
    never = threading.Event()
    waiting = pair.submit(reading=reading, after=never)
    begun = pair.submit(reading=reading, **({} if reading else {"note": b"not sent"}))
    assert waiting.cancel()
    assert begun.cancel()
    assert begun.cancel()
    pair.network.settle()
    for transfer in (waiting, begun):
        assert transfer.done()
        with pytest.raises(TransferError, match="cancelled before it began"):
            transfer.synchronize()
    np.testing.assert_array_equal(pair.mine, before[0])
    np.testing.assert_array_equal(pair.theirs, before[1])
    assert pair.far.end.notes() == []
    done = pair.submit(reading=reading)
    pair.ended(done)
    assert not done.cancel()
    pair.check()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("reading", [True, False])
def test_cancel_at_any_moment(executor, seed, reading):
    """Cancelled: no byte has changed. Too late: all bytes arrive."""
    pair = Pair(executor, seed=seed, faults=Faults(late=0.3, twice=0.3))
    held = pair.mine if reading else pair.theirs
    before = held.copy()
    transfer = pair.submit(reading=reading)
    for _ in range(seed):
        pair.network.step()
    if transfer.cancel():
        pair.network.settle()
        np.testing.assert_array_equal(held, before)
    else:
        pair.ended(transfer)
        assert pair.same()
    pair.check()


@pytest.mark.parametrize("reading", [True, False])
def test_a_deadline_before_it_begins(pair, reading):
    before = pair.mine.copy(), pair.theirs.copy()
    transfer = pair.submit(reading=reading, after=threading.Event(), deadline=0.005)
    pair.ended(transfer)
    with pytest.raises(TransferError, match=r"within its deadline of 0.005 seconds; it had not begun, and nothing was"):
        transfer.synchronize()
    np.testing.assert_array_equal(pair.mine, before[0])
    np.testing.assert_array_equal(pair.theirs, before[1])
    pair.check()


@pytest.mark.parametrize("reading", [True, False])
def test_a_deadline_while_the_wire_is_down(pair, reading):
    """The writes go on later; their slots come back then, and what arrives late changes nothing."""
    wires = pair.network.wires
    transfer = pair.submit(reading=reading, deadline=0.05)
    pair.network.run(lambda: any(wire.writes for wire in wires))
    for wire in wires:
        wire.frozen = True
    pair.network.run(lambda: transfer.over)
    with pytest.raises(TransferError, match=r"deadline of 0.05 seconds"):
        transfer.synchronize()
    before = pair.mine.copy(), pair.theirs.copy()
    for wire in wires:
        wire.frozen = False
    pair.network.settle()
    np.testing.assert_array_equal(pair.mine, before[0])
    np.testing.assert_array_equal(pair.theirs, before[1])
    pair.ended(pair.submit(reading=reading))
    assert pair.same()
    pair.check()


def test_credits_that_run_out(executor):
    """One slot is granted: eight chunks go through it, one after another; none is sent without a credit."""
    pair = Pair(executor, near={"slot_nbytes": 256, "slots": 8}, far={"slot_nbytes": 256, "granted": 1, "slots": 2})
    for reading in (False, True):
        transfer = pair.submit(reading=reading)
        pair.ended(transfer)
        assert pair.same()
        assert transfer.result().descriptors >= 8
    pair.far.polls = False  # no credit comes
    before = pair.network.wires[0].posted
    transfer = pair.submit(reading=False)
    for _ in range(100):
        pair.network.step()
    assert pair.network.wires[0].posted == before + 1
    assert pair.near.lane("far").sender.credits.free == 0
    pair.far.polls = True
    pair.ended(transfer)
    pair.check()


def test_wrong_arguments(pair):
    plan = pair.push.plan([0], [0])
    for wrong, words in (
        ({"priority": "low"}, "priority is 'low'"),
        ({"reading": True, "note": b"n"}, "a note goes with a transfer that writes"),
        ({"after": {0: threading.Event()}}, "after is a mapping of layers"),
        ({"after": {7: threading.Event()}, "by_layer": True}, "layers .7., which"),
        ({"after": object()}, "after is a builtins.object"),
        ({"attempts": 0}, "attempts"),
    ):
        with pytest.raises(KVPlanError, match=words):
            pair.near.end.submit("far", plan, **{"reading": False, **wrong})
    with pytest.raises(TransferError, match="no packed transfers with 'nobody': it is not known"):
        pair.near.end.submit("nobody", plan, reading=False)
    pair.check()


def test_a_peer_reads_and_writes_offered_memory_only(pair):
    """The plan names memory of the far process that it has not offered."""
    other = np.zeros((BLOCKS, LAYERS, 64), np.uint8)
    there = kvplan.KVLayout.from_tensors("block layer dim", other)
    pull, push = kvplan.compile(there, pair.here), kvplan.compile(pair.here, there)
    for plan, reading in ((pull.plan([1], [1]), True), (push.plan([1], [1]), False)):
        transfer = pair.near.end.submit("far", plan, reading=reading)
        pair.ended(transfer)
        with pytest.raises(TransferError, match=r"'far' said: a recipe from a peer (reads|writes) .* not in the"):
            transfer.synchronize()
    assert not other.any()
    pair.check()


def test_a_mover_that_fails(pair):
    for reading in (True, False):
        pair.network.faults = Faults(stuck=1.0)
        transfer = pair.submit(reading=reading)
        pair.ended(transfer)
        with pytest.raises(TransferError, match=r"could not be (gathered|scattered): the mover broke"):
            transfer.synchronize()
        pair.network.faults = Faults()
        pair.ended(pair.submit(reading=reading))
        assert pair.same()
    pair.check()


def test_a_write_that_fails_part_way(pair):
    pair.network.faults = Faults(fail=1.0)
    for reading in (True, False):
        transfer = pair.submit(reading=reading, attempts=3)
        pair.ended(transfer)
        error = str(transfer._ends[0][1])
        assert "the wire failed in 3 attempts: a cable broke" in error or pair.same(), error
    pair.network.faults = Faults(fail=0.5)
    for reading in (True, False):
        pair.ended(transfer := pair.submit(reading=reading, attempts=50))
        transfer.synchronize()
        assert pair.same()
    pair.check()


def test_many_peers_share_the_ring(executor):
    """Three slots to gather into, and two for each of six peers; all move at once, in both directions."""
    pair = Pair(executor, near={"slots": 15, "sending": 3, "granted": 2}, kv="none")
    names = [f"far{k}" for k in range(6)]
    caches = {name: np.random.default_rng(k).integers(0, 256, pair.theirs.shape, np.uint8) for k, name in
              enumerate(names)}  # fmt: skip
    transfers = []
    for k, name in enumerate(names):
        pair.network.place(name, executor)
        there = kvplan.KVLayout.from_tensors("block layer dim", caches[name])
        pair.near.meet(name, [pair.here])
        pair.network.places[name].meet("near", [there])
        plan = kvplan.compile(there, pair.here).plan([3], [k])
        transfers.append(pair.near.end.submit(name, plan, reading=True))
    pair.ended(*transfers)
    for k, name in enumerate(names):
        np.testing.assert_array_equal(pair.mine[:, k], caches[name][3])
    del pair.network.places["far"]
    pair.check()
