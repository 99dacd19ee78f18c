"""Plan all KV-cache groups of one model as one transfer. Each group has its own blocks, block ids and start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from kvplan.base.integers import optional_integer
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.plan.copy_program import CopyProgram
from kvplan.plan.placement import own_block_ids
from kvplan.plan.plan import Plan, join
from kvplan.ranks.rank_pair import PairProgram


class Plans(Protocol):
    """A program that can plan one cache group: a copy program, or one pair of a resharding."""

    @property
    def unit_tokens(self) -> int:
        """Return the tokens per unit; skips count units."""

    def plan(self, src_blocks: Any, dst_blocks: Any, src_skip: int = 0, dst_skip: int = 0) -> Plan:
        """Plan one transfer of this cache group."""


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
        self.programs: tuple[Plans, ...] = tuple(programs)
        if not self.programs:
            raise LayoutError("no groups; give at least one program")
        spans = []
        for k, program in enumerate(self.programs):
            if isinstance(program, CopyProgram):
                spans.append((program.src.block_tokens, program.dst.block_tokens))
            elif isinstance(program, PairProgram):
                spans.append(program.spans)
            else:
                raise LayoutError(f"programs[{k}] is a {type(program).__name__}; give what kvplan.compile makes")
        self._spans = tuple(spans)

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
                skips = self._skips(k, firsts[0][k], firsts[1][k]) if len(ids[0]) or len(ids[1]) else (0, 0)
                plans.append(program.plan(*ids, *skips))
            except KVPlanError as error:
                raise type(error)(f"group {k}: {error}") from error
        return plans[0] if len(plans) == 1 else join(plans)

    def _one_a_group(self, name: str, given: Any) -> Sequence[Any]:
        count = len(self.programs)
        if given is None and name.endswith("first"):
            return [None] * count
        if type(given) is list and len(given) == count:  # engines give such a list
            return given
        ordered = isinstance(given, Iterable) and not isinstance(given, (str, bytes, AbstractSet, Mapping))
        entries = list(given) if ordered and getattr(given, "ndim", 1) != 0 else []
        if len(entries) != count:
            raise BlockIndexError(f"{name} is {given!r}; give a sequence of {count}, one entry per group")
        return entries

    def _skips(self, group: int, src_first: Any, dst_first: Any) -> tuple[int, int]:
        """Return, for each side, the units of its first block that lie before the first token of the transfer."""
        spans, unit = self._spans[group], self.programs[group].unit_tokens
        src = (_counted("src_first", src_first) or 0) * spans[0]
        first = _counted("dst_first", dst_first)
        dst = src // spans[1] * spans[1] if first is None else first * spans[1]
        start = max(src, dst)
        for name, first, span in (("src", src, spans[0]), ("dst", dst, spans[1])):
            if start - first >= span:
                raise BlockIndexError(
                    f"the {name} blocks begin at token {first} of the request and the other side's at {start}; leave "
                    f"out the {(start - first) // span} {name} blocks before that"
                )
        return (start - src) // unit, (start - dst) // unit

    def __repr__(self) -> str:
        return f"Groups({', '.join(map(repr, self.programs))})"


def _counted(name: str, number: Any) -> int | None:
    right = "it counts blocks of the request before the first given"
    return optional_integer(name, number, least=0, right=right, error=BlockIndexError)
