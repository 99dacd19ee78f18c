"""The ranks of prefill that write the heads of a rank of decode, as SGLang numbers them in its staging ring.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py`` (``compute_head_slice_params``).
"""

from __future__ import annotations

from typing import NamedTuple

from kvplan.errors import KVPlanError


class Writer(NamedTuple):
    """The heads that one rank of prefill writes for a rank of decode, which SGLang numbers in that rank's pool.

    Attributes:
        place: which part of the ring's region is its own.
        head: the first of the heads in the pool of decode.
        heads: number of heads.
    """

    place: int
    head: int
    heads: int


def writers_of(prefill_tp: int, decode_tp: int, total_heads: int) -> tuple[list[Writer], int]:
    """Return the writers of any rank of decode, and the number of parts of its region in the ring.

    Ranks of prefill that replicate a head all write it. One of them is taken.

    Args:
        prefill_tp, decode_tp: ranks over which attention is split.
        total_heads: KV heads of the model.

    Raises:
        KVPlanError: neither number of ranks divides the other, so that SGLang connects ranks which do not hold all
            heads; or the writers lack a head.

    >>> writers_of(4, 2, 8)
    ([Writer(place=0, head=0, heads=2), Writer(place=1, head=2, heads=2)], 2)
    >>> writers_of(8, 2, 4)[0]  # heads are replicated twice
    [Writer(place=0, head=0, heads=1), Writer(place=2, head=1, heads=1)]
    >>> writers_of(2, 8, 8)
    ([Writer(place=0, head=0, heads=1)], 1)
    """
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        raise KVPlanError(
            f"prefill has {prefill_tp} ranks and decode {decode_tp}; SGLang connects them only if one number divides "
            "the other"
        )
    held = max(1, total_heads // decode_tp)
    if prefill_tp <= decode_tp:
        return [Writer(0, 0, held)], 1
    count, each = prefill_tp // decode_tp, max(1, total_heads // prefill_tp)
    replicas = max(1, prefill_tp // total_heads)
    first: dict[int, Writer] = {}
    for place in range(count):
        head = place // replicas * each % held
        first.setdefault(head, Writer(place, head, each))
    missing = set(range(held)) - {head + more for head in first for more in range(each)}
    if missing:
        raise KVPlanError(
            f"{total_heads} heads over {prefill_tp} ranks of prefill and {decode_tp} of decode: no rank of prefill "
            f"writes head {min(missing)} of a rank of decode; give numbers of ranks that divide the heads"
        )
    return list(first.values()), count
