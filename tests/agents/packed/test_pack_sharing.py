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
from kvplan.agents.packed.pack_sharing import Share, share
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.agents.packed.wire import Pace
from kvplan.errors import LayoutError
from tests.agents.packed.simulated_wire import Faults, Network, meet, slots_back

LAYERS, BLOCKS, DIM = 2, 12, 64
CHUNK = 256  # bytes: four rows, so that a transfer of all blocks has six chunks
GENTLE = Faults(late=0.3, twice=0.3)


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


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

    def some(self, name: str, chunks: int):
        """A plan that reads so many chunks of a peer's cache."""
        k = self.names.index(name)
        blocks = range(2 * chunks)  # of two rows of 64 bytes each
        there = KVLayout.from_tensors("block layer dim", self.theirs[name])
        here = KVLayout.from_tensors("layer block dim", self.mine)
        return kvplan.compile(there, here).plan(blocks, [k * BLOCKS + block for block in blocks])

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
    credits.release()
    assert (credits.returned, credits.leaving) == ([], [5]), "it may be used once"
    credits.release()
    assert (credits.returned, credits.granted, credits.leaving) == ([Credit(5, 0)], 1, [])
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
    for _ in range(2):
        credits.release()
    assert credits.returned[2:] == [Credit(6, 3)]
    with pytest.raises(LayoutError, match="slot 8 of 8 is recalled"):
        credits.recall([Credit(8, 0)])
    with pytest.raises(LayoutError, match="a slot is granted at turn 2,147,483,648"):
        Credits().grant(0, CHUNK, 8, [(1, False, 1 << 31)])
    for wrong in (Credit(8, 0), Credit(1, 4), Credit(2, 1 << 31)):
        with pytest.raises(LayoutError, match=f"slot {wrong.slot} of 8 is granted"):
            credits.more([wrong])


def test_slots_that_are_returned_late_and_twice():
    slots = [RingSlot(number, SimpleNamespace()) for number in range(3)]
    outbox = SimpleNamespace(owe=lambda given: None)
    receiver = Receiver(outbox, None, slots[:2], lambda note: None, Pace(lambda: 0.0))
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
    assert receiver.recall(9) == [Credit(1, 0)]
    with pytest.raises(LayoutError, match="slot 1 is returned after use 5"):
        receiver.returned([Credit(0, 0), Credit(1, 5)])
    assert sorted(receiver.granted) == [0, 1], "nothing is taken of a message that is wrong"


def test_a_peer_that_gets_all_it_wants_takes_no_idle_peers_last_slot(executor):
    star = Star(executor, 5, slots=14, faults=Faults(), sending=2)
    assert star.held() == [4, 3, 3, 2, 0]
    star.ended(star.middle.end.submit("peer4", star.some("peer4", 2), reading=True))
    assert star.held()[4] == 2
    assert min(star.held()[:4]) >= 1


@pytest.mark.parametrize("period", [10, 60, 100])
def test_peers_that_look_seldom_take_turns_too(executor, period):
    """A grant and the recall of it lie in one inbox: the slot is used once all the same."""
    star = Star(executor, 3, slots=2, faults=Faults())
    transfers = [star.send(name) for name in star.names]
    for turn in range(20_000):
        for name in star.names:
            star.network.places[name].polls = turn % period == 0
        star.network.step()
        if all(one.over for one in transfers):
            break
    star.ended(*transfers)


@pytest.mark.parametrize("stopped", range(4))
@pytest.mark.parametrize("slots", [3, 4, 6])
def test_a_peer_that_stops_holds_up_no_other_one(executor, slots, stopped):
    """It keeps the slots that it had, and returns none; then it is lost, and nothing is left."""
    star = Star(executor, 4, slots=slots, faults=Faults(), sending=1)
    star.ended(*[star.send(name) for name in star.names])
    star.ended(star.send(star.names[stopped]))
    star.network.places[star.names[stopped]].polls = False
    others = [name for k, name in enumerate(star.names) if k != stopped]
    for _ in range(3):
        for name in others:
            star.ended(star.send(name))
        star.ended(*[star.pull(name) for name in others])
    for _ in range(200):
        star.network.step()
    assert not star.middle.end.busy, "nobody polls without a pause for slots that do not come"
    star.middle.end.lost(star.names[stopped], "it died")
    star.network.settle()
    assert star.middle.end.ring.free + sum(map(len, (star.middle.lane(name).granted for name in others))) == slots - 1


