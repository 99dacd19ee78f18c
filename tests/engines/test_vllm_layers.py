"""Loads by layer, without vLLM and without a GPU: which layer waits for which bytes, how loads fail, and the cost."""

from __future__ import annotations

import timeit
from types import SimpleNamespace

import pytest

import kvplan
from kvplan.engines.vllm.layer_loads import LayerLoads, places_of
from kvplan.engines.vllm.lines import Job
from tests.engines.vllm_stand_ins import on_device, on_host, reference, rows_of, torch, two_layers, workers


@pytest.fixture
def made():
    """Makes workers, and shuts them down."""
    with workers() as make:
        yield make


class Asked:
    """A transfer that notes which layers were awaited; None stands for all."""

    def __init__(self, *groups, error=None):
        self.layer_groups, self.waits, self.error = groups, [], error

    def wait_layer(self, layer, stream):
        self._wait(layer)

    def wait(self, stream):
        self._wait(None)

    def _wait(self, layer):
        if self.error is not None:
            raise self.error
        self.waits.append(layer)

    def await_issue(self):
        if self.error is not None:
            raise self.error


class Loads:
    """Layer loads over transfers that are given."""

    def __init__(self, layer_names, references, hooked, caches=None):
        self.whole, self.failed, self.transfers = None, [], []
        worker = SimpleNamespace(device="cpu", submit_layers=self._submit, give_up=self.failed.append)
        self.layers = LayerLoads(worker, places_of(layer_names, references, caches))
        self.step(hooked)

    def _submit(self, number, host_spec, device_spec, whole):
        self.whole = whole
        transfers, groups = zip(*self.transfers, strict=True)
        return Job(number, device_spec, list(transfers), list(groups))

    def step(self, hooks, *transfers, hooked=True, late=()):
        """A step; returns, for each hook, the layers that were awaited until then."""
        self.transfers, found = transfers, []
        self.layers.begin_forward()
        if transfers:
            self.layers.load([(1, None, None)], hooked=hooked)
            found.append([list(transfer.waits) for transfer, _ in transfers])
        for name in hooks:
            if self.layers.waiting:
                self.layers.wait_layer(name)
            found.append([list(transfer.waits) for transfer, _ in transfers])
        self.layers.leave_forward()
        found.append([list(transfer.waits) for transfer, _ in transfers])
        for name in late:
            if self.layers.waiting:
                self.layers.wait_layer(name)
        self.layers.settle()
        return found


def references(*tensors):
    return [reference(tensor, 64) for tensor in tensors]


def test_a_hook_waits_for_its_own_group_of_layers():
    loads = Loads([["a", "b", "c", "d"]], [references(0, 1, 2, 3)], "abcd")
    transfer = Asked((0, 1), (2, 3))
    assert loads.step("abcd", (transfer, (0,))) == [[[]], [[0]], [[0]], [[0, 2]], [[0, 2]], [[0, 2]]]
    assert loads.whole == frozenset()


def test_a_skipped_layer_leaves_no_group_out():
    """Groups arrive in order: behind the group of layer c, those of a and b have arrived."""
    loads = Loads([["a", "b", "c"]], [references(0, 1, 2)], "abc")
    assert loads.step("c", (Asked((0,), (1,), (2,)), (0,)))[1] == [[2]]
    assert loads.step("b", (Asked((0,), (1,), (2,)), (0,)))[1:] == [[[1]], [[1, None]]]


def test_the_order_of_execution_need_not_be_that_of_the_numbers():
    loads = Loads([["a", "b", "c"]], [references(0, 1, 2)], "cab")
    assert loads.step("cab", (Asked((0,), (1,), (2,)), (0,)))[1:4] == [[[2]]] * 3


def test_layers_that_share_a_tensor_wait_for_it():
    loads = Loads([["a", "b", "c"]], [references(0, 1, 0)], "cb")
    transfer = Asked((0,), (1,))
    assert loads.step("cb", (transfer, (0,)))[1:3] == [[[0]], [[0, 1]]]


def test_a_layer_without_a_cache_of_its_own_waits_like_its_target():
    rows = torch.zeros(2, 64)
    caches = {"a": rows[0], "b": rows[1], "reader": rows[0]}
    loads = Loads([["a", "b"]], [references(0, 1)], ["reader", "a", "b"], caches)
    assert loads.step(["reader", "b"], (Asked((0,), (1,)), (0,)))[1:3] == [[[0]], [[0, 1]]]


def test_a_layer_that_is_not_known_waits_for_everything():
    loads = Loads([["a", "b"]], [references(0, 1)], "ab")
    assert loads.step("xab", (Asked((0,), (1,)), (0,)))[1] == [[1]]
    assert loads.step("xab", (Asked((0,), (1,)), (0,)))[1] == [[]]  # now it is known, and has no cache that is loaded


def test_packed_layers_wait_whole_at_the_first():
    loads = Loads([["a", "b"], ["c"]], [references(0), references(0)], "abc")
    assert places_of([["a", "b"]], [references(0)])["a"][0].layer is None
    assert loads.step("cab", (Asked((0,)), (1,)))[1] == [[0]]
    assert loads.whole == {0}


def test_groups_without_hooks_are_awaited_before_the_model():
    """Layers of linear attention read their states without a hook."""
    loads = Loads([["a", "b"], ["m"]], [references(0, 1), references(2)], "ab")
    states, pages = Asked((0,)), Asked((0,), (1,))
    waits = loads.step("ab", (states, (1,)), (pages, (0,)))
    assert waits[:3] == [[[None], []], [[None], [0]], [[None], [0, 1]]]
    assert loads.whole == {1}


