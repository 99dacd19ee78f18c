"""What adapters share: the engine's stream, warm-up while it starts, and blocks from its lists of token slots."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvplan.cuda.handles import current_stream as current_handle
from kvplan.errors import BlockIndexError
from kvplan.execute.executor import Executor
from kvplan.layout.strides import Int64Array
from kvplan.plan.placement import own_block_ids
from kvplan.ranks.groups import Plans

logger = logging.getLogger("kvplan.engines")


class Stream(NamedTuple):
    """The handle of a stream; an executor needs no more, and a ``torch.cuda.Stream`` takes microseconds to make."""

    cuda_stream: int


def current_stream(device: str) -> Stream | None:
    """Return torch's current stream on a device such as ``"cuda:0"``; None on the CPU, which has no streams.

    >>> current_stream("cpu") is None
    True
    """
    handle = None if device == "cpu" else current_handle(int(device.removeprefix("cuda:")))
    return None if handle is None else Stream(handle)


def prepare(executor: Executor, programs: Iterable[Plans] = (), *, by_layer: bool = False) -> None:
    """Warm up an executor for transfers of these programs; log a failure, because the engine must start in any case.

    A plan that is refused here is refused again at its transfer; there the engine can continue without it. If a
    compiler fails here, it is possible that no transfer needs it.
    """
    for program in (None, *programs):
        try:
            plan = None if program is None else program.plan([0], [0])
            executor.prepare(plan, by_layer=by_layer)
        except Exception as error:  # the engine starts in any case
            what = "loops" if program is None else program
            logger.warning("%r: transfers will be refused, or the first one will wait: %s: %s", what,
                           type(error).__name__, error)  # fmt: skip


def slot_array(slots: Any, name: str) -> Int64Array:
    """Return slots as an int64 array. A GPU tensor is copied to the CPU, after the work that computes it.

    Args:
        slots: slot numbers: int sequence, numpy array, or torch tensor on any device.
        name: name of the list in error messages.

    Raises:
        BlockIndexError: slots are not one-dimensional, not integers, or negative (an engine's mark for no slot).

    >>> slot_array([8, 9, 10, 11], "slot_mapping")
    array([ 8,  9, 10, 11])
    """
    made = own_block_ids(slots.detach().cpu() if hasattr(slots, "detach") else slots, name)
    if made.size and made.min() < 0:
        at = int(made.argmin())
        raise BlockIndexError(f"{name}[{at}] is {int(made[at])}; give slots of the pool, from 0")
    return made


def blocks_of(slots: Int64Array, tokens: int) -> Int64Array | None:
    """Return the blocks that slots fill. Return None if a block is not whole, or its slots are not in order.

    Args:
        slots: slot numbers, block after block.
        tokens: slots per block.

    >>> import numpy as np
    >>> blocks_of(np.array([8, 9, 10, 11, 0, 1, 2, 3]), 4)
    array([2, 0])
    >>> blocks_of(np.array([8, 9, 10, 12]), 4), blocks_of(np.array([8, 9]), 4)
    (None, None)
    """
    if slots.size % tokens or first_stray(slots, tokens) is not None:
        return None
    return slots[::tokens] // tokens


def first_stray(slots: Int64Array, tokens: int) -> int | None:
    """Return the index of the first slot that is not at its place in a block; None if all are.

    >>> import numpy as np
    >>> first_stray(np.array([8, 9, 10, 12]), 4), first_stray(np.array([8, 9, 10, 11, 0, 1]), 4)
    (3, None)
    """
    within = np.arange(slots.size, dtype=np.int64) % tokens
    stray = np.flatnonzero(slots != slots[np.arange(slots.size) - within] // tokens * tokens + within)
    return int(stray[0]) if stray.size else None
