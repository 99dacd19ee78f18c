"""A packed transfer, as the process that began it sees it, and as the one that receives its chunks does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from kvplan.agents.latched_transfer import BEGUN, LatchedTransfer
from kvplan.agents.packed.pack_messages import Credit
from kvplan.agents.packed.pack_rows import Piece, Row, chunks_of_pieces
from kvplan.base.process import check_process
from kvplan.base.threads import Call, Latch
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import Transfer, TransferResult, cancellation, check_layer
from kvplan.plan.plan import Plan

LOOK_SECONDS = 50e-6  # between two polls of a caller that waits, if no thread polls

_CANCELLED = "cancelled"


class Progress(Protocol):
    """The part of an end that its transfers need.

    Attributes:
        tally: sums over all transfers.
    """

    tally: Tally

    @property
    def threaded(self) -> bool:
        """Whether a thread of the owner polls."""

    def poll(self) -> bool:
        """Move everything on that can move now."""

    @property
    def wake(self) -> Callable[[], object]:
        """Lets the thread poll now."""


class Wish(NamedTuple):
    """The arguments of a submit.

    Attributes:
        plan: the plan.
        peer: name of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer; ``b""`` for none.
        attempts: how often a chunk is written, at most.
        deadline: seconds until it is given up, or None.
        urgent: whether it has high priority.
        counted: whether its end is added to sums.
    """

    plan: Plan
    peer: str
    reading: bool
    note: bytes = b""
    attempts: int = 1
    deadline: float | None = None
    urgent: bool = False
    counted: bool = True


class PackedTransfer(LatchedTransfer):
    """A transfer whose bytes travel in a few large chunks. :meth:`kvplan.agents.packed.pack_end.End.submit` returns it.

    A pull has ended when its last chunk is scattered here. A push has ended when the peer has said that its last chunk
    is scattered there. An error says what the destination holds.

    Args:
        wish: the arguments of the submit.
        end: the end that moves it.
        now: clock, in seconds.
        make: makes its pieces, with the most bytes of a chunk.

    Attributes:
        plan: the plan that it moves.
        wish: as given.
        until: when it is given up, by the clock; None for never.
        pieces: its pieces, in the order in which they arrive; empty until the peer's slots are known.
        chunks: number of its chunks; 0 until it begins.
        posted: calls that moved them: writes and messages of this process.
    """

    def __init__(self, wish: Wish, end: Progress, now: Callable[[], float], make: Callable[[int], list[Piece]]) -> None:
        super().__init__(wish.plan)
        self.wish = wish
        self.until = None if wish.deadline is None else now() + wish.deadline
        self.pieces: list[Piece] = []
        self.chunks = self.posted = self._chunk_nbytes = 0
        self._end, self._make = end, make
        self._began = time.perf_counter()
        self._step = Latch()  # set when a piece has arrived, and replaced
        self._left: list[int] = []  # of each piece, chunks that have not arrived
        self.left: Callable[[PackedTransfer], object] | None = None  # tells the lane that it has ended

    # ---- the face of a transfer --------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        self._look()
        return self._over.happened

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        if not self._await(lambda: self._over.happened, timeout):
            raise self._late(timeout)
        self._raise()

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """Block until the bytes of a layer have arrived, if it reads; otherwise until it has ended."""
        del stream
        check_layer(self.plan, layer)
        if self.wish.reading:
            self._await(lambda: self._over.happened or self._arrived(layer), None)
            if not self._over.happened:
                return
        else:
            self._await(lambda: self._over.happened, None)
        self._raise()

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`kvplan.Transfer.layer_groups`."""
        return tuple(piece.layers for piece in self.pieces) or (self.plan.layers,)

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`; without a thread, its callers end it."""
        return self._end.threaded and super().add_done_callback(function)

    def cancel(self) -> bool:
        """Cancel it if it has not begun: nothing was scattered, or written. Its note is not sent.

        See :meth:`kvplan.Transfer.cancel`.
        """
        if not self._over.happened:
            self._fates.append(_CANCELLED)
            if not self.begun:
                self._finish(None, TransferError(cancellation(self.plan)))
                self._end.wake()
        return bool(self._fates) and not self.begun

    # ---- for the lane ------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.happened

    def make(self, chunk_nbytes: int) -> None:
        """Make its pieces, with at most this number of bytes a chunk, if they are not made or have larger chunks."""
        if not 0 < self._chunk_nbytes <= chunk_nbytes:
            self.pieces, self._chunk_nbytes = self._make(chunk_nbytes), chunk_nbytes

    def count(self, rows: Sequence[Row]) -> None:
        """Take its chunks."""
        self.chunks, self._left = len(rows), chunks_of_pieces(rows, len(self.pieces))

    def claim(self) -> bool:
        """Begin to change the destination; return False if it was cancelled before."""
        if not self._fates:
            self._fates.append(BEGUN)
        if not self.begun:  # its cancel may have been interrupted
            self._finish(None, TransferError(cancellation(self.plan)))
        return self.begun

    @property
    def begun(self) -> bool:
        """Whether the destination may have been changed."""
        return bool(self._fates) and self._fates[0] is BEGUN

    def arrive(self, piece: int) -> None:
        """Count a chunk of a piece as arrived."""
        self._left[piece] -= 1
        if not self._left[piece]:
            self._next_step()

    def finish(self) -> None:
        """End it well."""
        seconds = time.perf_counter() - self._began
        self._finish(TransferResult(self.plan.nbytes, seconds, "packed", self.chunks, self.posted), None)

    def fail(self, what: str, held: str) -> None:
        """End it with an error, that says what the destination holds."""
        verb = "reading from" if self.wish.reading else "writing to"
        self._finish(None, TransferError(f"{verb} {self.wish.peer!r} failed: {what}; {held}"))

    def _finish(self, result: TransferResult | None, error: TransferError | None) -> None:
        self._ends.append((result, error))
        if self._over.happened:
            return
        result, error = self._ends[0]  # an interrupt may have come after the first end
        if len(self._ends) == 1:
            self._count(result, error)
        self._over.set()
        self._next_step()
        self.pieces = [piece._replace(packing=None) for piece in self.pieces]
        self._make = _ended
        if self.left is not None:
            self.left(self)

    def _next_step(self) -> None:
        step, self._step = self._step, Latch()
        step.set()

    def _count(self, result: TransferResult | None, error: TransferError | None) -> None:
        if not self.wish.counted:
            return
        tally = self._end.tally
        if result is not None:
            tally.add(result, "read" if self.wish.reading else "write")
        elif self.begun or not self._fates:
            tally.fail(self.plan, "packed", error)
        else:
            tally.cancel()

    # ---- waits -------------------------------------------------------------------------------------------------------

    def _arrived(self, layer: int) -> bool:
        if not self._left:
            return False
        for piece, left in zip(self.pieces, self._left, strict=True):
            if left:
                return False
            if layer in piece.layers:
                return True
        return False

    def _await(self, over: Callable[[], bool], timeout: float | None) -> bool:
        if over():
            return True
        check_process(self._generation)
        if self._end.threaded:
            self._end.wake()
        until = None if timeout is None else time.monotonic() + timeout
        while self._end.threaded:
            step = self._step
            if over() or not step.wait(None if until is None else until - time.monotonic()):
                return over()
        while not over():
            if until is not None and time.monotonic() > until:
                return False
            if not self._end.poll():
                time.sleep(LOOK_SECONDS)
        return True

    def _look(self) -> None:
        if not self._over.happened and not self._end.threaded:
            check_process(self._generation)
            self._end.poll()


def _ended(chunk_nbytes: int) -> list[Piece]:
    del chunk_nbytes
    raise TransferError("the transfer has ended")


class Inbound:
    """The chunks of one transfer that this process receives.

    Args:
        whose: whether this process has asked for them, or the peer pushes them.
        number: number of the transfer.
        rows: its chunks.
        urgent: whether it has high priority.
        own: the transfer, if this process has asked.
        note: the peer's note for the user.
        whole: whether these are all of its chunks; more come by :meth:`Receiver.extend` otherwise.

    Attributes:
        come: number of chunks that have come.
        scattered: number of chunks that are scattered.
        running: number of chunks that are being scattered.
        over: whether it has ended, so that no further chunk is scattered.
        left: by piece, number of chunks that have not come; empty for a peer's push, whose pieces nobody waits for.
    """

    def __init__(
        self, whose: int, number: int, rows: list[Row], *, urgent: bool,
        own: PackedTransfer | None = None, note: bytes = b"", whole: bool = True,
    ) -> None:  # fmt: skip
        self.whose, self.number, self.rows, self.urgent, self.own, self.note = whose, number, rows, urgent, own, note
        self.come = self.scattered = self.running = 0
        self.over = False
        self.seen = bytearray(len(rows))
        self.whole = whole
        self.left = [] if own is None else chunks_of_pieces(rows, rows[-1].piece + 1 if rows else 0)

    @property
    def rest(self) -> float:
        """Number of chunks that have not come; infinite while more may be added."""
        return len(self.rows) - self.come if self.whole else inf

    def to_come(self, piece: int) -> float:
        """Return how many chunks of a piece that is waited for have not come."""
        return self.left[piece] if self.left else self.rest

    def held(self) -> str:
        """Return what the destination holds after an error."""
        if not self.scattered and not self.running:
            return "nothing was moved"
        still = ", and may still change" if self.running else ""
        return f"the destination's blocks hold {self.scattered} of {len(self.rows)} chunks{still}: do not use them"


class Scatter(NamedTuple):
    """A chunk that is being scattered; ``moved`` is None if it could not be submitted."""

    inbound: Inbound
    row: Row
    credit: Credit
    moved: Transfer | None
    epoch: int
