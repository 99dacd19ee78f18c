"""Chunks that are gathered while the peer has no slot for them: how many, who is first, and what becomes of them."""

from __future__ import annotations

import pytest

from kvplan import TransferError
from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_jobs import AHEAD, SPARE
from tests.agents.packed.pairs import Pair

CHUNKS = 10  # of all blocks, in slots of 256 bytes


def frozen(executor, *, sending=8, **submit):
    """A pair whose peer gives one slot, which a write keeps; and a push that waits."""
    small = {"slot_nbytes": 256}
    pair = Pair(executor, near=small | {"slots": sending + 4, "sending": sending}, far=small | {"granted": 1})
    pair.network.settle()
    pair.network.wires[0].frozen = True
    transfer = pair.submit(reading=False, **submit)
    for _ in range(20):
        pair.network.step()
    return pair, transfer


def thaw(pair):
    pair.network.wires[0].frozen = False


def test_some_chunks_are_gathered_ahead(executor):
    pair, transfer = frozen(executor)
    sender = pair.near.lane("far").sender
    assert (len(sender._writing), len(sender._unlent)) == (1, AHEAD)
    assert all(chunk.moved.done() for chunk in sender._unlent)
    with pytest.raises(TransferError, match="has no slot of the peer"):
        sender._unlent[0].theirs.number  # noqa: B018  # the property raises it
    thaw(pair)
    pair.ended(transfer)
    assert transfer.chunks == CHUNKS
    assert pair.same()
    pair.check()


def test_they_leave_slots_to_others(executor):
    for sending in (2, 4, 5, 6):
        pair, transfer = frozen(executor, sending=sending)
        assert len(pair.near.lane("far").sender._unlent) == max(0, sending - 1 - SPARE)
        thaw(pair)
        pair.ended(transfer)
        pair.check()


def test_a_chunk_of_high_priority_gets_the_next_slot(executor):
    pair, transfer = frozen(executor)
    other = pair.submit([0], [9], reading=False, priority="high")
    whose = []
    write = pair.network.wires[0].write

    def watched(local, remote, nbytes, note):
        whose.append(messages.read_data(messages.read(note).body).transfer & 1)
        return write(local, remote, nbytes, note)

    pair.network.wires[0].write = watched
    thaw(pair)
    pair.ended(transfer, other)
    assert whose == [1, *[0] * (CHUNKS - 1)]
    pair.check()


@pytest.mark.parametrize("end", ["refused", "late", "forgotten", "anew"])
def test_no_slot_is_lost_if_they_are_not_wanted_any_more(executor, end):
    pair, transfer = frozen(executor, deadline=1.0 if end == "late" else None)
    near, far = pair.near, pair.far
    if end == "refused":
        far.lane("near").receiver.refuse(2, "no more")
    elif end == "late":
        pair.network.clock += 2.0
    elif end == "forgotten":
        far.end.forget("near")
    else:
        far.lane("near").restart("it was interrupted")
    thaw(pair)
    pair.ended(transfer)
    with pytest.raises(TransferError):
        transfer.synchronize()
    pair.network.settle()
    assert len(near.end._own.sends) == near.end.sending
    if end != "forgotten":
        again = pair.submit(reading=False)
        pair.ended(again)
        again.synchronize()
        pair.check()
