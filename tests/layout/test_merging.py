"""Merged layouts: what two of them may not differ in, and what becomes of regions that both have."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVLayout


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_memory_that_one_of_them_may_only_read_is_read_only(frozen):
    memory = np.zeros((4, 16), np.uint8)
    halves = [memory[:, :8], memory[:, 8:]]
    for k in frozen:
        halves[k].flags.writeable = False
    merged = KVLayout.merge([KVLayout.from_tensors("block dim", half, part=f"p{k}") for k, half in enumerate(halves)])
    assert len(merged.regions) == 1
    assert merged.writable == (not frozen)


def test_seams_of_both_are_seams_of_the_whole():
    memory = np.zeros((4, 16), np.uint8)
    at = memory.ctypes.data
    layouts = [
        KVLayout.from_tensors("block dim", memory[:, 8 * k : 8 * k + 8], part=f"p{k}", seams=[at + 16 * seam])
        for k, seam in enumerate((3, 1))
    ]
    assert KVLayout.merge(layouts).seams == (at + 16, at + 48)
