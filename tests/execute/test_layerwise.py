"""A transfer whose layers are submitted one by one: the same bytes as the whole plan, and one end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout, KVPlanError, TransferError
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


def test_a_store_while_a_model_computes(executor):
    held, pool, program = pair()
    store = executor.begin(program.plan([1, 2], [7, 0]))
    assert store.layer_groups == ((5,), (6,), (7,))
    for k, layer in enumerate(program.src.layers):
        assert store.missing == tuple(range(layer, 8))
        held[k][1] = 40 + k  # the model writes the layer
        store.submit(layer)
        store.wait_layer(layer)
        assert (pool[7, k] == 40 + k).all()
        assert not pool[:, k + 1 :].any()
        assert store.done() == (layer == 7)
    store.wait()
    result = store.result()
    assert (result.nbytes, result.path, result.descriptors, result.predicted) == (3 * 2 * 64, "host", 6, None)
    assert executor.stats().transfers == 3


def test_it_waits_for_what_writes_each_layer(executor):
    held, pool, program = pair()
    gates = [threading.Event() for _ in held]
    store = executor.begin(program.plan([1], [7]))
    for k, gate in enumerate(gates):
        store.submit(5 + k, after=gate)
    assert not store.missing
    with pytest.raises(TransferError, match=r"transfer of 192 bytes has not finished within 0\.01 seconds"):
        store.synchronize(0.01)
    assert not pool.any()
    for k, gate in enumerate(gates):
        held[k][1] = 9
        gate.set()
    later = executor.submit(program.plan([1], [6]), after=store)
    later.synchronize()
    assert (pool[[6, 7]] == 9).all()


def test_layers_that_move_together(executor):
    _, pool, program = pair(4)
    store = executor.begin(program.plan([0], [3]), groups=2)
    assert store.layer_groups == ((5, 6), (7, 8))
    store.submit(6)
    assert not pool.any()
    with pytest.raises(TransferError, match="were not submitted"):
        store.wait_layer(6)
    store.submit(5)
    store.wait_layer(6)
    assert pool[3, :2].all()
    assert not pool[3, 2:].any()


def test_a_layer_that_is_missing_is_named(executor):
    _, pool, program = pair()
    store = executor.begin(program.plan([0], [3]))
    store.submit(6)
    for call in (store.synchronize, store.result, store.wait):
        with pytest.raises(TransferError, match=r"layers 5 7 of Plan\(.*\) were not submitted; call submit\(layer\)"):
            call()
    assert pool[3, 1].all()  # what was submitted has arrived when the error is raised
    store.await_issue()
    assert not store.done()
    store.submit(5)
    with pytest.raises(TransferError, match=r"layer 7 of Plan\(.*\) was not submitted"):
        store.synchronize()


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


def test_a_submit_that_is_refused_may_be_repeated(executor):
    _, _, program = pair()
    store = executor.begin(program.plan([0], [3]))
    with pytest.raises(KVPlanError, match=r"after is a builtins\.int"):
        store.submit(5, after=7)
    for layer in (5, 6, 7):
        store.submit(layer)
    assert store.result().nbytes == 192


def test_cancelling(executor):
    _, pool, program = pair()
    store = executor.begin(program.plan([0], [3]))
    assert store.cancel()
    assert store.cancel()
    assert store.done()
    with pytest.raises(TransferError, match="cancelled before it began"):
        store.submit(5)
    with pytest.raises(TransferError, match="cancelled before it began"):
        store.synchronize()
    assert not pool.any()
    begun = executor.begin(program.plan([0], [3]))
    begun.submit(5)
    assert not begun.cancel()
    begun.submit(6)


def test_several_programs_have_one_end(executor):
    made = [pair(), pair(2)]
    plan = kvplan.join([program.plan([0], [3 + k]) for k, (_, _, program) in enumerate(made)])
    store = executor.begin(plan)
    for layer in plan.layers:
        store.submit(layer)
    assert store.result().nbytes == plan.nbytes
    assert all(pool[3 + k].all() for k, (_, pool, _) in enumerate(made))


def test_warming_up_moves_nothing(executor):
    _, pool, program = pair()
    executor.begin(program.plan([0], [3])).prepare()
    assert not pool.any()
