"""Check that torch can allocate on a device, in the words of kvplan."""

from __future__ import annotations

from typing import Any

from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError


def check_device(device: Any) -> None:
    """Check that torch can allocate on a device.

    Raises:
        LayoutError: torch does not know the device, or this machine lacks it.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise LayoutError(f"device is {quoted(device)}, which torch does not know; give 'cpu' or 'cuda:0'") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise LayoutError(
                f"device is {quoted(str(device))}, and torch {torch.__version__} reaches no GPU; give 'cpu'"
            )
        if found.index is not None and found.index >= count:
            raise LayoutError(f"device is {quoted(str(device))}, and the GPUs here are cuda:0 to cuda:{count - 1}")
        return
    try:
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # torch was built without it
        why = str(error).partition("\n")[0]
        raise LayoutError(f"device is {quoted(str(device))}, which torch cannot use here ({why}); give 'cpu'") from None
