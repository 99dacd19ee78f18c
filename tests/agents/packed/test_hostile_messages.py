"""Messages that a peer must not send: no wrong byte moves, nothing hangs, and the slots return."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_messages import (
    LONG,
    MAGIC,
    ROW_NBYTES,
    Credit,
    Data,
    Hello,
    Message,
    OrderPart,
    message,
)
from kvplan.agents.packed.pack_orders import Ordered
from kvplan.errors import LayoutError, TransferError
from tests.agents.packed.pairs import Pair, order_bytes
from tests.profiles import examples

KINDS = range(messages.HELLO, messages.BYE + 1)


def ends(pair):
    """Numbers of the two ends."""
    lane = pair.near.lane("far")
    return lane.outbox.mine, lane.outbox.theirs


def say(pair, kind, body=b"", given=(), *, sender=None, receiver=None):
    """Let far send near a message of these numbers; by default those of the two ends."""
    if sender is None or receiver is None:
        mine, theirs = ends(pair)
        sender, receiver = theirs if sender is None else sender, mine if receiver is None else receiver
    note = message(kind, sender, receiver, given, body)
    assert pair.near.end.take("far", note)


def whole(pair, before=None):
    """No byte has changed, and whether the lane lives or not, no slot is lost."""
    pair.network.settle()
    pair.check()
    if before is not None:
        np.testing.assert_array_equal(pair.mine, before[0])
        np.testing.assert_array_equal(pair.theirs, before[1])


def again(pair):
    """The two meet again, and move every block."""
    for place, other, layout in ((pair.near, "far", pair.here), (pair.far, "near", pair.there)):
        if not place.end.has(other):
            place.meet(other, [layout])
    pair.network.run(lambda: all(
        place.end.has(far) and place.lane(far).outbox.ready for place, far in ((pair.near, "far"), (pair.far, "near"))
    ))  # fmt: skip
    for reading in (True, False):
        pair.ended(transfer := pair.submit(reading=reading))
        transfer.synchronize()
        assert pair.same()


def slot_of(pair):
    return next(iter(pair.near.lane("far").receiver.granted))


WRONG = {
    "a slot that was not granted": lambda pair: (messages.DATA, messages.data_body(Data(0, 1, 0, 7000, 1))),
    "a slot to gather into": lambda pair: (
        messages.DATA,
        messages.data_body(Data(0, 1, 0, next(iter(pair.near.end._own.senders)), 1)),
    ),
    "a turn too far": lambda pair: (messages.DATA, messages.data_body(Data(0, 1, 0, slot_of(pair), 9))),
    "a void turn too far": lambda pair: (messages.VOID, messages.credit_body(Credit(slot_of(pair), 2**32 - 1))),
    "a transfer of neither end": lambda pair: (messages.DATA, messages.data_body(Data(2, 1, 0, slot_of(pair), 1))),
    "an end of neither end": lambda pair: (messages.DONE, messages.which_body(9, 1)),
    "a part of no parts": lambda pair: (messages.ASK, messages.part_body(OrderPart(2, 0, 1, 0, 0, b""))),
    "a part beyond the parts": lambda pair: (messages.PUSH, messages.part_body(OrderPart(2, 0, 1, 3, 3, b""))),
    "millions of parts": lambda pair: (messages.PUSH, messages.part_body(OrderPart(2, 0, 1, 0, 1 << 31, b"x"))),
    "an order of no order": lambda pair: (messages.ASK, messages.part_body(OrderPart(2, 0, 1, 0, 1, b"no order"))),
    "a short body": lambda pair: (messages.DATA, b"\0"),
    "no time": lambda pair: (
        messages.ASK,
        messages.part_body(OrderPart(2, 0, 1, 0, 1, order_bytes(Ordered(False, 1, 1024, float("nan"), ())))),  # noqa: FBT003
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("busy", [False, True])
def test_a_message_that_cannot_be_right(pair, name, busy):
    """The lane ends with an error that says so, at both ends; then the two can meet again."""
    before = pair.mine.copy(), pair.theirs.copy()
    transfer = pair.submit(reading=True) if busy else None
    say(pair, *WRONG[name](pair))
    pair.network.settle()
    assert not pair.near.end.has("far")
    assert not pair.far.end.has("near")
    if transfer is not None:
        with pytest.raises(TransferError, match=r"it sent a wrong message: .*; nothing was moved"):
            transfer.synchronize()
    whole(pair, before)
    again(pair)
    whole(pair)


def test_a_greeting_that_cannot_be_right(pair):
    _, theirs = ends(pair)
    for hello in (
        Hello(0, 1000, 8, "cpu", ((0, False, 0),)), Hello(0, 0, 8, "cpu", ((0, False, 0),)),
        Hello(0, 1024, 0, "cpu", ()), Hello(0, 1024, 1 << 20, "cpu", ()), Hello(0, 1024, 8, "cpu", ((8, False, 0),)),
        Hello(0, 1024, 8, "cpu", ((1, False, 0), (1, True, 0))),
    ):  # fmt: skip
        again(pair)
        say(pair, messages.HELLO, messages.hello_body(hello), sender=theirs + (1 << 61))
        pair.network.settle()
        assert not pair.near.end.has("far")
        whole(pair)


def test_a_message_without_a_checksum_that_fits(pair):
    note = bytearray(message(messages.CREDIT, *ends(pair)[::-1], ()))
    note[-1] ^= 1
    assert pair.near.end.take("far", bytes(note))
    pair.network.settle()
    assert not pair.near.end.has("far")
    again(pair)
    whole(pair)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_other_ends_change_nothing(pair, kind):
    """A late message of an end that is no more, with any content, is not read."""
    before = pair.mine.copy(), pair.theirs.copy()
    mine, theirs = ends(pair)
    for sender, receiver in ((theirs - 1, mine), (theirs, mine + 1), (theirs - 1, 0), (1, 1)):
        if kind == messages.HELLO and sender == theirs:
            continue  # of the end that is
        say(pair, kind, b"anything" * 9, (Credit(1, 1),), sender=sender, receiver=receiver)
    pair.network.settle()
    assert pair.near.end.has("far")
    whole(pair, before)
    again(pair)


def test_a_transfer_that_is_called_done_too_early(pair):
    """The wire stands still, and the peer says that a push is done."""
    wire = pair.network.wires[0]
    transfer = pair.submit([0], [0], reading=False)
    number = next(iter(pair.near.lane("far").sender.jobs))[1]
    say(pair, messages.DONE, messages.which_body(messages.PUSHED, number))
    pair.ended(transfer)
    with pytest.raises(TransferError, match="is called done after 0 of 1 chunks"):
        transfer.synchronize()
    assert wire.posted == 0
    again(pair)
    whole(pair)


def test_orders_that_are_refused(pair):
    """Orders that can be read, and must not be followed: the other end hears why, and the lane stays open."""
    before = pair.mine.copy(), pair.theirs.copy()
    heard = []
    pair.network.hear = lambda note: heard.append(messages.read(note)) or note
    for number, order in enumerate((
        Ordered(False, 1, 1 << 20, 0.0, ()), Ordered(False, 1, 255, 0.0, ()), Ordered(False, 1, 1024, 0.0, (b"x",)),  # noqa: FBT003
        Ordered(False, 1, 1024, 0.0, (bytes(200), b"recipe")),  # noqa: FBT003
    )):  # fmt: skip
        for kind in (messages.ASK, messages.PUSH):
            heard.clear()
            say(pair, kind, messages.part_body(OrderPart(1000 + 2 * number, 0, 1, 0, 1, order_bytes(order))))
            pair.network.settle()
            assert [one.kind for one in heard] == [messages.FAILED]
            assert pair.near.end.has("far")
    whole(pair, before)
    again(pair)


def test_many_orders_with_missing_parts(pair):
    """A peer that begins orders without end loses its lane; memory stays bounded."""
    for number in range(5000):
        say(pair, messages.PUSH, messages.part_body(OrderPart(2 * number, 0, 1, 0, 2, b"part")))
    pair.network.settle()
    assert not pair.near.end.has("far")
    again(pair)
    whole(pair)


def test_many_transfers_with_gaps(pair):
    """Numbers far apart take memory each: there is an end to them."""
    for number in range(70_000):
        say(pair, messages.CANCEL, messages.which_body(messages.PUSHED, 4 * number + 4))
    pair.network.settle()
    assert not pair.near.end.has("far")
    again(pair)
    whole(pair)


def test_a_peer_that_leaves_and_greets_again_and_again(pair):
    """It gets no further slots before it has said that it writes no more."""
    free = pair.near.end.ring.free
    mine, theirs = ends(pair)
    hello = messages.hello_body(Hello(0, 1024, 8, "cpu", ((0, False, 0),)))
    pair.far.polls = False
    for turn in range(10):
        say(pair, messages.BYE, b"\0", sender=theirs + turn, receiver=mine)
        say(pair, messages.HELLO, hello, sender=theirs + turn + 1, receiver=0)
        for _ in range(5):
            pair.network.step()
    assert pair.near.end.ring.free == free
    say(pair, messages.BYE, b"\1", sender=theirs + 10, receiver=mine)
    for _ in range(5):
        pair.network.step()
    assert pair.near.end.has("far")  # its last greeting was kept
    assert pair.near.end.ring.free == free
    pair.near.end.lost("far", "enough")
    pair.far.end.lost("near", "enough")
    pair.far.polls = True
    pair.network.settle()
    again(pair)
    whole(pair)


def test_slots_that_were_not_taken_are_not_given_back(pair):
    lane = pair.near.lane("far")
    free = lane.sender.credits.free
    for _ in range(3):
        say(pair, messages.CREDIT, b"", [Credit(slot, turn) for slot in range(12) for turn in range(4)])
    pair.network.settle()
    assert lane.sender.credits.free == free == lane.sender.credits.granted
    whole(pair)


def test_a_chunk_that_comes_again_in_another_slot(pair):
    """Its second slot holds other bytes: they must not be scattered."""
    transfer = pair.submit(reading=True)
    lane = pair.near.lane("far")
    pair.network.run(lambda: any(lane.receiver._turns.values()))
    taken = [slot for slot, turn in lane.receiver._turns.items() if turn]
    other = next(slot for slot in lane.receiver.granted if slot not in taken)
    inbound = next(iter(lane.receiver.inbounds.values()))
    say(pair, messages.DATA, messages.data_body(Data(0, inbound.number, inbound.seen.index(1), other, 1)))
    pair.network.settle()
    with pytest.raises(TransferError, match="comes again, or is not in the transfer"):
        transfer.synchronize()
    again(pair)
    whole(pair)


@pytest.mark.parametrize("nbytes", [0, 100, LONG - 1, LONG, LONG + 7, 5 * ROW_NBYTES, 5 * ROW_NBYTES + 3])
def test_a_changed_message_is_not_read(nbytes):
    """One byte that changes, anywhere, or two words of a body that change places."""
    rng = random.Random(nbytes)
    note = message(messages.PUSH, 7, 9, [Credit(3, 1)], rng.randbytes(nbytes))
    first, header = len(note) - nbytes, len(message(messages.PUSH, 7, 9, ()))
    assert messages.read(note).body == note[first:]
    # Of the head, a credit, the body's begin and its end; and anywhere.
    for at in (
        17,
        header,
        min(first, len(note) - 1),
        len(note) - 1,
        *(rng.randrange(13, len(note)) for _ in range(40)),
    ):
        changed = note[:at] + bytes([note[at] ^ rng.randint(1, 255)]) + note[at + 1 :]
        with pytest.raises(LayoutError, match="a message of packed transfers cannot be read"):
            messages.read(changed)
    words, row = nbytes // 8, ROW_NBYTES // 8
    pairs = [(0, 1), (0, words - 1), *(sorted(rng.sample(range(words), 2)) for _ in range(20))] if words > 1 else []
    for a, b in [*pairs, (5, 5 + row)] if nbytes >= LONG else pairs:  # of a row, of its end, of a column; and any two
        body = note[first:]
        one, other = body[8 * a : 8 * a + 8], body[8 * b : 8 * b + 8]
        swapped = body[: 8 * a] + other + body[8 * a + 8 : 8 * b] + one + body[8 * b + 8 :]
        with pytest.raises(LayoutError, match="a message of packed transfers cannot be read"):
            messages.read(note[:first] + swapped)


@examples(60)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_random_messages(data, seed, executor):
    """Bytes with the magic, real messages with other numbers, and random bodies with the right numbers."""
    pair = Pair(executor, seed=seed)
    before = pair.mine.copy(), pair.theirs.copy()
    mine, theirs = ends(pair)
    rng = random.Random(seed)
    for _ in range(20):
        pick = data.draw(st.integers(0, 3))
        body = data.draw(st.binary(max_size=60))
        if pick == 0:
            assert pair.near.end.take("far", MAGIC + body)
        elif pick == 1:
            given = [Credit(rng.randrange(9), rng.randrange(3))]
            say(pair, rng.choice(KINDS), body, given, sender=theirs, receiver=mine)
        elif pick == 2:
            kind = rng.choice((messages.DONE, messages.FAILED, messages.CANCEL))
            body = messages.which_body(rng.randrange(2), rng.randrange(6), "why")
            say(pair, kind, body, sender=theirs, receiver=mine)
        else:
            made = Message(rng.choice(KINDS), rng.choice((mine, theirs, 1)), rng.choice((mine, theirs, 0)), (), body)
            assert pair.near.end.take("far", message(*made))
        pair.network.step()
    np.testing.assert_array_equal(pair.mine, before[0])
    np.testing.assert_array_equal(pair.theirs, before[1])
    pair.network.settle()
    whole(pair, before)
    if not (pair.near.end.has("far") and pair.far.end.has("near")):
        for place, other, layout in ((pair.near, "far", pair.here), (pair.far, "near", pair.there)):
            place.end.lost(other, "met again")
            pair.network.settle()
            place.meet(other, [layout])
        pair.network.settle()
    again(pair)
