"""Layouts of vLLM's canonical caches: the pages of a cache group, on the device and in the host's rows.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``CanonicalKVCaches``, ``CanonicalPageMapping``, ``CopyRun``),
``v1/kv_offload/cpu/gpu_worker.py``, ``v1/kv_offload/cpu/shared_offload_region.py``.

A block of vLLM is one token slot here, because no transfer splits it. A device layout has blocks of one slot. A host
layout has chunks of ``blocks_per_chunk`` slots. Each tensor is a layer, in the order of its cache group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.ranks.shards import Turn


class Steps(NamedTuple):
    """A loop over fragments: their number, and the strides between them in bytes, on the device and on the host."""

    number: int
    device: int
    host: int


class Fragments(NamedTuple):
    """Fragments of equal size inside a page, on the device and on the host.

    Attributes:
        device, host: offset in bytes of the first fragment from the beginning of the page.
        nbytes: bytes of a fragment.
        outer, inner: two nested loops over the fragments.
    """

    device: int
    host: int
    nbytes: int
    outer: Steps
    inner: Steps


class Page(NamedTuple):
    """The page of one tensor, from a reference in a cache group.

    Attributes:
        tensor: index of the tensor.
        fragments: the fragments of its page that are moved.
        turn: the rule that picks the blocks that this rank stores, by host block number; it loads all blocks.
    """

    tensor: int
    fragments: tuple[Fragments, ...]
    turn: Turn


class GroupLayouts(NamedTuple):
    """Layouts of the pages of a cache group, or of its pages with the same turn."""

    turn: Turn
    device: KVLayout
    host: KVLayout


def pages_of(references: Sequence[Any], *, canonical: bool) -> tuple[Page, ...]:
    """Return the pages of references, one for each tensor; layers that share a cache refer to the same tensor.

    Args:
        references: vLLM's ``CanonicalKVCacheRef``, or objects with ``tensor_idx``, ``page_size_bytes``, ``mapping``.
        canonical: True if the host has canonical pages, by ``mapping``; False if it has this worker's own pages.

    >>> from types import SimpleNamespace as Ref
    >>> pages_of([Ref(tensor_idx=0, page_size_bytes=96, mapping=None)], canonical=False)[0].fragments[0].nbytes
    96
    """
    if not references:
        raise LayoutError("a KV-cache group has no references; give at least one tensor")
    found: dict[int, Page] = {}
    for number, reference in enumerate(references):
        page = _page(number, reference, canonical=canonical)
        known = found.setdefault(page.tensor, page)
        if known == page:
            continue
        if canonical or known.turn != page.turn:
            raise LayoutError(f"references to tensor {page.tensor} have different mappings; give one mapping per page")
        if page.fragments[0].nbytes > known.fragments[0].nbytes:
            found[page.tensor] = page
    return tuple(found.values())


def _page(number: int, reference: Any, *, canonical: bool) -> Page:
    if not canonical:
        nbytes = int(reference.page_size_bytes)
        return Page(reference.tensor_idx, (Fragments(0, 0, nbytes, ONCE, ONCE),), Turn(0, 1))
    mapping = reference.mapping
    if mapping is None:
        raise LayoutError(
            f"reference {number} (tensor {reference.tensor_idx}) has no canonical mapping; remove canonical_layout "
            "from kv_connector_extra_config, or use a cache that vLLM can certify"
        )
    return Page(reference.tensor_idx, _folded(mapping.runs), Turn(mapping.writer_index, mapping.num_writers))


ONCE = Steps(1, 0, 0)


def _folded(runs: Iterable[Any]) -> tuple[Fragments, ...]:
    """Join runs at equal distances into loops. If tokens alternate between ranks, a page has one run per token."""
    found = [
        Fragments(
            run.local_offset, run.canonical_offset, run.fragment_size, ONCE,
            Steps(run.num_fragments, run.local_stride, run.canonical_stride) if run.num_fragments > 1 else ONCE,
        )
        for run in runs
    ]  # fmt: skip
    folded: list[Fragments] = []
    for first, steps in _in_steps(found):
        single = first.inner.number == 1
        folded.append(first._replace(inner=steps) if single else first._replace(outer=steps))
    found, folded = folded, []
    for first, steps in _in_steps(found):
        # Fragments have at most two loops.
        whole = first.outer.number == 1
        folded += [first._replace(outer=steps)] if whole else [_moved(first, steps, k) for k in range(steps.number)]
    return tuple(folded)


def _in_steps(found: Sequence[Fragments]) -> Iterator[tuple[Fragments, Steps]]:
    """Yield the first of each series of fragments at equal distances, and the loop of the series."""
    at = 0
    while at < len(found):
        first, end = found[at], at + 1
        device = host = 0
        while end < len(found) and found[end][2:] == first[2:]:
            step = found[end].device - found[end - 1].device, found[end].host - found[end - 1].host
            if min(step) <= 0 or (end - at > 1 and step != (device, host)):
                break
            device, host = step
            end += 1
        yield first, Steps(end - at, device, host) if end - at > 1 else ONCE
        at = end


def _moved(first: Fragments, steps: Steps, times: int) -> Fragments:
    return first._replace(device=first.device + times * steps.device, host=first.host + times * steps.host)


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
    pages: Sequence[Page], device_rows: Sequence[Any], host_rows: Sequence[Any], blocks_per_chunk: int
) -> GroupLayouts:
    """Describe the pages of a cache group on the device and on the host.

    Args:
        pages: pages of the group; the turn of the first page is returned.
        device_rows: for each tensor, ``(blocks, page)`` bytes as a torch tensor; there may be gaps between rows.
        host_rows: for each tensor, ``(chunks, blocks_per_chunk * page)`` bytes.
        blocks_per_chunk: number of device blocks in a host chunk.
    """
    alike: dict[object, list[tuple[int, int, Fragments, Any, Any]]] = {}
    for layer, page in enumerate(pages):
        device, host = device_rows[page.tensor], host_rows[page.tensor]
        _check_rows(page.tensor, device, host, blocks_per_chunk)
        for piece, fragments in enumerate(page.fragments):
            key = piece, fragments, *((tuple(rows.shape), rows.stride()) for rows in (device, host))
            alike.setdefault(key, []).append((layer, piece, fragments, device, host))
    sides: tuple[list[KVLayout], list[KVLayout]] = [], []
    for found in alike.values():
        layers, pieces, _, devices, hosts = zip(*found, strict=True)
        fragments = found[0][2]
        loops = fragments.outer, fragments.inner
        views = (
            [_view(rows, 1, fragments.device, [loop.device for loop in loops], fragments) for rows in devices],
            [_view(rows, blocks_per_chunk, fragments.host, [loop.host for loop in loops], fragments) for rows in hosts],
        )
        for side, tensors in zip(sides, views, strict=True):
            dims, part = "layer: block token dim.0 dim.1 dim.2", f"piece_{pieces[0]}"
            side.append(KVLayout.from_tensors(dims, tensors, layers=layers, part=part))
    device, host = (side[0] if len(side) == 1 else KVLayout.merge(side) for side in sides)
    return GroupLayouts(pages[0].turn, device, host)


def check_bytes(name: str, rows: Any) -> None:
    """Raise LayoutError unless a torch tensor has rows of contiguous single bytes; there may be gaps between rows."""
    if rows.ndim != 2 or rows.element_size() != 1 or rows.stride()[1] != 1:
        raise LayoutError(
            f"{name} has shape {tuple(rows.shape)}, strides {tuple(rows.stride())} and elements of "
            f"{rows.element_size()} bytes; give single bytes of shape (blocks, bytes)"
        )


def _check_rows(tensor: int, device: Any, host: Any, blocks_per_chunk: int) -> None:
    for side, rows in (("device", device), ("host", host)):
        check_bytes(f"tensor {tensor} on the {side}", rows)
    if host.shape[1] % blocks_per_chunk:
        raise LayoutError(
            f"tensor {tensor} has rows of {host.shape[1]} bytes on the host; give rows of {blocks_per_chunk} blocks of "
            "equal size"
        )


def _view(rows: Any, blocks: int, offset: int, strides: Sequence[int], fragments: Fragments) -> Any:
    """View the fragments of every page of every row: (rows, pages per row, outer, inner, bytes)."""
    page, numbers = rows.shape[1] // blocks, (fragments.outer.number, fragments.inner.number)
    reach = sum((number - 1) * stride for number, stride in zip(numbers, strides, strict=True))
    last = offset + reach + fragments.nbytes
    if last > page:  # no other check finds this if the allocation continues behind the page
        raise LayoutError(f"fragments reach byte {last - 1} of a page of {page} bytes, from byte {offset} on")
    shape = rows.shape[0], blocks, *numbers, fragments.nbytes
    # The stride of a loop over one fragment has no effect, but it must not be 0.
    steps = [stride or fragments.nbytes for stride in strides]
    return rows.as_strided(shape, (rows.stride()[0], page, *steps, 1), rows.storage_offset() + offset)
