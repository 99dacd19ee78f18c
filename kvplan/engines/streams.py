"""The stream in which an engine works."""

from __future__ import annotations

from typing import Any

from kvplan.layout.kvlayout import KVLayout


def current_stream(layout: KVLayout) -> Any:
    """Torch's current stream on the GPU that holds a layout; None on the CPU, which has no streams.

    >>> import numpy as np
    >>> current_stream(KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8))) is None
    True
    """
    if layout.device == "cpu":
        return None
    import torch

    return torch.cuda.current_stream(layout.device)
