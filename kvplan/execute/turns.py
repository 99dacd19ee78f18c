"""Whose turn it is: what urgent transfers and others wait for, room in the driver's queue, cancelling."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kvplan.conflicts import conflict
from kvplan.errors import TransferError
from kvplan.execute.after import Wait, recorded
from kvplan.execute.forks import generation
from kvplan.execute.transfer import cancellation, wait_for
from kvplan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.flight import DeviceTransfer
    from kvplan.execute.lane import Lane
    from kvplan.execute.runtime import Path, Runtime

# Calls in flight on a lane from which on its own thread issues: the driver's queue has an end, of about a thousand, and
# a call that finds it full waits for the GPU.
MANY_CALLS = 256


def before(runtime: Runtime, plan: Plan, other: Lane) -> list[DeviceTransfer]:
    """What has not ended on the direction's other lane and conflicts with a plan; the lanes' lock is held."""
    if not other.pending and not other.flying:
        return []
    with runtime.lock:
        others = dict.fromkeys((*other.pending, *other.flying))
    return [one for one in others if not one._over and conflict(one.plan, plan)]


def issue_later(
    runtime: Runtime, transfer: DeviceTransfer, path: Path, lane: Lane, after: Any, waits: list[Wait] | None,
    behind: list[DeviceTransfer], *, by_layer: bool,
) -> None:  # fmt: skip
    """Issue a transfer behind what the lane's own thread has to issue; that thread holds no lock meanwhile.

    While it has work, submits queue here instead of going to the streams themselves.
    """
    issued = transfer._issued = threading.Event()
    # An event is awaited as it is recorded now; by the time this is issued, its owner may have recorded it again.
    waits = None if waits is None else [recorded(lane, wait, transfer) for wait in waits]
    earlier = [*behind, *(wait for wait in waits or () if not isinstance(wait, int))]

    def job() -> None:
        try:
            if not take(runtime, transfer, lane, after if waits is None else None, earlier):
                return
            with runtime.device.current(), runtime.device.patient():
                runtime._issue(transfer, path, lane, waits or [], behind, by_layer=by_layer)
        except BaseException as error:  # noqa: BLE001  # it belongs to the transfer; the next one must still run
            runtime._abandon(transfer, error)
        finally:
            left(runtime, transfer, lane)
            issued.set()

    lane.pending.append(transfer)
    try:
        lane.later(job)
    except RuntimeError as error:
        lane.pending.remove(transfer)
        raise TransferError(f"no thread issues a transfer of {transfer.plan.nbytes} bytes: {error}") from error


def take(runtime: Runtime, transfer: DeviceTransfer, lane: Lane, after: Any, earlier: list[DeviceTransfer]) -> bool:
    """Wait on the CPU, in the lane's thread, for ``after``, and for the issue of what comes earlier than a transfer.

    Returns:
        False: it was cancelled meanwhile.

    Raises:
        BaseException: what ``after`` raised.
    """
    with runtime.lock:
        if transfer._over:
            return False
        lane.waiting = transfer
    problem: BaseException | None = None
    try:
        wait_for(after)
        for one in earlier:
            if one._issued is not None:
                one._issued.wait()
        wait_for_room(runtime, lane)
    except BaseException as error:  # noqa: BLE001  # of a transfer that was cancelled it is nobody's
        problem = error
    with runtime.lock:
        if transfer._over:  # and this thread has been relieved
            return False
        lane.waiting = None
        transfer._begun = True
    if problem is not None:
        raise problem
    return True


def full(runtime: Runtime, lane: Lane) -> bool:
    """Whether the driver's queue may have no room for the calls of another transfer."""
    if lane.calls <= MANY_CALLS:
        return False
    runtime.reap()
    return lane.calls > MANY_CALLS


def wait_for_room(runtime: Runtime, lane: Lane) -> None:
    """Wait on the CPU, in the lane's thread, until the driver's queue has room."""
    while full(runtime, lane):
        with runtime.lock:
            first = lane.flying[0] if lane.flying else None
        if first is not None:
            runtime.block(first)


def left(runtime: Runtime, transfer: DeviceTransfer, lane: Lane) -> None:
    """A transfer does not wait for its lane's thread any more."""
    with runtime.lock:
        if transfer in lane.pending:
            lane.pending.remove(transfer)


def cancel(runtime: Runtime, transfer: DeviceTransfer) -> bool:
    """Take back a transfer that its lane's thread has not begun to issue; whether it will not run."""
    with runtime.lock:
        if transfer._issued is None or transfer._begun or transfer._over:
            return transfer._cancelled
        transfer._cancelled = transfer._over = True
        transfer._error = TransferError(cancellation(transfer.plan))
        runtime.tally.cancel()
        for lane in runtime.lanes.values():
            left(runtime, transfer, lane)
            if lane.waiting is transfer:
                lane.relieve()
        transfer._give_back()
        transfer._issued.set()
    return True


def in_flight(runtime: Runtime) -> int:
    """Transfers that have not ended, as far as is known."""
    if runtime.generation != generation():  # nobody holds this process's share of the lock
        return 0
    with runtime.lock:
        some = dict.fromkeys(one for lane in runtime.lanes.values() for one in (*lane.pending, *lane.flying))
    return sum(not one._over for one in some)
