"""Packed transfers between two real processes by real NIXL, host memory: all bytes of random pairs, and kills."""

from __future__ import annotations

import pytest

from tests.agents.by_nixl.packed_pairs import WIRES, kills, pairs

pytest.importorskip("nixl", reason="NIXL is not installed: pip install 'kvplan[nixl]'")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transports", WIRES)
def test_random_pairs(transports, monkeypatch):
    monkeypatch.setenv("UCX_TLS", transports)
    pairs(15, 1, transports)


@pytest.mark.parametrize("transports", WIRES)
def test_kills(transports, monkeypatch):
    monkeypatch.setenv("UCX_TLS", transports)
    kills(4, 1, transports)
