"""The lane to one peer: its greeting and its end, messages both ways, and the transfers that wait to begin."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_messages import Credit, Hello, Message
from kvplan.agents.packed.pack_orders import Ordered, Parts, order_bytes, parts_of, read_order
from kvplan.agents.packed.pack_receiver import Inbound, Receiver
from kvplan.agents.packed.pack_rows import MOST_CHUNKS, Mover, counts_of, rows_of
from kvplan.agents.packed.pack_sender import Job, Sender, held
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.agents.packed.packer import Packer
from kvplan.agents.packed.slot_ring import MOST_SLOTS, RingSlot, SlotRing
from kvplan.agents.packed.wire import Wire
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, LayoutError, TransferError
from kvplan.layout.kvlayout import KVLayout

PAUSE_SECONDS = 0.01  # before a message that was not sent is tried again; the pause doubles
SENDS = 10  # attempts to send a message, before the peer counts as lost
MOST_EARLY = 4 * MOST_SLOTS  # credits that wait for the peer's ring
MOST_LATE = 1 << 20  # transfers of a peer that have ended while an earlier one has not
LEFT = "the peer was forgotten, or this end was closed"

log = logging.getLogger("kvplan.agents")


class Own(NamedTuple):
    """What all lanes of an end share.

    Attributes:
        ring: this process's slots.
        sends: free slots to gather into.
        mover: gathers and scatters.
        packer: makes packings and reads recipes.
        now: clock, in seconds.
        epoch: returns a number for a lane, larger than all before.
    """

    ring: SlotRing
    sends: deque[RingSlot]
    mover: Mover
    packer: Packer
    now: Callable[[], float]
    epoch: Callable[[], int]


class Lane:
    """The connection to one peer.

    Args:
        name: name of the peer.
        wire: the wire to it.
        offered: layouts of this process that the peer may read and write.
        own: what all lanes share.
        granted: slots that the peer may write.

    Attributes:
        name: as given.
        ready: whether both sides know each other's ring.
        dead: whether the peer's process is gone.
        why: why no transfer is accepted any more; None while it is open.
        over: whether nothing moves any more, and the slots are back in the ring.
        waiting: transfers that have not begun.
        notes: notes for the user.
    """

    def __init__(
        self, name: str, wire: Wire, offered: Mapping[str, KVLayout], own: Own, granted: Sequence[RingSlot]
    ) -> None:
        self.name, self.wire = name, wire
        self.ready = self.dead = self.over = False
        self.why: str | None = None
        self.waiting: deque[PackedTransfer] = deque()
        self.cancelled: deque[PackedTransfer] = deque()
        self.notes: deque[bytes] = deque()
        self._offered, self._own, self._granted = offered, own, granted
        self.sender = Sender(self, wire, own.mover, own.sends)
        self.receiver = Receiver(self, own.mover, granted, self.notes.append)
        self._mine, self._theirs = own.epoch(), 0
        self._owed: list[Credit] = []
        self._early: list[Credit] = []  # credits that came before the peer's HELLO
        self._enough = max(1, len(granted) // 2)  # slots that are given back together
        self._outbox: deque[tuple[int, bytes]] = deque()
        self._unsent = 0  # attempts for the first message of the outbox
        self._again_at = 0.0
        self._hello_due = True
        self._timed: list[PackedTransfer] = []
        self._begun: dict[PackedTransfer, Job | Inbound] = {}
        self._counts = {(pushing, urgent): 0 for pushing in (False, True) for urgent in (False, True)}
        self._asks, self._pushes = Parts(), Parts()
        self._said_bye = self._said_quiet = self._peer_quiet = False
        self._chunk_nbytes = 0

    # ---- transfers of this process -----------------------------------------------------------------------------------

    def take(self, transfer: PackedTransfer) -> None:
        """Take a transfer; raise TransferError if the lane is not open."""
        if self.why is not None:
            raise TransferError(f"no transfer with {self.name!r}: {self.why}")
        transfer.withdraw = self.cancelled.append
        self.waiting.append(transfer)

    @property
    def chunk_nbytes(self) -> int:
        """Most bytes of a chunk: those of a slot on either side; 0 while the peer's are not known."""
        return self._chunk_nbytes

    @property
    def in_flight(self) -> int:
        """Number of transfers of this process that have not ended."""
        return sum(not one.over for one in [*self.waiting, *self._begun.copy()])

    @property
    def busy(self) -> bool:
        """Whether it has work, or waits for the peer."""
        return bool(
            self.waiting or self._begun or self._outbox or self.sender.busy or self.receiver.inbounds
            or not self.receiver.quiet or self.why is not None or not self.ready
        )  # fmt: skip

    def _begin_waiting(self, now: float) -> bool:
        began, later = False, []
        while self.waiting:
            transfer = self.waiting.popleft()
            if transfer.over:
                continue
            if transfer.until is not None and transfer not in self._timed:
                self._timed.append(transfer)
            try:
                if not self.ready or not self._may_begin(transfer):
                    later.append(transfer)
                    continue
                self._begin(transfer, now)
                began = True
            except Exception as error:  # noqa: BLE001  # it is the transfer's
                transfer.fail(str(error), "nothing was moved")
        self.waiting.extendleft(reversed(later))
        return began

    def _may_begin(self, transfer: PackedTransfer) -> bool:
        """Return whether the first piece of a push, or all pieces of a pull, may begin."""
        transfer.make(self._chunk_nbytes)
        pieces = transfer.pieces if transfer.wish.reading else transfer.pieces[:1]
        try:
            return all(piece.ready() for piece in pieces)
        except Exception as error:
            raise TransferError(f"its after= failed ({error})") from error

    def _begin(self, transfer: PackedTransfer, now: float) -> None:
        wish, pieces = transfer.wish, transfer.pieces
        reading = wish.reading
        rows = rows_of(
            [(one.packing, one.packing.scatter if reading else one.packing.gather) for one in pieces],
            self._chunk_nbytes,
        )
        transfer.count(counts_of(rows))
        recipes = tuple(one.packing.recipe("src" if reading else "dst") for one in pieces)
        left = 0.0 if transfer.until is None else max(transfer.until - now, 1e-3)
        order = order_bytes(
            Ordered(wish.urgent, wish.attempts, self._chunk_nbytes, left, recipes, b"" if reading else wish.note)
        )
        if reading and not rows:
            transfer.finish()
            return
        self._counts[not reading, wish.urgent] += 1
        number = self._counts[not reading, wish.urgent] << 1 | wish.urgent
        if reading:
            inbound = Inbound(messages.PULL, number, rows, urgent=wish.urgent, own=transfer)
            self._begun[transfer] = inbound
            self.receiver.take(inbound)
            self._say_parts(messages.ASK, number, order, transfer)
            return
        rides = bool(rows) and messages.overhead(0) + messages.data_nbytes() + len(order) <= self.wire.most_note
        job = Job(
            messages.PUSHED, number, rows, urgent=wish.urgent, attempts=wish.attempts,
            ready=[piece.ready for piece in pieces], order=order if rides else b"", own=transfer,
        )  # fmt: skip
        self._begun[transfer] = job
        if not rides:
            if not transfer.claim():
                self._counts[True, wish.urgent] -= 1
                return
            self._say_parts(messages.PUSH, number, order, transfer)
        self.sender.take(job)

    def _say_parts(self, kind: int, number: int, order: bytes, transfer: PackedTransfer) -> None:
        for body in parts_of(number, order, self.wire.most_note):
            self.say(kind, body)
            transfer.posted += 1

    def _give_up(self, now: float) -> None:
        """End transfers whose deadline has passed, and stop those that were cancelled."""
        while self.cancelled:
            self._stop(self.cancelled.popleft())
        for transfer in self._timed[:]:
            if transfer.over:
                self._timed.remove(transfer)
            elif transfer.until is not None and now > transfer.until:
                self._timed.remove(transfer)
                late = f"it did not end within its deadline of {transfer.wish.deadline} seconds"
                moving = self._begun.get(transfer)
                holds = "it had not begun, and nothing was moved"
                if moving is not None:
                    holds = held(moving) if isinstance(moving, Job) else moving.held()
                transfer.fail(late, holds)
                self._stop(transfer)
        if self._begun:
            for transfer in [one for one in self._begun if one.over]:
                del self._begun[transfer]

    def _stop(self, transfer: PackedTransfer) -> None:
        moving = self._begun.pop(transfer, None)
        if isinstance(moving, Job):
            self.sender.withdraw(moving)
        elif moving is not None:
            self.receiver.withdraw(moving)

    # ---- progress ----------------------------------------------------------------------------------------------------

    def step(self, now: float) -> bool:
        """Move on what can move without new chunks; return whether anything changed."""
        if self._hello_due:
            self._greet()
        changed = self.receiver.step()
        changed |= self.sender.step()
        if self._begun or self._timed or self.cancelled:
            self._give_up(now)
        if self.waiting:
            changed |= self._begin_waiting(now)
        if len(self._owed) >= self._enough and not self.dead:
            self.say(messages.CREDIT)
        if self._outbox:
            self._flush(now)
        if self.why is not None:
            self._leave()
        return changed

    def say(self, kind: int, body: bytes = b"") -> None:
        """Send a message, now or once the peer is ready."""
        if not self.dead:
            self._outbox.append((kind, body))
            if len(self._outbox) == 1:
                self._flush(self._own.now())

    def note(self, kind: int, body: bytes) -> tuple[bytes, Sequence[Credit]]:
        """Return the note of a message, and the slots that it gives back."""
        if not self._owed:
            return messages.message(kind, self._mine, self._theirs, (), body), ()
        room = (self.wire.most_note - messages.overhead(0) - len(body)) // 8
        count = max(0, min(room, messages.MOST_CREDITS))
        ride, self._owed = self._owed[:count], self._owed[count:]
        return messages.message(kind, self._mine, self._theirs, ride, body), ride

    def owe(self, credits: Sequence[Credit]) -> None:
        """Give slots back with a later message."""
        self._owed += credits

    def _flush(self, now: float) -> None:
        while self._outbox and (self.ready or self._outbox[0][0] == messages.BYE) and now >= self._again_at:
            kind, body = self._outbox[0]
            if kind == messages.CREDIT and not self._owed:
                self._outbox.popleft()
                continue
            note, ride = self.note(kind, body)
            if not self._sent(note, now):
                self.owe(ride)
                return
            self._outbox.popleft()

    def _sent(self, note: bytes, now: float) -> bool:
        try:
            self.wire.send(note)
        except Exception as error:  # noqa: BLE001  # it is tried again
            self._unsent += 1
            self._again_at = now + PAUSE_SECONDS * 2**self._unsent
            if self._unsent >= SENDS:
                self.lost(f"the wire did not take a message in {SENDS} attempts: {error}")
            return False
        self._unsent = 0
        return True

    def hear(self, note: bytes) -> None:
        """Take a message of the peer. One that cannot be right ends the lane: the peer is not what it should be."""
        if self.over or self.dead:
            return
        try:
            self._hear(messages.read(note))
        except LayoutError as error:
            log.warning("%s sent a wrong message: %s", self.name, error)
            self.fail_all(f"it sent a wrong message: {error}")
            self.leave(f"it sent a wrong message: {error}")

    def _hear(self, heard: Message) -> None:
        if heard.kind == messages.HELLO:
            self._hello(heard)
            return
        if heard.sender != self._theirs or heard.receiver != self._mine:
            return  # it is late: one of the two ends was restarted
        if not self.ready:
            self._early += heard.credits
            if len(self._early) > MOST_EARLY:
                raise LayoutError("too many slots were given back")
        else:
            for credit in heard.credits:
                self.sender.credits.credit(*credit)
        body, kind = heard.body, heard.kind
        if kind == messages.DATA:
            data = messages.read_data(body)
            if data.order and not self.receiver.ended(data.transfer):
                self._pushed(data.transfer, data.order)
            self.receiver.data(data)
        elif kind in (messages.ASK, messages.PUSH):
            self._part(kind, messages.read_part(body))
        elif kind == messages.VOID:
            self.receiver.void(messages.read_credit(body))
        elif kind == messages.BYE:
            self._peer_quiet |= body == b"\1"
            self.fail_all("the peer has left")
            self.leave("the peer has left")
        elif kind != messages.CREDIT:
            self._told(kind, *messages.read_which(body))

    def _told(self, kind: int, number: int, why: str) -> None:
        """Take the end of a transfer from the other end."""
        job = self.sender.jobs.get((messages.PUSHED, number))
        if kind == messages.DONE:
            if job is not None and job.own is not None and job.next == len(job.rows):
                self.sender.stop(job)
                job.own.finish()
        elif kind == messages.FAILED:
            inbound = self.receiver.inbounds.get((messages.PULL, number))
            told = f"{self.name!r} said: {why}"
            if number & 1 << 62:
                return
            if inbound is not None and why[:1] != _PUSH:
                self.receiver.fail(inbound, told, tell=False)
            elif job is not None:
                self.sender.fail(job, told.replace(_PUSH, "", 1), tell=False)
        else:
            del why
