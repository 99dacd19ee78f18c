"""A wire inside one process: writes that take turns, come part by part, and fail; notes late, doubled and out of order.

Memory is numpy's, and a step of the network moves what chance says. One seed gives one run, again and again.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import kvplan
from kvplan.agents.packed.pack_end import End
from kvplan.errors import TransferError
from kvplan.plan.row_plans import Memory

MOVING, DONE = "moving", "done"


@dataclass
class Faults:
    """What goes wrong, each with its chance.

    Attributes:
        late: a note waits for another turn of the network.
        twice: a note comes again, some time later.
        refuse: a write, or a note, is not taken.
        fail: a write fails after a part of its bytes.
        told: a write that failed had moved all of its bytes, and its note comes.
        linger: a release has to be asked again.
        stuck: a gather or a scatter fails.
    """

    late: float = 0.0
    twice: float = 0.0
    refuse: float = 0.0
    fail: float = 0.0
    told: float = 0.0
    linger: float = 0.0
    stuck: float = 0.0


NONE = Faults()


class Write:
    """A write on its way."""

    def __init__(self, wire: SimulatedWire, local: int, remote: int, nbytes: int, note: bytes) -> None:
        self.wire, self.local, self.remote, self.nbytes, self.note = wire, local, remote, nbytes, note
        self.at = 0
        self.state = MOVING
        self.released = False

    def move(self, rng: random.Random, faults: Faults) -> None:
        """Move some of the bytes."""
        some = min(self.nbytes - self.at, rng.randint(1, self.nbytes))
        self.wire.check(self.remote + self.at, some)
        ctypes.memmove(self.remote + self.at, self.local + self.at, some)
        self.at += some
        if self.at < self.nbytes and rng.random() < faults.fail:
            self.state = "failed: a cable broke"
        elif self.at == self.nbytes:
            self.state = "failed: all came" if rng.random() < faults.told else DONE
            self.wire.carry(self.note)


class Moved:
    """A plan that a simulated mover moves: all of it, after some looks, or never."""

    def __init__(self, mover: Mover, plan: kvplan.Plan, looks: int) -> None:
        self._mover, self.plan, self._looks = mover, plan, looks
        self._error: Exception | None = None
        self._ended = False

    def done(self) -> bool:
        if self._looks > 0:
            self._looks -= 1
            return False
        if not self._ended:
            self._ended = True
            mover = self._mover
            if mover.network.rng.random() < mover.network.faults.stuck:
                self._error = TransferError("the mover broke")
            else:
                mover.executor.submit(self.plan).synchronize()
        return True

    def synchronize(self) -> None:
        assert self._ended
        if self._error is not None:
            raise self._error


class Mover:
    """Moves plans by an executor, as late as chance says: so a run depends on its seed alone."""

    def __init__(self, network: Network, executor: kvplan.Executor) -> None:
        self.network, self.executor = network, executor

    def submit(self, plan: kvplan.Plan, after=None, *, priority: str = "normal") -> Moved:
        if after is not None:
            after.synchronize()
        return Moved(self, plan, self.network.rng.randrange(4))


class SimulatedWire:
    """The wire from one place to another."""

    def __init__(self, network: Network, mine: str, theirs: str, most_note: int) -> None:
        self.network, self.mine, self.theirs, self.most_note = network, mine, theirs, most_note
        self.writes: list[Write] = []
        self.reach = (0, 0)
        self.closed = False

    def ring(self, address: int, nbytes: int, device: str) -> None:
        assert device == "cpu"
        self.reach = address, address + nbytes

    def check(self, address: int, nbytes: int) -> None:
        assert self.reach[0] <= address < address + nbytes <= self.reach[1], "a write beyond the ring"

    def _refuses(self) -> None:
        assert not self.closed, "it was closed"
        if self.network.rng.random() < self.network.faults.refuse:
            raise TransferError("the wire takes nothing")

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        assert nbytes > 0
        assert len(note) <= self.most_note
        with self.network.lock:
            return self._write(local, remote, nbytes, note)

    def _write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        self.check(remote, nbytes)
        moving = [one for wire in self.network.wires for one in wire.writes]
        assert not any(one.remote < remote + nbytes and remote < one.remote + one.nbytes for one in moving), (
            "two writes into one slot"
        )
        self._refuses()
        made = Write(self, local, remote, nbytes, note)
        self.writes.append(made)
        return made

    def state(self, handle: Write) -> str:
        assert not handle.released
        return handle.state

    def release(self, handle: Write) -> bool:
        assert not handle.released
        if handle.state == MOVING or self.network.rng.random() < self.network.faults.linger:
            return False
        with self.network.lock:
            handle.released = True
            self.writes.remove(handle)
        return True

    def send(self, note: bytes) -> None:
        assert len(note) <= self.most_note
        with self.network.lock:
            self._refuses()
            self.carry(note)

    def carry(self, note: bytes) -> None:
        network = self.network
        network.notes.append((self.mine, self.theirs, note))
        if network.rng.random() < network.faults.twice:
            network.echoes.append((self.mine, self.theirs, note))

    def close(self) -> None:
        assert not self.writes
        self.closed = True


@dataclass
class Network:
    """All wires, with one chance.

    Attributes:
        notes: notes on their way: sender, receiver, and bytes.
        echoes: notes that come again.
        clock: time, in seconds; each turn takes one millisecond.
    """

    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    most_note: int = 1 << 16
    notes: list[tuple[str, str, bytes]] = field(default_factory=list)
    echoes: list[tuple[str, str, bytes]] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    wires: list[SimulatedWire] = field(default_factory=list)
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.lock = threading.RLock()

    def now(self) -> float:
        return self.clock

    def place(self, name: str, executor, **kw) -> Place:
        """Make an end."""
        self.places[name] = made = Place(self, name, executor, **kw)
        return made

    def turn(self) -> None:
        """Let some time pass on all wires."""
        with self.lock:
            self._turn()

    def _turn(self) -> None:
        rng, faults = self.rng, self.faults
        self.clock += 1e-3
        for wire in self.wires:
            for write in wire.writes:
                if write.state == MOVING and rng.random() < 0.7:
                    write.move(rng, faults)
        if self.echoes and rng.random() < 0.3:
            self.notes.append(self.echoes.pop(rng.randrange(len(self.echoes))))
        if faults.late:
            rng.shuffle(self.notes)
        later = []
        for note in self.notes:
            if rng.random() < faults.late:
                later.append(note)
            elif note[1] in self.places:
                self._arrive(*note)
        self.notes[:] = later

    def _arrive(self, sender: str, receiver: str, note: bytes) -> None:
        if not self.places[receiver].end.take(sender, note):
            self.places[receiver].other.append((sender, note))

    def step(self) -> None:
        """One turn, and one poll of every end."""
        self.turn()
        for place in list(self.places.values()):
            place.end.poll()

    def run(self, over: Callable[[], object], turns: int = 200_000) -> None:
        """Go on until something holds."""
        for _ in range(turns):
            if over():
                return
            self.step()
        raise AssertionError("it hangs")

    def settle(self, turns: int = 5000) -> None:
        """Let all that is on its way arrive."""
        for _ in range(turns):
            self.step()
            if not self.notes and not self.echoes and not any(place.waits for place in self.places.values()):
                return


class Place:
    """A process: its end, its ring and its wires."""

    def __init__(self, network, name, executor, *, slots=8, slot_nbytes=1024, **kw) -> None:
        self.network, self.name = network, name
        pool = np.full(slots * slot_nbytes + 512, 0x5A, np.uint8)
        start = -pool.ctypes.data % 256
        self.ring = pool[start : start + slots * slot_nbytes]
        memory = Memory(self.ring.ctypes.data, self.ring.nbytes, "cpu", pool)
        self.mover = Mover(network, executor)
        self.end = End(name, memory, slot_nbytes, self.mover, lambda: None, now=network.now, **kw)
        self.other: list[tuple[str, bytes]] = []
        self.total = slots

    def meet(self, other: str, layouts=()) -> SimulatedWire:
        """Know another place."""
        wire = SimulatedWire(self.network, self.name, other, self.network.most_note)
        self.network.wires.append(wire)
        self.end.add(other, wire, list(layouts))
        return wire

    @property
    def waits(self) -> bool:
        return self.end.busy or any(lane.waits for lane in self.end._peers.every)

    def lane(self, other: str):
        return self.end._peers.lanes[other]


def meet(network: Network, one: str, other: str, layouts=((), ())) -> None:
    """Let two places know each other, and wait until their lane is open."""
    a, b = network.places[one], network.places[other]
    a.meet(other, layouts[0])
    b.meet(one, layouts[1])
    network.run(lambda: all(
        place.end.has(far) and place.lane(far).outbox.ready for place, far in ((a, other), (b, one))
    ))  # fmt: skip


def slots_back(network: Network) -> None:
    """Every slot is where it was: free to gather, or with the peer that it was granted to; and that peer knows it."""
    network.settle()
    for place in network.places.values():
        end = place.end
        assert not end.busy, place.name
        assert not place.waits, place.name
        assert len(end._own.sends) == end.sending
        lanes = end._peers.every
        assert end.ring.free + end.sending + sum(len(lane.granted) for lane in lanes) == place.total
        for lane in lanes:
            assert not lane.starts.busy
            assert not lane.receiver._early
            assert not lane.receiver._come
            for orders in (lane.receiver.orders, lane._requests._asks):
                assert not orders._parts._open
            far = network.places[lane.name].end._peers.lanes.get(place.name)
            if far is not None and far.outbox.ready and far.outbox.theirs == lane.outbox.mine:
                known = far.sender.credits
                assert known.granted == len(lane.granted)
                left = f"{place.name} <- {lane.name}: {known._slots}, {lane.outbox._owed}, {lane.receiver._turns}"
                assert known.free + lane.outbox.owed == known.granted, f"a slot is lost: {left}"
