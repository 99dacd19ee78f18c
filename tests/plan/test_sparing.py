"""Little work without numba: equal to what the compiled loops do, and chosen only where it was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.execute.host import copy_by_memmove
from kvplan.execute.memcpy import copy

# ---- the host path -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [copy, copy_by_memmove])
@pytest.mark.parametrize(("first", "last"), [(0, 6), (1, 5), (2, 3), (4, 4), (0, 0)])
def test_some_of_the_copies_of_a_part(loop, first, last):
    src, dst = np.arange(1, 49, dtype=np.uint8), np.zeros(48, np.uint8)
    units = np.array([[0, 16, 32]] * 2) + np.array([[src.ctypes.data], [dst.ctypes.data]])
    runs = (np.array([0, 8]), np.array([8, 0]), np.array([4, 8]))  # 0-3 to 8-11, 8-15 to 0-7 of each unit
    loop(units, *runs, first, last, streaming=False)
    expected = np.zeros(48, np.uint8)
    for at in range(first, last):
        unit, run = 16 * (at // 2), at % 2
        if run == 0:
            expected[unit + 8 : unit + 12] = src[unit : unit + 4]
        else:
            expected[unit : unit + 8] = src[unit + 8 : unit + 16]
    np.testing.assert_array_equal(dst, expected)
