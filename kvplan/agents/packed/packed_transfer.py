"""A packed transfer: at the end that a peer has told of it, and at the end that began it, as its user sees it."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplan.agents.packed.line import ENDED, NOTHING, Line, Offer, id_bytes
from kvplan.agents.packed.ring import Ring
from kvplan.agents.peer_transfer import BOUND, LatchedTransfer, Order, question
from kvplan.base.process import check_process
from kvplan.base.threads import Call, Latch
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.transfer import TransferResult, check_layer
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Chunks, Outline, layer_pieces, outlines_of, sources_of
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.plan import Plan, PlanSource

GROUPS = 8  # most groups of layers of a transfer by layer; as many as layers if each waits for an object of its own
PATIENCE = 30.0  # seconds without a chunk that moves, after which a transfer fails if nothing else was asked for
LOOK_SECONDS = 50e-6  # between two polls of a caller that waits, if no thread polls
STREAMS = ("cuda_stream", "__cuda_stream__")  # attributes of a stream; one that records no event is the executor's


class Moving:
    """A transfer at one of its ends. This one is a peer's; :class:`.packed_transfer.PackedTransfer` is this end's own.

    Args:
        outlines: what both ends know of it.
        groups: most groups of layers.
        sends: whether this end gathers and writes.
        urgent: whether it has high priority.
        note: note for the user of the end that did not begin it.
        own: layouts of this process that hold all units.
        offer: the memory that a peer may name.
        sources: the block ids of both ends, at the end that began it.

    Attributes:
        line, number: the line to the other end, and its number at the end that began it; 0 until both ends know of it.
        side: the side of its plan that is this end's: 0 if it sends.
        cut: its chunks.
        ready: number of chunks that may travel to this end.
        next: number of chunks for which this end, as a receiver, has named a slot.
        slots: slots of the receiver, by chunk; a receiver's until the chunk has come, a sender's until it is written.
        named: chunks to send that have a slot there.
        scattered: number of chunks that have been scattered.
        copying, writing: numbers of gathers and scatters, and of writes, that move here.
        why: why it failed.
        begun: whether the destination may have been changed.
        stopped: whether nothing more of it begins.
        reported, answered: whether this end has told that it failed, and whether the other end has told its end.
        moved_at: when something of it moved.
        ids: this end's block ids of chunks that are not known before, by chunk.
        left: a stream that the executor must wait for, or None.
    """

    mine = False
    left: Any = None
    line: Line
    cut: Chunks

    def __init__(
        self, outlines: Sequence[Outline], groups: int, *, sends: bool, urgent: bool, note: bytes,
        own: tuple[KVLayout, ...], offer: Offer = NOTHING, sources: Sequence[PlanSource] = (),
    ) -> None:  # fmt: skip
        self.outlines, self.groups, self.own, self.offer, self.sources = outlines, groups, own, offer, sources
        self.sends, self.urgent, self.note = sends, urgent, note
        self.side = 0 if sends else 1
        self.number = self.ready = self.next = self.scattered = self.copying = self.writing = 0
        self.slots: dict[int, int] = {}
        self.named: deque[int] = deque()
        self.why: str | None = None
        self.begun = self.stopped = self.reported = self.answered = False
        self.moved_at = 0.0
        self.ids: dict[int, Any] = {}

    def begin(self, line: Line, number: int) -> None:
        """Cut it into chunks, and stand among the transfers of the line, which is open."""
        self.cut = Chunks(self.outlines, line.chunk_nbytes, self.groups)
        self.line, self.number = line, number
        line.moving[self.key] = self

    @property
    def key(self) -> tuple[bool, int]:
        """Its key among the transfers of the line."""
        return self.mine, self.number

    def ids_there(self, chunk: int) -> bytes:
        """Return the other end's block ids of a chunk for a message; none if it has them."""
        return id_bytes(self.cut.ids(self.sources, chunk, 1 - self.side)) if self.mine else b""

    def chunk_plan(self, chunk: int, ring: Ring, slot: int) -> Plan:
        """Plan to gather a chunk into a slot, or to scatter it from there; raise KVPlanError if an id is wrong."""
        ids = self.cut.ids(self.sources, chunk, self.side) if self.mine else self.ids.pop(chunk)
        plan = self.cut.plan(chunk, self.side, ids, self.own, ring.layout, ring.address(slot))
        for span, part in zip(self.cut.chunks[chunk].spans, plan.parts, strict=True):
            if not self.mine and not isinstance(span.piece.program, CopyProgram):
                nbytes = span.piece.program.program.groups[0].nbytes
                self.offer.check_rows(part.units[self.side], nbytes, self.own[0].device)
        return plan

    def arrive(self, chunk: int) -> bool:
        """Take it that a chunk is scattered; return whether it was the last one."""
        del chunk
        self.scattered += 1
        return self.scattered == len(self.cut.chunks)

    def end(self, why: str | None) -> None:
        """Tell the user of the end; nothing of it is copied at this end any more."""


