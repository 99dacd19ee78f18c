"""Waiting for other threads and processes without depending on how fast the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds after which a test fails rather than hangs. What a test waits for comes by itself, so no result depends on it.
PATIENCE = 600.0


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(1e-3)
