"""What a transfer waits for, and until when: `after=`, layers, priorities, deadlines, cancels, forgotten peers."""

from __future__ import annotations

import time

import pytest

from kvplan import KVPlanError, PathError, TransferError
from tests.contract.peers.pairs import BLOCKS, LAYERS
from tests.contract.peers.transports import agents, every, over

GENEROUS = 20.0  # seconds beyond a deadline, on a machine that does much else


@agents
@pytest.mark.parametrize("reading", [False, True], ids=["push", "pull"])
def test_a_transfer_waits_for_its_event(pair, reading):
    number = pair.submit([1, 2], [3, 4], reading=reading, event=1)
    assert not pair.near.done(number)
    assert pair.near.stats().in_flight == 1
    pair.check()
    pair.near.set(1)
    pair.near.end(number)
    pair.copied([1, 2], [3, 4], reading=reading)
    pair.check()


@agents
def test_transfers_wait_for_each_other(pair):
    """A block goes there, on within this process, and back: each step reads what the one before it wrote."""
    first = last = pair.submit([0], [7], reading=False, event=1)
    for k in range(1, 6):
        last = pair.submit([k], [7 if k % 2 else 8], reading=bool(k % 2), behind=last)
        if not k % 2:
            last = pair.submit([k], [7], reading=False, behind=last)
    assert not pair.near.done(first)
    pair.near.set(1)
    pair.near.end(last)
    pair.copied([0], [7], reading=False)
    for k in range(1, 6):
        pair.copied([k], [7 if k % 2 else 8], reading=bool(k % 2))
        if not k % 2:
            pair.copied([k], [7], reading=False)
    pair.check()


@over("packed")
def test_layers_are_pushed_as_they_are_computed(pair):
    number = pair.submit([3, 4], [9, 2], reading=False, by_layer=True, events=dict(enumerate(range(LAYERS))))
    assert not pair.near.done(number)
    pair.check()
    for layer in range(LAYERS):
        pair.near.set(layer)
        for mine, theirs in ((3, 9), (4, 2)):
            pair.there.tensors[theirs, layer] = pair.here.tensors[layer, mine].transpose(1, 0, 2)
        until = time.monotonic() + GENEROUS
        while time.monotonic() < until and pair.far.content() != [root.tobytes() for root in pair.there.roots]:
            time.sleep(0.01)
        pair.check()
    pair.near.end(number)


@agents
def test_a_deadline_ends_a_transfer_that_has_not_begun(pair):
    begun = time.monotonic()
    number = pair.submit([1], [2], reading=False, event=1, deadline=0.5, note=b"never sent")
    with pytest.raises(TransferError, match=r"deadline.*nothing was moved"):
        pair.near.end(number)
    assert 0.5 <= time.monotonic() - begun < 0.5 + GENEROUS
    pair.check()
    pair.near.set(1)
    pair.move([1], [2], reading=False, note=b"sent", deadline=60.0)
    pair.check()
    assert [note for _, note in pair.far.hear(1)] == [b"sent"]


@agents
def test_urgent_transfers_overtake_those_that_wait(pair):
    waits = [pair.submit([k], [k], reading=False, event=1) for k in range(4)]
    for k in range(4, 12):
        pair.move([k], [k], reading=False, priority="high")
    assert not any(pair.near.done(number) for number in waits)
    pair.near.set(1)
    for k, number in enumerate(waits):
        pair.near.end(number)
        pair.copied([k], [k], reading=False)
    pair.check()


@every
def test_a_forgotten_peer_takes_nothing_and_is_met_again(pair):
    pair.move([1], [2], reading=True)
    old = pair.far.card()
    pair.near.keep("far", "forgotten")
    pair.near.forget("far")
    with pytest.raises(KVPlanError):
        pair.near.submit("forgotten", [1], [2], reading=True, **pair.transport.options)
    pair.near.forget("forgotten")  # a second call does nothing
    assert pair.near.meet(old) == "far"
    pair.move([3], [4], reading=True)
    pair.check()


@every
def test_a_peer_that_is_met_again_replaces_the_first(pair):
    for k in range(5):
        pair.move([k], [k], reading=False)
        pair.near.keep("far", "replaced")
        pair.near.meet(pair.far.card())
        with pytest.raises(KVPlanError):
            pair.near.submit("replaced", [1], [2], reading=True, **pair.transport.options)
    pair.move(range(BLOCKS), range(BLOCKS), reading=True)
    pair.check()


@agents
def test_a_peer_that_closes_takes_nothing_more(pair):
    pair.move([1], [2], reading=False)
    pair.near.begin("until_refused", "far", [1], reading=False, **pair.transport.options)
    pair.far.close()
    assert "'far'" in pair.near.answer()


@over("shm", "packed")
def test_streams_are_of_gpus(pair):
    """Only owners of GPU memory order the work of their streams with that of visitors."""
    for call in (pair.far.publish, pair.far.wait_for_visitors):
        with pytest.raises(PathError, match="'far' offers no memory of a GPU"):
            call()


@over("cuda_ipc")
def test_visitors_wait_for_what_the_owner_published(pair):
    """The owner's stream writes late; the visitor is told at once, and reads what was written."""
    for value in range(8):
        pair.far.fill(value, 0.05)
        pair.far.publish()
        pair.near.end(pair.submit(range(BLOCKS), range(BLOCKS), reading=True))
        for root in pair.there.roots:
            root[:] = value
        pair.copied(range(BLOCKS), range(BLOCKS), reading=True)
        pair.check()


@over("cuda_ipc")
def test_the_owner_s_stream_waits_for_visitors(pair):
    """A pull waits for the visitor's GPU; the owner may write the blocks again only behind it."""
    pair.move(range(BLOCKS), range(BLOCKS), reading=True)  # loads the kernels
    for value in range(8):
        number = pair.submit(range(BLOCKS), range(BLOCKS), reading=True, busy=0.05)
        pair.far.wait_for_visitors()
        pair.far.fill(value)
        pair.near.end(number)
        pair.copied(range(BLOCKS), range(BLOCKS), reading=True)
        for root in pair.there.roots:
            root[:] = value
        pair.check()
