"""How many calls a chunk and a poll take: each costs the CPU about 0.1 us, and nothing here is timed."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.agents.by_nixl.packed_way import GPU_SLOTS
from kvplan.agents.packed.pack_lane import Lane
from kvplan.agents.packed.pack_rows import ended
from tests.agents.packed import simulated_wire
from tests.agents.packed.simulated_wire import Faults, Network, meet
from tests.profiles import examples

PACKED = "/kvplan/agents/packed/"
CHUNKS = 200


class AtOnce:
    """A mover that has moved everything already."""

    def __init__(self, *_) -> None:
        pass

    def submit(self, plan, after=None, *, priority="normal"):
        self.plan = plan
        return self

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Timed:
    """A plan that has moved at the second turn of the network."""

    def __init__(self, network: Network, plan: kvplan.Plan) -> None:
        self.network, self.plan, self.until = network, plan, network.clock + 1.5e-3

    def done(self) -> bool:
        return self.network.clock >= self.until

    def synchronize(self) -> None:
        pass


class AfterTurns(AtOnce):
    """A mover that takes two turns of the network for each plan, whether it is looked at or not, as a GPU does."""

    def __init__(self, network: Network, *_) -> None:
        self.network = network

    def submit(self, plan, after=None, *, priority="normal"):
        return Timed(self.network, plan)


def counting(counts: Counter, name: str, call):
    """Count the calls of the protocol's own code."""

    def look(frame, event, _):
        if event in {"call", "c_call"} and PACKED in frame.f_code.co_filename:
            counts[name] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)


def met(network):
    """Let both ends meet; return a layout of each."""
    arrays = (np.zeros((CHUNKS * 64, 64), np.uint8) for _ in range(2))
    here, there = (kvplan.KVLayout.from_tensors("block dim", array) for array in arrays)
    meet(network, "near", "far", ([here], [there]))
    return here, there


def test_calls_of_a_chunk(monkeypatch):
    """At most 120 calls a chunk on either side, whichever begins, with the order and its checks."""
    monkeypatch.setattr(simulated_wire, "Mover", AtOnce)
    network = Network(0)
    near, far = (network.place(name, None, slots=48, slot_nbytes=4096) for name in ("near", "far"))
    here, there = met(network)
    rng = np.random.default_rng(0)
    for reading in (True, False):
        ids, others = rng.permutation(CHUNKS * 64), rng.permutation(CHUNKS * 64)
        plan = (
            kvplan.compile(there, here).plan(others, ids) if reading else kvplan.compile(here, there).plan(ids, others)
        )
        transfer = near.end.submit("far", plan, reading=reading)
        counts: Counter = Counter()
        while not transfer.over:
            network.turn()
            for place in (near, far):
                counting(counts, place.name, place.end.poll)
        assert transfer.chunks == CHUNKS
        assert max(counts.values()) <= 120 * CHUNKS, counts
        assert sum(wire.posted for wire in network.wires) == CHUNKS * (1 if reading else 2)


def test_calls_of_a_poll(monkeypatch):
    """An idle lane takes few calls; one that waits for slow writes takes as many for sixteen as for three."""
    monkeypatch.setattr(simulated_wire, "Mover", AtOnce)
    counts: Counter = Counter()
    for sending in (3, 16):
        network = Network(0)
        near = network.place("near", None, slots=48, slot_nbytes=4096, sending=sending)
        network.place("far", None, slots=48, slot_nbytes=4096, granted=20)
        here, there = met(network)
        for _ in range(5):
            network.step()
        counting(counts, f"idle {sending}", near.end.poll)
        near.end.submit("far", kvplan.compile(here, there).plan(range(CHUNKS * 64), range(CHUNKS * 64)), reading=False)
        network.wires[0].frozen = True
        for _ in range(5):
            network.step()
        counting(counts, f"slow {sending}", near.end.poll)
    assert counts["idle 3"] == counts["idle 16"] <= 16
    assert counts["slow 16"] <= counts["slow 3"] + 6 <= 40, counts


def test_calls_of_a_poll_beside_no_other_peer(monkeypatch):
    """A lone peer that wants more slots than there are costs a poll no search for them."""
    monkeypatch.setattr(simulated_wire, "Mover", AfterTurns)
    network = Network(0)
    near, far = (network.place(name, None, slots=16, slot_nbytes=4096) for name in ("near", "far"))
    here, there = met(network)
    near.end.submit("far", kvplan.compile(there, here).plan(range(CHUNKS * 64), range(CHUNKS * 64)), reading=True)
    network.run(lambda: near.lane("far").short and len(near.lane("far").granted) == 10)
    far.polls = False
    network.settle(20)
    counts: Counter = Counter()
    assert near.lane("far").short
    counting(counts, "short", near.end.poll)
    assert counts["short"] <= 25, counts


