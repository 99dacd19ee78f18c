"""What the tests of the driver share: libraries that are played."""

from __future__ import annotations

import pytest

from kvplan.cuda import driver as cuda
from kvplan.cuda import use
from kvplan.cuda.device import Device
from tests.cuda.fake_system import libraries
from tests.simulated.entries import Entries


@pytest.fixture
def fakes(monkeypatch):
    """The played libraries of the driver and of NVML; the driver that is kept is another one afterwards."""
    cuda.loaded.cache_clear()
    yield libraries(monkeypatch)
    cuda.loaded.cache_clear()


@pytest.fixture
def entries():
    """Entry points of a driver that is none: each writes what it is told to."""
    made = Entries()
    with use(made):
        yield made


@pytest.fixture
def device(entries):
    """The second GPU of that driver."""
    return Device(1)
