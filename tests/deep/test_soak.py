"""A small run of `tests.deep.soak`."""

from __future__ import annotations

import pytest

from tests.deep import soak

pytestmark = [pytest.mark.slow, pytest.mark.slow]


def test_random_transfers_move_every_byte_and_leave_nothing():
    soak.soak(seed=1, transfers=1_500)
