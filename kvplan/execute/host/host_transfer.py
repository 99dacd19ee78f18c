"""A transfer of the host path, and its state. No other file assigns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvplan.base.latch import Wake, sleep, wake_all
from kvplan.base.process import check_process
from kvplan.errors import TransferError
from kvplan.execute.transfer import StreamlessTransfer, TransferResult, cancellation
from kvplan.plan.plan import Plan

BEGUN = object()  # an entry of ``fates``: the runner has begun the transfer


class HostTransfer(StreamlessTransfer):
    """A transfer of the host path.

    Args:
        plan: the plan to move.
        after: the ``after`` of the submit.
        urgent: whether it has high priority.
        cancel: a function that cancels the transfer if it has not begun, and returns whether it will not run.
        generation: number of the process that it belongs to; see :func:`kvplan.base.process.generation`.

    Attributes:
        after: the ``after`` of the submit; None when the transfer has begun.
        urgent: whether it has high priority.
        fates: :data:`BEGUN`, or an object of each caller that cancels the transfer; the first entry decides.
        sleepers: queues of the threads that wait for its end.
    """

    _over = False
    _error: BaseException | None = None

    def __init__(
        self, plan: Plan, after: Any, urgent: bool, cancel: Callable[[HostTransfer], bool], generation: int
    ) -> None:
        self.plan = plan
        self.after = after
        self.urgent = urgent
        self._cancel = cancel
        self._generation = generation
        self.fates: list[object] = []
        self.sleepers: list[Wake] = []

    @property
    def cancelled(self) -> bool:
        """Return whether it was cancelled before it began."""
        fates = self.fates
        return bool(fates) and fates[0] is not BEGUN

    def done(self) -> bool:
        """Return whether it has finished; see :meth:`Transfer.done`."""
        return self._over or self.cancelled

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has finished; see :meth:`Transfer.synchronize`."""
        if not self._over:
            check_process(self._generation)  # in a forked child, no thread would end it
            if not sleep(self.done, self.sleepers, timeout):
                raise self._late(timeout)
        if self.cancelled:
            raise TransferError(cancellation(self.plan))
        if self._error is not None:
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error

    def cancel(self) -> bool:
        """Cancel it if it has not begun; see :meth:`Transfer.cancel`."""
        return self._cancel(self)

    def forget_after(self) -> None:
        """Let go of what it waited for."""
        self.after = None

    def begin(self) -> bool:
        """Begin it, in its runner's thread; return False if it was cancelled before."""
        self.fates.append(BEGUN)
        return self.fates[0] is BEGUN

    def finish(self, result: TransferResult | None, error: BaseException | None = None) -> None:
        """End it with a result or an error, in its runner's thread."""
        self._result, self._error = result, error
        self._over = True
        wake_all(self.sleepers)

    def __repr__(self) -> str:
        ended = "cancelled" if self.cancelled else "failed" if self._error else "done"
        return f"Transfer({self.plan!r}, {ended if self.done() else 'in flight'})"
