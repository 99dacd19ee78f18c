"""Peers that die, leave, come back or begin anew, at any step: every transfer ends, and every slot returns."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.errors import LayoutError, PathError, TransferError
from tests.agents.packed.drawn_pairs import allowed, finished
from tests.agents.packed.pairs import Pair
from tests.agents.packed.simulated_wire import Faults, Network, meet

ROUGH = Faults(late=0.3, twice=0.3, fail=0.1, told=0.1, linger=0.2)


def begun(executor, seed, steps, reading):
    """A transfer of ten blocks, after some steps; two more wait behind it."""
    pair = Pair(executor, seed=seed, faults=ROUGH, near={"slot_nbytes": 256}, far={"slot_nbytes": 256})
    pair.before = [pair.mine.copy(), pair.theirs.copy()]
    pair.moving = [pair.submit(reading=reading, attempts=9) for _ in range(3)]
    for _ in range(steps):
        pair.network.step()
    return pair


def checked(pair, reading):
    """Each transfer has ended; each byte is old or right."""
    assert all(transfer.over for transfer in pair.moving)
    done = [finished(transfer) for transfer in pair.moving]
    held, old = (pair.mine, pair.before[0]) if reading else (pair.theirs, pair.before[1])
    other = pair.theirs if reading else pair.mine
    allowed([held], [old], [np.ascontiguousarray(other.swapaxes(0, 1))])
    assert pair.same() or not any(done)


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_a_peer_that_dies(executor, steps, reading):
    pair = begun(executor, steps, steps, reading)
    network = pair.network
    del network.places["far"]
    for wire in network.wires:
        wire.down = True
        for write in wire.writes if wire.mine == "near" else ():
            write.state = "failed: the peer is gone"
        if wire.mine == "far":
            wire.writes.clear()
    pair.near.end.lost("far", "its process has ended")
    assert not pair.near.end.has("far")
    with pytest.raises(TransferError, match="no packed transfers with 'far'"):
        pair.submit(reading=reading)
    network.settle()
    checked(pair, reading)
    assert pair.near.end.ring.free + pair.near.end.sending == pair.near.total
    assert len(pair.near.end._own.sends) == pair.near.end.sending
    assert network.wires[0].closed
    pair.near.end.close()


@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("who", ["near", "far"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
def test_a_peer_that_is_forgotten(executor, steps, reading, who):
    """Slots return once the other end has said that its writes have ended, also over a rough wire."""
    pair = begun(executor, steps, steps, reading)
    pair.network.places[who].end.forget("far" if who == "near" else "near")
    pair.network.settle()
    checked(pair, reading)
    for place in (pair.near, pair.far):
        assert place.end.ring.free + place.end.sending == place.total
        assert not place.end._peers.every
    other = pair.far if who == "near" else pair.near
    with pytest.raises(TransferError, match="it has left"):
        other.end.submit(who, pair.push.plan([], []), reading=False)
    pair.check()


def test_slots_wait_for_a_peer_that_still_writes(executor):
    pair = Pair(executor)
    pair.submit(reading=True)
    wire = pair.network.wires[1]
    pair.network.run(lambda: wire.writes)
    wire.frozen = True
    pair.near.end.forget("far")
    for _ in range(3000):
        pair.network.step()
    assert pair.near.end.ring.free + pair.near.end.sending < pair.near.total
    with pytest.raises(TransferError, match="'near' closes, and writes of 'far' may still move in its ring"):
        pair.near.end.close(timeout=0.01)
    wire.frozen = False
    pair.network.settle()
    assert pair.near.end.ring.free + pair.near.end.sending == pair.near.total
    pair.near.end.close()
    with pytest.raises(TransferError, match="are closed"):
        pair.submit(reading=True)
    with pytest.raises(TransferError, match="are closed"):
        pair.near.meet("far")


@pytest.mark.parametrize("seed", range(25))
def test_a_peer_that_is_forgotten_and_met_again(executor, seed):
    """Goodbyes and greetings in any order, with writes on their way: a new lane opens by itself at the other end."""
    pair = begun(executor, seed, seed % 12, reading=bool(seed & 1))
    network = pair.network
    who, other = (pair.near, pair.far) if seed & 2 else (pair.far, pair.near)
    layouts = {"near": pair.here, "far": pair.there}
    for _ in range(3):
        who.end.forget(other.name)
        for _ in range(network.rng.randrange(6)):
            network.step()
        while who.end.ring.free == 0:
            network.step()
        who.meet(other.name, [layouts[who.name]])
        for _ in range(network.rng.randrange(6)):
            network.step()
    network.run(lambda: all(
        place.end.has(far) and place.lane(far).outbox.ready for place, far in ((pair.near, "far"), (pair.far, "near"))
    ))  # fmt: skip
    network.settle()
    checked(pair, reading=bool(seed & 1))
    for reading in (True, False):
        pair.ended(transfer := pair.submit(reading=reading, attempts=99))
        transfer.synchronize()
        assert pair.same()
    pair.check()


@pytest.mark.parametrize("seed", range(10))
def test_a_restarted_peer_takes_the_place_of_the_old_one(executor, seed):
    pair = begun(executor, seed, seed * 3, reading=False)
    network = pair.network
    for wire in [wire for wire in network.wires if wire.mine == "far"]:
        wire.writes.clear()
        network.wires.remove(wire)
    network.notes[:] = [note for note in network.notes if note[1] != "far"]
    pair.far = network.place("far", executor)
    pair.near.meet("far", [pair.here])
    pair.far.meet("near", [pair.there])
    network.run(lambda: pair.near.lane("far").outbox.ready and pair.far.lane("near").outbox.ready)
    network.settle()
    assert all(transfer.over for transfer in pair.moving)
    pair.ended(transfer := pair.submit(reading=False, attempts=99))
    transfer.synchronize()
    assert pair.same()
    pair.check()


def test_a_wire_that_takes_no_message(executor):
    """After eight attempts to send, the peer counts as lost."""
    pair = Pair(executor)
    pair.network.wires[0].down = True
    transfer = pair.submit(reading=True)
    pair.network.run(lambda: transfer.over)
    with pytest.raises(TransferError, match="the wire did not take a message in 8 attempts: the wire takes nothing"):
        transfer.synchronize()
    assert not pair.near.end.has("far")
    pair.network.settle()
    assert pair.near.end.ring.free + pair.near.end.sending == pair.near.total


def test_a_ring_that_cannot_be_written(executor):
    network = Network()
    near, far = network.place("near", executor), network.place("far", executor)

    def refuse(address, nbytes, device):
        raise PathError("there is no way")

    near.meet("far").ring = refuse
    far.meet("near")
    network.settle()
    assert not near.end.has("far")
    assert not far.end.has("near")
    assert near.end.ring.free + near.end.sending == near.total


def test_rings_that_are_too_small(executor):
    network = Network()
    with pytest.raises(LayoutError, match="a ring of 1 slots; give memory for at least two"):
        network.place("one", executor, slots=1)
    with pytest.raises(LayoutError, match="multiple of 256"):
        network.place("odd", executor, slot_nbytes=1000)
    two = network.place("two", executor, slots=2)
    assert (two.end.sending, two.end.ring.free) == (1, 1)
    network.most_note = 100
    with pytest.raises(PathError, match="a note of the wire has 100 bytes"):
        two.meet("far")


def test_slots_by_default(executor):
    """Of 48 slots 16 gather; peers get a third of the free ones: 10, then 7, and 3 at least while there are."""
    network = Network()
    place = network.place("big", executor, slots=48, slot_nbytes=256)
    assert (place.end.sending, place.end.ring.free) == (16, 32)
    for k in range(8):
        place.meet(f"peer{k}")
    assert [len(lane.granted) for lane in place.end._peers.every] == [10, 7, 5, 3, 3, 3, 1, 0]


def test_both_close_at_once(executor):
    pair = begun(executor, 1, 7, reading=True)
    pair.near.end.forget("far")
    pair.far.end.forget("near")
    pair.network.settle()
    for place in (pair.near, pair.far):
        place.end.close()
        place.end.close()
    assert all(wire.closed for wire in pair.network.wires)


def test_one_side_knows_the_other_first(executor):
    """Greetings that come before the peer is added are the owner's to keep; here the first one is lost."""
    network = Network(3)
    near, far = network.place("near", executor), network.place("far", executor)
    near.meet("far")
    for _ in range(10):
        network.step()
    far.meet("near")
    network.run(lambda: near.lane("far").outbox.ready and far.lane("near").outbox.ready)
    meet(network, "near", "far")
