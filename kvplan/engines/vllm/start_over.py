"""Requests whose loads failed in the step that used them start over in vLLM's scheduler.

vLLM 0.33.0 sets such a request back to its first lost block, while it stays in the batch. Three things go wrong then:
a step that was scheduled ahead adds a token that it computed from the lost bytes, the newer model runner goes on from
the old position, and a model with several KV-cache groups ends the engine. Here, the request is preempted instead, as
vLLM does when its blocks run out: all of its tokens in flight are dropped, and it computes its whole prompt anew.

Source: vLLM 0.33.0, ``v1/core/sched/scheduler.py`` (``_handle_invalid_blocks``, ``_preempt_request``,
``_free_request_blocks``, ``_handle_failed_recving``, ``reset_prefix_cache``); vLLM #49250.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

NULL_BLOCK = 0  # vLLM's block for what is not kept; all requests share it
logger = logging.getLogger("kvplan.engines.vllm")


class Freed(NamedTuple):
    """Blocks that a request gave back while a step with it was in flight.

    Attributes:
        request: vLLM's request.
        groups: its blocks, for each KV-cache group.
        steps: number of steps that had been scheduled.
    """

    request: Any
    groups: Sequence[Sequence[int]]
    steps: int


_freed: weakref.WeakKeyDictionary[Any, list[Freed]] = weakref.WeakKeyDictionary()  # by scheduler


def install(scheduler_class: type[Any], connector_class: type[Any]) -> None:
    """Let schedulers of a class handle failed loads of a connector by :func:`handle`; others go on as before.

    Args:
        scheduler_class: vLLM's ``Scheduler``.
        connector_class: class of the connectors that report such loads.
    """
    given, free = scheduler_class._handle_invalid_blocks, scheduler_class._free_request_blocks
    if hasattr(given, "of_kvplan"):
        return

    def serves(scheduler: Any) -> bool:
        parts = getattr(scheduler.connector, "_connectors", (scheduler.connector,))  # of vLLM's MultiConnector
        return any(isinstance(part, connector_class) for part in parts)

    @functools.wraps(given)
    def handle_invalid_blocks(scheduler: Any, blocks: set[int], counts: Mapping[str, int]) -> set[str]:
        if serves(scheduler):
            return handle(scheduler, blocks)
        lost: set[str] = given(scheduler, blocks, counts)
        return lost

    @functools.wraps(free)
    def free_request_blocks(scheduler: Any, request: Any) -> Any:
        if request.num_in_flight_tokens and serves(scheduler):
            note_freed(scheduler, request)
        return free(scheduler, request)

    handle_invalid_blocks.of_kvplan = True  # type: ignore[attr-defined]
    scheduler_class._handle_invalid_blocks = handle_invalid_blocks
    scheduler_class._free_request_blocks = free_request_blocks


def note_freed(scheduler: Any, request: Any) -> None:
    """Note the blocks of a request that ends, or is preempted, while a step with it is in flight.

    If the loads of that step fail, what it computed from them must not stay in the cache of prefixes.
    """
    groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    _freed[scheduler] = [*_in_flight(scheduler), Freed(request, groups, scheduler.num_executed_steps)]


def handle(scheduler: Any, blocks: Collection[int]) -> set[str]:
    """Take requests that hold lost blocks out of the batch, and their blocks out of the cache of prefixes.

    With vLLM's policy "recompute" they go back to the queue. They read no cache any more, so that a load that fails
    again and again cannot hold them up. With "fail", vLLM ends them with an error. A request that shares lost blocks
    while it waits for other bytes is treated as if those had failed, too.

    Args:
        scheduler: vLLM's scheduler, before it reads the output of the step.
        blocks: numbers of the lost blocks.

    Returns:
        The names of these requests: the scheduler ignores their tokens of this step.
    """
    wrong = set(blocks) - {NULL_BLOCK}
    sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
    again, evict = scheduler.recompute_kv_load_failures, scheduler.kv_cache_manager.evict_blocks
    spoiled = {
        name: found
        for name in scheduler.requests
        if (found := _spoiled(scheduler.kv_cache_manager.get_block_ids(name), sizes, wrong))
    }
    evict(wrong.union(*spoiled.values()))
    for request, groups, _ in _in_flight(scheduler):
        if found := _spoiled(groups, sizes, wrong):
            evict(found)
            request.drop_stale_output = True  # of a request that vLLM has preempted
    lost = [request for request in scheduler.running if request.request_id in spoiled]
    names = {request.request_id for request in lost}
    waiting = [
        request for request in scheduler.kv_holding_waiting
        if request.request_id in spoiled and request.status.name == "WAITING_FOR_REMOTE_KVS"
    ]  # fmt: skip
    told = sorted(request.request_id for request in [*lost, *waiting])
    if told:
        logger.warning("loads failed; %s %s", "these requests start over:" if again else "these requests fail:",
                       ", ".join(told))  # fmt: skip
    if not again:
        return set(told)
    for request in waiting:  # vLLM frees its blocks when the other bytes have come
        request.skip_reading_prefix_cache = True
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request.request_id)
    for request in reversed(lost):  # the last one goes back to the queue first
        request.skip_reading_prefix_cache = True
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.running = [request for request in scheduler.running if request.request_id not in names]
    # They may run again in the next step, as if they had not been in the last one.
    scheduler.prev_step_scheduled_req_ids.difference_update(names)
    return names


def _in_flight(scheduler: Any) -> list[Freed]:
    """Return the noted blocks that steps in flight may have written."""
    steps = scheduler.num_executed_steps - scheduler.vllm_config.max_concurrent_batches
    return [one for one in _freed.get(scheduler, ()) if one.steps > steps]


def _spoiled(groups: Sequence[Sequence[int]], sizes: Sequence[int], wrong: set[int]) -> set[int]:
    """Return the lost blocks of a request, and those after them in every group, which were computed from them.

    Args:
        groups: the request's blocks, for each KV-cache group.
        sizes: tokens of a block, for each group.
        wrong: numbers of the lost blocks.

    >>> sorted(_spoiled([[3, 4, 5, 6], [7, 8]], [16, 32], {5}))
    [5, 6, 8]
    """
    pairs = list(zip(groups, sizes, strict=True))
    first = min((k * size for group, size in pairs for k, block in enumerate(group) if block in wrong), default=None)
    return set() if first is None else {block for group, size in pairs for block in group[first // size :]}
