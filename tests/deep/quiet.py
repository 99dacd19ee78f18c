"""Fewer lines of kvplan's loggers: failed transfers are what some deep runs are for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(level: int = logging.ERROR) -> Iterator[None]:
    """Let kvplan's loggers handle lines from a level on, and then what they handled before."""
    logger = logging.getLogger("kvplan")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
