"""The profile of hypothesis, and fixtures of every folder."""

from __future__ import annotations

import gc
import signal
import sys

import pytest

import kvplan
from kvplan.plan.loops import sparing
from tests import profiles

profiles.load()


def pytest_collection_modifyitems(items):
    """Laws and other slow tests begin first, so that no worker ends long after the others."""
    items.sort(key=lambda item: 0 if "tests/laws/" in item.nodeid else 2 - bool(item.get_closest_marker("slow")))


def freeze() -> int:
    """Look no more at what stays until the end, such as modules and tests: each collection would take 0.35 s."""
    gc.collect()
    gc.freeze()
    return len(sys.modules)


frozen = 0  # modules


def pytest_collection_finish():
    global frozen
    frozen = freeze()


@pytest.fixture(scope="module", autouse=True)
def modules_frozen():
    """Engines import a thousand modules when they start, which stay, too."""
    global frozen
    yield
    if len(sys.modules) > frozen + 300:
        frozen = freeze()


@pytest.fixture(autouse=True)
def signals_as_before():
    """A test fails that leaves signals of the main thread blocked, another handler of alarms, or an alarm.

    Later tests would wait for their signals without end, or be interrupted. pytest-timeout may have an alarm and a
    handler of its own, and takes both back when a test fails.
    """
    mask, alarm = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getitimer(signal.ITIMER_REAL)
    handler = signal.getsignal(signal.SIGALRM)
    yield
    left, found = signal.getitimer(signal.ITIMER_REAL), signal.getsignal(signal.SIGALRM)
    further = left[1] != alarm[1] or (left[0] > 0 and not alarm[0])
    another = found not in (handler, signal.SIG_DFL)
    if further or another:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *alarm)
    assert signal.pthread_sigmask(signal.SIG_SETMASK, mask) == mask
    assert not another, f"alarms are handled by {found}"
    assert not further, f"an alarm comes in {left[0]} s, and every {left[1]} s"


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
