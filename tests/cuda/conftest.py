"""What the tests of the driver share: libraries that are played."""

from __future__ import annotations

import pytest

from kvplan.cuda import device as cuda
from tests.cuda.fake_system import libraries


@pytest.fixture
def fakes(monkeypatch):
    """The played libraries of the driver and of NVML; the driver that is kept is another one afterwards."""
    cuda.driver.cache_clear()
    yield libraries(monkeypatch)
    cuda.driver.cache_clear()
