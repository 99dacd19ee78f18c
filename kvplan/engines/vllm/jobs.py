"""Plans for the jobs of vLLM's offloading. A job lists device blocks of all groups, host chunks, and first blocks.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``GPULoadStoreSpec``) and ``v1/kv_offload/cpu/gpu_worker.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.integers import integer, integers
from kvplan.engines.vllm.lines import LayerPlan
from kvplan.engines.vllm.pages import GroupLayouts, Page, layouts_of
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.slicing import split_blocks
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile  # noqa: A004  # the contract's name
from kvplan.plan.placement import own_block_ids
from kvplan.plan.plan import Plan, join
from kvplan.ranks.groups import Groups, Plans

# Up to this number of blocks, the groups of a job are one plan. Groups share memory, so a join compares all copies
# with each other. For more blocks, one submission per group takes less time.
JOINED_BLOCKS = 128


class GroupIds(NamedTuple):
    """The blocks and chunks of one group that a job moves.

    Attributes:
        blocks: ids of device blocks, in order of tokens.
        chunks: numbers of host chunks; the job may use the first and the last in part.
        first: number of the request's blocks before the first one in ``blocks``.
    """

    blocks: Int64Array
    chunks: Int64Array
    first: int

    def none(self) -> GroupIds:
        """Return the group without blocks."""
        return GroupIds(_NONE, _NONE, self.first)


_NONE = np.empty(0, dtype=np.int64)


def ids_of(device_spec: Any, host_spec: Any, groups: int, blocks_per_chunk: int) -> list[GroupIds]:
    """Split the two id lists of a job by group.

    Args:
        device_spec: object with ``block_ids``, ``group_sizes`` and ``block_indices``, like ``GPULoadStoreSpec``.
        host_spec: object with ``block_ids``, the numbers of chunks.
        groups: number of groups.
        blocks_per_chunk: number of device blocks in a host chunk.

    Raises:
        BlockIndexError: the lengths of the lists do not agree.

    >>> from types import SimpleNamespace as Spec
    >>> device = Spec(block_ids=[7, 8, 9, 20], group_sizes=[3, 1], block_indices=[3, 8])
    >>> for group in ids_of(device, Spec(block_ids=[4, 5, 6]), groups=2, blocks_per_chunk=4):
    ...     print(group)  # block 3 is the last of chunk 4
    GroupIds(blocks=array([7, 8, 9]), chunks=array([4, 5]), first=3)
    GroupIds(blocks=array([20]), chunks=array([6]), first=8)
    """
    blocks, chunks = own_block_ids(device_spec.block_ids, "block_ids"), own_block_ids(host_spec.block_ids, "chunk ids")
    right = f"give a count of blocks for each of {groups} groups"
    sizes, firsts = (
        integers(name, getattr(device_spec, name), least=0, right=right, error=BlockIndexError)
        for name in ("group_sizes", "block_indices")
    )
    for name, given in (("group_sizes", sizes), ("block_indices", firsts)):
        if len(given) != groups:
            raise BlockIndexError(f"{name} are {list(given)}; {right}")
    found, block, chunk = [], 0, 0
    for size, first in zip(sizes, firsts, strict=True):
        end = chunk + (-(-(size + first % blocks_per_chunk) // blocks_per_chunk) if size else 0)
        found.append(GroupIds(blocks[block : block + size], chunks[chunk:end], first))
        block, chunk = block + size, end
    for what, ids, wanted in (("device blocks", blocks, block), ("host chunks", chunks, chunk)):
        if len(ids) != wanted:
            raise BlockIndexError(
                f"{len(ids)} {what} are given; groups of {sizes} blocks that begin at blocks {firsts} of the request "
                f"need {wanted} ({blocks_per_chunk} blocks per chunk)"
            )
    return found


def _chained(groups: Sequence[GroupIds]) -> GroupIds:
    """Return the blocks of one group of several loads, load after load. Several loads must be of whole chunks."""
    if len(groups) == 1:
        return groups[0]
    blocks, chunks = (np.concatenate([group[k] for group in groups]) for k in (0, 1))
    return GroupIds(blocks, chunks, first=0)


class Jobs:
    """The programs of all cache groups, which plan loads and stores.

    Args:
        groups: pages of each group, results of :func:`~kvplan.engines.vllm.pages.pages_of`.
        device_rows, host_rows: rows of each tensor, as for :func:`~kvplan.engines.vllm.pages.layouts_of`.
        blocks_per_chunk: number of device blocks in a host chunk.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Page]],
        device_rows: Sequence[Any],
        host_rows: Sequence[Any],
        blocks_per_chunk: int,
    ) -> None:
        if not groups:
            raise LayoutError("no KV-cache groups; give the pages of at least one")
        blocks_per_chunk = integer("blocks_per_chunk", blocks_per_chunk, least=1)
        self.blocks_per_chunk = blocks_per_chunk
        whole = [layouts_of(pages, device_rows, host_rows, blocks_per_chunk) for pages in groups]
        loads = [compile(group.host, group.device) for group in whole]
        self._loads = Groups(loads)
        self._block_nbytes = [program.unit_nbytes * program.program.dst_units for program in loads]
        self._stores = Groups([compile(group.device, group.host) for group in whole])
        # If ranks hold the same bytes, each stores some of the blocks. Then each block is planned alone.
        self._turns: list[list[_TurnStore]] | None = None
        if any(page.turn.ranks > 1 for pages in groups for page in pages):
            self._turns = [
                [_TurnStore(layouts_of(same, device_rows, host_rows, blocks_per_chunk)) for same in _by_turn(pages)]
                for pages in groups
            ]

    @property
    def loads(self) -> Sequence[Plans]:
        """Return the programs of the loads, one per group."""
        return self._loads.programs

    @property
    def stores(self) -> Sequence[Plans]:
        """Return the programs of the stores, one or more per group."""
        if self._turns is None:
            return self._stores.programs
        return [turn.program for turns in self._turns for turn in turns]

    def load(self, device_spec: Any, host_spec: Any) -> list[Plan]:
        """Plan a load from the host: one plan, or one per group if there are many blocks. No byte is moved twice."""
        return [self._load(some) for some in _split(self._ids(device_spec, host_spec))]

    def load_layers(self, loads: Sequence[tuple[Any, Any]], whole: Container[int] = ()) -> list[LayerPlan]:
        """Plan loads of one step whose layers are awaited one by one, as plans in the order of their submits.

        Loads of whole chunks are planned together, so that a layer of all of them arrives before the next layer of any.

        Args:
            loads: for each load, its device blocks and its host chunks, as for :func:`ids_of`.
            whole: groups that are moved first, and not by layer.
        """
        ids = [self._ids(*load) for load in loads]
        together = [k for k, groups in enumerate(ids) if all(self._has_whole_chunks(group) for group in groups)]
        parts = [together] if len(together) > 1 else [[k] for k in together]
        parts += [[k] for k in range(len(ids)) if k not in together]
        return [plan for part in parts for plan in self._plan_layers({k: ids[k] for k in part}, whole)]

    def _has_whole_chunks(self, group: GroupIds) -> bool:
        return group.first % self.blocks_per_chunk == 0 == len(group.blocks) % self.blocks_per_chunk

    def _plan_layers(self, loads: Mapping[int, list[GroupIds]], whole: Container[int]) -> Iterator[LayerPlan]:
        """Yield the plans of some loads that are planned together; the key of a load is its place in the step."""
        groups = [_chained(same) for same in zip(*loads.values(), strict=True)]
        # A group of few blocks, such as a sliding window, does not wait for the many blocks of another group.
        moving = sorted((k for k, group in enumerate(groups) if len(group.blocks)), key=lambda k: len(groups[k].blocks))
        for by_layer in (False, True):
            some = [k for k in moving if (k not in whole) == by_layer]
            few = sum(len(groups[k].blocks) for k in some) <= JOINED_BLOCKS
            for part in [some] if few and some else [[k] for k in some]:
                plan = self._load([group if k in part else group.none() for k, group in enumerate(groups)])
                sizes = {place: self._nbytes(ids, part) for place, ids in loads.items()}
                own = {place: nbytes for place, nbytes in sizes.items() if nbytes}
                yield LayerPlan(plan, tuple(part), by_layer=by_layer, nbytes=own)

    def _nbytes(self, groups: Sequence[GroupIds], some: Iterable[int]) -> int:
        return sum(len(groups[k].blocks) * self._block_nbytes[k] for k in some)

    def _load(self, groups: list[GroupIds]) -> Plan:
        return self._loads.plan(
            [group.chunks for group in groups],
            [group.blocks for group in groups],
            src_first=[group.first // self.blocks_per_chunk for group in groups],
            dst_first=[group.first for group in groups],
        )

    def store(self, device_spec: Any, host_spec: Any) -> list[Plan]:
        """Plan a store to the host, like :meth:`load`. If ranks hold the same bytes, plan this rank's blocks only."""
        groups = self._ids(device_spec, host_spec)
        if self._turns is not None:
            found = [
                [turn.plan(group, self.blocks_per_chunk) for turn in turns]
                for group, turns in zip(groups, self._turns, strict=True)
            ]
            joined = sum(len(group.blocks) for group in groups) <= JOINED_BLOCKS
            return [join([plan for plans in found for plan in plans])] if joined else [join(plans) for plans in found]
        firsts = [group.first for group in groups]
        return [
            self._stores.plan([g.blocks for g in some], [g.chunks for g in some], src_first=firsts)
            for some in _split(groups)
        ]

    def _ids(self, device_spec: Any, host_spec: Any) -> list[GroupIds]:
        return ids_of(device_spec, host_spec, len(self._loads.programs), self.blocks_per_chunk)


def _split(groups: list[GroupIds]) -> Iterator[list[GroupIds]]:
    """Yield all groups at once; or, if there are many blocks, one group at a time, with all other groups empty."""
    moving = [k for k, group in enumerate(groups) if len(group.blocks)]
    if len(moving) <= 1 or sum(len(group.blocks) for group in groups) <= JOINED_BLOCKS:
        yield groups
        return
    for number in moving:
        yield [group if k == number else group.none() for k, group in enumerate(groups)]


def _by_turn(pages: Sequence[Page]) -> Iterator[list[Page]]:
    for turn in dict.fromkeys(page.turn for page in pages):
        yield [page for page in pages if page.turn == turn]


class _TurnStore:
    """The program that stores this rank's blocks, chosen by their numbers on the host; its units are single blocks."""

    def __init__(self, group: GroupLayouts) -> None:
        view = split_blocks(group.host.built, 1)
        if view is None:
            raise LayoutError(f"{group.host} cannot be split into single blocks")
        self._turn = group.turn
        self.program: CopyProgram = compile(group.device, KVLayout(view, tensors=group.host.tensors))

    def plan(self, group: GroupIds, blocks_per_chunk: int) -> Plan:
        places = (group.chunks[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)).ravel()
        skip = group.first % blocks_per_chunk
        places = places[skip : skip + len(group.blocks)]
        mine = places % self._turn.ranks == self._turn.number
        return self.program.plan(group.blocks[mine], places[mine])
