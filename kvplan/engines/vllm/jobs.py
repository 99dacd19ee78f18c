"""Plans for the jobs of vLLM's offloading, over layouts of its canonical caches.

A block of vLLM is one token slot here, because no transfer splits it. A device layout has blocks of one slot. A host
layout has chunks of ``blocks_per_chunk`` slots, which may be staged whole. Each tensor is a layer, in the order of its
cache group. A job lists device blocks of all groups, host chunks, and first blocks.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``CanonicalKVCaches``, ``CanonicalPageMapping``, ``CopyRun``,
``GPULoadStoreSpec``), ``v1/kv_offload/cpu/gpu_worker.py``, ``v1/kv_offload/cpu/shared_offload_region.py``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.values import integer, integers
from kvplan.errors import BlockIndexError, LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.copy_program import CopyProgram, compile  # the contract's name
from kvplan.plan.placement import own_block_ids
from kvplan.plan.plan import Plan, unite
from kvplan.ranks.shards import Turn

Specs = tuple[Any, Any]  # the device's blocks and the host's chunks of a job


# Up to this number of blocks, the groups of a job are one submission. Large plans of one group each are placed faster.
JOINED_BLOCKS = 128


class Run(NamedTuple):
    """Fragments of one size at equal distances, in a page of the device and in a page of the host: vLLM's ``CopyRun``.

    Attributes:
        local_offset, canonical_offset: bytes before the first fragment, in the device's and in the host's page.
        fragment_size: bytes of a fragment.
        num_fragments: number of fragments.
        local_stride, canonical_stride: bytes from one fragment to the next.
    """

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


class Page(NamedTuple):
    """The page of one tensor, from a reference in a cache group.

    Attributes:
        tensor: index of the tensor.
        runs: what is moved.
        turn: the rule that picks the blocks that this rank stores, by host block number; it loads all blocks.
    """

    tensor: int
    runs: tuple[Run, ...]
    turn: Turn


def pages_of(references: Sequence[Any], *, canonical: bool) -> tuple[Page, ...]:
    """Return the pages of references, one for each tensor; layers that share a cache refer to the same tensor.

    Args:
        references: vLLM's ``CanonicalKVCacheRef``, or objects with ``tensor_idx``, ``page_size_bytes``, ``mapping``.
        canonical: True if the host has canonical pages, by ``mapping``, which each reference then has; False if it has
            this worker's own pages.

    >>> from types import SimpleNamespace as Ref
    >>> pages_of([Ref(tensor_idx=0, page_size_bytes=96, mapping=None)], canonical=False)[0].runs[0].fragment_size
    96
    """
    if not references:
        raise LayoutError("a KV-cache group has no references; give at least one tensor")
    pages: dict[int, Page] = {}
    for reference in references:
        page = _page(reference, canonical=canonical)
        known = pages.setdefault(page.tensor, page)
        if known != page and canonical:
            raise LayoutError(f"references to tensor {page.tensor} have different mappings; give one mapping per page")
        if page.runs[0].fragment_size > known.runs[0].fragment_size:
            pages[page.tensor] = page
    return tuple(pages.values())


def _page(reference: Any, *, canonical: bool) -> Page:
    if not canonical:
        nbytes = int(reference.page_size_bytes)
        return Page(reference.tensor_idx, (Run(0, 0, nbytes, 1, nbytes, nbytes),), Turn(0, 1))
    mapping = reference.mapping
    runs = tuple(Run(*attrgetter(*Run._fields)(run)) for run in mapping.runs)
    return Page(reference.tensor_idx, runs, Turn(mapping.writer_index, mapping.num_writers))


def canonical_nbytes(groups: Sequence[Sequence[Any]], tensors: int) -> list[int]:
    """Return the bytes of each tensor's canonical page: the largest page of all groups that share the tensor."""
    largest = [0] * tensors
    for references in groups:
        for reference in references:
            page = reference.mapping.canonical_page_size_bytes
            largest[reference.tensor_idx] = max(largest[reference.tensor_idx], page)
    return largest


def layouts_of(
    pages: Sequence[Page],
    device_rows: Sequence[Any],
    host_rows: Sequence[Any],
    blocks_per_chunk: int,
    *,
    single: bool = False,
) -> tuple[KVLayout, KVLayout]:
    """Describe the pages of a cache group on the device and on the host.

    Args:
        pages: pages of the group, or some of them.
        device_rows: for each tensor, ``(blocks, page)`` bytes as a torch tensor; there may be gaps between rows.
        host_rows: for each tensor, ``(chunks, blocks_per_chunk * page)`` bytes.
        blocks_per_chunk: number of device blocks in a host chunk.
        single: whether the host's blocks are the single blocks of its chunks, one after another.
    """
    alike: dict[tuple[Any, ...], list[tuple[int, Any, Any]]] = {}
    for layer, page in enumerate(pages):
        device, host = device_rows[page.tensor], host_rows[page.tensor]
        for piece, run in enumerate(page.runs):
            key = piece, run, *((tuple(rows.shape), rows.stride()) for rows in (device, host))
            alike.setdefault(key, []).append((layer, device, host))
    sides: tuple[list[KVLayout], list[KVLayout]] = [], []
    for (piece, run, *_), rows in alike.items():
        layers, devices, hosts = zip(*rows, strict=True)
        views = (
            [_view(each, 1, run, run.local_offset, run.local_stride) for each in devices],
            [_view(each, blocks_per_chunk, run, run.canonical_offset, run.canonical_stride) for each in hosts],
        )
        for side, tensors in zip(sides, views, strict=True):
            dims = f"layer: {'block.0 block.1' if single else 'block token'} dim.0 dim.1"
            side.append(KVLayout.from_tensors(dims, tensors, layers=layers, part=f"piece_{piece}"))
    device, host = (side[0] if len(side) == 1 else KVLayout.merge(side) for side in sides)
    return device, host


def _view(rows: Any, blocks: int, run: Run, offset: int, stride: int) -> Any:
    """View the fragments of every page of every row: (rows, pages per row, fragments, bytes)."""
    page, steps = rows.shape[1] // blocks, run.num_fragments
    last = offset + (steps - 1) * stride + run.fragment_size
    if last > page:  # no other check finds this if the allocation continues behind the page
        raise LayoutError(f"fragments reach byte {last - 1} of a page of {page} bytes, from byte {offset} on")
    step = stride if steps > 1 else run.fragment_size  # a loop over one fragment has any stride, but not 0
    shape = rows.shape[0], blocks, steps, run.fragment_size
    return rows.as_strided(shape, (rows.stride()[0], page, step, 1), rows.storage_offset() + offset)


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
        groups: pages of each group, results of :func:`pages_of`.
        device_rows, host_rows: rows of each tensor, as for :func:`layouts_of`.
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
