"""The stream in which an engine launches its work."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.cuda.handles import current_stream as current_handle


class Stream(NamedTuple):
    """The handle of a stream; an executor needs no more, and a ``torch.cuda.Stream`` takes microseconds to make."""

    cuda_stream: int


def current_stream(device: str) -> Stream | None:
    """Return torch's current stream on a device such as ``"cuda:0"``; None on the CPU, which has no streams.

    >>> current_stream("cpu") is None
    True
    """
    handle = None if device == "cpu" else current_handle(int(device.removeprefix("cuda:")))
    return None if handle is None else Stream(handle)
