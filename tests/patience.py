"""Waiting for other threads and processes without depending on how fast the machine is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import kvplan

# Seconds after which a test fails rather than hangs. What a test waits for comes by itself, so no result depends on it.
PATIENCE = 600.0


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process brings about."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(1e-3)


def takes_no_more(executor: kvplan.Executor) -> bool:
    """Whether an executor has been closed: its transfers may still be in flight."""
    try:
        executor.prepare()
    except kvplan.TransferError as error:
        return "is closed" in str(error)
    return False


def once(condition: Callable[[], object], action: Callable[[], object]) -> threading.Thread:
    """Do something when a condition holds, in a thread, while the caller is busy with what makes it hold."""

    def work() -> None:
        until(condition)
        action()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
