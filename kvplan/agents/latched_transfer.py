"""A transfer between processes, which several threads may end: the base of direct and of packed ones."""

from __future__ import annotations

from kvplan.base.process import generation
from kvplan.base.threads import Call, Latch
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer, TransferResult
from kvplan.plan.plan import Plan


class LatchedTransfer(Transfer):
    """A transfer whose first end counts, whichever thread gave it; then a latch wakes those that wait.

    Args:
        plan: the plan that it moves.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._generation = generation()
        self._over = Latch()
        self._ends: list[tuple[TransferResult | None, TransferError | None]] = []  # the first one counts

    def result(self) -> TransferResult:
        """Wait for its end and return its result; see :meth:`kvplan.Transfer.result`."""
        self.synchronize()
        result = self._ends[0][0]
        if result is None:
            raise TransferError("the transfer ended without a result")
        return result

    def add_done_callback(self, function: Call) -> bool:
        """See :meth:`kvplan.Transfer.add_done_callback`."""
        self._over.call(function)
        return True

    def _raise(self) -> None:
        """Raise the error of a transfer that has ended, if there is one."""
        error = self._ends[0][1]
        if error is not None:
            raise error.with_traceback(None)

    def __repr__(self) -> str:
        state = "in flight" if not self._over.happened else "failed" if self._ends[0][1] else "done"
        return f"{type(self).__name__}({self.plan!r}, {state})"


def failure(peer: str, what: str, held: str, *, reading: bool) -> TransferError:
    """Return the error of a transfer with a peer: what failed, and what the destination holds."""
    return TransferError(f"{'reading from' if reading else 'writing to'} {peer!r} failed: {what}; {held}")