@pytest.mark.parametrize("slots", [12, 48])
def test_calls_of_an_empty_poll(monkeypatch, slots):
    """In the middle of a transfer, a poll finds that nothing has come or ended by few calls, on both sides."""
    monkeypatch.setattr(simulated_wire, "Mover", AfterTurns)
    network = Network(0)
    near, far = (network.place(name, None, slots=slots, slot_nbytes=4096) for name in ("near", "far"))
    here, there = met(network)
    near.end.submit("far", kvplan.compile(there, here).plan(range(CHUNKS * 64), range(CHUNKS * 64)), reading=True)
    for _ in range(30):
        network.step()
        for place in (near, far):
            counts: Counter = Counter()
            for _ in range(60):  # until all writes that have ended are found
                place.end.poll()
            counting(counts, place.name, place.end.poll)
            assert counts[place.name] <= 40, counts
    assert near.end.busy


class Watched:
    """Counts the steps of all lanes, and lets no lane see anything while it is blind."""

    def __init__(self) -> None:
        self.steps, self.blind = 0, False

    @contextmanager
    def lanes(self) -> Iterator[None]:
        step, look = Lane.step, Lane.look

        def stepped(lane, now):
            self.steps += 1
            return step(lane, now)

        def looked(lane, now):
            return not self.blind and look(lane, now)

        with mock.patch.object(Lane, "step", stepped), mock.patch.object(Lane, "look", looked):
            yield


