"""What ``after=`` names, as things that a stream of the GPU can wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.errors import KVPlanError
from kvplan.execute.gpu.device_transfer import DeviceTransfer

if TYPE_CHECKING:
    from kvplan.execute.gpu.lane import Lane

Wait = int | DeviceTransfer  # an event, or a transfer, whose event may be given back meanwhile


def waits_of(after: Any, transfer: DeviceTransfer) -> list[Wait] | None:
    """What the GPU is to wait for before a transfer; None where only the CPU can wait.

    Raises:
        KVPlanError: a transfer that was captured into a graph.
        TransferError: the driver refuses to record an event.
    """
    if after is None:
        return []
    if isinstance(after, DeviceTransfer):
        if after._captured:
            raise KVPlanError("after is a transfer captured into a CUDA graph; give the stream that replays it")
        return [after]
    device = transfer._runtime.device
    handle = stream_handle(after)
    if handle is not None:
        if getattr(after, "device_index", device.ordinal) != device.ordinal:
            after = transfer._after = after.record_event()  # only its own device can record on it
            return [after.cuda_event]
        event = transfer.event()
        device.record(event, handle)
        return [event]
    theirs = event_handle(after)
    if theirs is None:
        return None
    transfer._after = after
    return [theirs] if theirs else []  # one never recorded has passed


def recorded(lane: Lane, wait: Wait, transfer: DeviceTransfer) -> Wait:
    """An event of the transfer's own behind what somebody else's stands for now."""
    if isinstance(wait, DeviceTransfer) or transfer._after is None:
        return wait
    device, event = transfer._runtime.device, transfer.event()
    device.wait(lane.gate, wait)
    device.record(event, lane.gate)
    return event