class PackedTransfer(LatchedTransfer, Moving):
    """A transfer whose bytes travel in a few large chunks. :meth:`kvplan.Peer.submit` returns it.

    A pull has ended when its last chunk is scattered here. A push has ended when the peer has said that its last chunk
    is scattered there. An error says what the destination holds. Once it has ended, nothing of it reads or writes
    memory of this process but the ring.

    Args:
        end: the :class:`.end.End` that moves it.
        order: the arguments of the submit. It begins when its ``after=`` has completed: a stream, an event, a Transfer,
            or None; for a push by layer, also a mapping from numbers of layers to such objects.
        patience: seconds without a chunk that moves, after it could have begun, until it is given up, if its user has
            given no deadline.

    Attributes:
        plan: the plan that it moves.
        peer: name of the peer.
        layers: the layers of each group, in the order of the groups.
        opened: number of groups whose gates are open.
        waits: whether it is known to wait for its ``after=``, and has not begun; False until it was asked.
    """

    mine, waits = True, False

    def __init__(self, end: Any, order: Order, patience: float = PATIENCE) -> None:
        plan, mapping, reading = order.plan, isinstance(order.after, Mapping), order.reading
        if mapping and (reading or not order.by_layer):
            raise KVPlanError("after is a mapping of layers; give it with by_layer=True, and to write")
        outlines = outlines_of(plan)
        groups = (len(plan.layers) if mapping else GROUPS) if order.by_layer else 1
        LatchedTransfer.__init__(self, order, end.tally)
        own = tuple(dict.fromkeys(pair[reading] for pair in plan.layouts))
        Moving.__init__(
            self, outlines, groups, sends=not reading, urgent=order.urgent, note=order.note, own=own,
            sources=sources_of(plan),
        )  # fmt: skip
        self.layers = tuple([layers for layers, _ in layer_pieces(outlines, groups)])
        self.peer, self.opened = order.peer, 0
        self._patience = patience if order.deadline is BOUND else math.inf
        self._gates: list[list[Callable[[], object]]] = [[] for _ in self.layers]  # questions, by group
        self._wait_for(order.after)
        self._end, self._began = end, time.perf_counter()
        self._arrivals = [Latch() for _ in self.layers]  # of each group; all are set at the end

    def _wait_for(self, after: Any) -> None:
        """Wait for one object with all groups, or for one of each of some layers."""
        if isinstance(after, Mapping):
            if strange := sorted(set(after) - set(self.plan.layers), key=str):
                raise KVPlanError(f"after has layers {strange}, which {self.plan!r} does not move")
            for gate, layers in zip(self._gates, self.layers, strict=True):
                gate += [question(after[k]) for k in sorted(layers & after.keys()) if after[k] is not None]
        elif any(hasattr(after, name) for name in STREAMS) and not hasattr(after, "record_event"):
            self.left = after
        elif after is not None:
            self._gates[0].append(question(after))

    # ---- the face of a transfer --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        if not self._over.happened and not self._end.threaded():
            check_process(self._generation)
            self._end.poll()
        return self._over.happened

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        if not self._await(self._over, timeout):
            raise self._late(timeout)
        self._raise()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Block until the bytes of a layer have arrived, if it reads; otherwise until it has ended."""
        del stream
        check_layer(self.plan, layer)
        arrivals = [arrival for arrival, some in zip(self._arrivals, self.layers, strict=True) if layer in some]
        self._await(self._over if self.sends or not arrivals else arrivals[0], None)
        if self._over.happened:
            self._raise()

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`kvplan.Transfer.layer_groups`."""
        return tuple([tuple(sorted(some)) for some in self.layers])

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`; without a thread, its callers end it."""
        return self._end.threaded() and super().add_done_callback(function)

    def cancel(self) -> bool:
        """Cancel it if it has not begun: nothing was scattered, or written. Its note is not sent.

        See :meth:`kvplan.Transfer.cancel`.
        """
        check_process(self._generation)  # a thread of the parent may hold the lock
        with self._end.polling:
            if not (self.begun or self._over.happened):
                self.cancelled = True
                self._end.traffic.fail(self, "it was cancelled")
        return self.cancelled

    def _await(self, latch: Latch, timeout: float | None) -> bool:
        if latch.happened:
            return True
        check_process(self._generation)
        if self._end.threaded():
            self._end.wake()
            return latch.wait(timeout)
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not latch.happened and time.monotonic() <= until:
            if not self._end.poll():
                time.sleep(LOOK_SECONDS)
        return latch.happened

    # ---- for the end -------------------------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether some of it waits for its ``after=``."""
        return self.opened < len(self.layers)

    @property
    def lost(self) -> bool:
        """Whether the wire has reported the peer as gone."""
        return bool(self.number) and self.line.wire.gone

    def pass_gates(self, now: float) -> bool:
        """Open the gates that can be opened now, in order; return whether there was one."""
        before = self.opened
        try:
            while self.gated and all(ask() for ask in self._gates[self.opened]):
                self._gates[self.opened] = []  # so that a chain of transfers does not stay alive
                self.opened, self.moved_at = self.opened + 1, now
        except Exception as error:
            raise TransferError(f"its after= failed ({error})") from error
        self.waits = not self.opened
        return self.opened > before

    def late(self, now: float) -> str | None:
        """Return why it is given up now, or None."""
        if self.until is not None and now > self.until:
            return "its deadline has passed"
        if not self.gated and now > self.moved_at + self._patience:
            return f"nothing of it has moved for {self._patience:g} seconds"
        return None

    def begin(self, line: Line, number: int) -> None:
        """See :meth:`Moving.begin`."""
        super().begin(line, number)
        self._missing = Counter(chunk.group for chunk in self.cut.chunks)  # that have not arrived

    def arrive(self, chunk: int) -> bool:
        """See :meth:`Moving.arrive`: a group has arrived when it and all groups before it are scattered."""
        self._missing[self.cut.chunks[chunk].group] -= 1
        for group, arrival in enumerate(self._arrivals):
            if self._missing[group]:
                break
            arrival.set()
        return super().arrive(chunk)

    def end(self, why: str | None) -> None:
        """See :meth:`Moving.end`; the first end counts."""
        if self.ended:
            return
        if why is None and self.note and self.line.state >= ENDED:  # the peer hears of it by DONE
            why = f"the note was not sent: {self.line.why}"
        if why is None:
            chunks, seconds = len(self.cut.chunks), time.perf_counter() - self._began
            self._end_as(TransferResult(self.plan.nbytes, seconds, "packed", chunks, chunks))
        else:
            self._end_as(None, "" if self.cancelled else why, self._holds())
        self._gates, self.left = [[]], None
        self._over.set()
        for arrival in self._arrivals:
            arrival.set()

    def _holds(self) -> str:
        """Return what the destination holds after an error."""
        if not self.begun:
            return "nothing was moved"
        if self.sends:
            return "the peer's memory may hold all of the bytes, or a part of them"
        if self.scattered == (chunks := len(self.cut.chunks)):
            return "all bytes have moved"
        return f"the destination's blocks hold {self.scattered} of {chunks} chunks: do not use them"
