"""A direct transfer by NIXL: a descriptor for each piece, posted, polled, and given up at its deadline."""

from __future__ import annotations

import time
from typing import Any

from kvplan.agents.by_nixl.nixl_end import NixlEnd, in_words
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer, TransferResult
from kvplan.plan.nixl_lists import nixl_lists
from kvplan.plan.plan import Plan

LOOK_SECONDS = 50e-6  # seconds between two polls of a transfer in flight
DONE = "DONE"  # NIXL's state of a transfer that has moved all bytes


class NixlTransfer(Transfer):
    """A direct transfer by NIXL, which moves the bytes even if no thread polls it.

    Only :meth:`done` and calls that wait notice that the bytes have moved, even within the submit, or that it has
    failed; the ``seconds`` of the result end there.

    Args:
        end: this process's end.
        peer: name of the peer.
        order: the arguments of the submit, a :class:`kvplan.agents.peer_transfer.Order`. NIXL sends the note.
        flying: the peer's transfers in flight; it stands there until its end.
    """

    def __init__(self, end: NixlEnd, peer: str, order: Any, flying: set[NixlTransfer]) -> None:
        self.plan: Plan = order.plan
        self._end, self._peer, self._reading, self._flying = end, peer, order.reading, flying
        self._until, self._deadline = order.until, order.deadline
        self._descriptors = 0
        self._handle: Any = None  # NIXL's
        self._told = ""  # DONE, or why it failed, if NIXL has told that already
        self._error: TransferError | None = None
        self._over = False
        flying.add(self)
        self._posted = time.perf_counter()
        try:
            self._told = _ended_as(self._post(order.note))
        except Exception as error:  # noqa: BLE001  # any error of NIXL is the transfer's
            self._told = in_words(error)

    def _post(self, note: bytes) -> str:
        nixl = self._end.nixl
        if not self.plan.nbytes:
            if note:
                nixl.send_notif(self._peer, note)
            return DONE
        src, dst = nixl_lists(self.plan.descriptors(), self.plan.layouts)
        mine, theirs = (dst, src) if self._reading else (src, dst)
        self._descriptors = mine.descriptors
        here, there = nixl.get_xfer_descs(*mine), nixl.get_xfer_descs(*theirs)
        # One handle: lists that NIXL prepares for later transfers would be two more, and take as long to make.
        self._handle = nixl.initialize_xfer("READ" if self._reading else "WRITE", here, there, self._peer, note)
        return str(nixl.transfer(self._handle))

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        with self._end.lock:
            if not self._over:
                self._ask()
                if self._told:
                    self._finish(None if self._told == DONE else self._told)
                elif self._until is not None and time.monotonic() > self._until:
                    self.give_up(f"it did not end within its deadline of {self._deadline} seconds")
            return self._over

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        started = time.monotonic()
        while not self.done():
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._late(timeout)
            time.sleep(LOOK_SECONDS)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def give_up(self, why: str) -> None:
        """End it now as failed, unless NIXL has told its end; the caller holds the lock."""
        if not self._over:
            self._finish(None if self._told == DONE else self._told or why)

    def _ask(self) -> None:
        if self._handle is not None and not self._told:
            try:
                self._told = _ended_as(self._end.nixl.check_xfer_state(self._handle))
            except Exception as error:  # noqa: BLE001  # any error of NIXL is the transfer's
                self._told = in_words(error)

    def _result_now(self) -> TransferResult:
        seconds = time.perf_counter() - self._posted
        return TransferResult(self.plan.nbytes, seconds, "nixl", self._descriptors, 1)

    def _finish(self, problem: str | None) -> None:
        handle, self._handle = self._handle, None
        self._end.release(handle, self.plan)
        if problem is None:
            self._result = self._result_now()
        else:
            self._error = TransferError(f"{problem}; if the peer is gone, meet() its new card and plan again")
        self._over = True
        self._flying.discard(self)


def _ended_as(state: str) -> str:
    """Return DONE, or why a transfer failed, from a state that NIXL reports; "" if it moves still."""
    return "" if state == "PROC" else DONE if state == DONE else f"NIXL reports the state {state}"
