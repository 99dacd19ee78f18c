"""Writes of several chunks: which go together, and what becomes of them after failures."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import LayoutError, TransferError
from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_messages import MOST_TOGETHER, Credit, Data
from tests.agents.packed.drawn_pairs import allowed, faults, finished
from tests.agents.packed.pairs import LAYERS, Pair
from tests.agents.packed.simulated_wire import Faults
from tests.profiles import examples

CHUNKS = 40
RING = {"slot_nbytes": 256, "slots": 32, "sending": 12, "granted": 16, "together": True}


def many(executor, *, blocks=CHUNKS, **more):
    """A pair of large rings; each block makes a chunk."""
    pair = Pair(executor, near=RING | more, far=RING | more, blocks=blocks)
    pair.network.settle()
    return pair


def watched(pair, *, reading=False):
    """Note the chunks of each write, by their numbers."""
    wire, seen = pair.network.wires[reading], []
    write = wire.write

    def noted(parts, note):
        chunks = messages.read_data(messages.read(note).body)
        assert [data.chunk for data in chunks] == list(range(chunks[0].chunk, chunks[0].chunk + len(parts)))
        seen.append([data.chunk for data in chunks])
        return write(parts, note)

    wire.write = noted
    return seen


@pytest.mark.parametrize("reading", [True, False])
def test_chunks_that_are_gathered_together_are_written_together(executor, reading):
    """The first and the last ones go alone, and never more than half of what is left: it can be scattered meanwhile."""
    pair = many(executor)
    seen = watched(pair, reading=reading)
    transfer = pair.submit(reading=reading)
    pair.ended(transfer)
    assert transfer.chunks == CHUNKS
    assert pair.same()
    assert [*chain(*seen)] == list(range(CHUNKS))
    sizes = list(map(len, seen))
    assert (sizes[0], sizes[-1], max(sizes)) == (1, 1, 4)
    assert len(sizes) <= CHUNKS // 2
    for chunks in seen:
        assert len(chunks) <= max(1, (CHUNKS - chunks[0]) // 2)
    pair.check()


@pytest.mark.parametrize("more", [{"together": False}, {"sending": 3}, {"granted": 7}, {"priority": "high"}], ids=str)
def test_some_chunks_go_alone(executor, more):
    """Those of the CPU, of few slots on either side, and of high priority: nothing waits for others."""
    submit = {key: more[key] for key in more if key == "priority"}
    pair = many(executor, **{key: more[key] for key in more if key != "priority"})
    seen = watched(pair)
    pair.ended(pair.submit(reading=False, **submit))
    assert pair.same()
    assert list(map(len, seen)) == [1] * CHUNKS
    pair.check()


def test_chunks_of_two_pieces_go_apart(executor):
    """By layers, each piece ends by small writes, so that its waits end soon."""
    pair = many(executor, blocks=60)
    seen = watched(pair, reading=True)
    transfer = pair.submit(reading=True, by_layer=True)
    pair.network.run(lambda: transfer.pieces or transfer.over)
    inbound = next(iter(pair.near.lane("far").receiver.inbounds.values()))
    pieces = [row.piece for row in inbound.rows]
    pair.ended(transfer)
    assert pair.same()
    assert len(set(pieces)) == LAYERS
    assert max(map(len, seen)) > 1
    for chunks in seen:
        assert len({pieces[chunk] for chunk in chunks}) == 1
    assert all(
        len(chunks) == 1
        for chunks in seen
        if chunks[-1] + 1 == len(pieces) or pieces[chunks[-1] + 1] > pieces[chunks[-1]]
    )
    pair.check()


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("reading", [True, False])
def test_a_write_of_several_chunks_that_fails_is_posted_again_or_loses_no_slot(executor, reading, attempts):
    pair = many(executor)
    seen = watched(pair, reading=reading)
    transfer = pair.submit(reading=reading, attempts=attempts)
    wire = pair.network.wires[reading]
    pair.network.run(lambda: any(len(write.parts) > 1 for write in wire.writes))
    several = next(write for write in wire.writes if len(write.parts) > 1)
    several.state = "failed: a cable broke"
    pair.ended(transfer)
    if attempts == 1:
        with pytest.raises(TransferError, match="a cable broke"):
            transfer.synchronize()
    else:
        transfer.synchronize()
        assert pair.same()
        numbers = [tuple(chunks) for chunks in seen]
        assert len(numbers) - len(set(numbers)) == 1
    pair.check()
    again = pair.submit(reading=reading)
    pair.ended(again)
    again.synchronize()
    assert pair.same()
    pair.check()


class Broken:
    """A gather that ends with an error, in place of another one."""

    def __init__(self, moved) -> None:
        self.plan, self.done = moved.plan, moved.done

    def synchronize(self) -> None:
        raise TransferError("the mover broke")


def test_a_gather_that_failed_fails_no_chunk_before_it(executor):
    """The chunks before it are written; none behind it is."""
    pair = many(executor)
    seen = watched(pair)
    transfer = pair.submit(reading=False)
    sender = pair.near.lane("far").sender
    pair.network.run(lambda: len(sender._gathering) > 2 and sender._writing)
    broken = sender._gathering[-1]
    broken.moved = Broken(broken.moved)
    pair.ended(transfer)
    with pytest.raises(TransferError, match="could not be gathered: the mover broke"):
        transfer.synchronize()
    assert broken.number not in [*chain(*seen)]
    pair.check()


@pytest.mark.parametrize("count", [0, MOST_TOGETHER + 1])
def test_a_write_of_no_chunk_or_of_too_many_is_refused(executor, count):
    body = messages.data_body(Data(1, 1, 0, 0, 1), [Credit(0, 1)] * (MOST_TOGETHER if count else 0))
    if not count:
        body = body[:13] + b"\0"
    with pytest.raises(LayoutError, match="a message of packed transfers cannot be read"):
        messages.read_data(body)


@examples(60)
@given(
    blocks=st.integers(1, 80), reading=st.booleans(), by_layer=st.booleans(), wrong=faults(),
    attempts=st.sampled_from((1, 1, 8)), legs=st.sampled_from((2, 7, 1 << 16)), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_long_transfers_by_large_rings(executor, blocks, reading, by_layer, wrong, attempts, legs, seed):
    """The law of packed transfers, where many chunks are on the way: what is called done is right, and no slot lost."""
    pair = Pair(executor, near=RING | {"leg_units": legs}, far=RING | {"leg_units": legs}, blocks=blocks, seed=seed)
    pair.network.faults = replace(wrong, fail=wrong.fail / 8, stuck=wrong.stuck / 8)
    order = np.random.default_rng(seed).permutation(blocks).tolist()
    target = pair.mine if reading else pair.theirs.swapaxes(0, 1)
    before, wanted = target.copy(), target.copy()
    if reading:
        wanted[:, order] = pair.theirs.swapaxes(0, 1)
    else:
        wanted[:] = pair.mine[:, order]
    transfer = pair.submit(order, range(blocks), reading=reading, by_layer=by_layer, attempts=attempts)
    pair.ended(transfer)
    done = finished(transfer)
    pair.network.faults = Faults()
    pair.network.settle()
    allowed([target], [before], [wanted])
    if done:
        np.testing.assert_array_equal(target, wanted)
    pair.check()
