"""The receiver of chunks: scatter each chunk from its slot once, and give the slot back to the peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvplan.agents.packed.pack_messages import CANCEL, DONE, FAILED, PULL, PUSHED, Credit, Data, which_body
from kvplan.agents.packed.pack_orders import Orders
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_rows import TOGETHER, Copier, Mover, Row, ended, failure
from kvplan.agents.packed.pack_transfer import Inbound, PackedTransfer, Scatter
from kvplan.agents.packed.slot_ring import RingSlot
from kvplan.errors import LayoutError

HELD = 2  # chunks that wait for others are at most this part of those that go together
AHEAD_SLOTS = 4  # slots that the peer may write, and chunks to come, while chunks wait for others


class Receiver:
    """Receives the chunks of all transfers with one peer.

    Args:
        outbox: messages to the peer.
        mover: scatters.
        granted: the slots that the peer may write.
        arrived: called with each note for the user.
        together: whether the chunks that a look finds may be scattered by one submit, as GPUs do.

    Attributes:
        granted: by number.
        recalled: numbers of granted slots that the peer is to return.
        inbounds: transfers that have not ended, by whose they are and their numbers.
        orders: orders of the peer's pushes.
    """

    def __init__(
        self, outbox: Outbox, mover: Mover, granted: Sequence[RingSlot], arrived: Callable[[bytes], object],
        *, together: bool = False,
    ) -> None:  # fmt: skip
        self.granted = {slot.number: slot for slot in granted}
        self.recalled: set[int] = set()
        self.inbounds: dict[tuple[int, int], Inbound] = {}
        self.orders = Orders()
        self._outbox, self._copier, self._arrived = outbox, Copier(mover), arrived
        self._turns = dict.fromkeys(self.granted, 0)  # the latest use of each slot that has come
        self._bases = dict(self._turns)  # the turn of each grant, before its first use
        self._past: dict[int, int] = {}  # turns of slots that were returned since the last greeting
        self._early: dict[int, list[Data]] = {}  # chunks of pushes whose order has not come
        self._come: list[Scatter] = []  # chunks that have come and are not submitted yet
        self._scattering: list[Scatter] = []
        self._submitting = 0  # the first of them: those that are being submitted
        self._together, self._epoch = together, 0

    @property
    def quiet(self) -> bool:
        """Whether no chunk is being scattered, or has come."""
        return not self._scattering and not self._come

    @property
    def _read(self) -> list[Scatter]:
        """The chunks whose slots are read, or will be."""
        return [*self._come, *self._scattering]

    @property
    def busy(self) -> bool:
        """Whether a transfer has not ended, or a chunk is being scattered."""
        return bool(self.inbounds or self._scattering or self._come)

    @property
    def _most(self) -> int:
        """Number of chunks that are scattered together, at most."""
        return len(self.granted) // TOGETHER if self._together else 1

    @property
    def _free(self) -> int:
        """Number of slots that the peer may write now, if no chunk is on its way."""
        early = sum([len(some) for some in self._early.values()])  # chunks whose leg of the order has not come
        return len(self.granted) - len(self._read) - early - self._outbox.owed

    @property
    def served(self) -> list[Inbound]:
        """The peer's transfers that scatter to this process's memory, or will."""
        inbounds = [*self.inbounds.values(), *(one.inbound for one in self._read)]
        return [inbound for inbound in inbounds if inbound.own is None]

    def touches(self, transfer: PackedTransfer) -> bool:
        """Return whether a chunk of a transfer of this process is being scattered."""
        return any(one.inbound.own is transfer for one in self._read)

    def slots(self) -> tuple[tuple[int, bool, int], ...]:
        """Return the slots that the peer may write, each with whether it is still read, and the turn of its grant."""
        read = {one.credit.slot for one in self._read}
        return tuple((number, number in read, self._bases[number]) for number in self.granted)

    def grant(self, slots: Sequence[RingSlot]) -> list[Credit]:
        """Let the peer write further slots; return the slots, each with the turn of its grant."""
        for slot in slots:
            self._turns[slot.number] = self._bases[slot.number] = self._past.get(slot.number, -1) + 1
            self.granted[slot.number] = slot
        return [Credit(slot.number, self._bases[slot.number]) for slot in slots]

    def recall(self, count: int) -> list[Credit]:
        """Ask for slots back; return them, each with the turn of its grant."""
        numbers = [number for number in self.granted if number not in self.recalled][:count]
        self.recalled.update(numbers)
        return [Credit(number, self._bases[number]) for number in numbers]

    @property
    def used(self) -> bool:
        """Whether the peer has written a slot since it was granted."""
        return bool([number for number in self.granted if self._turns[number] > self._bases[number]])

    def returned(self, given: Sequence[Credit]) -> list[RingSlot]:
        """Take slots back that the peer writes no more; raise LayoutError if it cannot be through with one."""
        read = {one.credit.slot for one in self._read}
        known = dict([one for one in given if one.slot in self.recalled and one.turn >= self._bases[one.slot]])
        for number, turn in known.items():  # others came twice
            if turn != self._turns[number] or number in read:
                raise LayoutError(f"slot {number} is returned after use {turn:,}; use {self._turns[number]:,} has come")
        self._past |= known
        self.recalled -= known.keys()
        return [self.granted.pop(number) for number in known]  # last: an interrupt may come between

    def take(self, inbound: Inbound) -> None:
        """Receive a transfer, and the chunks of it that have come already."""
        self.inbounds[inbound.whose, inbound.number] = inbound
        early = self._early.pop(inbound.number, ()) if inbound.whose == PUSHED else ()
        if not inbound.rows:
            self._complete(inbound)
        for data in early:
            self._take_data(inbound, data)

    def extend(self, inbound: Inbound, rows: Sequence[Row], *, whole: bool) -> None:
        """Add chunks to a push of the peer, and take those that have come already; ``whole`` if no more will come."""
        inbound.rows += rows
        inbound.seen.extend(bytes(len(rows)))
        inbound.whole = whole
        for data in self._early.pop(inbound.number, ()):
            self._take_data(inbound, data)

    def _take_data(self, inbound: Inbound, data: Data) -> None:
        """Take a chunk of a transfer, or keep it until the transfer's order has come so far."""
        if data.chunk < len(inbound.rows) or inbound.whole:
            self._scatter(inbound, data)
        else:
            self._early.setdefault(inbound.number, []).append(data)

    def data(self, data: Data) -> None:
        """Take a chunk; raise LayoutError if it lies in a slot that the peer cannot have written."""
        if not self._next(data.slot, data.turn):
            return
        inbound = self.inbounds.get((data.whose, data.transfer))
        if inbound is not None:
            self._take_data(inbound, data)
        elif data.whose == PUSHED and not self.orders.known(data.transfer):
            self._early.setdefault(data.transfer, []).append(data)
        else:
            self._outbox.owe([Credit(data.slot, data.turn)])

    def void(self, credit: Credit) -> None:
        """Take a slot back whose write failed; raise LayoutError if the peer cannot have written it."""
        if self._next(*credit):
            self._outbox.owe([credit])

    def _next(self, slot: int, turn: int) -> bool:
        """Count a use of a slot; return False if it was counted before."""
        last = self._turns.get(slot)
        if last is None:
            raise LayoutError(f"a chunk lies in slot {slot}, which was not granted")
        if turn <= last:
            return False  # it came twice
        if turn != last + 1:
            raise LayoutError(f"slot {slot} is used for the {turn:,}th time, after {last:,} uses")
        self._turns[slot] = turn
        return True

    def _scatter(self, inbound: Inbound, data: Data) -> None:
        credit = Credit(data.slot, data.turn)
        if data.chunk >= len(inbound.rows) or inbound.seen[data.chunk]:
            raise LayoutError(f"chunk {data.chunk:,} of {len(inbound.rows):,} comes again, or is not in the transfer")
        if inbound.over or not self._claim(inbound):
            self._outbox.owe([credit])
            return
        inbound.seen[data.chunk] = 1
        inbound.come += 1
        inbound.running += 1
        row = inbound.rows[data.chunk]
        if inbound.left:
            inbound.left[row.piece] -= 1
        self._come.append(Scatter(inbound, row, credit, None, self._epoch))

    def scatter(self) -> None:
        """Scatter what has come. Chunks of one piece that came one after another go together, if several may.

        The peer gets their slots back together. So they are at most half of its slots, and the wire has others.
        """
        while self._come:
            first, some = self._come[0], self._come[:1]
            most = self._most
            for one in self._come[1:most]:
                if one.inbound is not first.inbound or one.row.half is not first.row.half:
                    break
                some.append(one)
            if self._wait_for_more(some, most):
                return
            inbound, moved, self._submitting = first.inbound, None, len(some)
            after = inbound.own.pieces[first.row.piece].ready.left if inbound.own is not None else None
            try:
                if not inbound.over:
                    chunks = [(one.row, self.granted[one.credit.slot].place) for one in some]
                    moved = self._copier.submit(chunks, after, urgent=inbound.urgent)
            except Exception as error:  # noqa: BLE001  # it is the transfer's
                inbound.running -= len(some)
                self.fail(inbound, f"a chunk could not be scattered: {error}")
                inbound.running += len(some)
            self._scattering += [one._replace(moved=moved) for one in some]
            self._submitting = 0
            del self._come[: len(some)]  # last: an interrupt may come between

    def _wait_for_more(self, some: Sequence[Scatter], most: int) -> bool:
        """Return whether chunks wait for the next ones, so that more of them are scattered together.

        The peer has slots meanwhile: half of them, since chunks on the way have some. The last chunks of a piece
        that is waited for, and those of high priority, wait for nothing. A peer's push is waited for as a whole.
        """
        inbound, piece = some[0].inbound, some[0].row.piece
        if inbound.over or inbound.urgent or len(some) >= most // HELD or len(some) < len(self._come):
            return False
        return inbound.to_come(piece) >= AHEAD_SLOTS and self._free >= max(AHEAD_SLOTS, len(self.granted) // 2)

    def _claim(self, inbound: Inbound) -> bool:
        if inbound.own is None or inbound.own.claim():
            return True
        self.withdraw(inbound)
        return False

    def look(self) -> bool:
        """Return whether a scatter has ended."""
        running = set[tuple[bool, str]]()
        # No generator: an interrupt would end it where nobody hears of that.
        return True in [ended(one.moved, one.inbound.urgent, running) for one in self._scattering]

    def step(self) -> bool:
        """End what is scattered; return whether anything changed."""
        self.scatter()  # chunks that waited for others wait no more if their transfer was given up
        if not self._scattering:
            return False
        running = set[tuple[bool, str]]()
        over = [one for one in self._scattering if ended(one.moved, one.inbound.urgent, running)]
        for one in over:
            self._scattering.remove(one)
            inbound = one.inbound
            inbound.running -= 1
            self._outbox.owe([one.credit if one.epoch == self._epoch else Credit(one.credit.slot, 0)])
            error = failure(one.moved)
            if error is not None:
                self.fail(inbound, f"a chunk could not be scattered: {error}")
            elif one.moved is not None:
                inbound.scattered += 1
                if not inbound.over:
                    if inbound.own is not None:
                        inbound.own.arrive(one.row.piece)
                    if inbound.whole and inbound.scattered == len(inbound.rows):
                        self._complete(inbound)
        return bool(over)

    def _complete(self, inbound: Inbound) -> None:
        if inbound.own is not None:
            inbound.own.finish()  # first: an interrupt may come between
        self._end(inbound)
        if inbound.own is None:
            if inbound.note:
                self._arrived(inbound.note)
            self._outbox.say(DONE, which_body(inbound.whose, inbound.number))

    def fail(self, inbound: Inbound, why: str, *, tell: bool = True) -> None:
        """Give a transfer up, and tell the other end."""
        if inbound.over:
            return
        held = inbound.held()
        if inbound.own is not None:
            inbound.own.fail(why, held)
        self._end(inbound)
        if tell:
            kind = CANCEL if inbound.whose == PULL else FAILED
            self._outbox.say(kind, which_body(inbound.whose, inbound.number, why))

    def withdraw(self, inbound: Inbound) -> None:
        """Scatter no more of a transfer that this process has cancelled, and tell the other end."""
        if not inbound.over:
            self._end(inbound)
            self._outbox.say(CANCEL, which_body(inbound.whose, inbound.number))

    def refuse(self, number: int, why: str) -> None:
        """Refuse a push of the peer, or end one that the peer has given up; its slots go back."""
        inbound = self.inbounds.get((PUSHED, number))
        if inbound is not None:
            self._end(inbound)
        self._forget(number)
        self.orders.first(number)
        if why:
            self._outbox.say(FAILED, which_body(PUSHED, number, why))

    def _end(self, inbound: Inbound) -> None:
        inbound.over = True
        self.inbounds.pop((inbound.whose, inbound.number), None)
        if not inbound.whole:
            self._forget(inbound.number)

    def _forget(self, number: int) -> None:
        """Take no further leg of the order of a push, and give the slots of its chunks back that wait for one."""
        self.orders.end(number)
        for data in self._early.pop(number, ()):
            self._outbox.owe([Credit(data.slot, data.turn)])

    def drop_early(self) -> None:
        """Forget chunks of pushes whose order has not come."""
        self._early.clear()

    def reset(self, why: str) -> None:
        """Give all transfers up; chunks that are being scattered go on.

        A scatter whose submit was interrupted may run. It is submitted again: once that has ended, both have.
        """
        for inbound in list(self.inbounds.values()):
            self.fail(inbound, why, tell=False)
        while self._submitting:
            one = self._come[0]
            if all(other.credit != one.credit for other in self._scattering):
                with suppress(Exception):
                    chunk = one.row, self.granted[one.credit.slot].place
                    one = one._replace(moved=self._copier.submit([chunk], None, urgent=one.inbound.urgent))
                self._scattering.append(one)
            self._submitting -= 1
            del self._come[0]  # last: an interrupt may come between
        self.orders = Orders()
        self._early.clear()
        self._come.clear()
        self._turns = dict.fromkeys(self.granted, 0)
        self._bases = dict(self._turns)
        self._past.clear()
        self.recalled.clear()
        self._epoch += 1
