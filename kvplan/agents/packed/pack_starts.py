"""The transfers that this process begins with one peer: they wait, begin, and end in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from kvplan.agents.packed.pack_jobs import Job, held
from kvplan.agents.packed.pack_messages import ASK, PULL, PUSH, PUSHED, data_nbytes, overhead
from kvplan.agents.packed.pack_orders import Ordered, order_pieces, parts_of
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_receiver import Receiver
from kvplan.agents.packed.pack_rows import rows_of
from kvplan.agents.packed.pack_sender import Sender
from kvplan.agents.packed.pack_transfer import Inbound, PackedTransfer
from kvplan.plan.packing.chunk_half import Half
from kvplan.plan.packing.pack_recipe import Buffer, recipe_pieces

LOOK_SECONDS = 1e-3  # between two looks at deadlines
UNBEGUN = "it had not begun, and nothing was moved"
LEG_UNITS = 1 << 17  # units of a leg of an order, unless a chunk has more: mostly 512 KiB of addresses
FIRST = 8  # the first leg has this part of them: the other end waits for it


class Telling(NamedTuple):
    """An order that is told leg by leg.

    Attributes:
        transfer: the transfer.
        number: its number.
        chunk_nbytes: most bytes of a chunk.
        legs: for each leg, the halves of the other end.
        begins: for each leg, whether it begins a piece.
    """

    transfer: PackedTransfer
    number: int
    chunk_nbytes: int
    legs: Sequence[Sequence[Half]]
    begins: Sequence[bool]

    def pieces(self, number: int, now: float) -> list[Buffer]:
        """Return a leg, in pieces; raise KVPlanError if one of its recipes cannot be written."""
        wish, until = self.transfer.wish, self.transfer.until
        left = 0.0 if until is None else max(until - now, 1e-3)
        note = b"" if wish.reading or number else wish.note
        order = Ordered(wish.urgent, wish.attempts, self.chunk_nbytes, left, (), note, self.begins[number])
        return order_pieces(order, [recipe_pieces(half) for half in self.legs[number]])


def legs_of(halves: Sequence[Half], chunk_nbytes: int, leg_units: int = LEG_UNITS) -> list[list[Half]]:
    """Cut the pieces of a transfer into the legs of its order, at the ends of chunks.

    Args:
        halves: the other end's half of each piece.
        chunk_nbytes: most bytes of a chunk.
        leg_units: most units of a leg, unless one chunk has more; of the first leg, a part of them.

    Returns:
        For each leg, its halves, at least one leg.
    """
    legs: list[list[Half]] = [[]]
    units, most = 0, max(leg_units // FIRST, 1)
    for half in halves:
        first = begin = 0
        for end in half.cuts(chunk_nbytes)[1:] if half.nbytes else ():
            if units and units + end - begin > most:
                if first < begin:
                    legs[-1].append(half.part(first, begin))
                legs.append([])
                units, most, first = 0, leg_units, begin
            units, begin = units + end - begin, end
        if first < begin:
            legs[-1].append(half.part(first, begin) if first else half)
    return legs


def begins_of(halves: Sequence[Half], legs: Sequence[Sequence[Half]]) -> list[bool]:
    """Return for each leg whether it begins a piece: the other end counts the pieces across legs.

    Args:
        halves, legs: see :func:`legs_of`.
    """
    ends = {0, *accumulate([half.units for half in halves if half.nbytes])}
    starts = accumulate([sum([half.units for half in leg]) for leg in legs[:-1]], initial=0)
    return [start in ends for start in starts]


class Starts:
    """Begins transfers with a peer, in the order of their submits; those that wait for their ``after=`` come later.

    Args:
        outbox: messages to the peer.
        sender, receiver: chunks to the peer, and from it.
        most_note: most bytes of a note.
        leg_units: most units of a leg of an order, unless one chunk has more.

    Attributes:
        waiting: transfers that have not begun, in the order of their submits.
        ended: transfers that have ended since the last step.
    """

    def __init__(self, outbox: Outbox, sender: Sender, receiver: Receiver, most_note: int, leg_units: int) -> None:
        self.waiting: dict[PackedTransfer, None] = {}
        self.ended: deque[PackedTransfer] = deque()
        self._outbox, self._sender, self._receiver, self._most_note = outbox, sender, receiver, most_note
        self._leg_units = leg_units
        self._begun: dict[PackedTransfer, Job | Inbound] = {}
        # By priority, orders that are told, and the number of the next leg.
        self._tellings: tuple[deque[tuple[Telling, int]], deque[tuple[Telling, int]]] = deque(), deque()
        self._look_at = 0.0  # when deadlines are looked at again
        self._timed: dict[PackedTransfer, None] = {}  # transfers with a deadline
        self._counts = {(pushing, urgent): 0 for pushing in (False, True) for urgent in (False, True)}

    @property
    def in_flight(self) -> int:
        """Number of transfers that have not ended."""
        return sum(not one.over for one in {**self.waiting, **self._begun})

    @property
    def busy(self) -> bool:
        """Whether a transfer has not ended, or its order is told still."""
        normal, urgent = self._tellings
        return bool(self.waiting or self._begun or self.ended or normal or urgent)

    @property
    def tells(self) -> bool:
        """Whether legs of an order are to be told."""
        return any(self._tellings)

    def due(self, now: float) -> bool:
        """Return whether a step may begin or end a transfer now."""
        normal, urgent = self._tellings
        return bool(self.ended or self.waiting or normal or urgent or (self._timed and now >= self._look_at))

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
        if self.tells:
            self._tell(self._tellings[True] or self._tellings[False], now)
            changed = True
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
        halves, others = list[Half](), list[Half]()
        for piece in transfer.pieces:
            packing = piece.packing
            if packing is not None:
                halves.append(packing.dst if reading else packing.src)
                others.append(packing.src if reading else packing.dst)
        rows = rows_of(halves, chunk_nbytes)
        transfer.count(rows)
        if not rows:
            others = []
            if reading or not wish.note:
                transfer.finish()
                return
        key = not reading, wish.urgent
        number = (self._counts[key] + 1) << 1 | wish.urgent
        legs = legs_of(others, chunk_nbytes, self._leg_units)
        telling = Telling(transfer, number, chunk_nbytes, legs, begins_of(others, legs))
        order = telling.pieces(0, now)
        rides = bool(rows) and not reading and len(telling.legs) == 1
        rides = rides and overhead(0) + data_nbytes() + sum([len(piece) for piece in order]) <= self._most_note
        if not rows and not transfer.claim():
            return
        self._counts[key] += 1
        if reading:
            inbound = Inbound(PULL, number, rows, urgent=wish.urgent, own=transfer)
            self._begun[transfer] = inbound
            self._receiver.take(inbound)
        else:
            job = Job(
                PUSHED, number, rows, urgent=wish.urgent, attempts=wish.attempts,
                ready=[piece.ready for piece in transfer.pieces], order=b"".join(order) if rides else b"", own=transfer,
            )  # fmt: skip
            self._begun[transfer] = job
            self._sender.take(job)
        if not rides:
            self._say(telling, 0, order)
            if len(telling.legs) > 1:
                self._tellings[wish.urgent].append((telling, 1))

    def _say(self, telling: Telling, number: int, leg: list[Buffer]) -> None:
        """Tell a leg of an order."""
        for body in parts_of(telling.number, number, len(telling.legs), leg, self._most_note):
            self._outbox.say(ASK if telling.transfer.wish.reading else PUSH, body)
            telling.transfer.posted += 1

    def _tell(self, line: deque[tuple[Telling, int]], now: float) -> None:
        """Tell the next leg of the first order of a line. The other end has begun with the legs before it."""
        telling, number = line[0]
        if telling.transfer in self._begun and not telling.transfer.over:
            try:
                self._say(telling, number, telling.pieces(number, now))
            except Exception as error:  # noqa: BLE001  # it is the transfer's
                telling.transfer.fail(str(error), self._held(telling.transfer))
            number += 1
        else:
            number = len(telling.legs)
        if number == len(telling.legs):
            line.popleft()
        else:
            line[0] = telling, number

    def _expire(self, now: float) -> None:
        """End the transfers whose deadline has passed."""
        self._look_at = now + LOOK_SECONDS
        for transfer in list(self._timed):
            if transfer.until is not None and now > transfer.until:
                late = f"it did not end within its deadline of {transfer.wish.deadline} seconds"
                transfer.fail(late, self._held(transfer))
                self._stop(transfer)

    def _held(self, transfer: PackedTransfer) -> str:
        """Return what the destination of a transfer holds after an error."""
        moving = self._begun.get(transfer)
        if moving is None:
            return UNBEGUN
        return held(moving) if isinstance(moving, Job) else moving.held()

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
        for line in self._tellings:
            line.clear()
        self._counts = dict.fromkeys(self._counts, 0)

    def fail_all(self, why: str) -> None:
        """Fail the transfers that have not begun."""
        for transfer in list(self.waiting):
            transfer.fail(why, UNBEGUN)
            self.waiting.pop(transfer, None)
        self.reset()
