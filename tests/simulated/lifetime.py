"""What is held, and whether it is let go."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

from tests.gpu.caches import Pair


def gone(references: list[weakref.ref], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while any(reference() is not None for reference in references):
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.005)
    return True


def tensors_of(pair: Pair) -> list[Any]:
    held = [layout.tensors for layout in pair.layouts]
    return [tensor for tensors in held for tensor in (tensors if isinstance(tensors, list) else [tensors])]
