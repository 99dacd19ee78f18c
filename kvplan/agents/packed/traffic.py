"""The chunks of all transfers of an end: they are gathered, written and scattered, transfer by transfer, in turns.

A slot of a receiver belongs to one chunk from its GO until the chunk is scattered, or until nothing of the sender moves
any more. The sender gathers a chunk after its GO. Each end tells at most once that a transfer has failed, when nothing
of it moves there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvplan.agents.packed import line as messages
from kvplan.agents.packed.line import ENDED, MOST_PROGRAMS, OPEN, OVER, Inbox, Line, Message, Offer, read_program
from kvplan.agents.packed.packed_transfer import Moving, PackedTransfer
from kvplan.agents.packed.ring import Ring, most_of_a_peer
from kvplan.base.threads import error_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Outline

Clock = Callable[[], float]


class Flight(NamedTuple):
    """A gather, a scatter, or a write.

    Attributes:
        what: the executor's transfer, or the wire's handle.
        moving: whose chunk it is.
        chunk: number of the chunk.
        slot: its slot of this ring.
    """

    what: Any
    moving: Moving
    chunk: int
    slot: int


class Turns:
    """The free slots for one side, and the transfers that want one, in turns, those of high priority first.

    Args:
        free: the free slots.
        side: 0 for slots to gather into, 1 for slots that peers write.
        take: gives a slot to a transfer; returns whether it wants another one, so that it stays in line.
    """

    def __init__(self, free: list[int], side: int, take: Callable[[Moving, int], bool]) -> None:
        self._free, self._side, self._take, self._number = free, side, take, len(free)
        self._queues = deque[Moving](), deque[Moving]()

    def add(self, moving: Moving) -> None:
        """Let a transfer stand in line that did not."""
        self._queues[moving.urgent].append(moving)

    def give_back(self, line: Line, slot: int) -> None:
        """Take a slot that is free again."""
        self._free.append(slot)
        line.taken[self._side] -= 1

    def pass_on(self, *, shared: bool) -> bool:
        """Give free slots to transfers; ``shared`` is whether there is more than one peer. Return whether one was."""
        most, before = most_of_a_peer(self._number, shared=shared), len(self._free)
        for queue in reversed(self._queues):
            passed = 0  # in a row, whose peers have all that they may have
            while self._free and passed < len(queue):
                moving = queue.popleft()
                if moving.why is not None:
                    continue
                taken = moving.line.taken
                if taken[self._side] >= most:
                    passed += 1
                    queue.append(moving)
                    continue
                passed = 0
                taken[self._side] += 1
                if self._take(moving, self._free.pop()):
                    queue.append(moving)
        return len(self._free) < before


class Traffic:
    """The transfers of an end. One thread at a time calls the methods.

    Args:
        offer: returns the memory that peers may name.
        notes: gets the notes of transfers that peers began and that have ended well, each with the peer.
        lose: ends a line, for a reason.
        now: the clock.

    Attributes:
        copies, writes: what is gathered or scattered, and what is written.
    """

    _turns: tuple[Turns, ...] = ()
    _last_number = 0

    def __init__(self, offer: Callable[[], Offer], notes: Inbox, lose: Callable[[Line, str], None], now: Clock) -> None:
        self._offer, self._notes, self._lose, self._now = offer, notes, lose, now
        self.copies: list[Flight] = []
        self.writes: list[Flight] = []

    def open(self, ring: Ring, mover: Executor) -> None:
        """Take this process's slots, and what gathers and scatters; before, no line is open."""
        self._ring, self._mover = ring, mover
        self._turns = Turns(ring.out, 0, self._gather), Turns(ring.into, 1, self._go)

    def step(self, *, shared: bool) -> bool:
        """Do what can be done now; return whether there was something."""
        moved = [self._end_copies(), self._end_writes()]
        return any(moved + [turns.pass_on(shared=shared) for turns in self._turns])

    # ---- messages ----------------------------------------------------------------------------------------------------

    def order(self, line: Line, moving: PackedTransfer) -> None:
        """Tell the peer of a transfer of this end, or that more of its chunks may travel."""
        body = b""
        if not moving.number:
            self._last_number += 1
            moving.begin(line, self._last_number)
            new: dict[int, Any] = {}
            if len(line.numbers) > MOST_PROGRAMS:
                line.numbers.clear()
            outlines = [[line.number(one.program, moving.side, new), *one.skips, one.units] for one in moving.outlines]
            fields = outlines, new, moving.groups, moving.sends, moving.urgent
            body = messages.body_of(fields, moving.note)
        ready = sum([chunk.group < moving.opened for chunk in moving.cut.chunks])
        if body or moving.sends:
            self._say(moving, messages.ORDER, body, chunk=ready)
        if not moving.sends:
            self._receive(moving, ready)

    def hear(self, line: Line, message: Message) -> None:
        """Take a message of an open line; raise an error if it cannot be right."""
        kind, chunk = message.kind, message.chunk
        moving = line.moving.get((not message.mine, message.transfer))
        if moving is not None and kind in (messages.GO, messages.CHUNK) and message.body:
            moving.ids[chunk] = messages.ids_of(message.body)
        if moving is None:
            if kind == messages.ORDER and message.body:
                self._take(line, message)
        elif kind == messages.FAIL:
            moving.answered = True
            self.fail(moving, f"{line.name!r} said: {message.body.decode(errors='replace')}")
        elif moving.why is not None:
            moving.answered |= kind == messages.DONE  # it had ended there before it failed here
            self.settle(moving)
        elif kind == messages.ORDER:
            self._receive(moving, chunk)
        elif kind == messages.DONE:
            self._finish(moving)
        elif kind == messages.GO:
            moving.slots[chunk] = message.slot
            moving.named.append(chunk)
            if len(moving.named) == 1:
                self._turns[0].add(moving)
        elif kind == messages.CHUNK:
            moving.moved_at = self._now()
            self._copy(moving, chunk, moving.slots.pop(chunk))

    def _take(self, line: Line, message: Message) -> None:
        """Begin what a peer has ordered."""
        (numbers, programs, groups, sends, urgent), note = messages.fields_of(message.body)
        line.programs |= {int(number): document for number, document in programs.items()}
        offer, side, outlines, own = self._offer(), int(sends), list[Outline](), dict[KVLayout, None]()
        try:
            for number, src_skip, dst_skip, units in numbers:
                if isinstance(line.programs[number], dict):
                    line.programs[number] = read_program(line.programs[number], offer)
                program, layouts = line.programs[number]
                outlines.append(Outline(program, (src_skip, dst_skip), units))
                layouts = layouts or offer.holding((program.src, program.dst)[side], rows=True)
                own |= dict.fromkeys(layouts)
            if sends and not all(layout.writable for layout in own):
                raise TransferError("the memory that it would write is read-only")
            moving = Moving(outlines, groups, sends=not sends, urgent=urgent, note=note, own=tuple(own), offer=offer)
            moving.begin(line, message.transfer)
        except KVPlanError as error:
            self._tell(line, messages.FAIL, str(error).encode(), transfer=message.transfer)
            return
        line.noted.setdefault((moving.sends, urgent), deque()).append(moving)
        if not moving.sends:
            self._receive(moving, message.chunk)

    def _receive(self, moving: Moving, ready: int) -> None:
        """Let so many chunks of a transfer come, or end it if it has none."""
        waits, moving.ready = moving.next < moving.ready, ready
        if not moving.cut.chunks:
            self._finish(moving)
        elif not waits and moving.next < ready:
            self._turns[1].add(moving)

    def _say(self, moving: Moving, kind: int, body: bytes = b"", *, chunk: int = 0, slot: int = 0) -> None:
        self._tell(moving.line, kind, body, mine=moving.mine, transfer=moving.number, chunk=chunk, slot=slot)

    def _tell(self, line: Line, kind: int, body: bytes, **numbers: Any) -> None:
        """Send a message, unless the line has ended; a line whose message is not sent ends."""
        if line.state == OPEN and (error := error_of(lambda: line.say(kind, body, **numbers))) is not None:
            self._lose(line, str(error))

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def _go(self, moving: Moving, slot: int) -> bool:
        """Name a slot for the next chunk of a transfer that comes here."""
        chunk = moving.next
        moving.slots[chunk] = slot
        moving.next += 1
        self._say(moving, messages.GO, moving.ids_there(chunk), chunk=chunk, slot=slot)
        return moving.next < moving.ready

    def _gather(self, moving: Moving, slot: int) -> bool:
        """Gather a chunk that has a slot at its receiver."""
        self._copy(moving, moving.named.popleft(), slot)
        return bool(moving.named)

    def _copy(self, moving: Moving, chunk: int, slot: int) -> None:
        """Gather a chunk into a slot, or scatter it from there."""
        try:
            moving.begun |= not moving.sends
            plan = moving.chunk_plan(chunk, self._ring, slot)
            copy = self._mover.submit(plan, moving.left, priority="high" if moving.urgent else "normal")
        except Exception as error:  # it is the transfer's
            self._give_back(moving, slot)
            self.fail(moving, f"a chunk could not be copied: {error}")
            return
        moving.copying += 1
        self.copies.append(Flight(copy, moving, chunk, slot))

    def _give_back(self, moving: Moving, slot: int) -> None:
        self._turns[moving.side].give_back(moving.line, slot)

    def _end_copies(self) -> bool:
        ended = [flight for flight in self.copies if flight.what.done()]
        for flight in ended:
            copy, moving, chunk, slot = flight
            self.copies.remove(flight)
            moving.copying -= 1
            moving.moved_at = self._now()
            if (error := error_of(copy.synchronize)) is not None:
                self.fail(moving, f"a chunk could not be copied: {error}")
            if moving.why is None and moving.sends:
                self._write(moving, chunk, slot)
                continue
            self._give_back(moving, slot)
            if moving.why is None and moving.arrive(chunk):
                self._finish(moving)
            self.settle(moving)
        return bool(ended)

    def _write(self, moving: Moving, chunk: int, slot: int) -> None:
        line, nbytes = moving.line, moving.cut.chunks[chunk].nbytes
        try:
            moving.begun = True
            there = line.place.address + moving.slots.pop(chunk) * line.place.slot_nbytes
            body = moving.ids_there(chunk)
            message = Message(messages.CHUNK, line.mine, 0, moving.mine, moving.number, chunk, body=body)
            write = line.wire.write(self._ring.address(slot), there, nbytes, message.note())
        except Exception as error:  # it is the transfer's, and the line says the rest
            self._give_back(moving, slot)
            self.fail(moving, str(error))
            return
        moving.writing += 1
        self.writes.append(Flight(write, moving, chunk, slot))
        line.wire.post(write)

    def _end_writes(self) -> bool:
        before = len(self.writes)
        for flight in list(self.writes):
            write, moving, _, slot = flight
            wire, failed = moving.line.wire, moving.why is not None or moving.line.state >= ENDED
            try:
                over = wire.release(write) if failed else wire.over(write)
            except Exception as error:  # what else of the line moves is not known
                # Also of a transfer that has ended well: its receiver has said so.
                self._lose(moving.line, f"a write failed: {error}")
                over = wire.release(write)
            if over:
                self.writes.remove(flight)
                moving.writing -= 1
                moving.moved_at = self._now()
                self._give_back(moving, slot)
                self.settle(moving)
        return len(self.writes) < before

    # ---- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, moving: Moving) -> None:
        del moving.line.moving[moving.key]
        moving.stopped = True
        if not moving.sends:
            self._say(moving, messages.DONE)
        moving.end(None)
        self._give_notes(moving)

    def _give_notes(self, moving: Moving) -> None:
        """Give the user the notes of a peer's transfers that have ended, in the order of their orders."""
        noted = moving.line.noted.get((moving.sends, moving.urgent))
        while noted and noted[0].stopped:
            first = noted.popleft()
            if first.why is None and first.note:
                self._notes.append((first.line.name, first.note))

    def fail(self, moving: Moving, why: str) -> None:
        """Begin nothing more of a transfer; it ends when nothing of it moves here."""
        if not moving.stopped:
            moving.why, moving.stopped = why, True
            moving.named.clear()
            if moving.number:
                self._give_notes(moving)
        self.settle(moving)

    def settle(self, moving: Moving) -> None:
        """End a failed transfer as far as that is possible now; its slots come back once nothing writes there."""
        if moving.why is None or moving.copying:
            return
        moving.end(moving.why)
        if not moving.number or moving.writing or moving.key not in moving.line.moving:
            return
        if not moving.reported:
            moving.reported = True
            self._say(moving, messages.FAIL, moving.why.encode())  # which may end the line, and so itself
        over, line = moving.answered or moving.line.state == OVER, moving.line
        if over and line.moving.pop(moving.key, None) is not None and not moving.sends:
            for slot in moving.slots.values():
                self._give_back(moving, slot)
