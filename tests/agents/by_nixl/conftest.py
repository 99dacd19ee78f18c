"""Two agents that have met by NIXL."""

from __future__ import annotations

import pytest

from tests.agents.by_nixl.known_agents import Far


@pytest.fixture
def pair(request):
    """Two agents; a transfer is done after the looks that :func:`tests.agents.by_nixl.known_agents.looks` says."""
    made = Far(("nixl",), request.param)
    made.meet()
    yield made
    made.close()
