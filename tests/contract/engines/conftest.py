"""Loggers of the adapters, whose level and handlers the plugins set for a whole process."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def loggers():
    """Each logger of an engine has its level and its handlers again after a test."""
    found = [logging.getLogger(f"kvplan.engines.{name}") for name in ("lmcache", "nixl", "sglang")]
    before = [(logger.level, list(logger.handlers)) for logger in found]
    yield
    for logger, (level, handlers) in zip(found, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers
