"""A packed transfer at the end that began it, as its user sees it, and what it waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvplan.agents.latched_transfer import LatchedTransfer, failure
from kvplan.agents.packed.line import ENDED, Line, Moving
from kvplan.agents.packed.messages import id_bytes
from kvplan.agents.packed.ring import Ring
from kvplan.base.process import check_process
from kvplan.base.threads import Call, Latch
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.transfer import Transfer, TransferResult, call_when_done, cancellation, check_after, check_layer
from kvplan.plan.chunks import layer_pieces, outlines_of, sources_of
from kvplan.plan.plan import Plan

GROUPS = 8  # most groups of layers of a transfer by layer; as many as layers if each waits for an object of its own
PATIENCE = 30.0  # seconds without a chunk that moves, after which a transfer fails if nothing else was asked for
LOOK_SECONDS = 50e-6  # between two polls of a caller that waits, if no thread polls
STREAMS = ("cuda_stream", "__cuda_stream__")  # attributes of a stream; one that records no event is the executor's


def question(after: Any) -> Callable[[], object]:
    """Return a function that says, without blocking, whether an object has completed, and raises its error, if any.

    A transfer, an event of torch, and a ``threading.Event`` are asked. A stream of torch is asked through an event that
    is recorded now. Any other object that only blocks gets a thread of its own.

    Raises:
        KVPlanError: it cannot be waited for, or is an event of CUDA that was never recorded: it would count as passed.

    >>> import threading
    >>> event = threading.Event()
    >>> ask = question(event)
    >>> ask(), event.set(), ask()
    (False, None, True)
    """
    check_after(after)
    if getattr(after, "cuda_event", None) == 0:
        raise KVPlanError("after= has an event that was never recorded, and CUDA takes it for passed; record it first")
    if isinstance(after, Transfer):
        return lambda: after.done() and after.synchronize() is None
    event = after.record_event() if hasattr(after, "record_event") else after
    for name in ("done", "query", "is_set"):
        if callable(ask := getattr(event, name, None)):
            return ask  # type: ignore[no-any-return]
    ends: list[BaseException | None] = []
    call_when_done(event, ends.append, set())

    def over() -> bool:
        if ends and ends[0] is not None:
            raise ends[0]
        return bool(ends)

    return over


def gates_of(
    plan: Plan, layers: Sequence[frozenset[int]], after: Any
) -> tuple[list[list[Callable[[], object]]], Any]:  # fmt: skip
    """Return the questions of each group of layers, and the stream that the executor must wait for, or None.

    Args:
        plan: the plan.
        layers: the layers of each group.
        after: one object for all groups, or one for each of some layers.
    """
    if isinstance(after, Mapping):
        if strange := sorted(set(after) - set(plan.layers), key=str):
            raise KVPlanError(f"after has layers {strange}, which {plan!r} does not move")
        asked = [[after[k] for k in sorted(some & after.keys()) if after[k] is not None] for some in layers]
        return [[question(each) for each in some] for some in asked], None
    gates: list[list[Callable[[], object]]] = [[] for _ in layers]
    if any(hasattr(after, name) for name in STREAMS) and not hasattr(after, "record_event"):
        return gates, after
    if after is not None:
        gates[0].append(question(after))
    return gates, None


class PackedTransfer(LatchedTransfer, Moving):
    """A transfer whose bytes travel in a few large chunks. :meth:`kvplan.Peer.submit` returns it.

    A pull has ended when its last chunk is scattered here. A push has ended when the peer has said that its last chunk
    is scattered there. An error says what the destination holds. Once it has ended, nothing of it reads or writes
    memory of this process but the ring.

    Args:
        end: the :class:`.end.End` that moves it.
        peer: name of the peer.
        plan: a plan between layouts of this process and layouts of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer, which gets it after the last byte.
        after: a stream, an event, a Transfer, or None: the transfer begins when this has completed. For a push by
            layer, also a mapping from numbers of layers to such objects.
        until: when it is given up, as the clock counts; None for never, or as ``patience`` says.
        patience: seconds without a chunk that moves, after it could have begun, until it is given up.
        by_layer: whether layers arrive in their order; see :meth:`kvplan.Transfer.wait_layer`.
        priority: ``"high"`` or ``"normal"``; chunks of high priority come first.

    Attributes:
        plan: the plan that it moves.
        peer, until, patience: as given.
        layers: the layers of each group, in the order of the groups.
        opened: number of groups whose gates are open.
        cancelled: whether its user has cancelled it.
        waits: whether it has not begun, since it waits for its ``after=``.
    """

    mine, waits, cancelled = True, False, False

    def __init__(
        self, end: Any, peer: str, plan: Plan, *, reading: bool, note: bytes = b"", after: Any = None,
        until: float | None = None, patience: float | None = PATIENCE, by_layer: bool = False, priority: str = "normal",
    ) -> None:  # fmt: skip
        mapping = isinstance(after, Mapping)
        if mapping and (reading or not by_layer):
            raise KVPlanError("after is a mapping of layers; give it with by_layer=True, and to write")
        outlines = outlines_of(plan)
        groups = (len(plan.layers) if mapping else GROUPS) if by_layer else 1
        LatchedTransfer.__init__(self, plan)
        own = tuple(dict.fromkeys(pair[reading] for pair in plan.layouts))
        Moving.__init__(self, outlines, groups, sends=not reading, urgent=priority == "high", note=note, own=own)
        self.layers = tuple([layers for layers, _ in layer_pieces(outlines, groups)])
        self.peer, self.until, self.patience, self.opened = peer, until, patience, 0
        self._gates, self.left = gates_of(plan, self.layers, after)
        self._end, self._sources = end, sources_of(plan)
        self._began = time.perf_counter()
        self._arrivals = [Latch() for _ in self.layers]  # of each group; all are set at the end

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
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.happened

    @property
    def gated(self) -> bool:
        """Whether it waits for its ``after=``."""
        return self.opened < len(self.layers)

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
        if self.patience is not None and not self.gated and now > self.moved_at + self.patience:
            return f"nothing of it has moved for {self.patience:g} seconds"
        return None

    def begin(self, line: Line, number: int) -> None:
        """See :meth:`Moving.begin`."""
        super().begin(line, number)
        self._missing = [0] * len(self.layers)  # chunks that have not arrived, by group
        for chunk in self.cut.chunks:
            self._missing[chunk.group] += 1

    def ids_there(self, chunk: int) -> bytes:
        """See :meth:`Moving.ids_there`."""
        return id_bytes(self.cut.ids(self._sources, chunk, 1 - self.side))

    def chunk_plan(self, chunk: int, ring: Ring, slot: int) -> Plan:
        """See :meth:`Moving.chunk_plan`."""
        ids = self.cut.ids(self._sources, chunk, self.side)
        return self.cut.plan(chunk, self.side, ids, self.own, ring.layout, ring.address(slot))

    def arrive(self, chunk: int) -> None:
        """See :meth:`Moving.arrive`: a group has arrived when it and all groups before it are scattered."""
        super().arrive(chunk)
        self._missing[self.cut.chunks[chunk].group] -= 1
        for arrival, missing in zip(self._arrivals, self._missing, strict=True):
            if missing:
                break
            arrival.set()

    def end(self, error: str | None) -> None:
        """See :meth:`Moving.end`; the first end counts."""
        if self._over.happened:
            return
        tally, flow = self._end.tally, "write" if self.sends else "read"
        if error is None and self.note and self.line.state >= ENDED:  # the peer hears of it by DONE
            error = f"the note was not sent: {self.line.why}"
        if error is None:
            chunks, seconds = len(self.cut.chunks), time.perf_counter() - self._began
            result = TransferResult(self.plan.nbytes, seconds, "packed", chunks, chunks)
            self._ends.append((result, None))
            tally.add(result, flow)
        elif self.cancelled:
            self._ends.append((None, TransferError(cancellation(self.plan))))
            tally.cancel()
        else:
            failed = failure(self.peer, error, self._holds(), reading=not self.sends)
            self._ends.append((None, failed))
            tally.fail(self.plan, "packed", failed)
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
