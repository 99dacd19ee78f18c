"""vLLM's canonical caches as layouts: one group's pages on the device, and its places in the rows of the host.

Source: vLLM 0.33.0, ``v1/kv_offload/base.py`` (``CanonicalKVCaches``, ``CanonicalPageMapping``, ``CopyRun``),
``v1/kv_offload/cpu/gpu_worker.py``, ``v1/kv_offload/cpu/shared_offload_region.py``.

A block of vLLM is one token slot here, because no transfer parts it: a layout of the device has blocks of one slot, a
layout of the host has chunks of ``blocks_per_chunk`` slots. A layer is a tensor, in the order of its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.ranks.shards import Turn


class Steps(NamedTuple):
    """Something that is repeated: how often, and how many bytes from one to the next on each side."""

    number: int
    device: int
    host: int


class Fragments(NamedTuple):
    """Equal stretches of bytes inside a page, on the device and in its place on the host.

    Attributes:
        device, host: bytes from the beginning of the page to the first.
        nbytes: bytes of one.
        outer, inner: two loops over them.
    """

    device: int
    host: int
    nbytes: int
    outer: Steps
    inner: Steps


class Page(NamedTuple):
    """One reference of a group.

    Attributes:
        tensor: which tensor.
        fragments: what of its page is moved.
        turn: which blocks this rank stores, by their numbers on the host; all are loaded.
    """

    tensor: int
    fragments: tuple[Fragments, ...]
    turn: Turn


class GroupLayouts(NamedTuple):
    """The pages of a group, or those of them that are stored in the same turn."""

    turn: Turn
    device: KVLayout
    host: KVLayout


def pages_of(references: Sequence[Any], *, canonical: bool) -> tuple[Page, ...]:
    """References as pages, each tensor once: layers that share a cache name it several times.

    Args:
        references: vLLM's ``CanonicalKVCacheRef``, or what has its ``tensor_idx``, ``page_size_bytes``, ``mapping``.
        canonical: whether the host holds pages of no rank, by ``mapping``, and not this worker's own.

    Raises:
        LayoutError: no references, or one without a mapping where there must be one.

    >>> from types import SimpleNamespace as Ref
    >>> pages_of([Ref(tensor_idx=0, page_size_bytes=96, mapping=None)], canonical=False)[0].fragments[0].nbytes
    96
    """
    if not references:
        raise LayoutError("a KV-cache group has no references; each has a layer's tensor at least")
    found: dict[int, Page] = {}
    for number, reference in enumerate(references):
        page = _page(number, reference, canonical=canonical)
        known = found.setdefault(page.tensor, page)
        if known == page:
            continue
        if canonical or known.turn != page.turn:
            raise LayoutError(f"references to tensor {page.tensor} have different mappings; a page has one")
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
    """Runs of a mapping, those in equal steps as one: a token's, dealt to ranks one by one, are hundreds a page."""
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
        # Where a loop is there already, a second one around it is what the form has room for.
        whole = first.outer.number == 1
        folded += [first._replace(outer=steps)] if whole else [_moved(first, steps, k) for k in range(steps.number)]
    return tuple(folded)


def _in_steps(found: Sequence[Fragments]) -> Iterator[tuple[Fragments, Steps]]:
    """Neighbours that differ only in where they lie, and by the same bytes each time."""
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
    """Bytes of each tensor's canonical page: the largest of those that groups lay over one another.

    Raises:
        LayoutError: a reference without a mapping, or a tensor that no group names.
    """
    largest = [0] * tensors
    for references in groups:
        for number, reference in enumerate(references):
            _page(number, reference, canonical=True)
            page = reference.mapping.canonical_page_size_bytes
            largest[reference.tensor_idx] = max(largest[reference.tensor_idx], page)
    if 0 in largest:
        raise LayoutError(f"tensor {largest.index(0)} is in no group; its page on the host has no size")
    return largest


def layouts_of(
    pages: Sequence[Page], device_rows: Sequence[Any], host_rows: Sequence[Any], blocks_per_chunk: int
) -> GroupLayouts:
    """Layouts of both sides.

    Args:
        pages: of a group; the turn is the first one's.
        device_rows: of each tensor, ``(blocks, page)`` bytes: torch tensors, rows perhaps further apart than a page.
        host_rows: of each tensor, ``(chunks, blocks_per_chunk * page)`` bytes.
        blocks_per_chunk: blocks of the device in a chunk of the host.

    Raises:
        LayoutError: rows that are no whole blocks, or pages that overlap.
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


def _check_rows(tensor: int, device: Any, host: Any, blocks_per_chunk: int) -> None:
    for side, rows in (("device", device), ("host", host)):
        if rows.ndim != 2 or rows.element_size() != 1 or rows.stride()[1] != 1:
            raise LayoutError(
                f"tensor {tensor} on the {side} has shape {tuple(rows.shape)}, strides {tuple(rows.stride())} and "
                f"elements of {rows.element_size()} bytes; its rows are pages of single bytes, (blocks, bytes)"
            )
    if host.shape[1] % blocks_per_chunk:
        raise LayoutError(
            f"tensor {tensor} has rows of {host.shape[1]} bytes on the host; a row holds {blocks_per_chunk} blocks of "
            "one size"
        )


def _view(rows: Any, blocks: int, offset: int, strides: Sequence[int], fragments: Fragments) -> Any:
    """Fragments of every page of every row: (rows, pages of a row, outer, inner, bytes)."""
    page, numbers = rows.shape[1] // blocks, (fragments.outer.number, fragments.inner.number)
    reach = sum((number - 1) * stride for number, stride in zip(numbers, strides, strict=True))
    last = offset + reach + fragments.nbytes
    if last > page:  # the allocation may go on, so that nothing else would notice
        raise LayoutError(f"a page of {page} bytes has no bytes {offset} to {last - 1}")
    shape = rows.shape[0], blocks, *numbers, fragments.nbytes
    # A loop of one turn has any stride; the one of what is inside it does no harm.
    steps = [stride or fragments.nbytes for stride in strides]
    return rows.as_strided(shape, (rows.stride()[0], page, *steps, 1), rows.storage_offset() + offset)
