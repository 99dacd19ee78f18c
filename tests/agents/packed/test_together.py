"""Chunks that one submit copies together, as of a ring in GPU memory: how many, what becomes of them after an error."""

from __future__ import annotations

import pytest

from kvplan import KVPlanError, TransferError
from kvplan.agents.packed.pack_rows import Copier
from tests.agents.packed.pairs import Pair

CHUNKS = 10  # of all blocks, in slots of 256 bytes


class Watched(Copier):
    """Notes how many chunks each submit copies; some submits fail."""

    def __init__(self, mover) -> None:
        super().__init__(mover)
        self.submits: list[int] = []
        self.fails = 0

    def submit(self, chunks, after, *, urgent, spare=True):
        self.submits.append(len(chunks))
        if self.fails == len(self.submits):
            raise KVPlanError("no room")
        return super().submit(chunks, after, urgent=urgent, spare=spare)


def watched(executor, *, sending=8, granted=8, fails=(0, 0)):
    """A pair of ends that copy chunks together, and what each submits: gathers of near, scatters of far."""
    small = {"slot_nbytes": 256, "together": True}
    pair = Pair(executor, near=small | {"slots": sending + 2, "sending": sending},
                far=small | {"slots": granted + 2, "sending": 2, "granted": granted})  # fmt: skip
    pair.network.settle()
    sender, receiver = pair.near.lane("far").sender, pair.far.lane("near").receiver
    sender._copier, receiver._copier = Watched(pair.near.mover), Watched(pair.far.mover)
    sender._copier.fails, receiver._copier.fails = fails
    return pair, sender._copier.submits, receiver._copier.submits


@pytest.mark.parametrize(("sending", "most"), [(3, 1), (4, 1), (6, 2), (8, 3)])
def test_the_first_chunks_are_gathered_alone_and_later_ones_by_halves_of_the_slots(executor, sending, most):
    pair, gathers, scatters = watched(executor, sending=sending)
    transfer = pair.submit(reading=False)
    pair.ended(transfer)
    assert pair.same()
    assert sum(gathers) == sum(scatters) == CHUNKS
    assert gathers[:2] == [1, 1]
    assert max(gathers) == most
    pair.check()


def test_the_last_chunks_are_gathered_in_equal_parts(executor):
    """Four have begun, so at most four go together; six are left."""
    pair, gathers, _ = watched(executor, sending=12)
    pair.ended(pair.submit(reading=False))
    assert gathers == [1, 1, 2, 3, 3]
    pair.check()


def test_the_first_chunk_is_written_before_another_is_gathered(executor):
    pair, gathers, _ = watched(executor)
    transfer = pair.submit(reading=False)
    sender = pair.near.lane("far").sender
    seen = set()
    while not transfer.over:
        seen.add((len(gathers), sum(job.posted for job in sender.jobs.values())))
        pair.network.step()
    assert not {posted for submits, posted in seen if submits == 2} & {0}
    pair.check()


def test_chunks_that_wait_are_scattered_together(executor):
    pair, _, scatters = watched(executor)
    transfer = pair.submit(reading=False)
    pair.far.polls = False  # their notes wait
    for _ in range(60):
        pair.network.step()
    pair.far.polls = True
    pair.ended(transfer)
    assert pair.same()
    assert max(scatters) > 1
    pair.check()


def test_chunks_wait_until_more_can_be_scattered_together(executor):
    """In the middle of a transfer, two go together; its last ones wait for none."""
    pair, _, scatters = watched(executor, sending=8, granted=16)
    transfer = pair.submit(reading=False)
    pair.ended(transfer)
    assert pair.same()
    assert sum(scatters) == CHUNKS
    assert len(scatters) < CHUNKS
    assert 1 not in scatters[:1]
    pair.check()


def test_chunks_of_high_priority_wait_for_none(executor):
    pair, gathers, scatters = watched(executor, sending=8, granted=16)
    transfer = pair.submit(reading=False, priority="high")
    pair.far.polls = False
    for _ in range(2000):
        pair.far.polls = not pair.far.polls
        pair.network.step()
        receiver = pair.far.lane("near").receiver
        assert not receiver._come
    pair.ended(transfer)
    assert sum(gathers) == sum(scatters) == CHUNKS
    pair.check()


