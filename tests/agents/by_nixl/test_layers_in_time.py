"""Pushes by layer beside compute: the last layer arrives soon, however far apart layers are; by a clock of the test."""

from __future__ import annotations

import pytest

import kvplan
from kvplan.agents.by_nixl.nixl_progress import BUSY_NAP, MOST_BUSY_NAP, MOST_FAR_NAP, NEAR_GAP, prompt
from kvplan.agents.packed.pack_rows import UNRATED, WAITS, only_last_left, rows_of
from kvplan.plan.packing.packing import packings_by_layer
from tests.agents.by_nixl.virtual_wire import COPY, EMPTY, FOUND, Computed, Two

LAYERS = 16
# The steps behind a layer's compute: it is seen, gathered, written, and scattered, each of which a look finds and the
# next step follows; and the word of its end. Naps come at most twice between two looks that matter to the last layer.
STEPS = 4 * (FOUND + EMPTY) + 2 * COPY


@pytest.mark.parametrize("compute", [2.5e-3, 16e-3, 40e-3])
@pytest.mark.parametrize(("chunks", "seconds"), [(1, 1.34e-3), (2, 0.67e-3), (1, 0.17e-3)])
def test_the_last_layer_arrives_as_soon_whatever_a_layer_takes(chunks, seconds, compute):
    two = Two(seconds, patient=True, together=True, layers=LAYERS)
    tails = [two.push_by_layer(chunks, [compute * (1 + k % 3 / 50) for k in range(LAYERS)]) for _ in range(4)]
    slack = -MOST_BUSY_NAP if compute > NEAR_GAP else 2 * MOST_BUSY_NAP  # naps are short anyway
    assert max(tails) < chunks * seconds + STEPS + slack


def test_layers_before_the_last_ones_are_looked_for_rarely():
    """A layer of 40 ms has 400 naps of 0.1 ms."""
    two = Two(1.34e-3, patient=True, together=True, layers=LAYERS)
    two.push_by_layer(1, [40e-3] * LAYERS)
    assert max(two.near.looks, two.far.looks) < 200 * LAYERS


def test_only_the_last_layer_is_looked_for_often():
    """By the rows of the chunks; not of a plan that is one piece."""
    two = Two(1e-3, patient=True, layers=3)
    plan = kvplan.compile(two.here, two.there).plan(range(32), range(32))
    halves = [packing.src for _, packing in packings_by_layer(plan, 3)]
    rows = rows_of(halves, 4096)
    assert [row.piece for row in rows] == [0, 0, 1, 1, 2, 2]
    assert [only_last_left(rows, done, 1) for done in range(7)] == [False] * 4 + [True] * 3
    assert not any(only_last_left(rows, done, 0) for done in range(7))
    legs = [*rows, *rows_of([halves[2].part(0, 16)], 4096, 2), *rows_of([halves[2]], 4096, 3)]
    assert [row.piece for row in legs[6:]] == [2, 3, 3]
    assert [only_last_left(legs, done, 1) for done in range(10)] == [False] * 7 + [True] * 3
    assert [only_last_left(rows, done, 2) for done in range(7)] == [False] * 2 + [True] * 5
    many = rows_of(halves * 10, 4096)
    known = [only_last_left(many, done, 20) for done in range(60)]
    assert known == [False] * 20 + [True] * UNRATED + [False] * (38 - UNRATED) + [True] * 2
    long = [*many[:2], *(row._replace(piece=1) for row in many[2:])]
    known = [only_last_left(long, done, 1) for done in range(61)]
    assert known == [False] * 2 + [True] * UNRATED + [False] * (58 - 2 * UNRATED) + [True] * (UNRATED + 1)
    assert not any(only_last_left(rows[:2], done, 1) for done in range(3))
    assert not only_last_left([], 0, 1)


