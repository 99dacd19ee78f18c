"""The driver's handles of streams and events of torch, or of any library that names them so."""

from __future__ import annotations

import sys
from typing import Any


def stream_handle(stream: Any) -> int | None:
    """The driver's handle of a stream of torch, or of whatever follows its names; None where it is no stream."""
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        return int(protocol()[1])
    return None


def event_handle(event: Any) -> int | None:
    """The driver's handle of an event, 0 for one that was never recorded; None where it is no event of CUDA."""
    handle = getattr(event, "cuda_event", None)
    return handle if isinstance(handle, int) else None


def current_stream(ordinal: int) -> int | None:
    """Handle of torch's current stream on a device, or None where torch is not loaded or has not begun with CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a tenth of the cost
    return int(raw(ordinal) if raw is not None else torch.cuda.current_stream(ordinal).cuda_stream)
