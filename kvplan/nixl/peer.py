"""A transfer that NIXL makes: begun, asked after, tried again, given up."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.errors import TransferError
from kvplan.execute.transfer import StreamlessTransfer, TransferResult
from kvplan.plan.nixl_lists import nixl_lists
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.nixl.agent import NixlPeer

LOOK_SECONDS = 50e-6  # between two looks at what is in flight
PAUSE_SECONDS = 0.05  # before a second attempt; twice as long before each further one

log = logging.getLogger("kvplan.nixl")


class NixlTransfer(StreamlessTransfer):
    """A transfer between two processes. Made by :meth:`kvplan.nixl.agent.NixlPeer.submit`.

    NIXL moves the bytes whether anybody asks or not; that they have moved, and that an attempt has failed, is seen by
    :meth:`done` and by whatever waits; a result's ``seconds`` end there. Bytes that an attempt wrote before it failed
    stay written.

    Attributes:
        attempt: which one this is, from 1.
    """

    def __init__(
        self, peer: NixlPeer, plan: Plan, *, reading: bool, note: bytes, attempts: int, deadline: float | None
    ) -> None:
        self.plan = plan
        self.attempt = 0
        self._peer = peer
        self._agent = peer.agent
        self._reading = reading
        self._note = note
        self._attempts = attempts
        self._begun = time.monotonic()
        self._until = None if deadline is None else self._begun + deadline
        self._deadline = deadline
        self._posted = 0.0
        self._again_at: float | None = None  # of a pause between two attempts: its end
        self._joined = 0
        self._descriptors = 0
        self._held: list[Any] = []  # NIXL's handles, the transfer's first
        self._over = False
        self._result: TransferResult | None = None
        self._error: TransferError | None = None

    # The contract.

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        with self._agent.lock:
            if not self._over:
                self._look()
            return self._over

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        started = time.monotonic()
        while not self.done():
            if timeout is not None and time.monotonic() - started > timeout:
                raise TransferError(f"transfer of {self.plan.nbytes} bytes has not finished within {timeout} seconds")
            time.sleep(LOOK_SECONDS)
        if self._error is not None:
            raise self._error.with_traceback(None)

    # What agent and peer do with it; the agent's lock is held.

    def begin(self) -> None:
        """Try, for the first time or once more.

        Raises:
            PathError: the plan takes memory of two kinds on one side.
        """
        src, dst = nixl_lists(self.plan.descriptors(), self.plan.layouts) if self.plan.nbytes else (None, None)
        self.attempt += 1
        self._again_at = None
        self._joined = self._peer.joined
        if self not in self._peer.flying:
            self._peer.flying.append(self)
        nixl = self._agent.nixl
        self._posted = time.perf_counter()
        try:
            if src is None or dst is None:
                if self._note:
                    nixl.send_notif(self._peer.name, self._note)
                self._finish()
                return
            mine, theirs = (dst, src) if self._reading else (src, dst)
            self._descriptors = mine.descriptors
            sides = []
            for whose, side in (("NIXL_INIT_AGENT", mine), (self._peer.name, theirs)):
                sides.append(nixl.prep_xfer_dlist(whose, *side))
                self._held.append(sides[-1])
            every = np.arange(self._descriptors, dtype=np.int32)
            operation = "READ" if self._reading else "WRITE"
            self._held.insert(0, nixl.make_prepped_xfer(operation, sides[0], every, sides[1], every, self._note))
            state = nixl.transfer(self._held[0])
        except Exception as error:  # noqa: BLE001  # whatever NIXL says is the transfer's
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._take(state)

    def moves(self) -> bool:
        """Whether NIXL has it, and says at this moment that it goes on."""
        if self._held:
            self._look()
        return bool(self._held)

    def give_up(self, why: str) -> None:
        """End it now, badly."""
        if not self._over:
            self._release()
            self._end(self._problem(why))

    def _look(self) -> None:
        now = time.monotonic()
        if self._until is not None and now > self._until:
            self.give_up(f"it has not ended within its deadline of {self._deadline} seconds")
        elif self._again_at is not None:
            if now >= self._again_at:
                self._try_again()
        else:
            try:
                state = self._agent.nixl.check_xfer_state(self._held[0])
            except Exception as error:  # noqa: BLE001
                self._failed(f"{type(error).__name__}: {error}")
            else:
                self._take(state)

    def _take(self, state: str) -> None:
        if state == "DONE":
            self._release()
            self._finish()
        elif state != "PROC":
            self._failed(f"NIXL says {state}")

    def _finish(self) -> None:
        seconds = time.perf_counter() - self._posted
        self._result = TransferResult(self.plan.nbytes, seconds, "nixl", self._descriptors, 1)
        self._agent.tally.add(self._result, "read" if self._reading else "write")
        self._end(None)

    def _failed(self, what: str) -> None:
        self._release()
        if self.attempt >= self._attempts:
            self._end(self._problem(what))
            return
        pause = PAUSE_SECONDS * 2 ** (self.attempt - 1)
        self._again_at = time.monotonic() + pause
        log.warning(
            "transfer of %d bytes with %s failed (%s); attempt %d of %d in %.2f s",
            self.plan.nbytes, self._peer.name, what, self.attempt + 1, self._attempts, pause,
            extra={"kvplan_peer": self._peer.name, "kvplan_nbytes": self.plan.nbytes, "kvplan_attempt": self.attempt},
        )  # fmt: skip

    def _try_again(self) -> None:
        try:
            self._peer.rejoin(self._joined)
        except TransferError as error:
            self.attempt += 1
            self._failed(str(error))
        else:
            self.begin()

    def _problem(self, what: str) -> TransferError:
        verb = "reading from" if self._reading else "writing to"
        tries = f" in {self.attempt} attempts" if self.attempt > 1 else ""
        return TransferError(
            f"{verb} {self._peer.name!r} failed{tries}: {what}; its {self.plan.nbytes} bytes may be there in part. "
            f"If the peer is gone, meet() its new card and plan again"
        )

    def _end(self, error: TransferError | None) -> None:
        self._error = error
        self._over = True
        if self in self._peer.flying:
            self._peer.flying.remove(self)
        if error is not None:
            self._agent.tally.fail(self.plan, "nixl", error)

    def _release(self) -> None:
        """Give NIXL's handles back."""
        held, self._held = self._held, []
        self._agent.release([(handle, self.plan) for handle in held])

    def __repr__(self) -> str:
        state = "in flight" if not self._over else "failed" if self._error else "done"
        return f"Transfer({self.plan!r}, {state})"
