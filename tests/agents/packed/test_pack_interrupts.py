"""KeyboardInterrupt at the points of a poll: transfers end, nothing wrong is called done, and no slot is lost."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from tests.agents.packed.drawn_pairs import finished
from tests.agents.packed.pairs import BLOCKS, Pair
from tests.agents.packed.simulated_wire import Faults, Network, meet, slots_back
from tests.interrupts import Interrupt
from tests.profiles import PROFILE

POINTS = {"fast": 10, "ci": 40, "deep": 1 << 30}[PROFILE]


class InProtocol(Interrupt):
    """Interrupts the protocol's own code alone: the mover and the wire of the tests are not ready for it."""

    def _look(self, frame, event, arg):
        if event in {"call", "return", "c_return"} and "/kvplan/agents/packed/" in frame.f_code.co_filename:
            self._point(frame, f"{event} of {getattr(arg, '__qualname__', arg)}" if event == "c_return" else event)


def prepared(executor, number):
    faults = Faults(late=0.2, twice=0.3, fail=0.1, linger=0.2)
    rings = (
        {},
        {"together": True, "leg_units": 1},
        {"together": True, "slots": 32, "sending": 12, "granted": 16},  # many chunks are on the way
    )
    ring = {"slot_nbytes": 256} | rings[number % 3]
    return Pair(executor, seed=number, faults=faults, near=ring, far=ring, blocks=30 if number == 2 else BLOCKS)


def move(pair):
    """Three pushes and three pulls, one of them cancelled."""
    for turn in range(6):
        made = pair.submit(reading=bool(turn % 2), attempts=9, **({} if turn % 2 else {"note": b"n"}))
        pair.moving.append(made)
    pair.moving[3].cancel()
    pair.network.run(lambda: all(transfer.over for transfer in pair.moving))


def interrupted(executor, number, at):
    """Interrupt one such move at a point; return the number of points, and what happened."""
    pair = prepared(executor, number)
    pair.moving = []
    interrupt = InProtocol(at)
    if interrupt.within(lambda: move(pair)):
        pair.network.run(lambda: all(transfer.over for transfer in pair.moving))
        for transfer in pair.moving:
            (transfer.over and transfer.cancel()) or finished(transfer)
    pair.network.settle()
    for reading in (True, False):
        pair.network.run(lambda: pair.near.end.has("far") and pair.near.lane("far").outbox.ready)
        pair.ended(transfer := pair.submit(reading=reading, attempts=99))
        transfer.synchronize()
        assert pair.same()
    pair.check()
    return interrupt.points, interrupt.where


@pytest.mark.parametrize("number", range(3))
def test_interrupts_anywhere(executor, number):
    total, _ = interrupted(executor, number, 1 << 30)
    points = range(1, total + 1)
    rng = random.Random(number)
    for at in points if total <= POINTS else sorted(rng.sample(points, POINTS)):
        try:
            _, where = interrupted(executor, number, at)
        except BaseException as error:
            error.add_note(f"point {at} of {total}, seed {number}")
            raise
        assert where


def returned(at):
    """Let a peer leave and come back, and interrupt the begin of its lane at a point; return the points, and where."""
    network = Network(0)
    near, far = (network.place(name, None, slots=24, slot_nbytes=256, sending=8) for name in ("near", "far"))
    meet(network, "near", "far")
    far.end.forget("near")
    network.settle()
    peers = near.end._peers
    assert not peers.every
    interrupt, begin = InProtocol(at), peers._open

    def opened(peer, home):
        peers._open = begin
        made = []
        if interrupt.within(lambda: made.append(begin(peer, home))):
            raise KeyboardInterrupt
        return made[0]

    peers._open = opened
    far.meet("near")
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            network.settle()
    assert list(peers.lanes.values()) == list(peers.every)
    assert [lane.sender.most for lane in peers.every] == [7]
    network.run(lambda: near.end.has("far") and near.lane("far").outbox.ready)
    slots_back(network)
    return interrupt.points, interrupt.where


def test_a_lane_whose_begin_is_interrupted_is_reached():
    total, _ = returned(1 << 30)
    assert total > 50
    for at in range(1, total + 1):
        assert returned(at)[1]
