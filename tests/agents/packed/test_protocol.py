"""What the two ends promise each other: slots, turns, times, and messages that are lost or come twice."""

from __future__ import annotations

import threading
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, KVPlanError, TransferError
from kvplan.agents.packed.line import CHUNK, GO, HELLO, MAGIC, ORDER, Message
from kvplan.agents.peer_transfer import Order
from tests.agents.packed.simulated_wire import Faults, Network
from tests.interrupts import Interrupt
from tests.patience import PATIENCE

LAYERS, BLOCKS, DIM = 2, 64, 32  # 16 chunks of 256 bytes


class Pool:
    """A pool at a place, with content of its own."""

    def __init__(self, network, name, executor, notation, number, **options):
        shape = (LAYERS, BLOCKS, DIM) if notation.startswith("layer") else (BLOCKS, LAYERS, DIM)
        self.memory = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
        self.layout = KVLayout.from_tensors(notation, self.memory)
        self.end = network.place(name, executor, [self.layout], **options)
        self.name = name

    @property
    def blocks(self):
        return self.memory if len(self.memory) == BLOCKS else self.memory.swapaxes(0, 1)


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def pair(network, executor):
    return (Pool(network, "near", executor, "layer block dim", 1), Pool(network, "far", executor, "block layer dim", 2))


def pull(mine, theirs, blocks=range(BLOCKS), **options):
    plan = kvplan.compile(theirs.layout, mine.layout).plan(blocks, blocks)
    return mine.end.submit(Order(plan, theirs.name, reading=True, **options))


def push(mine, theirs, blocks=range(BLOCKS), **options):
    plan = kvplan.compile(mine.layout, theirs.layout).plan(blocks, blocks)
    return mine.end.submit(Order(plan, theirs.name, reading=False, **options))


def ended(network, transfer):
    network.run(lambda: transfer.ended)
    transfer.synchronize()


def kind_of(note):
    return Message.of(note).kind if note.startswith(MAGIC) else None


@pytest.mark.parametrize("kind", [ORDER, GO, CHUNK])
@pytest.mark.parametrize("times", [0, 2])
def test_a_message_that_is_lost_or_comes_twice_is_an_error(network, pair, kind, times):
    near, far = pair
    ended(network, pull(near, far, range(4)))
    left = [1]

    def drop(mine, peer, note):
        if kind_of(note) == kind and left[0]:
            left[0] -= 1
            return times
        return 1

    network.drop = drop
    before = near.blocks.copy()
    transfer = pull(near, far)
    with pytest.raises(TransferError):
        ended(network, transfer)
    assert ((near.blocks == before) | (near.blocks == far.blocks)).all()
    network.settle()
    ended(network, pull(near, far))
    assert (near.blocks == far.blocks).all()
    network.settle()


@pytest.mark.parametrize("lost", range(1, 4))
def test_greetings_that_are_lost_are_repeated(network, pair, lost):
    near, far = pair
    left = [lost]

    def drop(mine, peer, note):
        left[0] -= kind_of(note) == HELLO
        return int(kind_of(note) != HELLO or left[0] < 0)

    network.drop = drop
    ended(network, pull(near, far))
    assert (near.blocks == far.blocks).all()
    network.settle()


def test_a_peer_that_never_answers_is_given_up_although_more_transfers_begin(network, pair):
    near, far = pair
    network.stalled.add("far")
    first, begun = pull(near, far, deadline=None), network.now
    while not first.ended:
        last, soon = pull(near, far, deadline=None), network.now + 1
        network.run(lambda soon=soon: network.now > soon)
        assert network.now < begun + 60
    with pytest.raises(TransferError, match="it has said nothing for 30 seconds"):
        last.synchronize(PATIENCE)


