"""The lane to one peer: its greeting, its progress, and its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_jobs import Job
from kvplan.agents.packed.pack_messages import Credit, Hello, Message
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_receiver import Receiver
from kvplan.agents.packed.pack_requests import Parties, Requests
from kvplan.agents.packed.pack_sender import Sender
from kvplan.agents.packed.pack_starts import Starts
from kvplan.agents.packed.pack_transfer import Inbound, PackedTransfer
from kvplan.agents.packed.slot_ring import ALIGNMENT, MOST_SLOTS, Own, RingSlot, tell_user
from kvplan.agents.packed.wire import Wire
from kvplan.errors import LayoutError, TransferError
from kvplan.plan.packing.pack_checks import Offered

MOST_EARLY = 4 * MOST_SLOTS  # credits that wait for the peer's greeting
MOST_EARLY_SHARES = 1024  # messages about slots that do
PATIENCE = 0.05  # seconds for a recalled slot, and for one that is not used while another peer has none
REPEAT_SECONDS, MOST_REPEAT_SECONDS = 0.1, 5.0  # between two goodbyes to a peer that does not answer

log = logging.getLogger("kvplan.agents")


class Lane:
    """The connection to one peer. It greets with the first step.

    Args:
        name: name of the peer.
        wire: the wire to it.
        offered: memory of this process that the peer's recipes may name.
        own: the parts that all lanes share.
        granted: slots that the peer may write from the beginning.

    Attributes:
        name: as given.
        wire: as given.
        outbox: messages to the peer.
        sender, receiver: chunks to the peer, and from it.
        starts: transfers that this process begins.
        chunk_nbytes: most bytes of a chunk, to or from the peer; 0 while its ring is not known.
        why: why no transfer is accepted any more; None while it is open.
        wants: number of slots that the peer has use for; 0 if those that it has are enough.
        since: time of its latest grant, in seconds; 0 before the first.
        recalled_at: time when slots were recalled last.
    """

    def __init__(self, name: str, wire: Wire, offered: Offered, own: Own, granted: Sequence[RingSlot]) -> None:
        self.name, self.wire = name, wire
        self.why: str | None = None
        self.chunk_nbytes = 0
        self.outbox = Outbox(wire, own.epoch(), max(1, len(granted) // 4), own.now)
        self.sender = Sender(self.outbox, wire, own.mover, own.sends, together=own.together)
        told = partial(tell_user, own.notes, name)
        self.receiver = Receiver(self.outbox, own.mover, granted, told, together=own.together)
        self.starts = Starts(self.outbox, self.sender, self.receiver, wire.most_note, own.leg_units)
        parties = Parties(self.outbox, self.sender, self.receiver)
        self._requests = Requests(parties, name, offered, own.ring.slot_nbytes, own.now)
        self._own = own
        self._numbers = [self.outbox.mine]  # all that it ever had
        self._early: list[Credit] = []
        self._early_shares: list[tuple[int, bytes]] = []  # before the peer's greeting
        self.wants, self.since, self.recalled_at = 0, 0.0, 0.0
        self._heard_want = self._told_want = self._said_want = 0  # serial numbers of the peer's and own; slots
        self._asked: list[int] = []  # earlier ends of the peer that want to know when no write to them moves any more
        self._repeat_at, self._pause = 0.0, REPEAT_SECONDS  # of the goodbye
        self._greeted = self._invited = self._said_quiet = self._peer_quiet = False

    # ---- progress ----------------------------------------------------------------------------------------------------

    @property
    def granted(self) -> tuple[RingSlot, ...]:
        """The slots that the peer may write."""
        return tuple(self.receiver.granted.values())

    @property
    def short(self) -> bool:
        """Whether the peer has use for more slots than it has."""
        return self.wants > len(self.receiver.granted)

    @property
    def busy(self) -> bool:
        """Whether transfers are in flight, chunks move, messages wait to be sent, or slots are to be returned."""
        if self.sender.jobs or self.receiver.inbounds:  # first, since every look asks while a transfer is in flight
            return True
        moves = self.sender.busy or self.receiver.busy or self.starts.busy or self.outbox.busy
        if moves or self.why is not None:
            return moves
        known = self.sender.credits
        if known.returned or known.leaving or self._said_want:
            return True
        return bool(self.receiver.recalled) and self._own.now() - self.recalled_at <= PATIENCE

    @property
    def served(self) -> list[Job | Inbound]:
        """The peer's transfers that touch this process's memory."""
        return [*self.sender.served, *self.receiver.served]

    def touches(self, transfer: PackedTransfer) -> bool:
        """Return whether a transfer of this process may still touch its memory."""
        return self.starts.holds(transfer) or self.sender.touches(transfer) or self.receiver.touches(transfer)

    @property
    def waits(self) -> bool:
        """Whether a step may change anything: it is busy, the peer is short, or a greeting or a goodbye is to come."""
        return self.busy or not self.outbox.ready or self.why is not None or bool(self._asked) or self.short

    @property
    def over(self) -> bool:
        """Whether nothing moves any more, on either side, so that its slots may have other uses."""
        if self.why is None or self._asked or not (self.sender.quiet and self.receiver.quiet):
            return False
        if self.outbox.dead:
            return True
        return self._said_quiet and not self.outbox.waits and (self._peer_quiet or not self._invited)

    def look(self, now: float) -> bool:
        """Return whether a step may change anything, if the last one changed nothing and no message has come since."""
        outbox, sender = self.outbox, self.sender
        found = sender.look()
        if self.why is not None or not outbox.ready or self._asked:
            return True
        return found or self.receiver.look() or self.starts.due(now) or outbox.busy or sender.due

    def step(self, now: float) -> bool:
        """Move on what can move without new chunks; return whether anything changed. It follows a look."""
        if not self._greeted and self.why is None:
            self._greet()
        changed = self.receiver.step()
        outbox, opened = self.outbox, self.open
        if self.starts.due(now):
            changed |= self.starts.step(now, self.chunk_nbytes if opened else 0)
        if outbox.busy:
            outbox.flush()
        if outbox.lost is not None and not outbox.dead:
            self.lost(outbox.lost)
        if self._asked:
            self._answer()
        if self.why is not None and (now > self._repeat_at or (not self._said_quiet and self.sender.quiet)):
            self._say_bye(messages.ANSWER if now > self._repeat_at else 0)
        return changed

    def tell(self) -> None:
        """Tell the peer about slots, after a step and all that it has begun."""
        if self.open:
            self._tell_use()
        if self.outbox.busy:
            self.outbox.flush()

    def take(self, transfer: PackedTransfer) -> None:
        """Take a transfer; raise TransferError if the lane is not open."""
        if self.why is not None:
            raise TransferError(f"no transfer with {self.name!r}: {self.why}")
        self.starts.take(transfer)
        if self.why is not None:  # it has just ended
            self.starts.fail_all(self.why)

    # ---- slots that are shared ---------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether both ends have greeted, and neither leaves."""
        return self.outbox.ready and self.why is None

    def grant(self, slots: Sequence[RingSlot]) -> None:
        """Let the peer write further slots."""
        self.since = self._own.now()
        self._say_slots(messages.GRANT, self.receiver.grant(slots))

    def recall(self, count: int) -> None:
        """Ask the peer for slots that it is to return once they are free."""
        self.recalled_at = self._own.now()
        self._say_slots(messages.RECALL, self.receiver.recall(count))

    def _say_slots(self, kind: int, slots: Sequence[Credit]) -> None:
        for k in range(0, len(slots), messages.MOST_GRANT):
            self.outbox.say(kind, messages.credits_body(slots[k : k + messages.MOST_GRANT]))
        self._weigh()

    def _weigh(self) -> None:
        """Give slots back one by one while the peer has few, or is to return some."""
        count = 1 if self.receiver.recalled else len(self.receiver.granted) // 4
        self.outbox.enough = max(1, count)

    def _tell_use(self) -> None:
        """Return recalled slots that are free, and tell the peer how many slots this end has use for."""
        known = self.sender.credits
        if known.leaving:
            known.release()
        if known.returned:
            returned, known.returned = known.returned, []
            self._say_slots(messages.RETURN, returned)
        need = self.sender.need
        if need > max(self._said_want, known.granted) or (not need and self._said_want):
            self._said_want, self._told_want = need, self._told_want + 1
            self.outbox.say(messages.WANT, messages.want_body(self._told_want, need))

    def _shared(self, kind: int, body: bytes) -> None:
        """Take a message about slots; raise LayoutError if it cannot be right."""
        if self.why is not None:
            return
        if kind == messages.WANT:
            serial, wants = messages.read_want(body)
            if serial > self._heard_want:
                self._heard_want, self.wants = serial, wants
        elif kind == messages.RETURN:
            self._own.ring.give(self.receiver.returned(messages.read_credits(body)))
            self._weigh()
        elif self.outbox.ready:
            slots = messages.read_credits(body)
            (self.sender.credits.more if kind == messages.GRANT else self.sender.credits.recall)(slots)
        elif len(self._early_shares) < MOST_EARLY_SHARES:
            self._early_shares.append((kind, body))

    # ---- its beginning and its end -----------------------------------------------------------------------------------

    def _greet(self) -> None:
        self._greeted = True
        self._invited |= self.outbox.theirs != 0  # from now on the peer may write
        ring, slots = self._own.ring, self.receiver.slots()
        hello = Hello(ring.address, ring.slot_nbytes, len(ring.slots), ring.memory.device, slots)
        self.outbox.greet(messages.hello_body(hello))

    def hello(self, heard: Message) -> None:
        """Take a greeting; raise LayoutError if it cannot be right."""
        outbox = self.outbox
        if heard.sender < outbox.theirs or self.why is not None:
            return  # it is late
        hello = messages.read_hello(heard.body)
        numbers = {number for number, *_ in hello.slots}
        if hello.slot_nbytes < ALIGNMENT or hello.slot_nbytes % ALIGNMENT or not 0 < hello.total <= MOST_SLOTS:
            raise LayoutError(f"a ring of {hello.total:,} slots of {hello.slot_nbytes:,} bytes")
        if len(numbers) < len(hello.slots) or max(numbers, default=0) >= hello.total:
            raise LayoutError(f"a ring of {hello.total:,} slots has a slot twice, or a slot beyond its last")
        new = heard.sender != outbox.theirs
        if new:
            if outbox.theirs:
                self._reset(f"{self.name!r} has begun anew")
            outbox.theirs = heard.sender
        if heard.receiver == outbox.mine and not outbox.ready:
            try:
                self.wire.ring(hello.address, hello.total * hello.slot_nbytes, hello.device)
            except Exception as error:  # noqa: BLE001
                self.leave(f"its ring cannot be written: {error}")
                return
            self.chunk_nbytes = min(hello.slot_nbytes, self._own.ring.slot_nbytes)
            self.sender.credits.grant(hello.address, hello.slot_nbytes, hello.total, hello.slots)
            outbox.ready = True
            early, self._early = self._early, []
            shares, self._early_shares = self._early_shares, []
            for kind, body in shares:
                self._shared(kind, body)
            self._credit(early)
        if new or heard.receiver != outbox.mine:
            self._greet()
        outbox.flush()

    def restart(self, why: str) -> None:
        """Begin anew after progress was interrupted, when some state may be wrong: all that had begun fails."""
        if self.why is not None:
            self._shut(self.why)
            self.sender.recover()
            self._say_bye()
            return
        self._reset(why)
        self.sender.recover()
        self.outbox.mine = self._own.epoch()
        self._numbers.append(self.outbox.mine)
        self._greeted = False

    def _reset(self, why: str) -> None:
        self.sender.reset(why)
        self.receiver.reset(why)
        self.starts.reset()
        self.outbox.reset()
        self._requests.reset()
        self._early.clear()
        self._early_shares.clear()
        self.wants = self._heard_want = self._told_want = self._said_want = 0
        self._weigh()

    def lost(self, why: str) -> None:
        """End the lane: the peer is gone, and writes no more."""
        self.outbox.dead = True
        self._asked.clear()
        self.sender.unstick()
        self._shut(why)

    def leave(self, why: str) -> None:
        """End the lane, and tell the peer; the slots are in use until the peer says that its writes have ended."""
        if self.why is None:
            self._shut(why)
            self._say_bye()

    def _shut(self, why: str) -> None:
        self.why = self.why or why
        for job in list(self.sender.jobs.values()):
            self.sender.fail(job, why)
        for inbound in list(self.receiver.inbounds.values()):
            self.receiver.fail(inbound, why)
        self.starts.fail_all(why)
        self.receiver.drop_early()
        self.sender.credits.returned.clear()
        self._said_want = 0

    def _say_bye(self, answer: int = 0) -> None:
        """Tell the peer that this end leaves, and whether a write of it may still move."""
        if not self.outbox.dead:
            self.outbox.drop_unready()
            quiet = self.sender.quiet
            if self._greeted and not self.outbox.waits:
                self.outbox.say(messages.BYE, bytes([messages.QUIET * quiet | answer]))
                self._said_quiet = quiet
            self._said_quiet |= not self._greeted
            self._repeat_at = self._own.now() + self._pause
            self._pause = min(2 * self._pause, MOST_REPEAT_SECONDS)

    def _answer(self) -> None:
        """Tell earlier ends of the peer, which have left, that no write to them moves any more."""
        for number in [number for number in self._asked if not self.sender.writes_to(number)]:
            self.outbox.say(messages.BYE, bytes([messages.QUIET]), number)
            self._asked.remove(number)

    # ---- messages that come ------------------------------------------------------------------------------------------

    def hear(self, heard: Message) -> None:
        """Take a message that is no greeting. One that cannot be right ends the lane."""
        if self.outbox.dead:
            return
        try:
            if heard.kind == messages.BYE:
                self._parted(heard)
            elif heard.sender == self.outbox.theirs and heard.receiver == self.outbox.mine:
                if heard.credits:
                    self._credit(heard.credits)
                if heard.kind in messages.SHARING:
                    self._shared(heard.kind, heard.body)
                    return
                self._requests.hear(heard.kind, heard.body, closed=self.why is not None)
        except Exception as error:  # noqa: BLE001  # whatever a peer sends, the other peers go on
            self.wrong(error)

    def wrong(self, error: Exception) -> None:
        """End the lane, since the peer has sent a message that cannot be right."""
        log.warning("%s sent a wrong message: %s", self.name, error)
        self.leave(f"it sent a wrong message: {error}")

    def _parted(self, heard: Message) -> None:
        """Take a goodbye, to any of the numbers that this end ever had, or to none if the peer did not know one."""
        outbox = self.outbox
        if heard.receiver and heard.receiver not in self._numbers:
            return
        if heard.sender < outbox.theirs:  # an earlier end of the peer
            if heard.sender not in self._asked:
                self._asked.append(heard.sender)
            return
        outbox.theirs = heard.sender
        flags = heard.body[0] if heard.body else 0
        self._peer_quiet |= bool(flags & messages.QUIET)
        if self.why is None:
            self.leave("the peer has left")
        elif flags & messages.ANSWER:
            self._say_bye()

    def had(self, number: int) -> bool:
        """Return whether a number is this end's, or was."""
        return number in self._numbers

    def _credit(self, given: Sequence[Credit]) -> None:
        if self.outbox.ready:
            for number, turn in given:
                self.sender.credits.credit(number, turn)
        elif len(self._early) < MOST_EARLY:
            self._early += given
