"""Two agents that have met by NIXL."""

from __future__ import annotations

import pytest

from tests.agents.by_nixl.far_agents import Far


@pytest.fixture
def far():
    made = Far()
    yield made
    made.close()