@pytest.mark.parametrize("begin", [pull, push])
def test_a_peer_that_stalls_is_given_up_and_its_slots_come_back_when_it_goes_on(network, pair, executor, begin):
    near, far = pair
    other = Pool(network, "other", executor, "block layer dim", 3)
    ended(network, pull(near, far, range(4)))
    begun, transfer = network.now, begin(near, far)
    for _ in range(3):
        network.step()
    network.stalled.add("far")
    with pytest.raises(TransferError):
        ended(network, transfer)
    assert 29 < network.now - begun < 62
    ended(network, pull(near, other))  # with what slots there are
    assert (near.blocks == other.blocks).all()
    network.stalled.clear()
    network.settle()
    ended(network, pull(near, far))
    network.settle()


def test_a_peer_that_dies_gives_its_slots_back_at_once(network, pair):
    near, far = pair
    ended(network, pull(near, far, range(4)))
    transfer = pull(near, far)
    network.step()
    network.dead.add("far")
    with pytest.raises(TransferError, match="dead"):
        ended(network, transfer)
    network.notes.clear()
    network.run(lambda: not near.end.busy)
    assert not near.end.peers
    network.writes.clear()
    network.settle()


def test_slots_come_back_only_when_a_peer_answers_whose_connection_was_cut(network, pair):
    """It may write for some time: what is not sent to it says nothing of what it sends."""
    near, far = pair
    ended(network, pull(near, far, range(4)))
    free = len(near.end.ring.into)
    transfer = pull(near, far)
    network.run(lambda: network.writes)
    network.stalled.add("far")
    network.cut.add(("near", "far"))
    with pytest.raises(TransferError, match="cut"):
        ended(network, transfer)
    until = network.now + 20
    network.run(lambda: network.now > until)
    assert len(near.end.ring.into) < free
    assert network.writes
    network.stalled.clear()
    network.settle()
    ended(network, pull(near, far))
    assert (near.blocks == far.blocks).all()


@pytest.mark.parametrize("outcome", ["failed: the peer is gone", "moving"])
def test_a_write_that_arrived_and_whose_end_is_not_heard_keeps_no_slot(network, pair, outcome):
    near, far = pair
    ended(network, push(near, far, range(4)))
    network.outcome = "moving"
    ended(network, push(near, far, range(4)))
    network.outcome = outcome
    near.end.part("far", "it has gone")
    network.run(lambda: "far" not in near.end.peers)
    network.outcome = "done"
    network.settle()
    ended(network, push(near, far))
    assert (near.blocks == far.blocks).all()
    network.settle()


def test_an_unexpected_error_ends_the_transfer_once(network, pair):
    near, far = pair
    ended(network, pull(near, far, range(4)))
    errors = [RuntimeError("the wire is broken")]

    def fail(note):
        if kind_of(note) == ORDER and errors:
            raise errors.pop()

    network.fail = fail
    with pytest.raises(TransferError, match="broken"):
        ended(network, pull(near, far))
    network.settle()
    ended(network, pull(near, far))
    assert (near.blocks == far.blocks).all()


def test_ctrl_c_anywhere_in_a_poll_leaves_no_lock(network, pair):
    near, far = pair
    ended(network, pull(near, far, range(4)))
    for at in count(1):
        if not Interrupt(at).within(near.end.poll):
            break
        polled = []
        other = threading.Thread(target=lambda polled=polled: polled.append(near.end.poll()))
        other.start()
        other.join(PATIENCE)
        assert polled, at
    assert at > 10
    ended(network, pull(near, far))


def test_a_stalled_peer_leaves_half_of_the_slots_to_others(network, executor):
    near = Pool(network, "near", executor, "layer block dim", 1, slots=8)
    others = [Pool(network, name, executor, "block layer dim", k) for k, name in enumerate(("a", "b"))]
    for other in others:
        ended(network, pull(near, other, range(2)))
    stalled = pull(near, others[0], deadline=None)
    network.stalled.add("a")
    network.run(lambda: len(near.end.ring.into) < 5)
    for _ in range(20):
        network.step()
    ended(network, pull(near, others[1]))
    assert not stalled.ended
    network.stalled.clear()
    ended(network, stalled)
    network.settle()


