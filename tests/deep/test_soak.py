"""Small runs of `tests.deep.soak` and `tests.deep.signals`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deep import soak

pytestmark = [pytest.mark.slow, pytest.mark.slow]


def test_random_transfers_move_every_byte_and_leave_nothing():
    soak.soak(seed=1, transfers=1_500)


def test_signals_at_random_moments_wedge_no_executor():
    command = [sys.executable, "-m", "tests.deep.signals", "--count", "3", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no executor wedged") == 8
