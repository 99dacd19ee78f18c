"""The packed transfers of an end: who may gather, write and scatter, transfer by transfer, in turns.

A slot of a receiver belongs to one chunk from its GO until the chunk is scattered, or until nothing of the sender moves
any more. The sender gathers a chunk after its GO. Each end tells at most once that a transfer has failed, when nothing
of it moves there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvplan.agents.packed import messages
from kvplan.agents.packed.line import ANSWER_SECONDS, Clock, Copying, Line, Moving, Writing
from kvplan.agents.packed.messages import Inbox, Message, Order
from kvplan.agents.packed.packed_transfer import PackedTransfer
from kvplan.agents.packed.programs import Offer, program_body, read_program
from kvplan.agents.packed.ring import Ring, most_of_a_peer
from kvplan.base.threads import error_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Outline

MOVING, WRITTEN, GIVEN_UP = "moving", "done", "given up"  # states of a write


class Traffic:
    """The transfers of an end. One thread at a time calls the methods.

    Args:
        ring: this process's slots.
        mover: gathers and scatters.
        offer: returns the memory that peers may name.
        notes: gets the notes of transfers that peers began and that have ended well, each with the peer.
        now: the clock.

    Attributes:
        pending: transfers that this end has begun and that have not ended.
        leaving: lines that have ended, while something of them may move.
        lost: lines whose wire has lost the peer, and why.
        shared: whether there is more than one peer, so that each may have half of the slots.
    """

    def __init__(self, ring: Ring, mover: Executor, offer: Callable[[], Offer], notes: Inbox, now: Clock) -> None:
        self.pending: dict[PackedTransfer, Moving] = {}
        self.leaving: list[Line] = []
        self.lost: deque[tuple[Line, str]] = deque()
        self.notes = notes
        self.shared = False
        self._ring, self._mover, self._offer, self._now = ring, mover, offer, now
        self._slots = len(ring.into), len(ring.out)
        self._gated: dict[PackedTransfer, Moving] = {}
        self._sending, self._receiving = (deque[Moving](), deque[Moving]()), (deque[Moving](), deque[Moving]())
        self._copies: list[Copying] = []
        self._writes: list[Writing] = []
        self._last_number = 0

    @property
    def moves(self) -> bool:
        """Whether something moves here, so that looks are worth their time."""
        return bool(self.pending or self._copies or self._writes or self.leaving)

    @property
    def unsettled(self) -> bool:
        """Whether something reads or writes slots or blocks, or a peer may still write a slot."""
        return bool(self.pending or self._copies or self._writes or any(line.moving for line in list(self.leaving)))

    @property
    def copying(self) -> bool:
        """Whether something is gathered or scattered."""
        return bool(self._copies)

    # ---- beginnings --------------------------------------------------------------------------------------------------

    def queue(self, transfer: PackedTransfer, moving: Moving) -> None:
        """Begin a transfer of this end, once its line is open and its gates are."""
        self.pending[transfer] = moving
        if transfer.over or moving.line.why is not None:
            self.fail(moving, moving.line.why or "it was given up")
        else:
            self._gated[transfer] = moving

    def step(self) -> bool:
        """Do what can be done now; return whether there was something."""
        moved = self._open_gates()
        moved |= self._end_copies()
        moved |= self._end_writes()
        moved |= self._gather()
        moved |= self._name_slots()
        for line in list(self.leaving):
            self._part(line)
        return moved

    def _open_gates(self) -> bool:
        moved = False
        for transfer, moving in list(self._gated.items()):
            gates, before = transfer.gates, moving.opened
            if transfer not in self.pending:
                del self._gated[transfer]
                continue
            try:
                while gates and gates[0].completed():
                    moving.lefts.append(gates.pop(0).left)
                    moving.opened += 1
                if moving.number and moving.opened > before:
                    self._go_on(moving)
                elif moving.opened and moving.line.theirs and not moving.number:
                    self._begin(transfer, moving)
            except KVPlanError as error:
                self.fail(moving, str(error))
            except Exception as error:  # noqa: BLE001  # what the peer has heard is not known
                self.lose(moving.line, f"{type(error).__name__}: {error}")
            moved |= moving.opened > before
            if not gates and moving.ready_at is None:
                moving.ready_at = self._now()
            if not gates and moving.number:
                del self._gated[transfer]
        return moved

    def _begin(self, transfer: PackedTransfer, moving: Moving) -> None:
        line, numbers, wish = moving.line, list[list[int]](), transfer.wish
        self._last_number += 1
        moving.begin(self._last_number)
        for outline in moving.outlines:
            number, new = line.number(outline.program, moving.side)
            if new:
                self._tell(line, messages.PROGRAM, program_body(outline.program, moving.side), transfer=number)
            numbers.append([number, *outline.skips, outline.units])
        moving.ready = moving.open_chunks
        if len(line.moving) == 1:
            line.heard_at = self._now()
        order = Order(numbers, moving.groups, moving.sends, moving.urgent, wish.note)
        self._say(moving, messages.ORDER, order.body(), chunk=moving.ready)
        if not moving.sends:
            self._receive(moving)

    def _go_on(self, moving: Moving) -> None:
        moving.ready = moving.open_chunks
        if moving.sends:
            self._say(moving, messages.ORDER, chunk=moving.ready)
        else:
            self._receive(moving)

    def _receive(self, moving: Moving) -> None:
        """Let a transfer stand in the line for slots, or end it if it has no bytes."""
        if not moving.cut.chunks:
            self._finish(moving)
        elif not moving.lined and moving.next < moving.ready and moving.error is None:
            moving.lined = True
            self._receiving[moving.urgent].append(moving)

    # ---- messages ----------------------------------------------------------------------------------------------------

    def hear(self, line: Line, message: Message) -> None:
        """Take a message of an open line; raise TransferError if it cannot be right."""
        kind, number = message.kind, message.transfer
        if kind == messages.PROGRAM:
            try:
                line.programs[number] = read_program(message.body, self._offer())
            except KVPlanError as error:
                line.programs[number] = str(error)
            return
        moving = line.moving.get((not message.mine, number))
        if kind == messages.ORDER and moving is None:
            if message.body:
                self._take(line, message)
        elif moving is None:
            pass  # it has ended here
        elif kind == messages.FAIL:
            moving.answered = True
            self.fail(moving, f"{line.name!r} said: {message.body.decode(errors='replace')}")
        elif moving.error is not None:
            moving.answered |= kind == messages.DONE  # it had ended there before it failed here
            self._settle(moving)
        elif kind == messages.ORDER:
            moving.ready = message.chunk
            self._receive(moving)
        elif kind == messages.GO:
            moving.slots[message.chunk], ids = messages.read_go(message.body)
            moving.heard[message.chunk] = messages.ids_of(ids)
            moving.named.append(message.chunk)
            if not moving.lined:
                moving.lined = True
                self._sending[moving.urgent].append(moving)
        elif kind == messages.CHUNK:
            if message.chunk not in moving.slots:
                raise TransferError(f"chunk {message.chunk} came twice, or to no slot")
            moving.heard[message.chunk] = messages.ids_of(message.body)
            moving.moved_at = self._now()
            slot = moving.slots.pop(message.chunk)
            line.named -= 1
            self._copy(moving, message.chunk, slot)
        elif kind == messages.DONE:
            self._finish(moving)

    def _take(self, line: Line, message: Message) -> None:
        """Begin what a peer has ordered."""
        try:
            order = Order.of(message.body)
            known = [line.programs.get(number, "it was never told") for number, *_ in order.outlines]
            outlines, own = list[Outline](), list[KVLayout]()
            device = "cpu"
            for one, (_, src_skip, dst_skip, units) in zip(known, order.outlines, strict=True):
                if isinstance(one, str):
                    raise TransferError(one)
                outlines.append(Outline(one.program, (src_skip, dst_skip), units))
                own += one.own
                device = one.device
            moving = Moving(
                line, outlines, order.groups, sends=not order.sends, urgent=order.urgent, own=tuple(dict.fromkeys(own)),
                device=device, note=order.note, offer=self._offer(),
            )  # fmt: skip
            moving.begin(message.transfer)
        except (KVPlanError, ValueError) as error:
            self._tell(line, messages.FAIL, str(error).encode(), transfer=message.transfer)
            return
        line.noted.setdefault((moving.sends, moving.urgent), deque()).append(moving)
        moving.ready = message.chunk if order.sends else len(moving.cut.chunks)
        if not moving.sends:
            self._receive(moving)

    def _say(self, moving: Moving, kind: int, body: bytes = b"", *, chunk: int = 0) -> None:
        self._tell(moving.line, kind, body, mine=moving.mine, transfer=moving.number, chunk=chunk)

    def _tell(
        self, line: Line, kind: int, body: bytes = b"", *, mine: bool = False, transfer: int = 0, chunk: int = 0
    ) -> None:
        """Send a message, unless the line has ended; a line whose message is not sent ends."""
        if line.why is None:
            try:
                line.say(kind, body, mine=mine, transfer=transfer, chunk=chunk)
            except KVPlanError as error:
                self.lose(line, str(error))

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def _name_slots(self) -> bool:
        """Name free slots for the next chunks of transfers that come here."""
        most = most_of_a_peer(self._slots[0], shared=self.shared)

        def name(moving: Moving) -> None:
            chunk, slot = moving.next, self._ring.into.pop()
            moving.slots[chunk] = slot
            moving.next += 1
            moving.line.named += 1
            self._say(moving, messages.GO, messages.go_body(slot, self._ids_there(moving, chunk)), chunk=chunk)

        return self._take_turns(
            self._receiving, self._ring.into, lambda one: one.next < one.ready, lambda one: one.line.named < most, name
        )

    def _gather(self) -> bool:
        """Gather chunks that have a slot at their receiver."""
        most = most_of_a_peer(self._slots[1], shared=self.shared)

        def gather(moving: Moving) -> None:
            moving.line.sending += 1
            self._copy(moving, moving.named.popleft(), self._ring.out.pop())

        return self._take_turns(
            self._sending, self._ring.out, lambda one: bool(one.named), lambda one: one.line.sending < most, gather
        )

    def _take_turns(
        self, line_ups: tuple[deque[Moving], deque[Moving]], free: list[int], waits: Callable[[Moving], bool],
        may: Callable[[Moving], bool], take: Callable[[Moving], None],
    ) -> bool:  # fmt: skip
        """Give free slots to transfers in turns, urgent ones first; return whether one was given.

        Args:
            line_ups: transfers that stand in line, normal and urgent ones.
            free: slots.
            waits: returns whether a transfer has a chunk for a slot; otherwise it leaves the line.
            may: returns whether its peer may have one more slot.
            take: gives a slot to a transfer.
        """
        given = False
        for line_up in reversed(line_ups):
            full = 0
            while free and full < len(line_up):
                moving = line_up.popleft()
                if moving.error is not None or not waits(moving):
                    moving.lined = False
                    continue
                line_up.append(moving)
                full += 1
                if may(moving):
                    take(moving)
                    given, full = True, 0
        return given

    def _ids_there(self, moving: Moving, chunk: int) -> bytes:
        """Return the other end's ids of a chunk; none if the other end has them."""
        return messages.id_bytes(moving.cut.ids(moving.sources, chunk, 1 - moving.side)) if moving.mine else b""

    def _copy(self, moving: Moving, chunk: int, slot: int) -> None:
        """Gather a chunk into a slot, or scatter it from there."""
        try:
            copy = self._submit(moving, chunk, slot)
        except Exception as error:  # noqa: BLE001  # it is the transfer's
            self._give(moving, slot)
            self.fail(moving, f"a chunk could not be {'gathered' if moving.sends else 'scattered'}: {error}")
            return
        moving.copying += 1
        self._copies.append(Copying(copy, moving, chunk, slot))

    def _submit(self, moving: Moving, chunk: int, slot: int) -> Transfer:
        cut, side, group = moving.cut, moving.side, moving.cut.chunks[chunk].group
        ids = cut.ids(moving.sources, chunk, side) if moving.mine else moving.heard.pop(chunk)
        if not moving.sends and moving.transfer is not None and not moving.transfer.claim():
            raise TransferError("it was cancelled")
        offer = moving.offer
        own = moving.own or offer.on(moving.device)
        if not own:
            raise TransferError(f"no memory is offered on {moving.device}")
        plan = cut.plan(chunk, side, ids, own, self._ring.layout, self._ring.address(slot))
        if not moving.own:
            for span, part in zip(cut.chunks[chunk].spans, plan.parts, strict=True):
                nbytes = span.piece.program.program.groups[0].nbytes
                offer.check_rows(part.units[side], nbytes, moving.device)
        after = moving.lefts[group] if moving.lefts else None
        return self._mover.submit(plan, after, priority="high" if moving.urgent else "normal")

    def _give(self, moving: Moving, slot: int) -> None:
        """Take back a slot of this ring."""
        if moving.sends:
            self._ring.out.append(slot)
            moving.line.sending -= 1
        else:
            self._ring.into.append(slot)

    def _end_copies(self) -> bool:
        over = [one for one in self._copies if one.copy.done()]
        for one in over:
            self._copies.remove(one)
            moving = one.moving
            moving.copying -= 1
            moving.moved_at = self._now()
            error = error_of(one.copy.synchronize)
            if error is not None:
                self.fail(moving, f"a chunk could not be {'gathered' if moving.sends else 'scattered'}: {error}")
            if moving.sends and moving.error is None:
                self._write(one)
                continue
            self._give(moving, one.slot)
            if moving.error is None:
                self._scattered(moving, one.chunk)
            self._settle(moving)
        return bool(over)

    def _scattered(self, moving: Moving, chunk: int) -> None:
        moving.scattered += 1
        moving.left[moving.cut.chunks[chunk].group] -= 1
        while moving.transfer is not None and moving.arrived < len(moving.left) and not moving.left[moving.arrived]:
            moving.transfer.arrive(moving.arrived)
            moving.arrived += 1
        if moving.scattered == len(moving.cut.chunks):
            self._finish(moving)

    def _write(self, one: Copying) -> None:
        moving, line, chunk = one.moving, one.moving.line, one.chunk
        try:
            if moving.transfer is not None and not moving.transfer.claim():
                raise TransferError("it was cancelled")
            message = Message(
                messages.CHUNK, line.mine, 0, moving.mine, moving.number, chunk, self._ids_there(moving, chunk)
            )
            there = line.place.address + moving.slots.pop(chunk) * line.place.slot_nbytes
            nbytes = moving.cut.chunks[chunk].nbytes
            handle = line.wire.write(self._ring.address(one.slot), there, nbytes, message.note())
        except KVPlanError as error:
            self._give(moving, one.slot)
            self.fail(moving, str(error))
            return
        moving.writing += 1
        self._writes.append(Writing(handle, moving, one.slot))

    def _end_writes(self) -> bool:
        moved = False
        for one in list(self._writes):
            moving, wire = one.moving, one.moving.line.wire
            state = GIVEN_UP if moving.error or moving.line.why else wire.state(one.handle)
            if state == MOVING:
                continue
            if state not in (WRITTEN, GIVEN_UP):
                self.fail(moving, f"a write failed: {state.removeprefix('failed: ')}")
            if state != WRITTEN and not wire.release(one.handle):
                continue
            self._writes.remove(one)
            moving.writing -= 1
            moving.moved_at = self._now()
            self._give(moving, one.slot)
            self._settle(moving)
            moved = True
        return moved

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, moving: Moving) -> None:
        del moving.line.moving[moving.key]
        moving.over = moving.well = True
        if not moving.sends:
            self._say(moving, messages.DONE)
        if moving.transfer is not None:
            self.pending.pop(moving.transfer, None)
            if moving.transfer.wish.note and moving.line.why is not None:
                moving.transfer.fail(f"the note was not sent: {moving.line.why}", "all bytes have moved")
            else:
                moving.transfer.finish(len(moving.cut.chunks))
        self._tell_user(moving)

    def _tell_user(self, moving: Moving) -> None:
        """Tell the notes of a peer's transfers that have ended, in the order of their orders."""
        noted = moving.line.noted.get((moving.sends, moving.urgent))
        while noted and noted[0].over:
            ended = noted.popleft()
            if ended.well and ended.note:
                self.notes.append((ended.line.name, ended.note))

    def fail(self, moving: Moving, why: str) -> None:
        """Begin nothing more of a transfer; it ends when nothing of it moves here."""
        if not moving.number and moving.transfer is not None:
            if self.pending.pop(moving.transfer, None) is not None:
                moving.transfer.fail(why, "nothing was moved")
            return
        if moving.error is None and not moving.over:
            moving.error, moving.over = why, True
            moving.named.clear()
            self._tell_user(moving)
        self._settle(moving)

    def _settle(self, moving: Moving) -> None:
        """End a failed transfer as far as that is possible now."""
        if moving.error is None or moving.copying or moving.key not in moving.line.moving:
            return
        line = moving.line
        if moving.transfer is not None and self.pending.pop(moving.transfer, None) is not None:
            moving.transfer.fail(moving.error, moving.holds())
        if moving.writing:
            return
        if not moving.told:
            moving.told = True
            self._say(moving, messages.FAIL, moving.error.encode())
        ended = moving.answered or line.dead or (line.why is not None and moving.sends)
        # What it says may end the line, and so itself.
        if ended and line.moving.pop(moving.key, None) is not None and not moving.sends:
            self._ring.into.extend(moving.slots.values())
            line.named -= len(moving.slots)

    def lose(self, line: Line, why: str, *, dead: bool = False) -> None:
        """End a line: its transfers fail.

        Args:
            line: the line.
            why: why.
            dead: whether nothing of the peer moves any more; otherwise it says so, or dies, before its slots come back.
        """
        line.dead |= dead
        if line.why is None:
            line.why = why
            self.leaving.append(line)
            if not line.theirs:
                line.heard_at = self._now()
        waiting = [one for one in self.pending.values() if one.line is line and not one.number]
        for moving in [*line.moving.values(), *waiting]:
            moving.told = True  # the end of the line tells it
            self.fail(moving, line.why)

    def _part(self, line: Line) -> None:
        """Tell a peer that a line has ended, once nothing of this end moves; forget the line when all is settled."""
        if not line.parted and not any(one.moving.line is line for one in self._writes):
            error = error_of(lambda: line.say(messages.FAIL, messages.end_body(line.theirs, line.why or "")))
            line.parted = error is None or line.doubted  # otherwise it is told over a new connection
            if error is not None:
                self.lost.append((line, str(error)))
        unanswered = not line.theirs and self._now() - line.heard_at > ANSWER_SECONDS  # perhaps it packs nothing
        if (
            line.parted and not line.moving and (line.dead or unanswered)
        ):  # the transport knows it until it has answered
            self.leaving.remove(line)
            line.wire.close()