def test_a_process_that_leaves_does_not_poll_for_slots(executor):
    star = Star(executor, 2, slots=8, faults=Faults(), sending=2)
    peer = star.network.places["peer0"]
    star.middle.lane("peer0").recall(1)  # on its way
    star.middle.polls = False
    peer.end.forget("middle")
    star.network.settle(300)
    assert not peer.end.busy
    star.middle.polls, star.network.places["peer1"].polls = True, False
    star.middle.lane("peer1").recall(2)
    star.middle.end.forget("peer1")
    star.network.settle(300)
    assert not star.middle.end.busy


def test_an_interrupted_write_keeps_its_slot_and_no_other(executor):
    """Whether it moves is not known, so its slot is out for ever. Later pushes of that peer get another one."""
    star = Star(executor, 4, slots=4, faults=Faults(), sending=1)
    star.ended(*[star.send(name) for name in star.names])
    wire = star.network.places["peer0"].lane("middle").wire
    write, calls = wire.write, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return write(*given)

    wire.write = interrupted
    first = star.send("peer0")
    with pytest.raises(KeyboardInterrupt):
        star.network.run(lambda: first.over)
    star.network.settle(300)
    assert first.over
    for _ in range(3):
        one = star.middle.end.submit("peer0", star.some("peer0", 1), reading=True)
        star.ended(one, *[star.send(name) for name in star.names[1:]])


def test_busy_peers_have_equal_parts(executor):
    """The first one gets all but one of the slots; when another one begins, it returns some."""
    star = Star(executor, 2, slots=10, faults=Faults(), sending=2)
    first = [star.send("peer0") for _ in range(9)]
    star.network.run(lambda: star.held() == [7, 1])
    second = [star.send("peer1") for _ in range(9)]
    star.network.run(lambda: star.held() == [4, 4])
    star.ended(*first, *second)
    slots_back(star.network)


def test_what_is_free_is_granted_and_nothing_is_recalled_for_it():
    def lane(held, wants):
        receiver = SimpleNamespace(granted=dict.fromkeys(range(held)), recalled=set(), inbounds={}, used=False)
        made = SimpleNamespace(receiver=receiver, wants=wants, short=wants > held, since=0.0, recalled_at=0.0, asked=[])
        made.grant, made.recall = lambda got: receiver.granted.update(dict.fromkeys(got)), made.asked.append
        return made

    one, other = (Hashable(**vars(made)) for made in (lane(0, 2), lane(1, 0)))
    assert share([one, other], Share(6, 16, lambda count: [object() for _ in range(count)], 0.0))
    assert (len(one.receiver.granted), other.asked) == (2, [])


@pytest.mark.parametrize("body", [
    (messages.GRANT, [Credit(7, 1 << 32 - 1)]), (messages.GRANT, [Credit(99, 0)]), (messages.RECALL, [Credit(99, 0)]),
    (messages.GRANT, []), (messages.RECALL, [Credit(1, 0)] * 49), (messages.RETURN, []),
])  # fmt: skip
def test_wrong_messages_about_slots_end_their_lane_only(executor, body):
    kind, slots = body
    star = Star(executor, 2, slots=8, faults=Faults(), sending=2)
    good = star.send("peer1")
    lane = star.network.places["middle"].lane("peer0")
    note = messages.message(kind, lane.outbox.theirs, lane.outbox.mine, (), messages.credits_body(slots))
    star.middle.end.take("peer0", note)
    star.network.step()
    assert not star.middle.end.has("peer0")
    star.ended(good)


def test_a_return_of_slots_that_are_in_use_loses_none(executor):
    star = Star(executor, 2, slots=8, faults=Faults(), sending=2)
    star.network.places["peer0"].polls = False
    lane = star.middle.lane("peer0")
    lane.recall(2)
    first, second = sorted(lane.receiver.recalled)
    wrong = messages.credits_body([Credit(first, 0), Credit(second, 77)])
    note = messages.message(messages.RETURN, lane.outbox.theirs, lane.outbox.mine, (), wrong)
    star.middle.end.take("peer0", note)
    star.network.step()
    assert not star.middle.end.has("peer0")
    lane.lost("it is gone")
    star.network.settle(300)
    assert star.middle.end.ring.free + len(star.middle.lane("peer1").granted) + 2 == 8


def test_lanes_share_the_slots_to_gather_into(executor):
    """One that is alone has all but one; when others come, each has two thirds, and when they go, it has them again."""
    star = Star(executor, 1, slots=24, sending=8)
    end = star.middle.end

    def most():
        return [lane.sender.most for lane in end._peers.every]

    assert most() == [7]
    star.network.place("guest", executor, slots=8, slot_nbytes=CHUNK)
    meet(star.network, "middle", "guest")
    assert most() == [6, 6]
    star.network.faults = Faults()
    end.lost("guest", "it has gone")
    star.network.run(lambda: len(end._peers.every) == 1)
    assert most() == [7]
