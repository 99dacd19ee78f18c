"""Requests whose loads failed in the step that used them start over in vLLM's scheduler.

vLLM 0.33.0 sets such a request back to its first lost block, while it stays in the batch. Three things go wrong then:
a step that was scheduled ahead adds a token that it computed from the lost bytes, the newer model runner goes on from
the old position, and a model with several KV-cache groups ends the engine. Here, the request is preempted instead, as
vLLM does when its blocks run out: all of its tokens in flight are dropped, and it computes its whole prompt anew.

Source: vLLM 0.33.0, ``v1/core/sched/scheduler.py`` (``_handle_invalid_blocks``, ``_preempt_request``,
``reset_prefix_cache``); vLLM #49250.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

logger = logging.getLogger("kvplan.engines.vllm")


def install(scheduler_class: type[Any], connector_class: type[Any]) -> None:
    """Let schedulers of a class handle failed loads of a connector by :func:`handle`; others go on as before.

    Args:
        scheduler_class: vLLM's ``Scheduler``.
        connector_class: class of the connectors that report such loads.
    """
    given = scheduler_class._handle_invalid_blocks
    if hasattr(given, "__wrapped__"):
        return

    @functools.wraps(given)
    def handle_invalid_blocks(scheduler: Any, blocks: set[int], counts: Mapping[str, int]) -> set[str]:
        parts = getattr(scheduler.connector, "_connectors", (scheduler.connector,))  # of vLLM's MultiConnector
        if any(isinstance(part, connector_class) for part in parts):
            return handle(scheduler, blocks)
        lost: set[str] = given(scheduler, blocks, counts)
        return lost

    scheduler_class._handle_invalid_blocks = handle_invalid_blocks


def handle(scheduler: Any, blocks: Collection[int]) -> set[str]:
    """Take requests that hold lost blocks out of the batch, and their blocks out of the cache of prefixes.

    With vLLM's policy "recompute" they go back to the queue. They read no cache any more, so that a load that fails
    again and again cannot hold them up. With "fail", vLLM ends them with an error.

    Args:
        scheduler: vLLM's scheduler, before it reads the output of the step.
        blocks: numbers of the lost blocks.

    Returns:
        The names of these requests: the scheduler ignores their tokens of this step.
    """
    lost = [request for request in scheduler.running if _spoiled(scheduler, request, blocks)]
    again = scheduler.recompute_kv_load_failures
    names = {request.request_id for request in lost}
    scheduler.kv_cache_manager.evict_blocks(set(blocks))
    for request in reversed(lost):  # the last one goes back to the queue first
        scheduler.kv_cache_manager.evict_blocks(_spoiled(scheduler, request, blocks))
        if again:
            request.skip_reading_prefix_cache = True
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    if again:
        scheduler.running = [request for request in scheduler.running if request.request_id not in names]
        # They may run again in the next step, as if they had not been in the last one.
        scheduler.prev_step_scheduled_req_ids.difference_update(names)
    if lost:
        logger.warning("loads failed; %s %s", "these requests start over:" if again else "these requests fail:",
                       ", ".join(sorted(names)))  # fmt: skip
    return names


def _spoiled(scheduler: Any, request: Any, blocks: Collection[int]) -> set[int]:
    """Return the lost blocks of a request, and those after them, which were computed from them."""
    found: set[int] = set()
    for group in scheduler.kv_cache_manager.get_block_ids(request.request_id):
        first = next((k for k, block in enumerate(group) if block in blocks), len(group))
        found.update(group[first:])
    return found
