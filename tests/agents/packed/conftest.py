"""Two ends on a simulated wire."""

from __future__ import annotations

import pytest

from tests.agents.packed.pairs import Pair


@pytest.fixture
def pair(executor):
    """A pair without faults: ten blocks of three layers, rows of 64 bytes; a chunk has at most 1,024 bytes."""
    return Pair(executor)
