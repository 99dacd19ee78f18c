"""The heads that ranks of prefill and of decode share, and their order in SGLang's staging ring.

Source: SGLang 0.5.23, ``srt/disaggregation/common/staging_buffer.py`` (``compute_head_slice_params``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvplan.errors import KVPlanError, OverlapError


class Heads(NamedTuple):
    """Consecutive KV heads of a rank's pool.

    Attributes:
        first: the first of them, counted in that pool.
        many: number of heads.
    """

    first: int
    many: int


def written_heads(prefill_tp: int, decode_tp: int, total_heads: int) -> list[Heads]:
    """Return the heads of a decode rank that each of its writers sends, in the order of SGLang's ring.

    Ranks of prefill that replicate heads send equal ones.

    Args:
        prefill_tp, decode_tp: ranks over which attention is split.
        total_heads: KV heads of the model.

    Raises:
        KVPlanError: neither number of ranks divides the other, so that SGLang connects ranks which do not hold all
            heads; or the writers lack a head.

    >>> written_heads(4, 2, 8)
    [Heads(first=0, many=2), Heads(first=2, many=2)]
    >>> written_heads(8, 2, 4)  # heads are replicated twice
    [Heads(first=0, many=1), Heads(first=0, many=1), Heads(first=1, many=1), Heads(first=1, many=1)]
    >>> written_heads(2, 8, 8)
    [Heads(first=0, many=1)]
    """
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        raise KVPlanError(
            f"prefill has {prefill_tp} ranks and decode {decode_tp}; SGLang connects them only if one number divides "
            "the other"
        )
    held = max(1, total_heads // decode_tp)
    if prefill_tp <= decode_tp:
        return [Heads(0, held)]
    each, replicas = max(1, total_heads // prefill_tp), max(1, prefill_tp // total_heads)
    made = [Heads(part // replicas * each % held, each) for part in range(prefill_tp // decode_tp)]
    missing = set(range(held)) - {head for first, many in made for head in range(first, first + many)}
    if missing:
        raise KVPlanError(
            f"{total_heads} heads over {prefill_tp} ranks of prefill and {decode_tp} of decode: no rank of prefill "
            f"writes head {min(missing)} of a rank of decode; give numbers of ranks that divide the heads"
        )
    return made


def shared_heads(
    prefill_tp: int, prefill_rank: int, decode_tp: int, decode_rank: int, total_heads: int
) -> tuple[Heads, Heads] | None:
    """Return the heads that two ranks share, in the pool of each; None if they share none. Any numbers of ranks go.

    Args:
        prefill_tp, prefill_rank, decode_tp, decode_rank: numbers of ranks, and one rank of each side.
        total_heads: KV heads of the model; a multiple of both numbers of ranks, or a divisor.

    Raises:
        KVPlanError: the heads cannot be split over so many ranks.

    >>> shared_heads(4, 0, 6, 1, 12)  # heads 0 to 2, and heads 2 and 3
    (Heads(first=2, many=1), Heads(first=0, many=1))
    >>> shared_heads(4, 3, 6, 1, 12) is None
    True
    """
    here, there = _held(prefill_tp, prefill_rank, total_heads), _held(decode_tp, decode_rank, total_heads)
    begin, end = max(here.first, there.first), min(here.first + here.many, there.first + there.many)
    return (Heads(begin - here.first, end - begin), Heads(begin - there.first, end - begin)) if begin < end else None


def _held(ranks: int, rank: int, total: int) -> Heads:
    """Return the heads of the model that a rank has."""
    if total % ranks and ranks % total:
        raise KVPlanError(f"{total} heads over {ranks} ranks; give a multiple or a divisor of the heads")
    if total >= ranks:
        return Heads(rank * (total // ranks), total // ranks)
    return Heads(rank // (ranks // total), 1)


def places_of(parts: Sequence[Heads]) -> list[tuple[Heads, int]]:
    """Return the parts of a region that are scattered, each with the number of heads that lie before it.

    Of parts with equal heads, the first one is taken.

    Raises:
        OverlapError: two parts share some of their heads.

    >>> places_of([Heads(0, 2), Heads(0, 2), Heads(2, 1)])
    [(Heads(first=0, many=2), 0), (Heads(first=2, many=1), 4)]
    """
    made, taken, before = dict[Heads, int](), set[int](), 0
    for part in parts:
        if part not in made:
            heads = set(range(part.first, part.first + part.many))
            if heads & taken:
                raise OverlapError(f"head {min(heads & taken)} is in two parts; give equal parts, or parts that differ")
            taken |= heads
            made[part] = before
        before += part.many
    return list(made.items())
