"""Layouts of vLLM's canonical caches: the pages of a cache group, on the device and in the host's rows.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``CanonicalKVCaches``, ``CanonicalPageMapping``, ``CopyRun``),
``v1/kv_offload/cpu/gpu_worker.py``, ``v1/kv_offload/cpu/shared_offload_region.py``.

A block of vLLM is one token slot here, because no transfer splits it. A device layout has blocks of one slot. A host
layout has chunks of ``blocks_per_chunk`` slots, which may be staged whole. Each tensor is a layer, in the order of its
cache group.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.ranks.shards import Turn


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
        canonical: True if the host has canonical pages, by ``mapping``; False if it has this worker's own pages.

    >>> from types import SimpleNamespace as Ref
    >>> pages_of([Ref(tensor_idx=0, page_size_bytes=96, mapping=None)], canonical=False)[0].runs[0].fragment_size
    96
    """
    if not references:
        raise LayoutError("a KV-cache group has no references; give at least one tensor")
    pages: dict[int, Page] = {}
    for number, reference in enumerate(references):
        page = _page(number, reference, canonical=canonical)
        known = pages.setdefault(page.tensor, page)
        if known != page and canonical:
            raise LayoutError(f"references to tensor {page.tensor} have different mappings; give one mapping per page")
        if page.runs[0].fragment_size > known.runs[0].fragment_size:
            pages[page.tensor] = page
    return tuple(pages.values())


def _page(number: int, reference: Any, *, canonical: bool) -> Page:
    if not canonical:
        nbytes = int(reference.page_size_bytes)
        return Page(reference.tensor_idx, (Run(0, 0, nbytes, 1, nbytes, nbytes),), Turn(0, 1))
    mapping = reference.mapping
    if mapping is None:
        raise LayoutError(
            f"reference {number} (tensor {reference.tensor_idx}) has no canonical mapping; remove canonical_layout "
            "from kv_connector_extra_config, or use a cache that vLLM can certify"
        )
    runs = tuple(Run(*attrgetter(*Run._fields)(run)) for run in mapping.runs)
    return Page(reference.tensor_idx, runs, Turn(mapping.writer_index, mapping.num_writers))


def canonical_nbytes(groups: Sequence[Sequence[Any]], tensors: int) -> list[int]:
    """Return the bytes of each tensor's canonical page: the largest page of all groups that share the tensor."""
    largest = [0] * tensors
    for references in groups:
        for number, reference in enumerate(references):
            _page(number, reference, canonical=True)
            page = reference.mapping.canonical_page_size_bytes
            largest[reference.tensor_idx] = max(largest[reference.tensor_idx], page)
    if 0 in largest:
        raise LayoutError(f"no group names tensor {largest.index(0)}, so the size of its host page is unknown")
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
        _check_rows(page.tensor, device, host, blocks_per_chunk)
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


def _check_rows(tensor: int, device: Any, host: Any, blocks_per_chunk: int) -> None:
    for side, rows in (("device", device), ("host", host)):
        if rows.ndim != 2 or rows.element_size() != 1 or rows.stride()[1] != 1:
            raise LayoutError(
                f"tensor {tensor} on the {side} has shape {tuple(rows.shape)}, strides {tuple(rows.stride())} and "
                f"elements of {rows.element_size()} bytes; give single bytes of shape (blocks, bytes)"
            )
    if host.shape[1] % blocks_per_chunk:
        raise LayoutError(
            f"tensor {tensor} has rows of {host.shape[1]} bytes on the host; give rows of {blocks_per_chunk} blocks of "
            "equal size"
        )


def _view(rows: Any, blocks: int, run: Run, offset: int, stride: int) -> Any:
    """View the fragments of every page of every row: (rows, pages per row, fragments, bytes)."""
    page, steps = rows.shape[1] // blocks, run.num_fragments
    last = offset + (steps - 1) * stride + run.fragment_size
    if last > page:  # no other check finds this if the allocation continues behind the page
        raise LayoutError(f"fragments reach byte {last - 1} of a page of {page} bytes, from byte {offset} on")
    step = stride if steps > 1 else run.fragment_size  # a loop over one fragment has any stride, but not 0
    shape = rows.shape[0], blocks, steps, run.fragment_size
    return rows.as_strided(shape, (rows.stride()[0], page, step, 1), rows.storage_offset() + offset)