def test_the_last_layer_of_an_order_in_legs_is_looked_for_as_often():
    """A leg of one layer each. The receiver took the last one for a plain push: it ended 0.4 ms later."""
    two = Two(0.67e-3, patient=True, together=True, layers=LAYERS, leg_units=16)
    assert max([two.push_by_layer(1, [16e-3] * LAYERS) for _ in range(4)]) < 0.67e-3 + STEPS + MOST_BUSY_NAP


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("leg_units", [8, 16, 40])
def test_a_receiver_counts_pieces_across_legs(leg_units, by_layer):
    """A plain push is one piece, in however many legs it is told, and takes no short naps."""
    two = Two(1e-3, patient=True, layers=4, leg_units=leg_units)
    plan = kvplan.compile(two.here, two.there).plan(range(32), range(32))
    after = {3: Computed(two.clock, two.clock.time + 20e-3)} if by_layer else None
    transfer, seen, short = two.near.end.submit("far", plan, reading=False, by_layer=by_layer, after=after), [], []

    def look():
        for inbound in two.far.end._peers.lanes["near"].receiver.inbounds.values():
            seen[:] = [row.piece for row in inbound.rows]
        short.append(prompt(two.far.end.stages))
        return transfer.over

    two.near.naps.wake(two.clock.time)
    two.run(look)
    assert seen == ([0, 0, 1, 1, 2, 2, 3, 3] if by_layer else [0] * 8)
    assert any(short) is by_layer


@pytest.mark.parametrize(("seconds", "chunks"), [(0.17e-3, 1), (0.34e-3, 1), (0.17e-3, 3)])
def test_layers_that_share_the_last_event_arrive_soon(seconds, chunks):
    """Their first one waits, and the others follow. They ended 2 ms behind their bytes, and end 0.4 ms behind them."""
    two = Two(seconds, patient=True, together=True, layers=LAYERS)
    tails = [two.push_by_layer(chunks, [16e-3] * LAYERS, every=4) for _ in range(4)]
    assert max(tails) < 4 * chunks * seconds + STEPS + 2 * MOST_BUSY_NAP


@pytest.mark.parametrize("events", [{0: 0, 4: 1, 8: 2, 12: 3}, {0: 0, 8: 2, 12: 1, 15: 1}])
def test_a_sender_takes_short_naps_while_it_waits_for_the_last_event(events):
    """The last one of the layers, or the last one to come. Each process gives none for the ones before."""
    two = Two(0.17e-3, patient=True, layers=LAYERS)
    plan = kvplan.compile(two.here, two.there).plan(range(16), range(16))
    begun, last = two.clock.time, max(events.values())
    after = {layer: Computed(two.clock, begun + 20e-3 * number) for layer, number in events.items()}
    push = two.near.end.submit("far", plan, reading=False, by_layer=True, after=after)
    two.near.naps.wake(begun)
    for number in range(1, last + 1):
        ends = begun + 20e-3 * number - 1e-3
        two.run(lambda ends=ends: two.clock.time > ends)
        assert prompt(two.near.end.stages) is (number == last)
    two.run(lambda: push.over)
    push.synchronize()


def test_short_naps_for_the_last_layer_end_when_its_compute_is_late():
    """A second has 10,000 naps of 0.1 ms. A layer that takes three times as long as those before it is seen soon."""
    two = Two(1.34e-3, patient=True, together=True, layers=LAYERS)
    two.push_by_layer(1, [16e-3] * (LAYERS - 1) + [1.0])
    assert max(two.near.looks, two.far.looks) < 4000
    assert two.push_by_layer(1, [16e-3] * (LAYERS - 1) + [48e-3]) < 1.34e-3 + STEPS - MOST_BUSY_NAP


@pytest.mark.parametrize("last", [LAYERS - 1, 10])
@pytest.mark.parametrize("reading", [True, False])
@pytest.mark.parametrize("pushed", [True, False])
def test_a_push_that_waits_leaves_others_their_long_naps(pushed, reading, last):
    """Both processes, whichever one moves 192 chunks beside it, and whichever layer it waits for."""
    two = Two(1.34e-3, 24, patient=True, together=True, layers=LAYERS)
    one, other = (two.near, two.far) if pushed else (two.far, two.near)
    pools = (two.here, two.there) if pushed is not reading else (two.there, two.here)
    bulk = kvplan.compile(*pools).plan(range(192), range(192))

    def move():
        begun = two.clock.time
        two.near.looks = two.far.looks = 0
        transfer = one.end.submit(other.name, bulk, reading=reading)
        one.naps.wake(begun)
        two.run(lambda: transfer.over)
        assert transfer.chunks == 192
        return two.clock.time - begun, two.near.looks, two.far.looks

    alone = [move() for _ in range(2)][1]
    begun = two.clock.time
    ends = [begun + 8e-3 * layer if layer < last else begun + 1.0 for layer in range(LAYERS)]
    plan = kvplan.compile(two.here, two.there).plan(range(16), range(16))
    after = {layer: Computed(two.clock, at) for layer, at in enumerate(ends)}
    push = two.near.end.submit("far", plan, reading=False, by_layer=True, after=after)
    two.near.naps.wake(begun)
    two.run(lambda: two.clock.time > begun + 0.13)
    assert prompt(two.near.end.stages) is prompt(two.far.end.stages) is (last == LAYERS - 1)
    beside = move()
    assert not push.over
    assert beside[0] < 1.03 * alone[0]
    assert max(beside[1:]) < (3.5 if last == LAYERS - 1 else 1.3) * max(alone[1:])  # naps of 0.5 ms, or of 2 ms
    two.run(lambda: push.over)
    push.synchronize()


