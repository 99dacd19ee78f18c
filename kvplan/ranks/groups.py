"""Plan all KV-cache groups of one model as one transfer. Each group has its own blocks, block ids and start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kvplan.base.values import optional_integer
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.placement import own_block_ids
from kvplan.plan.plan import Plan, join
from kvplan.ranks.resharding import PairProgram

Plans = CopyProgram | PairProgram  # programs that can plan one cache group


class Groups:
    """A planner for a hybrid model: full attention, sliding windows, states and indexer rows move as one plan.

    Every cache group has its own program between its own layouts. Block sizes may differ. Groups may share memory, as
    in vLLM 0.33, because their block ids differ. A group without blocks moves nothing.

    Args:
        programs: one program per cache group: made by :func:`kvplan.compile`, or a pair from :func:`kvplan.reshard`.

    Raises:
        LayoutError: there are no programs, or an entry is not a program.

    >>> import kvplan, numpy as np
    >>> def cache(layers, tokens):
    ...     memory = np.zeros((len(layers), 64, 2, tokens, 2, 8), np.int8)
    ...     return kvplan.KVLayout.from_tensors("layer block kv token head dim", memory, layers=layers)
    >>> groups = kvplan.Groups([
    ...     kvplan.compile(cache((0, 2), 16), cache((0, 2), 64)),  # full attention
    ...     kvplan.compile(cache((1, 3), 16), cache((1, 3), 64)),  # of a window: what is before it is gone
    ... ])
    >>> groups.plan([range(8), [40, 41, 42]], [[0, 1], [5]], src_first=[0, 5])
    Plan(host of 11 units, 11264 bytes)
    """

    def __init__(self, programs: Sequence[Plans]) -> None:
        if not isinstance(programs, Iterable):
            raise LayoutError(f"programs is {programs!r}; give one program per group")
        self.programs = tuple(programs)
        if not self.programs:
            raise LayoutError("no groups; give at least one program")
        for k, program in enumerate(self.programs):
            if not isinstance(program, Plans):
                raise LayoutError(f"programs[{k}] is a {type(program).__name__}; give what kvplan.compile makes")

    def plan(
        self,
        src_blocks: Sequence[Any],
        dst_blocks: Sequence[Any],
        *,
        src_first: Sequence[int] | None = None,
        dst_first: Sequence[int] | None = None,
    ) -> Plan:
        """Plan one transfer of all cache groups.

        If one side has larger blocks, the other side's list may begin in the middle of such a block. The arguments
        ``src_first`` and ``dst_first`` determine the distance from the start of that block.

        Args:
            src_blocks, dst_blocks: for every group, block ids in order of tokens; both empty to move nothing.
            src_first: for every group, number of source blocks of the request before the first of ``src_blocks``
                (vLLM's ``block_indices``); 0 by default.
            dst_first: the same for the destination; by default the block that holds the first source token.

        Returns:
            One plan for all groups, which is submitted once and completes once.

        Raises:
            BlockIndexError: a group has no list, or ids, positions or lengths do not fit; the message names the group.
            OverlapError: a destination is written twice, by one group or by two groups that share memory.
        """
        lists = self._one_a_group("src_blocks", src_blocks), self._one_a_group("dst_blocks", dst_blocks)
        firsts = self._one_a_group("src_first", src_first), self._one_a_group("dst_first", dst_first)
        plans = []
        for k, program in enumerate(self.programs):
            try:
                ids = own_block_ids(lists[0][k], "src_blocks"), own_block_ids(lists[1][k], "dst_blocks")
                skips = _skips(program, firsts[0][k], firsts[1][k]) if len(ids[0]) or len(ids[1]) else (0, 0)
                plans.append(program.plan(*ids, *skips))
            except KVPlanError as error:
                raise type(error)(f"group {k}: {error}") from error
        return plans[0] if len(plans) == 1 else join(plans)

    def _one_a_group(self, name: str, given: Any) -> Sequence[Any]:
        count = len(self.programs)
        if given is None and name.endswith("first"):
            return [None] * count
        ordered = isinstance(given, Iterable) and not isinstance(given, (str, bytes, AbstractSet, Mapping))
        entries = list(given) if ordered and getattr(given, "ndim", 1) != 0 else []
        if len(entries) != count:
            raise BlockIndexError(f"{name} is {given!r}; give a sequence of {count}, one entry per group")
        return entries

    def __repr__(self) -> str:
        return f"Groups({', '.join(map(repr, self.programs))})"


def _skips(program: Plans, src_first: Any, dst_first: Any) -> tuple[int, int]:
    """Return, for each side, the units of its first block that lie before the first token of the transfer."""
    if isinstance(program, PairProgram):
        spans = program.spans
    else:
        spans = program.src.block_tokens, program.dst.block_tokens
    right = "it counts blocks of the request before the first given"
    counted = [
        optional_integer(name, first, least=0, right=right, error=BlockIndexError)
        for name, first in (("src_first", src_first), ("dst_first", dst_first))
    ]
    src = (counted[0] or 0) * spans[0]
    dst = (src // spans[1] if counted[1] is None else counted[1]) * spans[1]
    start = max(src, dst)
    for name, first, span in (("src", src, spans[0]), ("dst", dst, spans[1])):
        if start - first >= span:
            raise BlockIndexError(
                f"the {name} blocks begin at token {first} of the request and the other side's at {start}; leave "
                f"out the {(start - first) // span} {name} blocks before that"
            )
    return (start - src) // program.unit_tokens, (start - dst) // program.unit_tokens