def test_a_hook_of_one_group_does_not_wait_for_the_transfer_of_another():
    loads = Loads([["a", "c"], ["b", "d"]], [references(0, 1), references(0, 1)], "abcd")
    first, second = Asked((0,), (1,)), Asked((0,), (1,))
    waits = loads.step("abcd", (first, (1,)), (second, (0,)))
    assert waits[1:5] == [[[], [0]], [[0], [0]], [[0], [0, 1]], [[0, 1], [0, 1]]]


def test_the_layers_of_a_draft_model_are_awaited_at_the_end_of_the_forward_pass():
    loads = Loads([["a", "b", "draft"]], [references(0, 1, 2)], ())
    loads.step("ab", late=["draft"])
    assert loads.step("ab", (Asked((0,), (1,), (2,)), (0,)))[1:] == [[[0]], [[0, 1]], [[0, 1, None]]]


def test_before_a_hook_was_seen_everything_is_awaited_before_the_model():
    loads = Loads([["a", "b"]], [references(0, 1)], ())
    assert loads.step("ab", (Asked((0, 1)), (0,)))[0] == [[None]]
    assert loads.step("ab", (Asked((0,), (1,)), (0,)))[0] == [[]]


def test_a_step_without_hooks_waits_for_everything_first():
    loads = Loads([["a", "b"]], [references(0, 1)], "ab")
    assert loads.step("", (Asked((0, 1)), (0,)), hooked=False) == [[[None]], [[None]]]
    assert loads.whole == {0}
    assert loads.failed == []


def test_a_wait_that_raises_fails_its_job_alone():
    loads = Loads([["a", "b"]], [references(0, 1)], "ab")
    good = Asked((0,), (1,))
    broken = Asked((0,), (1,), error=kvplan.TransferError("the link is gone"))
    assert loads.step("ab", (broken, (0,)), (good, (0,)))[-1] == [[], [0, 1]]
    (job,) = loads.failed
    assert job.error == "TransferError: the link is gone"


# ---- with a worker ----


def test_a_job_that_cannot_be_planned_is_told_in_its_step(made, caplog):
    worker, cache, pool = two_layers(made)
    worker.keep_failures()
    pool.fill_(3)
    layers = LayerLoads(worker, places_of([["a", "b"]], worker.groups))
    layers.begin_forward()
    layers.load([(1, on_host([77]), on_device([3])), (2, on_host([1]), on_device([4]))], hooked=True)
    layers.wait_layer("a")
    layers.leave_forward()
    layers.settle()
    assert worker.take_failures() == [(1, (3,))]
    assert "expedited load job 1 failed: BlockIndexError: group 0: src_blocks[0] is 77" in caplog.text
    assert (cache[4] == 3).all()
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [(2, True)]
    worker.wait({1, 2})


def test_a_flush_waits_for_a_load_of_a_step(made):
    """Preempted and aborted requests: vLLM waits for their jobs by number."""
    worker, cache, pool = two_layers(made)
    pool.fill_(5)
    job = worker.submit_layers(4, on_host([1, 2]), on_device([7, 8]))
    worker.wait({4})
    assert job.done()
    assert (cache[[7, 8]] == 5).all()
    assert [result.job_id for result in worker.get_finished()] == [4]


@pytest.mark.parametrize("joined", [100, 0])
def test_groups_are_planned_whole_first_then_by_their_blocks(made, monkeypatch, joined):
    from kvplan.engines.vllm import jobs

    monkeypatch.setattr(jobs, "JOINED_BLOCKS", joined)
    cache, device = rows_of([64, 64], 16, seed=1)
    pool, host = rows_of([64, 64], 16, seed=2)
    groups = [references(0, 1), references(0), references(1), references(0)]
    worker = made(groups, device, host, 1)
    source, target = on_host(range(8)), on_device([1, 2, 3, 4, 5, 6, 7, 8], [4, 1, 3, 0])
    job = worker.submit_layers(1, source, target, whole={2})
    assert job.groups == ([(2,), (1, 0)] if joined else [(2,), (1,), (0,)])
    worker.wait({1})
    assert worker.get_finished()[0].success
    assert torch.equal(cache[1:5], pool[:4])
    assert torch.equal(cache[5, :64], pool[4, :64])
    assert torch.equal(cache[6:9, 64:], pool[5:8, 64:])
    assert not torch.equal(cache[6:9, :64], pool[5:8, :64])


def test_a_pool_without_a_chunk_refuses_a_load_by_layer(made):
    _, device = rows_of([64], 4)
    worker = made([references(0)], device, [torch.zeros((0, 64), dtype=torch.int8)], 1)
    assert "no chunk" in worker.submit_layers(1, on_host([0]), on_device([0])).error


# ---- costs ----


def best_us(call):
    return 1e6 * min(timeit.repeat(call, number=1000, repeat=20)) / 1000


def test_hooks_and_idle_steps_cost_little(made):
    """Limits are five times what was measured, since other tests run beside this one."""
    worker, *_ = two_layers(made)
    assert best_us(worker.get_finished) < 5
    loads = Loads([["a", "b"]], [references(0, 1)], "ab")
    loads.layers.begin_forward()
    loads.transfers = [(Asked((0,), (1,)), (0,))]
    loads.layers.load([(1, None, None)], hooked=True)
    loads.layers.wait_layer("a")
    assert best_us(lambda: loads.layers.wait_layer("a")) < 5
