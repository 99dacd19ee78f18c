"""A packed transfer, as the process that began it sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvplan.agents.latched_transfer import LatchedTransfer, failure
from kvplan.agents.packed.readiness import Ready
from kvplan.base.process import check_process
from kvplan.base.threads import Call, Latch
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import TransferResult, cancellation, check_layer
from kvplan.plan.plan import Plan

LOOK_SECONDS = 50e-6  # between two polls of a caller that waits, if no thread polls

BEGUN, CANCELLED = "begun", "cancelled"  # the fates of a transfer


class Progress(Protocol):
    """The part of an end that its transfers need.

    Attributes:
        tally: sums over all transfers.
    """

    tally: Tally

    def threaded(self) -> bool:
        """Whether a thread of the owner polls."""

    def poll(self) -> bool:
        """Move everything on that can move now."""

    @property
    def wake(self) -> Callable[[], object]:
        """Lets the thread poll now."""

    def give_up(self, transfer: PackedTransfer, why: str) -> None:
        """Let the thread that polls end a transfer."""


class Wish(NamedTuple):
    """The arguments of a submit.

    Attributes:
        plan: the plan.
        peer: name of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer; ``b""`` for none.
        until: when it is given up, as ``time.monotonic`` counts; None for never, or as ``patience`` says.
        patience: seconds without a chunk that moves, after it could have begun, until it is given up; None for never.
        urgent: whether it has high priority.
    """

    plan: Plan
    peer: str
    reading: bool
    note: bytes = b""
    until: float | None = None
    patience: float | None = None
    urgent: bool = False


class PackedTransfer(LatchedTransfer):
    """A transfer whose bytes travel in a few large chunks. :meth:`kvplan.Peer.submit` returns it.

    A pull has ended when its last chunk is scattered here. A push has ended when the peer has said that its last chunk
    is scattered there. An error says what the destination holds. Once it has ended, nothing of it reads or writes
    memory of this process but the ring.

    Args:
        wish: the arguments of the submit.
        end: the end that moves it.
        layers: the layers of each group, in the order of the groups.
        gates: for each group, what it waits for.

    Attributes:
        plan: the plan that it moves.
        wish, layers, gates: as given.
    """

    def __init__(self, wish: Wish, end: Progress, layers: Sequence[frozenset[int]], gates: Sequence[Ready]) -> None:
        super().__init__(wish.plan)
        self.wish, self.layers, self.gates = wish, layers, list(gates)
        self._end = end
        self._fates: list[str] = []  # the first one decides
        self._began = time.perf_counter()
        self._arrivals = [Latch() for _ in layers]  # of each group; all are set at the end

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
        self._await(arrivals[0] if self.wish.reading and arrivals else self._over, None)
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
        if not self._over.happened:
            self._fates.append(CANCELLED)
            if not self.begun:
                self._end.give_up(self, CANCELLED)
        return bool(self._fates) and not self.begun

    # ---- for the end -------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.happened

    def claim(self) -> bool:
        """Begin to change the destination; return False if it was cancelled before."""
        if not self._fates:
            self._fates.append(BEGUN)
        return self.begun

    @property
    def begun(self) -> bool:
        """Whether the destination may have been changed."""
        return bool(self._fates) and self._fates[0] is BEGUN

    def arrive(self, group: int) -> None:
        """Take it that a group of layers has arrived, and all groups before it."""
        self._arrivals[group].set()

    def finish(self, chunks: int) -> None:
        """End it well."""
        seconds = time.perf_counter() - self._began
        result = TransferResult(self.plan.nbytes, seconds, "packed", chunks, chunks)
        self._finish(result, None)

    def fail(self, what: str, held: str) -> None:
        """End it with an error, that says what the destination holds."""
        if self._fates and not self.begun:
            self._finish(None, TransferError(cancellation(self.plan)))
        else:
            self._finish(None, failure(self.wish.peer, what, held, reading=self.wish.reading))

    def _finish(self, result: TransferResult | None, error: TransferError | None) -> None:
        if self._over.happened:
            return
        self._ends.append((result, error))
        tally = self._end.tally
        if result is not None:
            tally.add(result, "read" if self.wish.reading else "write")
        elif self.begun or not self._fates:
            tally.fail(self.plan, "packed", error)
        else:
            tally.cancel()
        self.gates.clear()
        self._over.set()
        for arrival in self._arrivals:
            arrival.set()

    def _await(self, latch: Latch, timeout: float | None) -> bool:
        if latch.happened:
            return True
        check_process(self._generation)
        if self._end.threaded():
            self._end.wake()
            return latch.wait(timeout)
        until = None if timeout is None else time.monotonic() + timeout
        while not latch.happened:
            if until is not None and time.monotonic() > until:
                return False
            if not self._end.poll():
                time.sleep(LOOK_SECONDS)
        return True