def test_high_priority_is_asked_first(network, pair):
    near, far = pair
    ended(network, pull(near, far, range(4)))
    normal = [pull(near, far, range(32)) for _ in range(4)]
    network.step()
    urgent = pull(near, far, range(32, 64), urgent=True)
    ended(network, urgent)
    assert not any(transfer.ended for transfer in normal[1:])
    for transfer in normal:
        ended(network, transfer)


def test_transfers_take_turns(network, pair):
    near, far = pair
    large = pull(near, far, range(60))
    for _ in range(4):
        network.step()
    small = pull(near, far, range(60, 64))
    ended(network, small)
    assert not large.ended
    ended(network, large)


def test_a_transfer_that_waits_for_its_gate_has_no_deadline_and_no_slots(network, pair):
    near, far = pair
    ended(network, push(near, far, range(4)))
    event = threading.Event()
    waits = push(near, far, after=event)
    until = network.now + 100
    network.run(lambda: network.now > until)
    assert not waits.ended
    assert len(far.end.ring.into) == 4
    event.set()
    ended(network, waits)
    assert (near.blocks == far.blocks).all()


def test_an_event_that_was_never_recorded_is_refused(pair):
    event = SimpleNamespace(cuda_event=0, query=lambda: True, synchronize=lambda: None)  # as torch has it
    with pytest.raises(KVPlanError, match="never recorded"):
        push(*pair, after=event)


def test_memory_that_is_not_offered_is_refused(network, pair):
    near, _ = pair
    other = KVLayout.from_tensors("block layer dim", np.zeros((BLOCKS, LAYERS, DIM), np.uint8))
    plan = kvplan.compile(other, near.layout).plan([1], [2])
    with pytest.raises(TransferError, match="not all in the memory that is offered"):
        ended(network, near.end.submit(Order(plan, "far", reading=True)))
    network.settle()


def test_memory_that_is_offered_read_only_is_not_written(network, pair, executor):
    near, far = pair
    locked = far.memory.copy()
    locked.flags.writeable = False
    locked = KVLayout.from_tensors("block layer dim", locked)
    network.place("both", executor, [far.layout, locked])
    written = kvplan.compile(near.layout, KVLayout.from_tensors("block layer dim", far.memory.copy())).plan([1], [2])
    refused = kvplan.compile(near.layout, locked).plan([1], [2])
    before = [layout.tensors.copy() for layout in (far.layout, locked)]
    for plan, why in ((refused, "read-only"), (written, "not all in the memory that is offered")):
        with pytest.raises(TransferError, match=why):
            ended(network, near.end.submit(Order(plan, "both", reading=False)))
    for layout, content in zip((far.layout, locked), before, strict=True):
        assert (layout.tensors == content).all()
    ended(
        network, near.end.submit(Order(kvplan.compile(near.layout, far.layout).plan([1], [2]), "both", reading=False))
    )
    network.settle()


def test_many_programs_on_one_line(network, pair):
    """Each slice of a layout is a program of its own; numbers of old ones are used again."""
    near, far = pair
    for turn in range(150):
        layer = turn % LAYERS
        program = kvplan.compile(*(pool.layout.slice(layers=range(layer, layer + 1)) for pool in (far, near)))
        transfer = near.end.submit(Order(program.plan([turn % BLOCKS], [3]), "far", reading=True))
        ended(network, transfer)
        assert (near.blocks[3, layer] == far.blocks[turn % BLOCKS, layer]).all()
    network.settle()


def test_an_end_that_closes_tells_its_peers(network, pair):
    near, far = pair
    ended(network, pull(near, far, range(4)))
    network.faults = Faults(late=0.5)
    transfer = pull(near, far)
    network.step()
    closing = threading.Thread(target=lambda: far.end.close(20.0))
    closing.start()
    network.run(lambda: transfer.ended)
    with pytest.raises(TransferError, match="'far'"):
        transfer.synchronize()
    network.faults = Faults()
    network.run(lambda: not closing.is_alive())
    closing.join()
    with pytest.raises(TransferError, match="closed"):
        pull(far, near)
    with pytest.raises(TransferError):
        ended(network, pull(near, far))
    network.settle()
