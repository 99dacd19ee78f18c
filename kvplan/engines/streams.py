"""The stream in which an engine launches its work."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.cuda.handles import current_stream as current_handle

DEFAULT = 0  # handle of the default stream


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


class EngineStream:
    """The stream on which an engine replays its CUDA graphs, and the stream for kernels beside it.

    Kernels of graphs start 0.2 us later if two streams of the process, besides the default stream, have launched
    kernels (``docs/gpu.md``). vLLM replays its graphs on a stream of its own, and leaves the default stream idle.

    Args:
        device: name of the device, such as ``"cuda:0"``.

    >>> stream = EngineStream("cpu")
    >>> stream.look()
    >>> stream.beside() is None
    True
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen: Stream | None = None

    def look(self) -> None:
        """Note the current stream of the calling thread, at the first call that finds one."""
        if self._seen is None:
            self._seen = current_stream(self._device)

    def beside(self) -> Stream | None:
        """Return the default stream if the engine has another stream; otherwise None."""
        return Stream(DEFAULT) if self._seen is not None and self._seen.cuda_stream != DEFAULT else None