@pytest.mark.parametrize("slots", [9, 24])
@pytest.mark.parametrize("reading", [True, False])
def test_the_last_layer_beside_others_waits_for_two_naps_of_half_a_millisecond(reading, slots):
    """One until its event is seen, and one until its chunk is seen. Bulk transfers alone have naps of 2 ms."""
    two = Two(1.34e-3, slots, patient=True, together=True, layers=4)
    bulk = kvplan.compile(two.there, two.here).plan(range(800), range(800))
    other = two.near if reading else two.far

    def begin():
        transfer = other.end.submit("far" if reading else "near", bulk, reading=reading)
        other.naps.wake(two.clock.time)
        return transfer

    for _ in range(3):
        before = begin()
        two.run(lambda before=before: before.over)
        ends = [two.clock.time + 5e-3 * layer for layer in (1, 2, 3, 4)]
        after = {layer: Computed(two.clock, at) for layer, at in enumerate(ends)}
        plan = kvplan.compile(two.here, two.there).plan(range(16), range(16))
        push = two.near.end.submit("far", plan, reading=False, by_layer=True, after=after)
        two.near.naps.wake(two.clock.time)
        two.run(lambda ends=ends: two.clock.time > ends[1] + 2e-3)
        beside = begin()
        two.run(lambda push=push: push.over)
        assert not beside.over
        assert two.clock.time - ends[-1] < 1.34e-3 + STEPS + 2 * MOST_FAR_NAP
        two.run(lambda beside=beside: beside.over)


@pytest.mark.parametrize("first", [True, False])
def test_a_process_whose_pushes_all_wait_looks_rarely_on_a_wire_of_host_memory_too(first):
    """For its first layer, or for a later one. The other process cannot know when bytes come, which its looks move."""
    two = Two(0.17e-3, patient=False, layers=LAYERS)
    begun, waits = two.clock.time, 0 if first else 3
    after = {layer: Computed(two.clock, begun + (0.3 if layer == waits else 1e-3 * layer)) for layer in range(LAYERS)}
    plan = kvplan.compile(two.here, two.there).plan(range(16), range(16))
    push = two.near.end.submit("far", plan, reading=False, by_layer=True, after=after)
    two.near.naps.wake(begun)
    two.run(lambda: two.clock.time > begun + 0.1)
    before, far = two.near.looks, two.far.looks
    two.run(lambda: two.clock.time > begun + 0.19)
    assert two.near.end.resting
    assert 700 < two.near.looks - before < 90e-3 / MOST_BUSY_NAP
    assert (two.far.looks - far > 2500) is not first
    bulk = two.near.end.submit("far", kvplan.compile(two.there, two.here).plan(range(160), range(160)), reading=True)
    two.near.naps.wake(two.clock.time)
    begun, before = two.clock.time, two.near.looks
    two.run(lambda: bulk.over)
    assert not push.over
    assert two.near.looks - before > (two.clock.time - begun) / (BUSY_NAP + FOUND)
    two.run(lambda: push.over)
    assert not two.near.end.resting
    push.synchronize()


def test_a_push_by_layer_that_waits_for_nothing_takes_no_short_naps():
    two = Two(1.34e-3, 24, patient=True, together=True, layers=8)
    plan = kvplan.compile(two.here, two.there).plan(range(192), range(192))
    push, short = two.near.end.submit("far", plan, reading=False, by_layer=True), set()
    two.near.naps.wake(two.clock.time)

    def look():
        if two.far.end.moved[0]:  # before that it has not begun
            short.update(prompt(one.end.stages) or WAITS in one.end.stages for one in (two.near, two.far))
        return push.over

    two.run(look)
    assert short == {False}
