"""A lane: transfers of one direction, which end in the order of their submits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from kvplan.base.latch import Wake
from kvplan.base.threads import Standby, Worker, held_here
from kvplan.errors import TransferError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.lanes.issuing import Issuing
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.reaper import Alarm
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.waits import Awaited, Wait, recorded, wait_for_issue
from kvplan.execute.transfer import wait_on_cpu


class Lane(Issuing):
    """The streams of one direction, and the transfers on them.

    Args:
        resources: resources of the executor.
        name: name of the lane, and part of its thread's name.
        alarm: wakes the reaper, which watches transfers in flight.
        reap: takes back the memory and events of ended transfers, in all lanes.
        urgent: whether the lane is for urgent transfers.

    Attributes:
        issuing: the transfer that a submit is issuing now.
        pending: transfers that the lane's thread has not issued yet, in the order of their submits.
        waiting: the transfer whose ``after=`` the lane's thread now waits for, on the CPU.
        lock: held by a thread that submits.
        owned: returns whether the calling thread holds the lock.
        thread: the thread that issues pending transfers, those that wait on the CPU for their ``after=``.
        standby: a thread that waits in its place for objects that CUDA does not know.
    """

    def __init__(self, resources: Resources, name: str, alarm: Alarm, reap: Callable[[], int], *, urgent: bool) -> None:
        super().__init__(resources, name, alarm, reap, urgent=urgent)
        self.issuing: DeviceTransfer | None = None
        self.pending: deque[DeviceTransfer] = deque()
        self._stopped = False
        self.waiting: DeviceTransfer | None = None
        self.lock = threading.RLock()
        self.owned = held_here(self.lock)
        self.wake: Wake = SimpleQueue()
        self.stir: Callable[[], object] = partial(self.wake.put, None)
        self._issuer_stopped = False
        self.thread = Worker(f"kvplan-{name}", self._serve, "no thread issues transfers", resources.inside)
        self.standby = Standby(resources.inside)

    # Transfers of the lane.

    @property
    def busy(self) -> bool:
        """Return whether the lane's thread has transfers to issue, so that the next transfer must queue behind them."""
        return bool(self.pending)

    @property
    def queued(self) -> int:
        """Return the number of transfers that the lane's thread has not issued."""
        return sum(not one._over for one in self.pending.copy())

    def entries(self) -> dict[DeviceTransfer, None]:
        """Return all transfers that may not have ended: pending, being issued, and in flight, in this order."""
        some = dict.fromkeys(self.pending.copy())
        if self.issuing is not None:
            some[self.issuing] = None
        return some | dict.fromkeys(self.flying.copy())

    def issue_later(
        self, transfer: DeviceTransfer, path: Path, after: Any, waits: list[Wait] | None, *, blocking: bool = False
    ) -> None:
        """Queue a transfer for the lane's own thread, which holds no lock while it issues.

        While this thread has work, every submit queues its transfer here.

        Args:
            transfer, path, blocking: as in :meth:`issue`.
            after: the object that the CPU waits for if ``waits`` is None.
            waits: as in :meth:`issue`; None if only the CPU can wait.
        """
        # The transfer waits for an event as recorded now: its owner may record it again before the transfer is issued.
        if waits is not None and transfer.kept is not None:
            waits = [recorded(one, transfer, self.gate) if isinstance(one, int) else one for one in waits]
        earlier = [wait for wait in waits or () if not isinstance(wait, int)]
        device = self._device

        def job() -> None:
            try:
                if not self._take(transfer, after if waits is None else None, earlier):
                    transfer.give_back()
                    return
                with device.current():
                    self.issue(transfer, path, waits or [], blocking=blocking)
            except BaseException as error:  # noqa: BLE001  # the transfer's error; the next transfer must still run
                transfer.abandon(error)

        if not self.thread.started:
            try:
                self.thread.start()
            except TransferError as error:
                why = error.__cause__
                raise TransferError(f"no thread issues a transfer of {transfer.plan.nbytes} bytes: {why}") from why
        transfer.defer(job)
        self.pending.append(transfer)
        self.stir()

    def _take(self, transfer: DeviceTransfer, after: Any, earlier: list[Awaited]) -> bool:
        """Wait on the CPU, in the lane's thread, for ``after`` and for the issue of the transfers ``earlier``.

        Returns:
            Whether the transfer can be issued; False if it was cancelled meanwhile.

        Raises:
            BaseException: ``after`` raised it.
        """
        self.waiting = transfer
        problem: BaseException | None = None
        try:
            problem = wait_on_cpu(after, self.standby, self.wake, lambda: transfer._over)
            for one in earlier if problem is None else ():
                wait_for_issue(one, transfer, self.wake)
        except BaseException as error:  # noqa: BLE001  # ignored if the transfer was cancelled
            problem = error
        self.waiting = None
        if not transfer.take_up():
            return False
        if problem is not None:
            raise problem
        return True

    # The lane's thread.

    def stop(self) -> None:
        """End the thread after it has issued all pending transfers. No submit adds one any more."""
        self._stopped = True
        self.stir()

    def _serve(self) -> None:
        while (transfer := self._next()) is not None:
            transfer.issue_now()
            self.pending.popleft()
            transfer.is_issued()
            del transfer
        self.standby.dismiss()

    def joined(self) -> bool:
        """Return whether both threads have ended, after :meth:`stop`."""
        if not self.thread.join(0):
            return False
        issuer = self.issuer
        if issuer is None:
            return True
        if not self._issuer_stopped:
            self._issuer_stopped = True
            issuer.stop()
        return issuer.worker.join(0)

    def _next(self) -> DeviceTransfer | None:
        """Wait for the transfer to issue next, and return it; None if the lane is stopped and none is pending."""
        while True:
            for _ in range(self.wake.qsize()):  # drop old wakes before the check of pending transfers
                self.wake.get()
            if self.pending:
                return self.pending[0]
            if self._stopped:
                return None
            self.wake.get()
