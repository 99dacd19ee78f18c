"""Ends of packed transfers in one process, over a wire that delays, fails and loses what a test says."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvplan.agents.packed.end import End
from kvplan.agents.packed.line import Message, Offer
from kvplan.agents.packed.ring import Slots
from kvplan.errors import TransferError
from kvplan.layout.kvlayout import KVLayout

STEP = 0.01  # seconds of the simulated clock between two steps
MOST_STEPS = 100_000


@dataclass(frozen=True)
class Faults:
    """Chances of what goes wrong.

    Attributes:
        late: that nothing is delivered, and no write moves on, in a step.
        fail: that a write fails; it may have moved a part of its bytes.
        refuse: that a write is not posted.
        linger: that a write which is given up moves on for now.
        cut: that the connection breaks at a note, once in each direction, until it is renewed.
    """

    late: float = 0.0
    fail: float = 0.0
    refuse: float = 0.0
    linger: float = 0.0
    cut: float = 0.0


class Write:
    def __init__(self, wire: SimulatedWire, local: int, remote: int, nbytes: int, note: bytes) -> None:
        self.wire, self.local, self.remote, self.nbytes, self.note = wire, local, remote, nbytes, note
        self.state, self.arrived = "moving", False
        self.transfer = Message.of(note).transfer

    def move(self, network: Network) -> None:
        """Move on, or end."""
        if self.state != "moving" or network.chance(network.faults.late) or self.transfer in network.stuck:
            return
        if network.chance(network.faults.fail):
            ctypes.memmove(self.remote, self.local, network.rng.randrange(self.nbytes + 1))
            self.state = "failed: the wire says so"
            return
        if not self.arrived:
            ctypes.memmove(self.remote, self.local, self.nbytes)
            network.notes.append((self.wire.mine, self.wire.peer, self.note))
        self.arrived = True
        self.state = network.outcome


class SimulatedWire:
    """The wire from one place to another."""

    gone = False

    def __init__(self, network: Network, mine: str, peer: str) -> None:
        self.network, self.mine, self.peer = network, mine, peer
        self.closed = False

    def metadata(self) -> bytes:
        return self.mine.encode()

    def join(self, metadata: bytes, place: Any) -> None:
        assert metadata == self.peer.encode()
        assert place == self.network.places[self.peer].ring.place

    def renew(self) -> None:
        self.network.cut.discard((self.mine, self.peer))

    def write(self, local: int, remote: int, nbytes: int, note: bytes) -> Write:
        assert not self.closed
        assert note
        if self.network.chance(self.network.faults.refuse):
            raise TransferError("the wire takes no write")
        self.network.writes.append(Write(self, local, remote, nbytes, note))
        return self.network.writes[-1]

    def post(self, write: Write) -> None:
        pass

    def over(self, write: Write) -> bool:
        if write.state.startswith("failed"):
            raise TransferError(write.state)
        return write.state == "done"

    def release(self, write: Write) -> bool:
        if write.state == "moving":
            if self.network.chance(self.network.faults.linger) or self.mine in self.network.stalled:
                return False
            write.state = "failed: it was given up"
        return True

    def send(self, note: bytes) -> None:
        if self.network.fail is not None:
            self.network.fail(note)
        if (self.mine, self.peer) not in self.network.broke and self.network.chance(self.network.faults.cut):
            self.network.broke.add((self.mine, self.peer))
            self.network.cut.add((self.mine, self.peer))
        if (self.mine, self.peer) in self.network.cut:
            raise TransferError("the connection is cut")
        if self.peer in self.network.dead:
            raise TransferError("the peer is dead")
        self.network.notes.append((self.mine, self.peer, note))

    def close(self) -> None:
        assert not any(write.wire is self and write.state == "moving" for write in self.network.writes)
        self.closed = True


class Place:
    """An end, its ring, and what peers may name; it is its own transport."""

    def __init__(
        self, network: Network, name: str, executor: Any, slots: int, slot_nbytes: int, offered: Sequence[KVLayout]
    ) -> None:
        self.received: list[tuple[str, bytes]] = []
        self.wire = partial(SimulatedWire, network, name)
        offer = Offer(offered)
        self.end = End(name, self, lambda: offer, lambda _: executor, threaded=False, now=lambda: network.now)
        self.end.device, self.end.slots = lambda: "cpu", lambda: Slots(slots, slot_nbytes)
        self.ring = self.end.end().ring

    def notes(self) -> list[tuple[str, bytes]]:
        notes, self.received = self.received, []
        return notes

    def tell(self, peer: str, note: bytes) -> None:
        self.wire(peer).send(note)

    def add_ring(self, address: int, nbytes: int, device: str) -> None:
        pass

    def drop_ring(self) -> None:
        pass


class Network:
    """All places; time passes with each step."""

    def __init__(self, seed: int = 0) -> None:
        self.rng, self.now = random.Random(seed), 1000.0
        self.faults = Faults()
        self.places: dict[str, Place] = {}
        self.notes: list[tuple[str, str, bytes]] = []
        self.writes: list[Write] = []
        self.outcome = "done"  # of a write that has arrived, as its sender hears of it
        self.stalled: set[str] = set()  # places that do nothing
        self.dead: set[str] = set()
        self.stuck: set[int] = set()  # numbers of transfers whose writes do not move
        self.cut: set[tuple[str, str]] = set()  # connections, from and to, that are broken until they are renewed
        self.broke: set[tuple[str, str]] = set()  # those that have broken by chance
        self.fail: Callable[[bytes], object] | None = None  # called with each note that is sent
        self.drop: Callable[[str, str, bytes], int] | None = None  # how often a note is delivered

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def place(self, name: str, executor: Any, offered: Sequence[KVLayout] = (), *, slots: int = 6,
              slot_nbytes: int = 256) -> End:  # fmt: skip
        self.places[name] = Place(self, name, executor, slots, slot_nbytes, offered)
        return self.places[name].end

    def step(self) -> None:
        if any(place.end.traffic.copies for name, place in self.places.items() if name not in self.stalled | self.dead):
            time.sleep(1e-5)  # the executor's threads have a clock of their own
        else:
            self.now += STEP
        for write in self.writes:
            if write.wire.mine not in self.stalled:
                write.move(self)
        self.writes = [write for write in self.writes if write.state == "moving"]
        notes, self.notes = self.notes, []
        blocked = set[tuple[str, str]]()  # notes of one place arrive in order
        for mine, peer, note in notes:
            if (mine, peer) in blocked or peer in self.stalled or self.chance(self.faults.late):
                blocked.add((mine, peer))
                self.notes.append((mine, peer, note))
                continue
            if peer not in self.dead:
                for _ in range(1 if self.drop is None else self.drop(mine, peer, note)):
                    self.places[peer].received.append((mine, note))
        for name, place in self.places.items():
            if name not in self.stalled and name not in self.dead:
                place.end.poll()

    def run(self, over: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if over():
                return
            self.step()
        raise AssertionError("it does not end")

    def settle(self) -> None:
        """Let everything end that has begun."""
        alive = [place.end for name, place in self.places.items() if name not in self.dead]
        self.run(lambda: not self.notes and not self.writes and not any(end.busy for end in alive))
        for name, place in self.places.items():
            if name not in self.dead:
                slots = sorted(place.ring.out), sorted(place.ring.into)
                gathers = place.ring.gathers
                assert slots == (list(range(gathers)), list(range(gathers, place.ring.place.slots))), "a slot is lost"