@examples(50)
@given(st.integers(0, 1 << 32), st.integers(2, 14), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_poll_that_is_cut_short_would_have_changed_nothing(seed, slots, peers, reading, failing):
    """All steps of a poll that finds that nothing has come or ended would change nothing, and send nothing."""
    watched = Watched()
    with mock.patch.object(simulated_wire, "Mover", AfterTurns), watched.lanes():
        network = Network(seed)
        near = network.place("near", None, slots=slots, slot_nbytes=4096)
        arrays = [np.zeros((40 * 64, 64), np.uint8) for _ in range(peers + 1)]
        here, *others = (kvplan.KVLayout.from_tensors("block dim", array) for array in arrays)
        for k, there in enumerate(others):
            network.place(f"far{k}", None, slots=slots, slot_nbytes=4096)
            meet(network, "near", f"far{k}", ([here], [there]))
        network.faults = Faults(late=0.2, twice=0.1, fail=0.02 * failing)
        transfers = []
        for k, there in enumerate(others):
            count = network.rng.randint(1, 40 * 64)
            src, dst = (there, here) if reading else (here, there)
            plan = kvplan.compile(src, dst).plan(range(count), range(count))
            priority = network.rng.choice(["high", "normal"])
            deadline = network.rng.choice([None, 0.05])
            transfers.append(near.end.submit(f"far{k}", plan, reading=reading, priority=priority, deadline=deadline))
        for _ in range(5000):
            if all(transfer.over for transfer in transfers):
                break
            network.turn()
            for place in network.places.values():
                place.end.poll()
                watched.steps = 0
                changed = place.end.poll()
                if not watched.steps and place.end._progress._settled:  # it was cut short
                    before = [(wire.posted, wire.sent) for wire in network.wires]
                    place.end._progress._settled = False
                    watched.blind = True
                    assert not changed
                    assert not place.end.poll()
                    watched.blind = False
                    assert before == [(wire.posted, wire.sent) for wire in network.wires]
        assert all(transfer.over for transfer in transfers)


@pytest.mark.parametrize(("slots", "least"), [(32, 1.15), (GPU_SLOTS.number, 2.8)])
def test_rounds_of_a_chunk(monkeypatch, slots, least):
    """A lone peer has many chunks on the way: of 32 slots, one ends in 1.15 rounds of polls, though each takes ten."""
    monkeypatch.setattr(simulated_wire, "Mover", AfterTurns)
    network = Network(0)
    near, _ = (network.place(name, None, slots=slots, slot_nbytes=4096) for name in ("near", "far"))
    here, there = met(network)
    ids = range(CHUNKS * 64)
    for reading, (src, dst) in ((True, (there, here)), (False, (here, there))):
        rounds = 0
        transfer = near.end.submit("far", kvplan.compile(src, dst).plan(ids, ids), reading=reading)
        while not transfer.over:
            network.step()
            rounds += 1
        assert transfer.chunks == CHUNKS
        assert rounds <= least * CHUNKS, rounds / CHUNKS


@pytest.mark.parametrize(("known", "first"), [(False, 1), (True, 3)])
def test_chunks_on_the_way(monkeypatch, known, first):
    """A slow peer has seven of the ten slots to gather into, and leaves three to the others. Alone, it leaves one."""
    monkeypatch.setattr(simulated_wire, "Mover", AtOnce)
    network = Network(0)
    near = network.place("near", None, slots=32, slot_nbytes=4096)
    mine = np.zeros((CHUNKS * 64, 64), np.uint8)
    here = kvplan.KVLayout.from_tensors("block dim", mine)
    theirs = []

    def come(k):
        network.place(f"far{k}", None, slots=32, slot_nbytes=4096)
        theirs.append(kvplan.KVLayout.from_tensors("block dim", np.zeros_like(mine)))
        meet(network, "near", f"far{k}", ([here], theirs[k:]))

    for k in range(2 * known):
        come(k)
    for k, left in enumerate((first, 0)):
        if not known:
            come(k)
        there = theirs[k]
        for wire in network.wires:
            wire.frozen = True
        ids = range(CHUNKS * 64)
        near.end.submit(f"far{k}", kvplan.compile(here, there).plan(ids, ids), reading=False)
        for _ in range(5):
            network.step()
        assert (near.end.sending, len(near.end._own.sends)) == (10, left)


def test_one_that_runs_hides_only_those_of_its_priority_and_direction():
    class Moved:
        def __init__(self, direction, *, over):
            self.plan, self.over, self.asked = mock.Mock(direction=direction), over, False

        def done(self):
            self.asked = True
            return self.over

    line = [(Moved("load", over=False), False), (Moved("load", over=True), False), (Moved("load", over=True), True),
            (Moved("device", over=True), False), (None, False)]  # fmt: skip
    running = set()
    assert [ended(moved, urgent, running) for moved, urgent in line] == [False, False, True, True, True]
    assert [moved.asked for moved, _ in line if moved is not None] == [True, False, True, True]


class Inbox(deque):
    """Other threads have added notes behind the first look at it in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[str, bytes]] = []

    def take(self, peer: str, note: bytes) -> bool:
        self.late.append((peer, bytes(note)))
        return True

    def __bool__(self) -> bool:
        some = len(self) > 0
        self.extend(self.late)
        self.late.clear()
        return some


def to_a_small_ring(network):
    """Let an end with many slots meet one with two; return both, and the plan of a push of twelve chunks."""
    near, far = (network.place(name, None, slots=slots, slot_nbytes=4096) for name, slots in (("near", 16), ("far", 2)))
    here, there = met(network)
    return near, far, kvplan.compile(here, there).plan(range(12 * 64), range(12 * 64))


@pytest.mark.parametrize("seed", range(3))
def test_a_note_that_comes_within_a_step_is_not_forgotten(monkeypatch, seed):
    monkeypatch.setattr(simulated_wire, "Mover", AfterTurns)
    network = Network(seed)
    near, far, plan = to_a_small_ring(network)
    for place in (near, far):
        place.end._progress.inbox = inbox = Inbox()
        monkeypatch.setattr(place.end, "take", inbox.take)
    transfer = near.end.submit("far", plan, reading=False)
    for _ in range(3000):
        if transfer.over:
            break
        network.step()
    transfer.synchronize(0)


def test_a_gather_that_fails_without_a_slot_of_the_peer_is_seen(monkeypatch):
    class Failing(AtOnce):
        def submit(self, plan, after=None, *, priority="normal"):
            self.count = getattr(self, "count", 0) + 1
            moved = AtOnce()
            moved.plan = plan
            if self.count == 3:
                moved.synchronize = mock.Mock(side_effect=kvplan.TransferError("it broke"))
            return moved

    monkeypatch.setattr(simulated_wire, "Mover", Failing)
    network = Network(1)
    near, far, plan = to_a_small_ring(network)
    far.polls = False
    transfer = near.end.submit("far", plan, reading=False)
    for _ in range(50):
        network.step()
    assert transfer.over
    with pytest.raises(kvplan.TransferError, match="could not be gathered: it broke"):
        transfer.synchronize(0)
