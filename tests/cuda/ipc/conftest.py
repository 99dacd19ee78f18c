"""A driver that is none, with two GPUs that reach one another, and memory that other processes may open."""

from __future__ import annotations

import uuid

import pytest

from kvplan.cuda import use
from tests.simulated.entries import Entries

HANDLES = {0: 10, 1: 11}  # the driver's handles of the GPUs, by their number
CONTEXTS = {10: 0xC0, 11: 0xC1}
UUIDS = {10: bytes(range(16)), 11: bytes(range(16, 32))}
FIRST, SECOND = (str(uuid.UUID(bytes=raw)) for raw in UUIDS.values())


class Current:
    """The context of the calling thread."""

    now: int | None = None


@pytest.fixture
def entries():
    """The driver's entry points; `entries.current` has the context that is current."""
    made, current = Entries(), Current()
    made.current = current
    made.gives |= {
        "cuDeviceGetCount": [2],
        "cuDeviceGet": lambda _, ordinal: [HANDLES[ordinal]],
        "cuDevicePrimaryCtxRetain": lambda _, handle: [CONTEXTS[handle]],
        "cuDeviceGetUuid_v2": lambda _, handle: [UUIDS[handle]],
        "cuDeviceCanAccessPeer": [1],
        "cuCtxGetCurrent": lambda _: [current.now],
    }
    made.codes["cuCtxSetCurrent"] = lambda context: setattr(current, "now", context) or 0
    with use(made):
        yield made
