"""Merged layouts: what two of them may not differ in, and what becomes of regions that both have."""

from __future__ import annotations

import numpy as np
import pytest

from kvplan import KVLayout, LayoutError


def test_layouts_of_two_devices_are_not_merged():
    here, there = (
        KVLayout.from_spec(
            {"notation": "block dim", "sizes": {"block": 4, "dim": 8}, "part": part, "device": device}
        )
        for part, device in (("ckv", "cpu"), ("kpe", "cuda:0"))
    )  # fmt: skip
    with pytest.raises(LayoutError, match="layout 1 is on cuda:0, layout 0 on cpu"):
        KVLayout.merge([here, there])


def test_parts_of_different_token_counts_are_not_merged():
    ckv, kpe = (
        KVLayout.from_tensors("block token dim", np.zeros((4, tokens, 8), np.uint8), part=part)
        for part, tokens in (("ckv", 16), ("kpe", 8))
    )
    with pytest.raises(LayoutError, match=r"block_tokens differ: \[8, 16\]; give layouts with blocks of eq"):
        KVLayout.merge([ckv, kpe])


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


def test_layouts_that_share_bytes_are_not_merged():
    memory = np.zeros((4, 16), np.uint8)
    layouts = [
        KVLayout.from_tensors("block dim", memory[:, start : start + 8], part=f"p{start}") for start in (0, 8, 7)
    ]
    assert KVLayout.merge(layouts[:2]).block_nbytes == 16
    with pytest.raises(LayoutError, match="layer 0 'p0' and layer 0 'p7' overlap: they share bytes"):
        KVLayout.merge([layouts[0], layouts[2]])
