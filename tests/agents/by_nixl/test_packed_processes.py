"""Packed transfers between two real processes by real NIXL, host memory: kills."""

from __future__ import annotations

import pytest

from tests.agents.by_nixl.packed_pairs import WIRES, kills

pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'kvplan[nixl]'")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transports", WIRES)
def test_kills(transports, monkeypatch):
    monkeypatch.setenv("UCX_TLS", transports)
    kills(4, 1, transports)
