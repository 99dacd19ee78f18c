"""What is held, and whether it is let go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from tests.paged_caches import Pair
from tests.patience import until
from tests.simulated.device import Device


def wait_until_gone(references: list[weakref.ref], device: Device) -> None:
    """Let the device do all that was put on it, and the executor's own thread see that it has ended."""

    def gone() -> bool:
        device.run()  # by steps, a look at an event each, it would take as long as the looks do
        gc.collect()
        return all(reference() is None for reference in references)

    until(gone)


def tensors_of(pair: Pair) -> list[Any]:
    held = [layout.tensors for layout in pair.layouts]
    return [tensor for tensors in held for tensor in (tensors if isinstance(tensors, list) else [tensors])]
