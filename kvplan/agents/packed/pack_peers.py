"""The peers of an end: a lane to each, lanes that end, and peers that come back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_jobs import Job
from kvplan.agents.packed.pack_lane import Lane
from kvplan.agents.packed.pack_messages import Message
from kvplan.agents.packed.pack_sharing import LEAST_GRANT, Share, most_of_a_peer, most_to_gather, share
from kvplan.agents.packed.pack_transfer import Inbound
from kvplan.agents.packed.slot_ring import Own
from kvplan.agents.packed.wire import Wire
from kvplan.errors import KVPlanError
from kvplan.plan.packing.pack_checks import Offered

log = logging.getLogger("kvplan.agents")


@dataclass
class _Home:
    """A peer that was added, and not lost or forgotten since.

    Attributes:
        wire: the wire to it.
        offered: memory that it may name.
        last: the highest number of an end of it, to which a lane has ended.
        knock: a greeting that waits for the end of an earlier lane.
    """

    wire: Wire
    offered: Offered
    last: int = 0
    knock: Message | None = None


class Peers:
    """The lanes of an end. The thread that polls calls the methods, except for :meth:`add` and :meth:`remove`.

    A lane ends if its peer leaves, if a message cannot be right, or if the peer is lost or forgotten. Its slots have
    other uses once nothing moves on either side. If a peer that has left greets again, a new lane begins.

    Args:
        own: the parts that all lanes share.
        granted: slots for each peer, at most; None for a third of the slots that are free, and more on demand.

    Attributes:
        lanes: open lanes, by the names of their peers.
        every: all lanes, with those that end.
        closed: whether no lane begins any more.
    """

    def __init__(self, own: Own, granted: int | None) -> None:
        self.lanes: dict[str, Lane] = {}
        self.every: tuple[Lane, ...] = ()
        self.closed = False
        self._own, self._granted = own, granted
        self._homes: dict[str, _Home] = {}
        self._lock = threading.RLock()  # of lanes and free slots; never held while something is submitted

    def add(self, peer: str, wire: Wire, offered: Offered) -> Lane | None:
        """Begin a lane to a peer; return the lane to an earlier peer of that name, which is to end."""
        with self._lock:
            before = self.lanes.get(peer)
            home = _Home(wire, offered)
            self._open(peer, home)
            self._homes[peer] = home
            return before

    def remove(self, peer: str) -> list[Lane]:
        """Forget a peer; return its lanes, which are to end."""
        with self._lock:
            home = self._homes.pop(peer, None)
            self.lanes.pop(peer, None)
        found = [lane for lane in self.every if lane.name == peer]
        if home is not None and not any(lane.wire is home.wire for lane in found):
            home.wire.close()
        return found

    def refuse(self, served: Collection[Job | Inbound], why: str) -> None:
        """End some transfers of peers, and tell them; a copy that has begun goes on."""
        for lane in self.every:
            for job in [job for job in lane.sender.jobs.values() if job in served]:
                lane.sender.fail(job, why)
            for inbound in [inbound for inbound in lane.receiver.inbounds.values() if inbound in served]:
                lane.receiver.fail(inbound, why)

    def why_gone(self, peer: str) -> str:
        """Return why there is no open lane to a peer."""
        return "it has left" if peer in self._homes else "it is not known"

    def _open(self, peer: str, home: _Home) -> Lane:
        ring = self._own.ring
        with self._lock:
            granted = max(LEAST_GRANT, ring.free // 3) if self._granted is None else self._granted
            lane = Lane(peer, home.wire, home.offered, self._own, ring.take(min(granted, self._most)))
            every = (*self.every, lane)
            self._divide(every)  # first: an interrupt may come in it
            self.every = every
            self.lanes[peer] = lane  # no call comes between: nobody could reach a lane that is in one of them alone
        return lane

    def _divide(self, lanes: Sequence[Lane]) -> None:
        """Divide the slots to gather into among the lanes of now."""
        most = most_to_gather(len(self._own.senders), len(lanes))
        for lane in lanes:
            lane.sender.most = most

    def hear(self, peer: str, note: bytes) -> None:
        """Take a message of a peer."""
        try:
            heard = messages.read(note)
        except KVPlanError as error:
            if peer in self.lanes:
                self.lanes[peer].wrong(error)
            return
        if heard.kind == messages.HELLO:
            self._greeted(peer, heard)
            return
        for lane in self.every:
            if lane.name == peer:
                lane.hear(heard)
        if heard.kind == messages.BYE and not any(lane.had(heard.receiver) for lane in self.every if lane.name == peer):
            self._answer(peer, heard)

    def _answer(self, peer: str, heard: Message) -> None:
        """Answer a goodbye to a lane that is over: none of its writes moves."""
        home = self._homes.get(peer)
        if home is not None and heard.receiver and heard.body[:1] and heard.body[0] & messages.ANSWER:
            with suppress(Exception):  # the peer asks again
                note = messages.message(messages.BYE, heard.receiver, heard.sender, (), bytes([messages.QUIET]))
                home.wire.send(note)

    def _greeted(self, peer: str, heard: Message) -> None:
        lane, home = self.lanes.get(peer), self._homes.get(peer)
        if lane is not None and lane.why is None:
            _greet(lane, heard)
        elif home is not None and not self.closed:
            before = [lane for lane in self.every if lane.wire is home.wire]
            known = max([home.last, *(lane.outbox.theirs for lane in before)])
            if heard.sender > (known if home.knock is None else max(known, home.knock.sender)):
                home.knock = heard
            if not before:
                self._again(peer, home)

    def _again(self, peer: str, home: _Home) -> None:
        """Open a lane to a peer that comes back, if it has greeted."""
        if home.knock is not None:
            lane = self._open(peer, home)
            heard, home.knock = home.knock, None
            _greet(lane, heard)

    @property
    def _usable(self) -> int:
        """Number of slots for peers."""
        return len(self._own.ring.slots) - len(self._own.senders)

    @property
    def _most(self) -> int:
        """Most slots of a peer: one is left to others, since a peer that stops returns none."""
        return most_of_a_peer(self._usable, self._granted)

    def share(self) -> bool:
        """Grant slots to peers that have use for more; return whether anything changed."""
        short = [lane for lane in self.every if lane.short]
        if not short:
            return False
        own = self._own
        if len(self.every) == 1 and (not own.ring.free or len(short[0].receiver.granted) >= self._most):
            return False  # no other peer has slots
        state = Share(self._usable, self._most, own.ring.take, own.now())
        with self._lock:
            return share([lane for lane in self.every if lane.open], state)

    def drop(self) -> None:
        """Take the slots of lanes back where nothing moves any more."""
        gone = False
        for lane in self.every:
            if lane.why is not None:
                with self._lock:
                    if self.lanes.get(lane.name) is lane:
                        del self.lanes[lane.name]
            if lane.over:
                self._gone(lane)
                gone = True
        for peer, home in list(self._homes.items()) if gone else ():
            if home.knock is not None:
                self._greeted(peer, home.knock)  # kept while its earlier lane had not ended

    def _gone(self, lane: Lane) -> None:
        with self._lock:
            self.every = tuple([one for one in self.every if one is not lane])
            self._own.ring.give(lane.granted)
            self._divide(self.every)
        home = self._homes.get(lane.name)
        if home is not None and home.wire is lane.wire:
            home.last = max(home.last, lane.outbox.theirs)
        elif not any(one.wire is lane.wire for one in self.every):
            lane.wire.close()

    def restart(self, why: str) -> None:
        """Begin anew on all lanes after a step was interrupted at any point."""
        for lane in self.every:
            lane.restart(why)
        own = self._own
        self._divide(self.every)
        with self._lock:
            used = {slot.number for lane in self.every for slot in lane.granted}
            own.ring.give_all_but(used | own.senders)
        busy = {number for lane in self.every for number in lane.sender.slots()}
        own.sends[:] = [own.ring.slots[number] for number in own.senders if number not in busy]


def _greet(lane: Lane, heard: Message) -> None:
    try:
        lane.hello(heard)
    except Exception as error:  # noqa: BLE001  # whatever a peer sends, the other peers go on
        lane.wrong(error)


def ending(lanes: list[Lane], end: Callable[[Lane], object]) -> Callable[[], object]:
    """Return a call that ends lanes, for the thread that polls."""

    def call() -> None:
        for lane in lanes:
            end(lane)

    return call
