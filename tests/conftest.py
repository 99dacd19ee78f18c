"""Profiles of hypothesis, and the executor that the law tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

import kvplan

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", max_examples=250, deadline=None, suppress_health_check=slow)
settings.register_profile("deep", max_examples=20_000, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def executor():
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as shared:
        yield shared


@pytest.fixture
def prepared(monkeypatch):
    """What executors are asked to make ready: directions of plans, None for the loops, and whether by layers."""
    asked, whole = [], kvplan.Executor.prepare

    def prepare(executor, plan=None, *, by_layer=False):
        asked.append((plan and plan.direction, by_layer))
        whole(executor, plan, by_layer=by_layer)

    monkeypatch.setattr(kvplan.Executor, "prepare", prepare)
    return asked
