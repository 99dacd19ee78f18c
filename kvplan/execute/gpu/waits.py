"""Waits before a transfer is issued: for ``after=``, and for the issue of other transfers."""

from __future__ import annotations

from typing import Any

from kvplan.base.latch import Wake, sleep
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.errors import KVPlanError
from kvplan.execute.gpu.device_transfer import DeviceTransfer

Wait = int | DeviceTransfer  # an event, or a transfer, whose event may be given back meanwhile


def waits_of(after: Any, transfer: DeviceTransfer) -> list[Wait] | None:
    """List what the GPU must wait for before a transfer; None where only the CPU can wait.

    Raises:
        KVPlanError: a transfer that was captured into a graph.
        TransferError: the driver refuses to record an event.
    """
    if after is None:
        return []
    if isinstance(after, DeviceTransfer):
        if after.captures is not None:
            raise KVPlanError("after is a transfer captured into a CUDA graph; give the stream that replays it")
        return [after]
    device = transfer.resources.device
    handle = stream_handle(after)
    if handle is not None:
        if getattr(after, "device_index", device.ordinal) != device.ordinal:
            event = after.record_event()  # only its own device can record on it
            transfer.keep(event)
            return [event.cuda_event]
        mine = transfer.event()
        device.record(mine, handle)
        return [mine]
    theirs = event_handle(after)
    if theirs is None:
        return None
    transfer.keep(after)
    return [theirs] if theirs else []  # one never recorded has passed


def recorded(wait: Wait, transfer: DeviceTransfer, gate: int) -> Wait:
    """An event of the transfer's own, recorded behind another owner's event as that stands now.

    Args:
        wait: as :func:`waits_of` found it.
        transfer: the transfer that waits.
        gate: a stream that only waits.
    """
    if isinstance(wait, DeviceTransfer):
        return wait
    device, event = transfer.resources.device, transfer.event()
    device.wait(gate, wait)
    device.record(event, gate)
    return event


def wait_for_issue(one: DeviceTransfer, transfer: DeviceTransfer, wake: Wake) -> None:
    """Block a lane's thread until another transfer is issued, or until this one is cancelled."""
    issued = one._issued
    if issued is not None:
        sleep(lambda: issued.is_set() or transfer._over, issued.sleepers, None, wake)
