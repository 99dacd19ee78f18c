"""A plan layer by layer: the same byte moves, in the order of the layers."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan.plan.layers import even_edges, split_layers
from tests.compiled_cases import moves


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (2, [2, 3]), (3, [1, 2, 2]), (5, [1] * 5), (9, [1] * 5)])
def test_layers_are_dealt_out_evenly(count, sizes):
    cache = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((5, 4, 2, 8), np.int8), layer_start=3)
    host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((4, 5, 2, 8), np.int8), layer_start=3)
    plan = kvplan.compile(cache, host).plan([1, 2], [3, 0])
    made = split_layers(plan, even_edges(len(plan.layers), count))
    assert [len(layers) for layers, _ in made] == sizes
    assert [layer for layers, _ in made for layer in sorted(layers)] == [3, 4, 5, 6, 7]
    assert [part.nbytes for _, part in made] == [32 * size for size in sizes]
    other = kvplan.compile(cache, host).plan([3, 0], [1, 2])  # the cuts are kept, the units are its own
    again = [part for _, part in split_layers(other, even_edges(5, count))]
    assert moves(kvplan.join(again)) == moves(other)
