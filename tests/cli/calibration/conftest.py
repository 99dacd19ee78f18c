"""The folder of profiles, which is empty before each test."""

from __future__ import annotations

import pytest

from kvplan.cost import store


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The user's profiles; kvplan ships none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVPLAN_PROFILE", raising=False)
    monkeypatch.setattr(store, "PROFILES", tmp_path / "shipped")
    return tmp_path / "cache" / "kvplan" / "profiles"
