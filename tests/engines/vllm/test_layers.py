"""Loads by layer, without vLLM and without a GPU: which layer waits for which bytes, how loads fail, and the cost."""

from __future__ import annotations

import timeit
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.engines.vllm.layer_loads import LayerLoads, places_of
from kvplan.engines.vllm.lines import Job, LayerTransfer
from tests.engines.vllm.stand_ins import on_device, on_host, reference, rows_of, torch, two_layers, workers


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

    def _submit(self, loads, whole, beside_seconds):
        self.whole, self.beside_seconds = whole, beside_seconds
        jobs = [
            Job(number, device_spec, [transfer for transfer, _ in self.transfers]) for number, _, device_spec in loads
        ]
        return jobs, [LayerTransfer(transfer, groups, tuple(jobs)) for transfer, groups in self.transfers]

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
    (job,), _ = worker.submit_layers([(4, on_host([1, 2]), on_device([7, 8]))])
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
    _, transfers = worker.submit_layers([(1, source, target)], whole={2})
    assert [one.groups for one in transfers] == ([(2,), (1, 0)] if joined else [(2,), (1,), (0,)])
    worker.wait({1})
    assert worker.get_finished()[0].success
    assert torch.equal(cache[1:5], pool[:4])
    assert torch.equal(cache[5, :64], pool[4, :64])
    assert torch.equal(cache[6:9, 64:], pool[5:8, 64:])
    assert not torch.equal(cache[6:9, :64], pool[5:8, :64])


def test_a_pool_without_a_chunk_refuses_a_load_by_layer(made):
    _, device = rows_of([64], 4)
    worker = made([references(0)], device, [torch.zeros((0, 64), dtype=torch.int8)], 1)
    (job,), transfers = worker.submit_layers([(1, on_host([0]), on_device([0]))])
    assert "no chunk" in job.error
    assert transfers == []


def test_each_wait_of_the_stream_can_be_measured():
    loads = Loads([["a", "b"], ["m"]], [references(0, 1), references(2)], "ab")
    waits = []
    loads.layers._stall = lambda wait: waits.append(wait())
    loads.step("ab", (Asked((0,)), (1,)), (Asked((0,), (1,)), (0,)))
    assert len(waits) == 3  # the states before the model, and two layers


def test_the_loads_of_one_step_share_their_transfers(made):
    """Otherwise the first layer of the last load would arrive behind all layers of the others."""
    worker, cache, pool = two_layers(made)
    pool.copy_(torch.arange(pool.numel()).view(pool.shape) % 100)
    loads = [(1, on_host([5]), on_device([2])), (2, on_host([0, 3]), on_device([9, 4]))]
    jobs, transfers = worker.submit_layers(loads)
    assert [(one.groups, one.jobs) for one in transfers] == [((0,), tuple(jobs))]
    worker.wait({1, 2})
    assert torch.equal(cache[[2, 9, 4]], pool[[5, 0, 3]])
    results = worker.get_finished()
    assert [(one.job_id, one.success, one.transfer_size) for one in results] == [(1, True, 128), (2, True, 256)]
    whole = transfers[0].transfer.result()
    assert whole.nbytes == 384
    assert sum(one.transfer_time for one in results) == pytest.approx(whole.seconds)


def test_the_loads_of_a_step_share_its_compute_by_their_bytes(made):
    _, device = rows_of([64, 64], 16, seed=1)
    _, host = rows_of([64, 64], 16, seed=2)
    worker = made([references(0, 1), references(0)], device, host, 1)
    line = worker._line("expedited load")
    with mock.patch.object(line.executor, "submit", wraps=line.executor.submit) as submit:
        worker.submit_layers([(1, on_host(range(4)), on_device([1, 2, 3, 4], [3, 1]))], {1}, 0.014)
    told = [call.kwargs for call in submit.call_args_list]
    assert [one["by_layer"] for one in told] == [False, True]
    assert [one["beside_seconds"] for one in told] == pytest.approx([0.002, 0.012])
    worker.wait({1})


