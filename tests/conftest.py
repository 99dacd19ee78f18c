"""The profile of hypothesis, and fixtures of every folder."""

from __future__ import annotations

import signal

import pytest

import kvplan
from kvplan.plan.loops import sparing
from tests import profiles

profiles.load()


def pytest_collection_modifyitems(items):
    """Laws and other slow tests begin first, so that no worker ends long after the others."""
    items.sort(key=lambda item: 0 if "tests/laws/" in item.nodeid else 2 - bool(item.get_closest_marker("slow")))


@pytest.fixture(autouse=True)
def signals():
    """A test that blocked signals in the main thread would let later tests wait for theirs without end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before


@pytest.fixture(scope="session")
def executor():
    with kvplan.Executor(policy=kvplan.Policy(threads=2)) as shared:
        yield shared


@pytest.fixture(scope="session")
def sparing_executor():
    """An executor of a process that spares numba: little work is copied by memmove."""
    with sparing():
        shared = kvplan.Executor(policy=kvplan.Policy(threads=2))
    with shared:
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
