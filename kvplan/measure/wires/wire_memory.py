"""Memory at one end of a wire: of the host, or of a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.nixl_lists import memory_of


def tensor_of(device: str, nbytes: int) -> Any:
    """Return a tensor of bytes, each touched, so that no page is missing while something is timed.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``.
        nbytes: bytes.

    Raises:
        KVPlanError: the GPU's memory needs torch, and it is not installed.
    """
    if device == "cpu":
        return np.ones(nbytes, dtype=np.uint8)
    try:
        import torch
    except ModuleNotFoundError:
        raise KVPlanError('GPU memory needs torch; pip install "kvplan[cuda]"') from None
    flat = torch.ones(nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return flat


class Memory:
    """Bytes that NIXL registers.

    Args:
        device: ``"cpu"`` or ``"cuda:N"``.
        nbytes: bytes.

    Attributes:
        layout: a layout over them, with one block.
        address: address of the first byte.
        kind: NIXL's name of the memory, ``"DRAM"`` or ``"VRAM"``.
        number: number of the device.

    Raises:
        KVPlanError: the GPU's memory needs torch, and it is not installed.
    """

    def __init__(self, device: str, nbytes: int) -> None:
        self.kind, self.number = memory_of(device, "the memory of a wire")
        flat = tensor_of(device, nbytes)
        self.address = int(flat.ctypes.data if self.kind == "DRAM" else flat.data_ptr())
        self.layout = KVLayout.from_tensors("block dim", flat.reshape(1, -1))
