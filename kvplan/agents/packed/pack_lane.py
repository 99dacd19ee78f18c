"""The lane to one peer: its greeting, the messages that come, and its end."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_messages import Credit, Hello, Message, OrderPart
from kvplan.agents.packed.pack_orders import Ends, Ordered, Parts, read_order
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_receiver import Inbound, Receiver
from kvplan.agents.packed.pack_rows import Mover, Row, rows_of
from kvplan.agents.packed.pack_sender import Job, Sender
from kvplan.agents.packed.pack_starts import Starts
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.slot_ring import ALIGNMENT, MOST_SLOTS, RingSlot, SlotRing
from kvplan.agents.packed.wire import Wire
from kvplan.errors import KVPlanError, LayoutError, TransferError
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.packing.pack_recipe import half_of

MOST_EARLY = 4 * MOST_SLOTS  # credits that wait for the peer's greeting
MOST_CHUNKS = 1 << 20  # of a peer's transfer: a terabyte in chunks of 1 MiB
QUIET_SECONDS = 30.0  # after which a peer that does not answer a goodbye writes no more

log = logging.getLogger("kvplan.agents")


class Own(NamedTuple):
    """The parts that all lanes of an end share.

    Attributes:
        ring: this process's slots.
        sends: free slots to gather into.
        mover: gathers and scatters.
        now: clock, in seconds.
        epoch: returns a number for a lane, larger than all before.
    """

    ring: SlotRing
    sends: list[RingSlot]
    mover: Mover
    now: Callable[[], float]
    epoch: Callable[[], int]


class Lane:
    """The connection to one peer. It greets with the first step.

    Args:
        name: name of the peer.
        wire: the wire to it.
        offered: memory of this process that the peer's recipes may name.
        own: the parts that all lanes share.
        granted: slots that the peer may write.

    Attributes:
        name: as given.
        granted: as given.
        outbox: messages to the peer.
        sender, receiver: chunks to the peer, and from it.
        starts: transfers that this process begins.
        why: why no transfer is accepted any more; None while it is open.
        notes: notes for the user.
    """

    def __init__(self, name: str, wire: Wire, offered: Offered, own: Own, granted: Sequence[RingSlot]) -> None:
        self.name, self.granted = name, tuple(granted)
        self.why: str | None = None
        self.notes: deque[bytes] = deque()
        self.outbox = Outbox(wire, own.epoch(), max(1, len(granted) // 2), own.now)
        self.sender = Sender(self.outbox, wire, own.mover, own.sends)
        self.receiver = Receiver(self.outbox, own.mover, granted, self.notes.append)
        self.starts = Starts(self.outbox, self.sender, self.receiver, wire.most_note)
        self._wire, self._offered, self._own = wire, offered, own
        self._chunk_nbytes = 0  # of a slot on either side
        self._early: list[Credit] = []
        self._asks, self._pushes, self._asked = Parts(), Parts(), (Ends(), Ends())
        self._greeted = self._said_quiet = self._peer_quiet = False
        self._left_at = 0.0

    # ---- progress ----------------------------------------------------------------------------------------------------

    @property
    def chunk_nbytes(self) -> int:
        """Most bytes of a chunk, to or from the peer; 0 while its ring is not known."""
        return self._chunk_nbytes

    @property
    def busy(self) -> bool:
        """Whether it has work, or waits for the peer."""
        return bool(
            self.starts.busy or self.sender.busy or self.receiver.busy or self.outbox.waits
            or not self.outbox.ready or self.why is not None
        )  # fmt: skip

    @property
    def over(self) -> bool:
        """Whether nothing moves any more, on either side, so that its slots may have other uses."""
        if self.why is None or not (self.sender.quiet and self.receiver.quiet):
            return False
        if self.outbox.dead or not self.outbox.theirs:
            return True
        told = self._said_quiet and (not self.outbox.waits or self.outbox.lost is not None)
        return told and (self._peer_quiet or self._own.now() > self._left_at + QUIET_SECONDS)

    def step(self, now: float) -> bool:
        """Move on what can move without new chunks; return whether anything changed."""
        if not self._greeted:
            self._greet()
        changed = self.receiver.step()
        changed |= self.sender.step()
        changed |= self.starts.step(now, self._chunk_nbytes if self.outbox.ready and self.why is None else 0)
        self.outbox.flush()
        if self.outbox.lost is not None and not self.outbox.dead:
            if self.why is None:
                self.lost(self.outbox.lost)
            else:
                self._said_quiet = True  # the peer cannot be told
        if self.why is not None and not self._said_quiet:
            self._say_quiet()
        return changed

    def take(self, transfer: PackedTransfer) -> None:
        """Take a transfer; raise TransferError if the lane is not open."""
        if self.why is not None:
            raise TransferError(f"no transfer with {self.name!r}: {self.why}")
        self.starts.take(transfer)
        if self.why is not None:  # it has just ended
            self.starts.fail_all(self.why)

    # ---- its beginning and its end -----------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._greeted = True
        ring = self._own.ring
        device = ring.memory.device
        self.outbox.greet(messages.hello_body(Hello(ring.address, ring.slot_nbytes, device, self.receiver.slots())))

    def _hello(self, heard: Message) -> None:
        outbox = self.outbox
        if heard.sender < outbox.theirs:
            return  # it is late
        hello = messages.read_hello(heard.body)
        numbers = {number for number, _ in hello.slots}
        if hello.slot_nbytes < ALIGNMENT or hello.slot_nbytes % ALIGNMENT or not 0 < len(hello.slots) <= MOST_SLOTS:
            raise LayoutError(f"a ring of {len(hello.slots):,} slots of {hello.slot_nbytes:,} bytes")
        if len(numbers) < len(hello.slots):
            raise LayoutError("a ring has a slot twice")
        new = heard.sender != outbox.theirs
        if new:
            if outbox.theirs:
                self._reset(f"{self.name!r} has begun anew")
            outbox.theirs = heard.sender
        if heard.receiver == outbox.mine and not outbox.ready:
            ring_nbytes = (max(numbers) + 1) * hello.slot_nbytes
            try:
                self._wire.ring(hello.address, ring_nbytes, hello.device)
            except Exception as error:  # noqa: BLE001
                self.leave(f"its ring cannot be written: {error}")
                return
            self._chunk_nbytes = min(hello.slot_nbytes, self._own.ring.slot_nbytes)
            self.sender.credits.grant(hello.address, hello.slot_nbytes, hello.slots)
            outbox.ready = True
            early, self._early = self._early, []
            self._credit(early)
        if new or heard.receiver != outbox.mine:
            self._greet()
        if self.why is not None:
            self._say_bye()
        outbox.flush()

    def restart(self, why: str) -> None:
        """Begin anew after progress was interrupted, when some state may be wrong: all that had begun fails."""
        self._reset(why)
        self.sender.recover()
        self.outbox.mine = self._own.epoch()
        self._greeted = False

    def _reset(self, why: str) -> None:
        self.sender.reset(why)
        self.receiver.reset(why)
        self.starts.reset()
        self.outbox.reset()
        self._early.clear()
        self._asks, self._pushes, self._asked = Parts(), Parts(), (Ends(), Ends())

    def lost(self, why: str) -> None:
        """End the lane: the peer is gone, and writes no more."""
        self.outbox.dead = True
        self._shut(why)

    def leave(self, why: str) -> None:
        """End the lane, and tell the peer; the slots are in use until the peer says that its writes have ended."""
        if self.why is None:
            self._shut(why)
            self._left_at = self._own.now()
            self._say_bye()

    def _shut(self, why: str) -> None:
        self.why = self.why or why
        for job in list(self.sender.jobs.values()):
            self.sender.fail(job, why)
        for inbound in list(self.receiver.inbounds.values()):
            self.receiver.fail(inbound, why)
        self.starts.fail_all(why)
        self.receiver.drop_early()

    def _say_bye(self) -> None:
        if self.outbox.theirs and not self.outbox.dead:
            self.outbox.drop_unready()
            self._said_quiet = self.sender.quiet
            self.outbox.say(messages.BYE, b"\1" if self._said_quiet else b"\0")

    def _say_quiet(self) -> None:
        if self.sender.quiet and self.outbox.theirs:
            self._say_bye()

    # ---- messages that come ------------------------------------------------------------------------------------------

    def hear(self, note: bytes) -> None:
        """Take a message of the peer. One that cannot be right ends the lane."""
        if self.outbox.dead:
            return
        try:
            self._hear(messages.read(note))
        except KVPlanError as error:
            log.warning("%s sent a wrong message: %s", self.name, error)
            self.leave(f"it sent a wrong message: {error}")

    def _hear(self, heard: Message) -> None:
        kind, body = heard.kind, heard.body
        if kind == messages.HELLO:
            self._hello(heard)
            return
        if heard.sender != self.outbox.theirs or heard.receiver != self.outbox.mine:
            return  # it is late: one of the two ends has begun anew
        if heard.credits:
            self._credit(heard.credits)
        if kind == messages.DATA:
            data = messages.read_data(body)
            if data.order:
                self._pushed(data.transfer, data.order)
            self.receiver.data(data)
        elif kind == messages.ASK:
            self._part(self._asks, messages.read_part(body), self._ask)
        elif kind == messages.PUSH:
            self._part(self._pushes, messages.read_part(body), self._pushed)
        elif kind == messages.VOID:
            self.receiver.void(messages.read_credit(body))
        elif kind == messages.BYE:
            self._peer_quiet |= body == b"\1"
            self.leave("the peer has left")
        elif kind != messages.CREDIT:
            self._told(kind, *messages.read_which(body))

    def _credit(self, credits: Sequence[Credit]) -> None:
        if self.outbox.ready:
            for number, turn in credits:
                self.sender.credits.credit(number, turn)
        elif len(self._early) < MOST_EARLY:
            self._early += credits

    def _part(self, parts: Parts, part: OrderPart, whole: Callable[[int, bytes], None]) -> None:
        ended = self._asked[part.transfer & 1].ended(part.transfer >> 1) if parts is self._asks else (
            self.receiver.ended(part.transfer)
        )  # fmt: skip
        if not ended and self.why is None:
            order = parts.add(part)
            if order is not None:
                whole(part.transfer, order)

    def _ask(self, number: int, content: bytes) -> None:
        """Take the order of a pull."""
        if (messages.PULL, number) in self.sender.jobs:
            return  # it came twice
        self._asked[number & 1].end(number >> 1)  # a second order of this number is none
        order = read_order(content)
        try:
            rows = self._rows(order, "src")
        except KVPlanError as error:
            self.outbox.say(messages.FAILED, messages.which_body(messages.PULL, number, str(error)))
            return
        until = self._own.now() + order.seconds if order.seconds else None
        job = Job(messages.PULL, number, rows, urgent=bool(number & 1), attempts=order.attempts, until=until)
        if rows:
            self.sender.take(job)

    def _pushed(self, number: int, content: bytes) -> None:
        """Take the order of a push."""
        if self.receiver.ended(number) or (messages.PUSHED, number) in self.receiver.inbounds or self.why is not None:
            return
        order = read_order(content)
        try:
            rows = self._rows(order, "dst")
        except KVPlanError as error:
            self.receiver.refuse(number, str(error))
            return
        self.receiver.take(Inbound(messages.PUSHED, number, rows, urgent=bool(number & 1), note=order.note))

    def _rows(self, order: Ordered, side: str) -> list[Row]:
        """Return the chunks of a peer's order, checked; raise TransferError if they cannot be."""
        slot_nbytes, chunk_nbytes = self._own.ring.slot_nbytes, order.chunk_nbytes
        if not ALIGNMENT <= chunk_nbytes <= slot_nbytes:
            raise TransferError(f"chunks have {chunk_nbytes:,} bytes; a slot has {slot_nbytes:,}")
        halves = [half_of(recipe, self._offered, side) for recipe in order.recipes]
        chunks = sum(half.nbytes for half in halves) // chunk_nbytes
        if chunks > MOST_CHUNKS:
            raise TransferError(f"a transfer has {chunks:,} chunks; at most {MOST_CHUNKS:,} are taken")
        return rows_of([(half, half.plan) for half in halves], chunk_nbytes)

    def _told(self, kind: int, whose: int, number: int, why: str) -> None:
        """Take the end of a transfer from the other end."""
        if kind == messages.CANCEL:
            if whose == messages.PULL:
                self._asked[number & 1].end(number >> 1)
                self._asks.drop(number)
                job = self.sender.jobs.get((whose, number))
                if job is not None:
                    self.sender.stop(job)
            else:
                self._pushes.drop(number)
                self.receiver.refuse(number, "")
            return
        told = f"{self.name!r} said: {why}"
        job = self.sender.jobs.get((messages.PUSHED, number)) if whose == messages.PUSHED else None
        if job is not None and kind == messages.FAILED:
            self.sender.fail(job, told, tell=False)
        elif job is not None and job.own is not None and job.next == len(job.rows):
            self.sender.stop(job)
            job.own.finish()
        inbound = self.receiver.inbounds.get((whose, number)) if whose == messages.PULL else None
        if inbound is not None and kind == messages.FAILED:
            self.receiver.fail(inbound, told, tell=False)
