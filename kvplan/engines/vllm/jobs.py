"""Plans for the jobs of vLLM's offloading. A job lists device blocks of all groups, host chunks, and first blocks.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``GPULoadStoreSpec``) and ``v1/kv_offload/cpu/gpu_worker.py``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.values import integer, integers
from kvplan.engines.vllm.pages import Page, layouts_of
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile  # the contract's name
from kvplan.plan.placement import own_block_ids
from kvplan.plan.plan import Plan, unite
from kvplan.ranks.shards import Turn

Specs = tuple[Any, Any]  # the device's blocks and the host's chunks of a job


# Up to this number of blocks, the groups of a job are one submission. Large plans of one group each are placed faster.
JOINED_BLOCKS = 128


class GroupIds(NamedTuple):
    """The blocks of one group that a job moves.

    Attributes:
        blocks: ids of device blocks, in order of tokens.
        chunks: numbers of host chunks; the job may use the first and the last in part.
        skip: number of blocks in the first chunk before the first one that is moved.
    """

    blocks: Int64Array
    chunks: Int64Array
    skip: int


def ids_of(device_spec: Any, host_spec: Any, groups: int, blocks_per_chunk: int) -> list[GroupIds]:
    """Split the two id lists of a job by group.

    Args:
        device_spec: object with ``block_ids``, ``group_sizes`` and ``block_indices``, like ``GPULoadStoreSpec``; the
            last is the number of the request's blocks before the first one that is moved.
        host_spec: object with ``block_ids``, the numbers of chunks.
        groups: number of groups.
        blocks_per_chunk: number of device blocks in a host chunk.

    Raises:
        BlockIndexError: the lengths of the lists do not agree.

    >>> from types import SimpleNamespace as Spec
    >>> device = Spec(block_ids=[7, 8, 9, 20], group_sizes=[3, 1], block_indices=[3, 8])
    >>> for group in ids_of(device, Spec(block_ids=[4, 5, 6]), groups=2, blocks_per_chunk=4):
    ...     print(group)  # block 3 is the last of chunk 4
    GroupIds(blocks=array([7, 8, 9]), chunks=array([4, 5]), skip=3)
    GroupIds(blocks=array([20]), chunks=array([6]), skip=0)
    """
    blocks, chunks = own_block_ids(device_spec.block_ids, "block_ids"), own_block_ids(host_spec.block_ids, "chunk ids")
    right = f"give a count of blocks for each of {groups} groups"
    sizes, firsts = (
        integers(name, getattr(device_spec, name), least=0, right=right, error=BlockIndexError)
        for name in ("group_sizes", "block_indices")
    )
    for name, counts in (("group_sizes", sizes), ("block_indices", firsts)):
        if len(counts) != groups:
            raise BlockIndexError(f"{name} are {list(counts)}; {right}")
    ids, block, chunk = [], 0, 0
    for size, first in zip(sizes, firsts, strict=True):
        skip = first % blocks_per_chunk
        end = chunk + (-(-(skip + size) // blocks_per_chunk) if size else 0)
        ids.append(GroupIds(blocks[block : block + size], chunks[chunk:end], skip))
        block, chunk = block + size, end
    for what, numbers, wanted in (("device blocks", blocks, block), ("host chunks", chunks, chunk)):
        if len(numbers) != wanted:
            raise BlockIndexError(
                f"{len(numbers)} {what} are given; groups of {sizes} blocks that begin at blocks {firsts} of the "
                f"request need {wanted} ({blocks_per_chunk} blocks per chunk)"
            )
    return ids


class Move(NamedTuple):
    """One submission of one or more jobs.

    Attributes:
        plan: the plan.
        groups: numbers of the KV-cache groups whose blocks it moves.
        by_layer: whether the plan is submitted layer by layer.
        nbytes: the bytes that it moves for each job, by the job's place in the list.
    """

    plan: Plan
    groups: tuple[int, ...]
    by_layer: bool
    nbytes: Mapping[int, int]


class Jobs:
    """The programs of all cache groups, which plan loads and stores.

    The blocks of different groups, and of different jobs, are different ones: vLLM's scheduler and its manager hand
    out each block once. So the plans of several groups become one without a comparison of all copies.

    Args:
        groups: pages of each group, results of :func:`~kvplan.engines.vllm.pages.pages_of`.
        device_rows, host_rows: rows of each tensor, as for :func:`~kvplan.engines.vllm.pages.layouts_of`.
        blocks_per_chunk: number of device blocks in a host chunk.

    Attributes:
        loads: the program of each group.
        stores: the programs of each group, and the blocks that this rank stores by them; ranks that hold the same bytes
            store different blocks.
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
        self._per_chunk = integer("blocks_per_chunk", blocks_per_chunk, least=1)
        self.loads: list[CopyProgram] = []
        self.stores: list[list[tuple[Turn, CopyProgram]]] = []
        rows = device_rows, host_rows, self._per_chunk
        for pages in groups:
            device, host = layouts_of(pages, *rows)
            self.loads.append(compile(host, device))
            self.stores.append([])
            for turn in dict.fromkeys(page.turn for page in pages):
                mine = [page for page in pages if page.turn == turn]
                device, host = layouts_of(mine, *rows, single=turn.ranks > 1)
                self.stores[-1].append((turn, compile(device, host)))

    def load(self, jobs: Sequence[Specs], whole: Container[int] | None = None) -> list[Move]:
        """Plan loads from the host.

        Loads of whole chunks are planned together, so that a layer of all of them arrives before the next layer of any.

        Args:
            jobs: device blocks and host chunks of each.
            whole: groups that are moved first, and not by layer; None if no layer is awaited by itself.
        """
        ids = [self._ids(job) for job in jobs]
        if len(jobs) > 1 and any(group.skip or len(group.blocks) % self._per_chunk for job in ids for group in job):
            moves = [(place, move) for place, job in enumerate(jobs) for move in self.load([job], whole)]
            return [move._replace(nbytes={place: move.plan.nbytes}) for place, move in moves]
        plans = {}
        for k, program in enumerate(self.loads):
            blocks, chunks = (np.concatenate([job[k][side] for job in ids]) for side in (0, 1))
            if len(blocks):
                plans[k] = program.plan(chunks, blocks, ids[0][k].skip)
        return self._moves(plans, ids, whole)

    def store(self, jobs: Sequence[Specs]) -> list[Move]:
        """Plan one store to the host. If ranks hold the same bytes, plan this rank's blocks only."""
        (ids,) = (self._ids(job) for job in jobs)
        plans = {}
        for k, (blocks, chunks, skip) in enumerate(ids):
            own = []
            for turn, program in self.stores[k]:
                if turn.ranks == 1:
                    own.append(program.plan(blocks, chunks, 0, skip))
                else:
                    places = (chunks[:, None] * self._per_chunk + np.arange(self._per_chunk)).ravel()[skip:]
                    mine = places[: len(blocks)] % turn.ranks == turn.number
                    own.append(program.plan(blocks[mine], places[: len(blocks)][mine]))
            if len(blocks):
                plans[k] = unite(own)
        return self._moves(plans, [ids])

    def _moves(
        self, plans: Mapping[int, Plan], ids: Sequence[list[GroupIds]], whole: Container[int] | None = None
    ) -> list[Move]:
        """Return the submissions for plans of groups, for all jobs of these ids together."""
        moves = []
        for by_layer in (False, True):
            # A group of few blocks, such as a sliding window, does not wait for the many blocks of another group.
            some = [k for k in sorted(plans, key=lambda k: plans[k].units) if _by_layer(k, whole) == by_layer]
            few = sum(plans[k].units for k in some) <= JOINED_BLOCKS
            for groups in [tuple(some)] if few and some else [(k,) for k in some]:
                plan = unite([plans[k] for k in groups])
                sizes = [sum(len(job[k].blocks) * self.loads[k].unit_nbytes for k in groups) for job in ids]
                nbytes = {place: size for place, size in enumerate(sizes) if size} if len(ids) > 1 else {0: plan.nbytes}
                moves.append(Move(plan, groups, by_layer, nbytes))
        return moves

    def _ids(self, job: Specs) -> list[GroupIds]:
        return ids_of(*job, len(self.loads), self._per_chunk)


def _by_layer(group: int, whole: Container[int] | None) -> bool:
    return whole is not None and group not in whole