@pytest.mark.parametrize("hooked", [True, False])
def test_only_a_step_with_hooks_hides_its_loads(hooked):
    loads = Loads([["a", "b"]], [references(0, 1)], "ab")
    loads.layers.begin_forward()
    loads.layers.load([(1, None, None)], hooked=hooked, beside_seconds=0.5)
    assert loads.beside_seconds == (0.5 if hooked else None)


def test_of_several_loads_only_the_wrong_one_fails(made):
    worker, cache, pool = two_layers(made)
    worker.keep_failures()
    pool.fill_(3)
    loads = [(1, on_host([5]), on_device([2])), (2, on_host([99]), on_device([9])), (3, on_host([1]), on_device([7]))]
    jobs, transfers = worker.submit_layers(loads)
    assert [bool(job.error) for job in jobs] == [False, True, False]
    assert [one.jobs for one in transfers] == [(jobs[0],), (jobs[2],)]
    worker.wait({1, 2, 3})
    assert (cache[[2, 7]] == 3).all()
    assert [one.job_id for one in worker.get_finished()] == [1, 3]
    assert worker.take_failures() == [(2, (9,))]


def test_a_shared_transfer_that_fails_fails_all_of_its_loads():
    loads = Loads([["a", "b"]], [references(0, 1)], "ab")
    loads.transfers = [(Asked((0,), (1,), error=kvplan.TransferError("the link is gone")), (0,))]
    loads.layers.begin_forward()
    loads.layers.load([(1, None, None), (2, None, None)], hooked=True)
    loads.layers.wait_layer("a")
    loads.layers.leave_forward()
    loads.layers.settle()
    assert [(job.job_id, job.error) for job in loads.failed] == [
        (1, "TransferError: the link is gone"), (2, "TransferError: the link is gone"),
    ]  # fmt: skip


@st.composite
def steps(draw):
    """Loads of one step: blocks per chunk, and for each load and each of two groups (first block, number of blocks)."""
    per_chunk = draw(st.integers(1, 3))
    whole = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda one: (one[0] * per_chunk, one[1] * per_chunk))
    group = whole | st.tuples(st.integers(0, 4), st.integers(0, 4))
    return per_chunk, draw(st.lists(st.tuples(group, group), min_size=1, max_size=4))


@given(steps(), st.sampled_from([100, 0]), st.sets(st.integers(0, 1)))
def test_loads_of_one_step_move_what_each_moves_alone(step, joined, whole):
    per_chunk, loads = step
    sizes = [64, 32]
    rng = np.random.default_rng(len(loads))
    blocks, chunks = iter(rng.permutation(64).tolist()), iter(rng.permutation(64).tolist())
    asked = []
    for number, groups in enumerate(loads):
        device = [next(blocks) for _, count in groups for _ in range(count)]
        held = [
            next(chunks)
            for first, count in groups
            if count
            for _ in range(-(-(first % per_chunk + count) // per_chunk))
        ]
        target = on_device(device, [count for _, count in groups], [first for first, _ in groups])
        asked.append((number, on_host(held), target))
    moved = []
    with workers() as make, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvplan.engines.vllm.jobs.JOINED_BLOCKS", joined)
        for parts in ([asked], [[one] for one in asked]):
            cache, device = rows_of(sizes, 64, seed=1)
            _, host = rows_of([size * per_chunk for size in sizes], 64, seed=2)
            worker = make([references(0), [reference(1, 32)]], device, host, per_chunk)
            for part in parts:
                worker.submit_layers(part, whole)
            worker.wait(range(len(asked)))
            done = [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()]
            moved.append((cache, done))
    expected = [(number, True, sum(count * size for (_, count), size in zip(groups, sizes, strict=True)))
                for number, groups in enumerate(loads)]  # fmt: skip
    assert [done for _, done in moved] == [expected, expected]
    assert torch.equal(moved[0][0], moved[1][0])


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
