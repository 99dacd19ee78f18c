"""More peers than a ring has slots for: they share the slots, and none is lost, written twice, or kept for ever."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_credits import Credits
from kvplan.agents.packed.pack_messages import Credit
from kvplan.agents.packed.pack_receiver import Receiver
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.errors import LayoutError
from tests.agents.packed.simulated_wire import Faults, Network, meet, slots_back

LAYERS, BLOCKS, DIM = 2, 12, 64
CHUNK = 256  # bytes: four rows, so that a transfer of all blocks has six chunks
GENTLE = Faults(late=0.3, twice=0.3)


class Star:
    """One place in the middle, and its peers, each with a cache of its own."""

    def __init__(self, executor, peers: int, *, slots: int, seed: int = 0, faults: Faults = GENTLE, **kw) -> None:
        self.network = Network(seed)
        self.middle = self.network.place("middle", executor, slots=slots, slot_nbytes=CHUNK, **kw)
        rng = np.random.default_rng(seed)
        self.mine = rng.integers(0, 256, (LAYERS, BLOCKS * peers, DIM), dtype=np.uint8)
        here = KVLayout.from_tensors("layer block dim", self.mine)
        self.names = [f"peer{k}" for k in range(peers)]
        self.theirs, self.pulls, self.pushes = {}, {}, {}
        for k, name in enumerate(self.names):
            self.network.place(name, executor, slots=8, slot_nbytes=CHUNK)
            cache = self.theirs[name] = rng.integers(0, 256, (BLOCKS, LAYERS, DIM), dtype=np.uint8)
            there = KVLayout.from_tensors("block layer dim", cache)
            meet(self.network, "middle", name, ([here], [there]))
            ids = range(k * BLOCKS, (k + 1) * BLOCKS)
            self.pulls[name] = kvplan.compile(there, here).plan(range(BLOCKS), ids)
            self.pushes[name] = kvplan.compile(here, there).plan(ids, range(BLOCKS))
        self.network.faults = faults

    def pull(self, name: str, **kw):
        """Read a peer's cache into the middle."""
        return self.middle.end.submit(name, self.pulls[name], reading=True, **kw)

    def send(self, name: str, **kw):
        """Let a peer write its cache into the middle."""
        return self.network.places[name].end.submit("middle", self.pulls[name], reading=False, **kw)

    def ended(self, *transfers) -> None:
        self.network.run(lambda: all(one.over for one in transfers))
        for one in transfers:
            one.synchronize()

    def same(self) -> bool:
        caches = np.concatenate([self.theirs[name] for name in self.names])
        return bool((self.mine.swapaxes(0, 1) == caches).all())

    def held(self) -> list[int]:
        """The number of slots that each peer has."""
        return [len(self.middle.lane(name).granted) for name in self.names]

    def said(self) -> list[int]:
        """Keep the kinds of all messages about slots from now on."""
        kinds: list[int] = []

        def hear(note: bytes) -> bytes:
            kind = messages.read(note).kind
            kinds.extend([kind] * (kind in messages.SHARING))
            return note

        self.network.hear = hear
        return kinds


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("slots", [2, 3, 6])
def test_twenty_peers_read_and_write_through_a_few_slots(executor, slots, seed):
    star = Star(executor, 20, slots=slots, seed=seed)
    assert sum(star.held()) == star.middle.total - star.middle.end.sending
    chance = star.network.rng
    star.ended(*[(star.pull if chance.random() < 0.5 else star.send)(name) for name in star.names])
    assert star.same()
    slots_back(star.network)


@pytest.mark.parametrize("seed", range(12))
def test_failures_lose_no_slot(executor, seed):
    """Writes fail, peers are forgotten and met again, while slots go from one peer to another."""
    star = Star(executor, 6, slots=5, seed=seed, faults=Faults(late=0.3, twice=0.3, fail=0.2, told=0.2, linger=0.2))
    chance, network = star.network.rng, star.network
    for _ in range(4):
        transfers = [star.pull(name, attempts=3) for name in star.names if star.middle.end.has(name)]
        transfers += [star.send(name) for name in star.names if network.places[name].end.has("middle")]
        for _ in range(chance.randrange(40)):
            network.step()
        leaver = chance.choice(star.names)
        network.places[leaver].end.forget("middle")
        network.run(lambda made=transfers: all(one.over for one in made))
        network.places[leaver].meet("middle", [KVLayout.from_tensors("block layer dim", star.theirs[leaver])])
    network.faults = Faults()
    network.run(lambda: all(
        place.end.has(far) and place.lane(far).open
        for name in star.names for place, far in ((star.middle, name), (network.places[name], "middle"))
    ))  # fmt: skip
    star.ended(*[star.pull(name) for name in star.names])
    assert star.same()
    slots_back(network)


