"""Whose turn it is: what urgent transfers and others wait for, room in the driver's queue, cancelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Latch, sleep, waking
from kvplan.base.process import generation
from kvplan.errors import TransferError
from kvplan.execute.gpu.waits import Wait, recorded
from kvplan.execute.transfer import CLOSED_ERROR, cancellation, wait_on_cpu
from kvplan.plan.conflicts import conflict
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Path, Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Lane

# Calls in flight on a lane from which on its own thread issues: the driver's queue has an end, of about a thousand, and
# a call that finds it full waits for the GPU.
MANY_CALLS = 256


def before(plan: Plan, other: Lane) -> list[DeviceTransfer]:
    """What has not ended on the direction's other lane and conflicts with a plan."""
    if not other.pending.line and not other.flying and other.issuing is None:
        return []
    others = dict.fromkeys(other.pending.entries())  # in the order that a transfer goes through them
    if other.issuing is not None:
        others[other.issuing] = None
    others |= dict.fromkeys(other.flying.copy())
    return [one for one in others if not one._over and conflict(one.plan, plan)]


def issue_later(
    runtime: Runtime, transfer: DeviceTransfer, path: Path, lane: Lane, after: Any, waits: list[Wait] | None,
    behind: list[DeviceTransfer], *, by_layer: bool,
) -> None:  # fmt: skip
    """Issue a transfer behind what the lane's own thread has to issue; that thread holds no lock meanwhile.

    While it has work, submits queue here instead of going to the streams themselves.
    """
    # An event is awaited as it is recorded now; by the time this is issued, its owner may have recorded it again.
    waits = None if waits is None else [recorded(lane, wait, transfer) for wait in waits]
    earlier = [*behind, *(wait for wait in waits or () if not isinstance(wait, int))]

    def job() -> None:
        try:
            if not take(runtime, transfer, lane, after if waits is None else None, earlier):
                with runtime.lock:
                    transfer._give_back()
                return
            with runtime.device.current(), runtime.device.patient():
                runtime._issue(transfer, path, lane, waits or [], behind, by_layer=by_layer)
        except BaseException as error:  # noqa: BLE001  # it belongs to the transfer; the next one must still run
            runtime._abandon(transfer, error)

    if not lane.thread.started:
        try:
            lane.thread.start()
        except TransferError as error:
            why = error.__cause__
            raise TransferError(f"no thread issues a transfer of {transfer.plan.nbytes} bytes: {why}") from why
    transfer._job = job
    transfer._issued = Latch()
    lane.pending.append(transfer, lane.stir)
    if lane.pending.closed and lane.pending.withdraws(transfer):
        raise TransferError(CLOSED_ERROR)


def take(runtime: Runtime, transfer: DeviceTransfer, lane: Lane, after: Any, earlier: list[DeviceTransfer]) -> bool:
    """Wait on the CPU, in the lane's thread, for ``after``, and for the issue of what comes earlier than a transfer.

    Returns:
        False: it was cancelled meanwhile.

    Raises:
        BaseException: what ``after`` raised.
    """
    lane.waiting = transfer
    problem: BaseException | None = None
    try:
        problem = wait_on_cpu(after, lane.standby, lane.wake, lambda: transfer._over)
        for one in earlier if problem is None else ():
            wait_for_issue(one, transfer, lane)
        if problem is None and not transfer._over:
            wait_for_room(runtime, lane)
    except BaseException as error:  # noqa: BLE001  # of a transfer that was cancelled it is nobody's
        problem = error
    lane.waiting = None
    with lane.lock:  # a submit within which this one was made may still be issuing
        pass
    with runtime.lock:
        if transfer._over:
            return False
        transfer._begun = True
    if problem is not None:
        raise problem
    return True


def wait_for_issue(one: DeviceTransfer, transfer: DeviceTransfer, lane: Lane) -> None:
    """Wait, in the lane's thread, until another transfer is issued, or this one is taken back."""
    issued = one._issued
    if issued is not None:
        sleep(lambda: issued.is_set() or transfer._over, issued.sleepers, None, lane.wake)


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


def cancel(runtime: Runtime, transfer: DeviceTransfer) -> bool:
    """Take back a transfer that its lane's thread has not begun to issue; whether it will not run."""
    issued = transfer._issued
    if issued is None:
        return transfer._cancelled
    error = TransferError(cancellation(transfer.plan))
    count, wakes = runtime.tally.ends.append, waking(issued.sleepers)
    stirs = waking(runtime.wakes)
    with runtime.lock:
        if transfer._begun or transfer._over:
            return transfer._cancelled
        transfer._error = error
        transfer._cancelled = transfer._over = issued.happened = (
            True  # from here to the end of count() no signal is looked at
        )
        try:
            count("cancelled")
        finally:  # each is one call of C, so that all are made whatever is raised meanwhile
            try:
                any(wakes)
            finally:
                any(stirs)
        transfer._give_back()
    return True


def in_flight(runtime: Runtime) -> int:
    """Transfers that have not ended, as far as is known."""
    if runtime.generation != generation():  # nobody holds this process's share of the lock
        return 0
    some: dict[DeviceTransfer, None] = {}
    for lane in runtime.lanes.values():
        some |= dict.fromkeys(lane.pending.entries())  # in the order that a transfer goes through them
        if lane.issuing is not None:
            some[lane.issuing] = None
        some |= dict.fromkeys(lane.flying.copy())
    return sum(not one._over for one in some)
