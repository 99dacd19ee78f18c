"""The stream on which vLLM captures its CUDA graphs. Later, kvplan's kernels run on it.

vLLM replays its graphs on the default stream, and the stream of the capture is idle from then on. If kernels ran on a
third stream, each kernel of a graph would start 0.2 us later (``docs/gpu.md``, Streams).

Source: vLLM 0.33.0, ``distributed/parallel_state.py`` (``graph_capture``).
"""

from __future__ import annotations

from typing import Any

_captured: dict[int | None, Any] = {}  # by number of the GPU


def watch_captures(parallel_state: Any) -> None:
    """Note the stream of every later capture. A second call does nothing.

    Args:
        parallel_state: vLLM's module, which makes a ``GraphCaptureContext`` for each capture.

    >>> from types import SimpleNamespace as Some
    >>> module = Some(GraphCaptureContext=lambda stream: ("context", stream.number))
    >>> watch_captures(module)
    >>> module.GraphCaptureContext(Some(device=Some(index=7), number=3))
    ('context', 3)
    >>> captured_stream("cuda:7").number
    3
    """
    make = getattr(parallel_state, "GraphCaptureContext", None)
    if make is None or hasattr(make, "kvplan_notes"):
        return

    def noted(stream: Any, *given: Any, **named: Any) -> Any:
        _captured[getattr(getattr(stream, "device", None), "index", None)] = stream
        return make(stream, *given, **named)

    noted.kvplan_notes = True  # type: ignore[attr-defined]
    parallel_state.GraphCaptureContext = noted


def captured_stream(device: str) -> Any:
    """Return the stream of the last capture on a device such as ``"cuda:0"``; None if nothing was captured.

    >>> captured_stream("cpu") is None
    True
    """
    return _captured.get(int(device.removeprefix("cuda:"))) if device.startswith("cuda:") else None
