"""Notes between two processes: their order, their size, and that the bytes they tell of are there."""

from __future__ import annotations

from time import sleep

import numpy as np
import pytest

from kvplan import KVPlanError, TransferError
from tests.contract.peers.pairs import BLOCKS
from tests.contract.peers.transports import agents, every, over
from tests.strategies import GUARD

LONGEST = 60_000  # bytes


@over("shm", "packed", "cuda_ipc")
@pytest.mark.parametrize("reading", [False, True], ids=["push", "pull"])
def test_notes_come_in_the_order_of_the_submits(pair, reading):
    numbers = [pair.submit([k % BLOCKS], [k * 7 % BLOCKS], reading=reading, note=b"note %d" % k) for k in range(60)]
    for number in numbers:
        pair.near.end(number)
    assert pair.far.hear(60) == [("near", b"note %d" % k) for k in range(60)]
    assert pair.far.notes() == []


@over("shm", "direct", "packed", "cuda_ipc")
def test_a_note_alone_comes_behind_those_of_transfers_that_have_ended(pair):
    pair.near.end(pair.submit([1], [2], reading=False, note=b"first"))
    pair.near.send("far", b"second")
    pair.near.end(pair.submit([2], [3], reading=False, note=b"third"))
    sleep(0.3)  # all have come when the other process asks
    assert [note for _, note in pair.far.hear(3)] == [b"first", b"second", b"third"]


@over("direct")
def test_every_note_comes_once(pair):
    """NIXL sends the note of a direct transfer itself, and keeps no order between transfers."""
    numbers = [pair.submit([k % BLOCKS], [k * 7 % BLOCKS], reading=False, note=b"%d" % k) for k in range(60)]
    for number in numbers:
        pair.near.end(number)
    assert sorted(pair.far.hear(60)) == sorted(("near", b"%d" % k) for k in range(60))


@agents
def test_long_notes_arrive_whole(pair):
    long = np.random.default_rng(1).bytes(LONGEST)
    pair.near.send("far", long)
    pair.near.end(pair.submit([1], [2], reading=False, note=long[::-1]))
    pair.near.end(pair.submit([], [], reading=True, note=b"of no bytes"))
    assert sorted(note for _, note in pair.far.hear(3)) == sorted([long, long[::-1], b"of no bytes"])


@agents
def test_notes_that_are_too_long_are_refused(pair):
    with pytest.raises(KVPlanError, match=r"60,?000"):
        pair.near.send("far", bytes(LONGEST + 1))
    with pytest.raises(KVPlanError, match=r"60,?000"):
        pair.submit([1], [2], reading=False, note=bytes(LONGEST + 1))
    pair.near.send("far", b"a short one")
    assert pair.far.hear(1) == [("near", b"a short one")]
    pair.check()


@every
def test_a_note_is_seen_after_the_bytes_of_its_transfer(pair):
    """Each push writes a block that no other one writes."""
    pair.far.begin("contents_at_notes", BLOCKS)
    for k in range(BLOCKS):
        pair.move([k], [k * 5 % BLOCKS], reading=False, note=b"%d" % k)
    wanted = blocks(pair.there.roots[0].tobytes())
    for k, (note, content) in enumerate(pair.far.answer()):
        assert note == b"%d" % k
        np.testing.assert_array_equal(blocks(content[0])[k * 5 % BLOCKS], wanted[k * 5 % BLOCKS])
    pair.check()


def blocks(root: bytes) -> np.ndarray:
    """The bytes of the cache of the other process, block by block."""
    return np.frombuffer(root, np.uint8)[GUARD:-GUARD].reshape(BLOCKS, -1)


@agents
def test_a_note_of_a_transfer_that_waits_is_not_sent(pair):
    waits = pair.submit([0], [1], reading=False, note=b"of the first", event=1)
    cancelled = pair.submit([0], [2], reading=False, note=b"of one that is cancelled", event=2)
    assert pair.near.cancel(cancelled)
    assert pair.far.notes() == []
    pair.near.set(1)
    pair.near.end(waits)
    with pytest.raises(TransferError, match="cancelled"):
        pair.near.end(cancelled)
    assert pair.far.hear(1) == [("near", b"of the first")]
    assert pair.far.notes() == []
