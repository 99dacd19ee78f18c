"""The driver's handles of streams and events, from objects of torch or of a library with the same attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvplan.errors import PathError


def stream_handle(stream: Any) -> int | None:
    """Return the handle of a stream of torch, or with ``__cuda_stream__``; None if the object is not a stream."""
    handle = getattr(stream, "cuda_stream", None)
    if isinstance(handle, int):
        return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        return int(protocol()[1])
    return None


def lender(kernel_stream: Any) -> Callable[[], int | None]:
    """Return a function that returns the handle of the caller's stream for kernels, or None.

    The returned function raises PathError if the caller's function returns neither a stream nor None.

    Raises:
        PathError: the object is neither a stream nor a function.
    """
    fixed = stream_handle(kernel_stream)
    if kernel_stream is None or fixed is not None:
        return lambda: fixed
    if not callable(kernel_stream):
        raise PathError(f"kernel_stream is {kernel_stream!r}; give a CUDA stream, a function that returns one, or None")

    def lent() -> int | None:
        stream = kernel_stream()
        handle = stream_handle(stream)
        if handle is None and stream is not None:
            raise PathError(f"the function kernel_stream returned {stream!r}; expected a CUDA stream or None")
        return handle

    return lent


def event_handle(event: Any) -> int | None:
    """Return the handle of an event, 0 if it was never recorded; None if the object is not a CUDA event."""
    handle = getattr(event, "cuda_event", None)
    return handle if isinstance(handle, int) else None


def current_stream(ordinal: int) -> int | None:
    """Return the handle of torch's current stream on a device; None if torch is not loaded or has not begun CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch._C._cuda_getCurrentRawStream(ordinal))  # takes a tenth of the time of a stream object
