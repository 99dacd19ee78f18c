"""The transfers that this process begins with one peer: they wait, begin, and end in time."""

from __future__ import annotations

from collections import deque

from kvplan.agents.packed.pack_jobs import Job, held
from kvplan.agents.packed.pack_messages import ASK, PULL, PUSH, PUSHED, data_nbytes, overhead
from kvplan.agents.packed.pack_orders import Ordered, order_bytes, parts_of
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_receiver import Inbound, Receiver
from kvplan.agents.packed.pack_rows import rows_of
from kvplan.agents.packed.pack_sender import Sender
from kvplan.agents.packed.pack_transfer import PackedTransfer
from kvplan.plan.packing.chunk_half import Half

LOOK_SECONDS = 1e-3  # between two looks at deadlines
UNBEGUN = "it had not begun, and nothing was moved"


class Starts:
    """Begins transfers with a peer, in the order of their submits; those that wait for their ``after=`` come later.

    Args:
        outbox: messages to the peer.
        sender, receiver: chunks to the peer, and from it.
        most_note: most bytes of a note.

    Attributes:
        waiting: transfers that have not begun, in the order of their submits.
        ended: transfers that have ended since the last step.
    """

    def __init__(self, outbox: Outbox, sender: Sender, receiver: Receiver, most_note: int) -> None:
        self.waiting: dict[PackedTransfer, None] = {}
        self.ended: deque[PackedTransfer] = deque()
        self._outbox, self._sender, self._receiver, self._most_note = outbox, sender, receiver, most_note
        self._begun: dict[PackedTransfer, Job | Inbound] = {}
        self._look_at = 0.0  # when deadlines are looked at again
        self._timed: dict[PackedTransfer, None] = {}  # transfers with a deadline
        self._counts = {(pushing, urgent): 0 for pushing in (False, True) for urgent in (False, True)}

    @property
    def in_flight(self) -> int:
        """Number of transfers that have not ended."""
        return sum(not one.over for one in {**self.waiting, **self._begun})

    @property
    def busy(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self.waiting or self._begun or self.ended)

    def due(self, now: float) -> bool:
        """Return whether a step may begin or end a transfer now."""
        return bool(self.ended or self.waiting or (self._timed and now >= self._look_at))

    def holds(self, transfer: PackedTransfer) -> bool:
        """Return whether a step may still begin or end something of a transfer."""
        return transfer in self.waiting or transfer in self._begun or transfer in self.ended

    def take(self, transfer: PackedTransfer) -> None:
        """Take a transfer. Any thread may call it."""
        transfer.left = self.ended.append
        if transfer.until is not None:
            self._timed[transfer] = None
            self._look_at = 0.0
        self.waiting[transfer] = None

    def step(self, now: float, chunk_nbytes: int) -> bool:
        """Begin what may begin, and end what is late; return whether anything changed.

        Args:
            now: time by the clock.
            chunk_nbytes: most bytes of a chunk; 0 while the peer's ring is not known.
        """
        changed = False
        while self.ended:
            changed = True
            self._stop(self.ended[0])
            self.ended.popleft()  # last: an interrupt may come between
        if self.waiting:
            changed |= self._begin_waiting(now, chunk_nbytes)
        if self._timed and now >= self._look_at:
            self._expire(now)
        return changed

    def _begin_waiting(self, now: float, chunk_nbytes: int) -> bool:
        began = False
        for transfer in list(self.waiting):  # other threads may add some meanwhile
            try:
                if not transfer.over:
                    if not chunk_nbytes or not self._may_begin(transfer, chunk_nbytes):
                        continue
                    began = True
                    self._begin(transfer, now, chunk_nbytes)
            except Exception as error:  # noqa: BLE001  # it is the transfer's
                transfer.fail(str(error), "nothing was moved")
            self.waiting.pop(transfer, None)
        return began

    def _may_begin(self, transfer: PackedTransfer, chunk_nbytes: int) -> bool:
        """Return whether the first piece of a push, or every piece of a pull, may begin."""
        transfer.make(chunk_nbytes)
        pieces = transfer.pieces if transfer.wish.reading else transfer.pieces[:1]
        return all(piece.ready.completed() for piece in pieces)

    def _begin(self, transfer: PackedTransfer, now: float, chunk_nbytes: int) -> None:
        wish, reading = transfer.wish, transfer.wish.reading
        halves: list[Half] = []
        recipes: list[bytes] = []
        for piece in transfer.pieces:
            packing = piece.packing
            if packing is not None:
                halves.append(packing.dst if reading else packing.src)
                recipes.append(packing.recipe("src" if reading else "dst"))
        rows = rows_of(halves, chunk_nbytes)
        transfer.count(rows)
        if not rows:
            recipes = []
            if reading or not wish.note:
                transfer.finish()
                return
        left = 0.0 if transfer.until is None else max(transfer.until - now, 1e-3)
        note = b"" if reading else wish.note
        order = order_bytes(Ordered(wish.urgent, wish.attempts, chunk_nbytes, left, tuple(recipes), note))
        rides = bool(rows) and not reading and overhead(0) + data_nbytes() + len(order) <= self._most_note
        if not rows and not transfer.claim():
            return
        self._counts[not reading, wish.urgent] += 1
        number = self._counts[not reading, wish.urgent] << 1 | wish.urgent
        if reading:
            inbound = Inbound(PULL, number, rows, urgent=wish.urgent, own=transfer)
            self._begun[transfer] = inbound
            self._receiver.take(inbound)
        else:
            job = Job(
                PUSHED, number, rows, urgent=wish.urgent, attempts=wish.attempts,
                ready=[piece.ready for piece in transfer.pieces], order=order if rides else b"", own=transfer,
            )  # fmt: skip
            self._begun[transfer] = job
            self._sender.take(job)
        if not rides:
            for body in parts_of(number, order, self._most_note):
                self._outbox.say(ASK if reading else PUSH, body)
                transfer.posted += 1

    def _expire(self, now: float) -> None:
        """End the transfers whose deadline has passed."""
        self._look_at = now + LOOK_SECONDS
        for transfer in list(self._timed):
            if transfer.until is not None and now > transfer.until:
                moving = self._begun.get(transfer)
                holds = UNBEGUN if moving is None else held(moving) if isinstance(moving, Job) else moving.held()
                transfer.fail(f"it did not end within its deadline of {transfer.wish.deadline} seconds", holds)
                self._stop(transfer)

    def _stop(self, transfer: PackedTransfer) -> None:
        self._timed.pop(transfer, None)
        self.waiting.pop(transfer, None)
        moving = self._begun.get(transfer)
        if isinstance(moving, Job):
            self._sender.withdraw(moving)
        elif moving is not None:
            self._receiver.withdraw(moving)
        self._begun.pop(transfer, None)

    def reset(self) -> None:
        """Number transfers from 1 again: those that had begun have failed."""
        self._begun.clear()
        self._counts = dict.fromkeys(self._counts, 0)

    def fail_all(self, why: str) -> None:
        """Fail the transfers that have not begun."""
        for transfer in list(self.waiting):
            transfer.fail(why, UNBEGUN)
            self.waiting.pop(transfer, None)
        self.reset()
