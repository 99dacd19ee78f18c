"""What vLLM's scheduler does with requests whose loads failed in the step that used them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvplan.engines.vllm import start_over


class Connector:
    """Ours."""


class Request:
    """A request of vLLM's scheduler."""

    def __init__(self, name, groups, status="RUNNING", in_flight=0):
        self.request_id, self.groups, self.status = name, groups, SimpleNamespace(name=status)
        self.num_in_flight_tokens, self.num_computed_tokens = in_flight, 100
        self.skip_reading_prefix_cache = self.drop_stale_output = False


def scheduler_class():
    class Scheduler:
        """As much of vLLM's scheduler as is used."""

        recompute_kv_load_failures = True

        def __init__(self, *requests, sizes=(16,), connector=None, batches=1):
            self.requests = {request.request_id: request for request in requests}
            self.running = [request for request in requests if request.status.name == "RUNNING"]
            self.kv_holding_waiting = [one for one in requests if one.status.name == "WAITING_FOR_REMOTE_KVS"]
            self.failed_recving_kv_req_ids, self.prev_step_scheduled_req_ids = set(), set(self.requests)
            self.connector = connector or Connector()
            self.num_executed_steps, self.vllm_config = 7, SimpleNamespace(max_concurrent_batches=batches)
            self.evicted, self.queue, self.by_vllm = set(), [], []
            groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
            self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
            self.kv_cache_manager = SimpleNamespace(
                get_block_ids=lambda name: self.requests[name].groups, evict_blocks=self.evicted.update
            )

        def _handle_invalid_blocks(self, blocks, counts):
            self.by_vllm.append((blocks, counts))
            return {"vllm's"}

        def _free_request_blocks(self, request):
            request.groups = tuple([] for _ in request.groups)

        def _preempt_request(self, request, timestamp, drop_stale_output=False):
            assert timestamp > 0
            request.drop_stale_output, request.num_computed_tokens = drop_stale_output, 0
            self._free_request_blocks(request)
            self.queue.insert(0, request.request_id)

        def end(self, name):
            self._free_request_blocks(self.requests[name])
            self.running.remove(self.requests.pop(name))

    start_over.install(Scheduler, Connector)
    return Scheduler


@pytest.fixture
def scheduler():
    return scheduler_class()


def test_requests_that_share_lost_blocks_go_back_in_their_order(scheduler):
    first, second = Request("first", ([1, 2, 3],)), Request("second", ([1, 2, 4, 5],))
    other = Request("other", ([1, 6],))
    held = scheduler(first, other, second)
    assert held._handle_invalid_blocks({2}, {}) == {"first", "second"}
    assert held.queue == ["first", "second"]
    assert held.running == [other]
    assert held.evicted == {2, 3, 4, 5}
    assert held.prev_step_scheduled_req_ids == {"other"}
    assert first.drop_stale_output
    assert second.skip_reading_prefix_cache
    assert not other.skip_reading_prefix_cache


def test_a_request_that_shares_lost_blocks_while_it_waits_for_others_starts_over_too(scheduler):
    """Its own bytes come from the host between the steps, and it would go on behind a prefix that is garbage."""
    first, waiting = Request("first", ([1, 2],)), Request("waiting", ([1, 2, 3],), "WAITING_FOR_REMOTE_KVS")
    held = scheduler(first, waiting)
    assert held._handle_invalid_blocks({2}, {}) == {"first"}
    assert held.failed_recving_kv_req_ids == {"waiting"}
    assert waiting.num_computed_tokens == 0
    assert waiting.skip_reading_prefix_cache
    assert held.queue == ["first"]  # vLLM frees the blocks of the other when its bytes have come


def test_with_vllms_policy_to_fail_all_of_them_end(scheduler):
    first, waiting = Request("first", ([1, 2],)), Request("waiting", ([1, 2, 3],), "WAITING_FOR_REMOTE_KVS")
    held = scheduler(first, waiting)
    held.recompute_kv_load_failures = False
    assert held._handle_invalid_blocks({2}, {}) == {"first", "waiting"}
    assert held.queue == []
    assert held.running == [first]
    assert held.evicted == {2, 3}
    assert not held.failed_recving_kv_req_ids


def test_what_an_aborted_request_computed_from_lost_blocks_leaves_the_cache(scheduler):
    """A client that disconnects in the step of the load: its blocks are free, and still in the cache of prefixes."""
    aborted, other = Request("aborted", ([1, 2, 3, 4],), in_flight=30), Request("other", ([7],), in_flight=1)
    held = scheduler(aborted, other)
    held.end("aborted")
    assert held._handle_invalid_blocks({2}, {}) == set()
    assert held.evicted == {2, 3, 4}


def test_a_preempted_request_whose_step_is_in_flight_loses_its_tokens(scheduler):
    request = Request("preempted", ([1, 2, 3],), in_flight=30)
    held = scheduler(request, batches=2)
    held._preempt_request(held.running.pop(), 1.0)
    held.num_executed_steps += 1
    assert not request.drop_stale_output
    held._handle_invalid_blocks({2}, {})
    assert request.drop_stale_output
    assert held.evicted == {2, 3}


def test_every_group_loses_what_was_computed_behind_a_lost_block(scheduler):
    request = Request("of two groups", ([1, 2, 3, 4], [0, 6]))
    held = scheduler(request, sizes=(16, 32))
    assert held._handle_invalid_blocks({3, 0}, {}) == {"of two groups"}
    assert held.evicted == {3, 4, 6}


def test_vllms_null_block_is_not_lost(scheduler):
    held = scheduler(Request("of a window", ([0, 0, 5],)))
    assert held._handle_invalid_blocks({0, 9}, {}) == set()
    assert held.evicted == {9}


def test_another_connector_keeps_vllms_way(scheduler):
    held = scheduler(Request("theirs", ([1, 2],), in_flight=3), connector=SimpleNamespace())
    assert held._handle_invalid_blocks({2}, {"theirs": 3}) == {"vllm's"}


def test_ours_among_several_connectors_is_found(scheduler):
    held = scheduler(
        Request("first", ([1, 2],)), connector=SimpleNamespace(_connectors=[SimpleNamespace(), Connector()])
    )
    assert held._handle_invalid_blocks({2}, {}) == {"first"}
    assert not held.by_vllm
