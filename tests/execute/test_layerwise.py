"""A transfer whose layers are submitted one by one: the same bytes as the whole plan, and one end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, TransferError
from tests.execute.host_processes import Broken
from tests.profiles import examples
from tests.strategies import cases, layout_of


class OneByOne:
    """An executor that submits the layers of every plan in a drawn order."""

    def __init__(self, executor, drawn, groups):
        self.executor, self.drawn, self.groups = executor, drawn, groups

    def submit(self, plan):
        begun = self.executor.begin(plan, groups=self.groups)
        for layer in self.drawn.draw(st.permutations(plan.layers)):
            assert not begun.done()
            begun.submit(layer)
        return begun


@given(case=cases(), groups=st.sampled_from([None, 1, 2]), drawn=st.data())
@examples(60)
def test_layers_in_any_order_move_what_the_plan_moves(case, groups, drawn):
    src, dst = (layout_of(form.build(case.seed + k)) for k, form in enumerate((case.src, case.dst)))
    with kvplan.Executor() as executor:
        assert kvplan.verify(src, dst, executor=OneByOne(executor, drawn, groups)).ok


def pair(layers=3):
    """A cache of a tensor a layer, and a pool that keeps all layers of a block together."""
    held = [np.full((8, 4, 16), layer + 1, np.uint8) for layer in range(layers)]
    gpu = KVLayout.from_tensors("layer: block token dim", held, layer_start=5)
    pool = np.zeros((8, layers, 4, 16), np.uint8)
    return held, pool, kvplan.compile(gpu, KVLayout.from_tensors("block layer token dim", pool, layer_start=5))


@pytest.fixture
def executor():
    with kvplan.Executor() as made:
        yield made


def test_a_failed_layer_fails_the_transfer_after_the_others(executor):
    _, pool, program = pair()
    store = executor.begin(program.plan([0], [3]))
    store.submit(5, after=Broken())
    for layer in (6, 7):
        store.submit(layer)
    with pytest.raises(TransferError, match="the stream is gone"):
        store.synchronize()
    assert store.done()
    assert pool[3, 1:].all()
    with pytest.raises(TransferError, match="the stream is gone"):
        store.result()
