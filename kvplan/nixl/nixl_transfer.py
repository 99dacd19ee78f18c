"""A transfer by NIXL, which is posted, polled, tried again after a failure, and given up at its deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer, TransferResult
from kvplan.nixl.nixl_connection import Connection, in_words
from kvplan.plan.nixl_lists import nixl_lists
from kvplan.plan.plan import Plan

LOOK_SECONDS = 50e-6  # seconds between two polls of a transfer in flight
TOGETHER = 64  # transfers that are ended in one turn of the lock; half a millisecond
READ, WRITE = "READ", "WRITE"  # NIXL's operations
DONE = "DONE"  # NIXL's state of a transfer that has moved all bytes
PAUSE_SECONDS = 0.05  # seconds before a second attempt; the pause doubles before each further attempt

log = logging.getLogger("kvplan.nixl")


class NixlTransfer(Transfer):
    """A transfer between two processes. :meth:`kvplan.nixl.NixlPeer.submit` returns it.

    NIXL moves the bytes even if no thread polls it. But only :meth:`done` and calls that wait notice that the bytes
    have moved, even within the submit, or that an attempt has failed; the ``seconds`` of the result end there. Bytes
    that a failed attempt wrote stay.

    Attributes:
        attempt: number of the current attempt, from 1.
    """

    def __init__(
        self, connection: Connection, plan: Plan, operation: str, *, note: bytes, attempts: int, deadline: float | None
    ) -> None:
        self.plan = plan
        self.attempt = 0
        self._connection = connection
        self._end = connection.end
        self._operation = operation
        self._note = note
        self._attempts = attempts
        self._begun = time.monotonic()
        self._until = None if deadline is None else self._begun + deadline
        self._deadline = deadline
        self._posted = 0.0
        self._again_at: float | None = None  # end of the pause between two attempts
        self._joined = 0
        self._descriptors = 0
        self._handle: Any = None  # NIXL's, while it has an attempt
        self._over = False
        self._told = ""  # DONE, or why the attempt failed, if NIXL has told that already
        self._result: TransferResult | None = None
        self._error: TransferError | None = None

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        with self._end.lock:
            if not self._over:
                self._look()
            return self._over

    @property
    def lock(self) -> Any:
        """The lock that every call of NIXL takes."""
        return self._end.lock

    def moved(self) -> TransferResult | None:
        """Return the result if all bytes have moved; None if that is not known, or another thread calls NIXL.

        It only asks. NIXL's handle stays until :meth:`done`, or the peer's end: NIXL would release it twice
        after an interrupt of its ``release``. So a caller that may be interrupted leaves that to a thread of its own.
        """
        if not self._told:
            lock, nixl = self._end.lock, self._end.nixl
            for _ in filter(None, map(lock.acquire, (False,))):  # no interrupt comes between the lock and the try
                try:
                    if self._handle is not None and not self._told:
                        self._told = _ended_as(nixl.check_xfer_state(self._handle))
                except Exception as error:  # noqa: BLE001  # any error of NIXL is the transfer's
                    self._told = in_words(error)
                finally:
                    lock.release()
        return self._result_now() if self._told == DONE else None

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        started = time.monotonic()
        while not self.done():
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._late(timeout)
            time.sleep(LOOK_SECONDS)
        if self._error is not None:
            raise self._error.with_traceback(None)

    # The peer and its connection call these methods, and hold the lock of this process's end.

    def begin(self) -> None:
        """Post the transfer, for the first time or again."""
        src, dst = nixl_lists(self.plan.descriptors(), self.plan.layouts) if self.plan.nbytes else (None, None)
        self.attempt += 1
        self._again_at = None
        self._joined = self._connection.joined
        if self not in self._connection.flying:
            self._connection.flying.append(self)
        nixl = self._end.nixl
        self._posted = time.perf_counter()
        try:
            if src is None or dst is None:
                if self._note:
                    nixl.send_notif(self._connection.name, self._note)
                self._told = DONE
                return
            mine, theirs = (dst, src) if self._operation == READ else (src, dst)
            self._descriptors = mine.descriptors
            here, there = nixl.get_xfer_descs(*mine), nixl.get_xfer_descs(*theirs)
            # One handle: lists that NIXL prepares for later transfers would be two more, and take as long to make.
            self._handle = nixl.initialize_xfer(self._operation, here, there, self._connection.name, self._note)
            state = nixl.transfer(self._handle)
        except Exception as error:  # noqa: BLE001  # any error of NIXL is the transfer's
            self._told = in_words(error)
        else:
            self._told = _ended_as(state)  # a submit releases nothing; see moved()

    def moves(self) -> bool:
        """Return whether NIXL has the transfer and reports that it is in progress."""
        if self._handle is not None:
            self._look()
        return self._handle is not None

    def give_up(self, why: str) -> None:
        """End the transfer now as failed."""
        if self._told and not self._over:
            self._look()
        if not self._over:
            self._release()
            self._ended(self._problem(why))

    def _look(self) -> None:
        if not self._told:
            self._ask()
        if self._told == DONE:
            self._release()
            self._finish()
        elif self._told:
            self._failed(self._told)

    def _ask(self) -> None:
        """Ask NIXL, and try again or give up if it is time."""
        now = time.monotonic()
        if self._until is not None and now > self._until:
            self.give_up(f"it did not end within its deadline of {self._deadline} seconds")
        elif self._again_at is not None:
            if now >= self._again_at:
                self._try_again()
        else:
            try:
                self._told = _ended_as(self._end.nixl.check_xfer_state(self._handle))
            except Exception as error:  # noqa: BLE001  # any error of NIXL is the transfer's
                self._told = in_words(error)

    def _result_now(self) -> TransferResult:
        seconds = time.perf_counter() - self._posted
        return TransferResult(self.plan.nbytes, seconds, "nixl", self._descriptors, 1)

    def _finish(self) -> None:
        self._result = self._result_now()
        self._end.tally.add(self._result, self._operation.lower())
        self._ended(None)

    def _failed(self, what: str) -> None:
        self._told = ""
        self._release()
        if self.attempt >= self._attempts:
            self._ended(self._problem(what))
            return
        pause = PAUSE_SECONDS * 2 ** (self.attempt - 1)
        self._again_at = time.monotonic() + pause
        log.warning(
            "transfer of %d bytes with %s failed (%s); attempt %d of %d in %.2f s",
            self.plan.nbytes, self._connection.name, what, self.attempt + 1, self._attempts, pause,
            extra={
                "kvplan_peer": self._connection.name, "kvplan_nbytes": self.plan.nbytes, "kvplan_attempt": self.attempt,
            },
        )  # fmt: skip

    def _try_again(self) -> None:
        try:
            self._connection.rejoin(self._joined)
        except TransferError as error:
            self.attempt += 1
            self._failed(str(error))
        else:
            self.begin()

    def _problem(self, what: str) -> TransferError:
        verb = "reading from" if self._operation == READ else "writing to"
        tries = f" in {self.attempt} attempts" if self.attempt > 1 else ""
        return TransferError(
            f"{verb} {self._connection.name!r} failed{tries}: {what}; some of its {self.plan.nbytes} bytes may have "
            "arrived. If the peer is gone, meet() its new card and plan again"
        )

    def _ended(self, error: TransferError | None) -> None:
        self._error = error
        self._over = True
        if self in self._connection.flying:
            self._connection.flying.remove(self)
        if error is not None:
            self._end.tally.fail(self.plan, "nixl", error)

    def _release(self) -> None:
        """Release NIXL's handle."""
        handle, self._handle = self._handle, None
        self._end.release([] if handle is None else [(handle, self.plan)])

    def __repr__(self) -> str:
        state = "in flight" if not self._over else "failed" if self._error else "done"
        return f"Transfer({self.plan!r}, {state})"


def end_all(transfers: Sequence[Any]) -> None:
    """End transfers of one process that have moved, which releases NIXL's handles.

    Other threads that call NIXL wait for its lock once for many of them.
    """
    for first in range(0, len(transfers), TOGETHER):
        with transfers[0].lock:
            for one in transfers[first : first + TOGETHER]:
                one.done()


def _ended_as(state: str) -> str:
    """Return DONE, or why an attempt failed, from a state that NIXL reports; "" if it moves still."""
    return "" if state == "PROC" else DONE if state == DONE else f"NIXL reports the state {state}"
