"""Merged layouts: what becomes of regions that both have, and which sizes the whole and its slices tell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvplan import KVLayout
from kvplan.layout.dump import document_of


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


def test_slices_of_merged_layouts_tell_sizes_of_their_own():
    kv = KVLayout.from_tensors("layer: block kv token head dim", [np.zeros((8, 2, 4, 3, 16), np.float16)] * 1)
    scale = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 1, 6), np.uint8), part="scale", layers=[5])
    state = KVLayout.from_tensors("block dim", np.zeros((8, 100), np.int8), part="state", layers=[7])
    merged = KVLayout.merge([kv, scale, state])
    assert merged.sizes == {"layer": 3, "kv": 2, "block": 8, "token": 4}  # the others differ
    assert "| layer 0: k v head=3 dim=16 float16 | layer 5: scale head=1 dim=6 uint8 | layer 7: state dim=100" in str(
        merged
    )
    held = merged.slice(parts=["scale"])
    assert held.sizes == {"layer": 1, "block": 8, "kv": 1, "token": 4, "head": 1, "dim": 6}
    for layout in (merged, held, merged.slice(parts=["k"]), merged.slice(layers=[7]), merged.slice(layers=[5, 7])):
        assert KVLayout.from_spec(json.loads(json.dumps(document_of(layout.built)))) == layout