def test_a_busy_peer_gets_what_idle_ones_have(executor):
    star = Star(executor, 4, slots=15, faults=Faults(), sending=3)
    assert star.held() == [4, 3, 3, 2]
    star.ended(star.send("peer3"))
    assert star.held() == [2, 2, 2, 6], "as many as it has chunks; each other peer keeps one at least"
    slots_back(star.network)


def test_nothing_is_said_where_there_are_slots_enough(executor):
    star = Star(executor, 2, slots=60, faults=Faults())
    assert min(star.held()) >= 6
    kinds = star.said()
    for move in (star.pull, star.send):
        star.ended(*[move(name) for name in star.names])
    assert kinds == []


def test_one_slot_goes_round(executor):
    """All peers get on together, though only one of them can write at a time."""
    star = Star(executor, 4, slots=2, faults=Faults())
    transfers = [star.send(name) for name in star.names]
    network, order = star.network, []
    while not all(one.over for one in transfers):
        network.step()
        holder = star.held().index(1) if 1 in star.held() else None
        if holder is not None and order[-1:] != [holder]:
            order.append(holder)
    star.ended(*transfers)
    assert len(order) > 8, "each peer has had the slot more than once"
    assert set(order[:4]) == {0, 1, 2, 3}
    slots_back(network)


def test_a_slot_that_its_peer_cannot_use_yet_goes_to_others(executor):
    """A push waits for its `after=`, and has the only slot; the others do not wait for it."""
    star = Star(executor, 3, slots=2, faults=Faults())
    event = threading.Event()
    waits = star.send("peer0", after=SimpleNamespace(done=event.is_set, synchronize=lambda: None))
    star.network.run(lambda: star.held() == [1, 0, 0])
    star.ended(*[star.send(name) for name in star.names[1:]])
    event.set()
    star.ended(waits)
    slots_back(star.network)


def test_a_peer_whose_greeting_is_late_takes_what_was_granted_before_it():
    credits = Credits()  # noqa: A001
    credits.grant(0, CHUNK, 8, [(1, False, 0)])
    credits.more([Credit(5, 0), Credit(1, 0), Credit(5, 0)])
    assert (credits.granted, sorted(credits.some)) == (2, [1, 5])
    credits.recall([Credit(5, 0), Credit(5, 0)])
    assert (credits.returned, credits.granted) == ([Credit(5, 0)], 1)
    credits.more([Credit(5, 0)])  # the old grant comes again
    assert credits.granted == 1
    credits.more([Credit(5, 1)])
    lent = (credits.take(), credits.take())
    assert [(one.number, one.turn) for one in lent] == [(5, 2), (1, 1)]
    credits.recall([Credit(5, 0)])  # so does the old recall
    credits.recall([Credit(5, 1)])
    credits.written(5)
    assert len(credits.returned) == 1, "it has not been given back"
    credits.credit(5, 2)
    assert credits.returned[1:] == [Credit(5, 2)]
    credits.recall([Credit(6, 3)])  # it overtakes its grant
    credits.more([Credit(6, 3)])
    assert credits.returned[2:] == [Credit(6, 3)]
    for wrong in (Credit(8, 0), Credit(1, 4)):
        with pytest.raises(LayoutError, match=f"slot {wrong.slot} of 8 is granted"):
            credits.more([wrong])


def test_slots_that_are_returned_late_and_twice():
    slots = [RingSlot(number, SimpleNamespace()) for number in range(3)]
    outbox = SimpleNamespace(owe=lambda given: None)
    receiver = Receiver(outbox, None, slots[:2], lambda note: None)
    assert receiver.returned([Credit(0, 0)]) == [], "nobody has asked for it"
    assert receiver.recall(5) == [Credit(0, 0), Credit(1, 0)]
    assert receiver.recall(5) == []
    assert receiver.returned([Credit(1, 0), Credit(1, 0)]) == [slots[1]]
    assert receiver.grant([slots[1], slots[2]]) == [Credit(1, 1), Credit(2, 0)]
    assert receiver.recall(5) == [Credit(1, 1), Credit(2, 0)]
    assert receiver.returned([Credit(1, 0)]) == [], "the first return comes again"
    receiver.void(Credit(2, 1))
    for turn in (0, 2):
        with pytest.raises(LayoutError, match=f"slot 2 is returned after use {turn}; use 1 has come"):
            receiver.returned([Credit(2, turn)])
    assert receiver.returned([Credit(2, 1), Credit(1, 1)]) == [slots[2], slots[1]]
    receiver.reset("it begins anew")
    assert (receiver.slots(), receiver.recall(9)) == (((0, False, 0),), [Credit(0, 0)])
    assert receiver.grant([slots[1]]) == [Credit(1, 0)], "turns begin with a greeting"
