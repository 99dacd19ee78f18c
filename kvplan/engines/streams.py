"""The stream that an engine works in."""

from __future__ import annotations

from typing import Any

from kvplan.layout.kvlayout import KVLayout


def current_stream(layout: KVLayout) -> Any:
    """Torch's current stream of the GPU that holds a layout; None of the CPU, which has none to wait for.

    >>> import numpy as np
    >>> current_stream(KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8))) is None
    True
    """
    if layout.device == "cpu":
        return None
    import torch

    return torch.cuda.current_stream(layout.device)