@pytest.mark.parametrize("end", ["late", "forgotten", "refused", "restarted"])
@pytest.mark.parametrize("reading", [True, False])
def test_chunks_that_wait_give_their_slots_back_when_the_transfer_is_given_up(executor, reading, end):
    """A chunk waits for the next ones while the wire stands still; then nothing comes any more."""
    ring = {"slot_nbytes": 256, "slots": 24, "sending": 8, "granted": 16, "together": True}
    pair = Pair(executor, near=ring, far=ring)
    pair.network.settle()
    source, target = (pair.far, pair.near) if reading else (pair.near, pair.far)
    transfer = pair.submit(reading=reading, deadline=1.0 if end == "late" else None)
    receiver = target.lane(source.name).receiver
    pair.network.run(lambda: len(receiver._come) == 1)
    for wire in pair.network.wires:
        wire.frozen = True
    for _ in range(100):
        pair.network.step()
    assert len(receiver._come) == 1
    if end == "late":
        pair.network.clock += 2.0
    elif end == "forgotten":
        source.end.forget(target.name)
    elif end == "restarted":
        source.lane(target.name).restart("it was interrupted")
    elif reading:
        receiver.fail(*receiver.inbounds.values(), "no more")
    else:
        receiver.refuse(2, "no more")
    if reading and end in ("late", "refused"):  # the receiver knows it, and nothing else comes
        for _ in range(5):
            target.end.poll()
        assert not receiver._come
    for wire in pair.network.wires:
        wire.frozen = False
    pair.ended(transfer)
    with pytest.raises(TransferError):
        transfer.synchronize()
    pair.network.settle()
    assert not receiver._come
    if end != "forgotten":
        again = pair.submit(reading=reading)
        pair.ended(again)
        again.synchronize()
        assert pair.same()
        pair.check()


@pytest.mark.parametrize("fails", [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2)])
def test_a_submit_that_fails_loses_no_slot(executor, fails):
    """The transfer fails, whichever of its chunks it was, and a later one moves."""
    pair, _, _ = watched(executor, fails=fails)
    transfer = pair.submit(reading=False)
    pair.ended(transfer)
    with pytest.raises(TransferError, match="no room"):
        transfer.synchronize()
    pair.network.settle()
    pair.check()
    later = pair.submit(reading=False)
    pair.ended(later)
    later.synchronize()
    assert pair.same()
    pair.check()


def test_chunks_of_two_transfers_are_not_mixed(executor):
    pair, gathers, scatters = watched(executor)
    one, other = pair.submit(range(5), range(5), reading=False), pair.submit(range(5, 10), range(5, 10), reading=False)
    pair.ended(one, other)
    assert pair.same()
    assert sum(gathers) == sum(scatters) == CHUNKS
    pair.check()


@pytest.mark.parametrize("seed", range(4))
def test_no_chunk_of_normal_priority_begins_before_those_of_high_priority(executor, seed):
    pair, _, _ = watched(executor)
    pair.network.rng.seed(seed)
    sender, begun = pair.near.lane("far").sender, []
    submit = sender._copier.submit

    def noted(chunks, after, *, urgent, spare=True):
        begun.extend([urgent] * len(chunks))
        return submit(chunks, after, urgent=urgent, spare=spare)

    sender._copier.submit = noted
    pair.far.polls = False  # the greeting is over; nothing is written, so that both wait
    normal = pair.submit(range(6), range(6), reading=False)
    first = len(begun)
    high = pair.submit(range(6, 10), range(6, 10), reading=False, priority="high")
    pair.far.polls = True
    pair.ended(normal, high)
    behind = begun[first:]
    assert behind[: behind.count(True)] == [True] * behind.count(True)
    assert pair.same()
    pair.check()


@pytest.mark.parametrize("reached", ["submit", "list"])
def test_a_scatter_whose_submit_was_interrupted_keeps_its_slot(executor, reached):
    """It is submitted again, unless it is known: its slot counts as read until that has ended, and so the first one."""
    pair, _, _ = watched(executor)
    receiver, copies = pair.far.lane("near").receiver, []
    submit = receiver._copier.submit

    def interrupted(chunks, after, *, urgent, spare=True):
        copies.append(submit(chunks, after, urgent=urgent, spare=spare))
        if len(copies) == 1:
            raise KeyboardInterrupt
        return copies[-1]

    receiver._copier.submit = interrupted
    transfer = pair.submit(reading=False)
    with pytest.raises(KeyboardInterrupt):
        pair.ended(transfer)
    if reached == "list":  # the interrupt came one line later
        receiver._scattering.append(receiver._come[0]._replace(moved=copies[0]))
    pair.far.end.poll()  # begins anew
    assert len(copies) == 2 - (reached == "list")
    pair.network.settle()
    assert not receiver._submitting
    later = pair.submit(reading=False)
    pair.ended(later)
    later.synchronize()
    assert pair.same()
    pair.check()
