"""The transfers that a peer begins: their orders, checked, and the messages about them and about this end's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvplan.agents.packed import pack_messages as messages
from kvplan.agents.packed.pack_jobs import Job
from kvplan.agents.packed.pack_orders import Leg, Ordered, Orders, read_order
from kvplan.agents.packed.pack_outbox import Outbox
from kvplan.agents.packed.pack_receiver import Receiver
from kvplan.agents.packed.pack_rows import Row, rows_of
from kvplan.agents.packed.pack_sender import Sender
from kvplan.agents.packed.pack_transfer import Inbound
from kvplan.agents.packed.slot_ring import ALIGNMENT
from kvplan.errors import KVPlanError, LayoutError, TransferError
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.packing.pack_recipe import half_of


class Parties(NamedTuple):
    """The parts of a lane that a message of the peer may change.

    Attributes:
        outbox: messages to the peer.
        sender, receiver: chunks to the peer, and from it.
    """

    outbox: Outbox
    sender: Sender
    receiver: Receiver


class Requests:
    """Takes the messages of a peer about transfers, of either end.

    Args:
        parties: what they change.
        name: name of the peer.
        offered: memory of this process that the peer's recipes may name.
        slot_nbytes: bytes of a slot of this process's ring.
        now: clock, in seconds.
    """

    def __init__(
        self, parties: Parties, name: str, offered: Offered, slot_nbytes: int, now: Callable[[], float]
    ) -> None:
        self._outbox, self._sender, self._receiver = parties
        self._name, self._offered, self._slot_nbytes, self._now = name, offered, slot_nbytes, now
        self._asks = Orders()

    def reset(self) -> None:
        """Forget all orders: one of the two ends begins anew."""
        self._asks = Orders()

    def hear(self, kind: int, body: bytes, *, closed: bool) -> None:
        """Take a message.

        Args:
            kind: kind of the message.
            body: its body.
            closed: whether no order is taken any more.

        Raises:
            LayoutError: the message cannot be right.
        """
        if kind == messages.DATA:
            data = messages.read_data(body)
            if data.order and not closed:
                self._push(data.transfer, Leg(0, last=True, content=data.order))
            self._receiver.data(data)
        elif kind in (messages.ASK, messages.PUSH):
            part = messages.read_part(body)
            pull = kind == messages.ASK
            for leg in () if closed else (self._asks if pull else self._receiver.orders).add(part):
                (self._ask if pull else self._push)(part.transfer, leg)
        elif kind == messages.VOID:
            self._receiver.void(messages.read_credit(body))
        elif kind != messages.CREDIT:
            self._told(kind, *messages.read_which(body))

    def _ask(self, number: int, leg: Leg) -> None:
        """Take a leg of the order of a pull."""
        asks, job = self._asks, self._sender.jobs.get((messages.PULL, number))
        if not leg.number:
            asks.first(number)
        elif job is None:
            asks.end(number)  # the transfer has ended
            return
        order = read_order(leg.content)
        try:
            rows = self._rows(order, "src", leg, job.rows if job else ())
        except KVPlanError as error:
            asks.end(number)
            if job is not None:
                self._sender.fail(job, str(error))
            else:
                self._outbox.say(messages.FAILED, messages.which_body(messages.PULL, number, str(error)))
            return
        if job is not None:
            self._sender.extend(job, rows, whole=leg.last)
        elif rows:
            until = self._now() + order.seconds if order.seconds else None
            urgent, attempts, left = bool(number & 1), order.attempts, partial(asks.end, number)
            self._sender.take(
                Job(messages.PULL, number, rows, urgent=urgent, attempts=attempts, until=until, whole=leg.last,
                    left=left)
            )  # fmt: skip

    def _push(self, number: int, leg: Leg) -> None:
        """Take a leg of the order of a push."""
        orders, inbound = self._receiver.orders, self._receiver.inbounds.get((messages.PUSHED, number))
        if not leg.number:
            if not orders.first(number):
                return  # it came twice, with a chunk
        elif inbound is None:
            orders.end(number)  # the transfer has ended
            return
        order = read_order(leg.content)
        try:
            rows = self._rows(order, "dst", leg, inbound.rows if inbound else ())
        except KVPlanError as error:
            self._receiver.refuse(number, str(error))
            return
        if inbound is None:
            urgent = bool(number & 1)
            inbound = Inbound(messages.PUSHED, number, rows, urgent=urgent, note=order.note, whole=leg.last)
            self._receiver.take(inbound)
        else:
            self._receiver.extend(inbound, rows, whole=leg.last)

    def _rows(self, order: Ordered, side: str, leg: Leg, before: Sequence[Row]) -> list[Row]:
        """Return the chunks of a leg of a peer's order, checked; raise KVPlanError if they cannot be.

        Args:
            order: the content of the leg.
            side: side of its recipes.
            leg: the leg.
            before: chunks of the legs before it.
        """
        chunk_nbytes = order.chunk_nbytes
        if not ALIGNMENT <= chunk_nbytes <= self._slot_nbytes:
            raise TransferError(f"chunks have {chunk_nbytes:,} bytes; a slot has {self._slot_nbytes:,}")
        offered = self._offered.current()
        halves = [half_of(recipe, offered, side) for recipe in order.recipes]
        rows = rows_of(halves, chunk_nbytes, before[-1].piece + order.begins if before else 0)
        if not rows and not (leg.last and not leg.number):
            raise TransferError(f"leg {leg.number:,} of an order has no chunks, and the order has others")
        return rows

    def _told(self, kind: int, whose: int, number: int, why: str) -> None:
        """Take the end of a transfer from the other end."""
        if kind == messages.CANCEL:
            self._cancelled(whose, number)
            return
        told = f"{self._name!r} said: {why}"
        if whose == messages.PULL:
            inbound = self._receiver.inbounds.get((whose, number))
            if kind == messages.FAILED and inbound is not None:
                self._receiver.fail(inbound, told, tell=False)
            return
        job = self._sender.jobs.get((whose, number))
        if job is None or job.own is None:
            return
        if kind == messages.FAILED:
            self._sender.fail(job, told, tell=False)
        elif job.posted == len(job.rows):
            job.own.finish()  # first: an interrupt may come between
            self._sender.stop(job)
        else:
            raise LayoutError(f"transfer {number} is called done after {job.posted:,} of {len(job.rows):,} chunks")

    def _cancelled(self, whose: int, number: int) -> None:
        """End a transfer that the peer has given up."""
        if whose == messages.PUSHED:
            self._receiver.refuse(number, "")
            return
        self._asks.refuse(number)
        job = self._sender.jobs.get((whose, number))
        if job is not None:
            self._sender.stop(job)
