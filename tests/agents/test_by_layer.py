"""A prefill sends each layer as it is computed, and the other process waits layer by layer."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout
from tests.agents.workers import LAYERS, content
from tests.patience import PATIENCE, until

pytestmark = pytest.mark.slow


def test_each_layer_is_there_before_the_next_one_is_computed(others, agents):
    decode = others("decode", 3)
    peer = agents("prefill", layouts={}).meet(decode.card())
    theirs, made = peer.layouts["kv"], content(5)
    here = KVLayout.from_tensors("block layer dim", np.zeros_like(made))
    programs = [kvplan.compile(here.slice(layers=[layer]), theirs.slice(layers=[layer])) for layer in range(LAYERS)]
    computed = [threading.Event() for _ in range(LAYERS)]
    transfers = [
        peer.submit(programs[layer].plan([4, 1], [2, 9]), after=computed[layer], note=b"%d" % layer)
        for layer in range(LAYERS)
    ]
    expected = content(3)
    for layer in range(LAYERS):
        assert decode.notes() == []
        here.tensors[:, layer] = made[:, layer]
        computed[layer].set()
        notes: list = []
        until(lambda notes=notes: notes.extend(decode.notes()) or notes)
        assert notes == [("prefill", b"%d" % layer)]
        expected[[2, 9], layer] = made[[4, 1], layer]
        np.testing.assert_array_equal(decode.holds(), expected)
    for transfer in transfers:
        transfer.synchronize(PATIENCE)
