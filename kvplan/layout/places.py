"""Name the content or the padding that lies at an address."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvplan.base.numbers import nbytes_text, number_ranges
from kvplan.base.values import integer
from kvplan.errors import KVPlanError
from kvplan.layout.address_ranges import merged
from kvplan.layout.components import INT64_MAX, Component, Region, quoted_address
from kvplan.layout.inverse import (
    Row,
    blocks_in,
    check_rows,
    find,
    first_from,
    last_before,
    pieces,
    row_of,
    runs_in,
    steps_of,
)
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import extent, span

Spans = tuple[tuple[int, int], ...]  # (first, one past the last), ascending


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of memory: their coordinates, or their position in the padding. :func:`locate` returns places.

    Attributes:
        kind: ``"content"``; ``"padding"`` between content; ``"before"`` or ``"after"`` all content of the region;
            ``"unused"``: in a region without content of this layout; ``"outside"`` all regions.
        address: address of the first byte.
        nbytes: number of bytes; not always contiguous in content and in padding.
        region: number of the region, in order of address; outside all regions, number of the nearest region.
        offset: bytes from the start of the region to the first byte; outside, negative or past the region's end.
        region_nbytes: bytes of the region.
        component: the component that holds the content; None for padding.
        blocks: block ids of the content. Every block holds the tokens, heads and bytes below.
        tokens: token slots within each block; empty if blocks are opaque.
        heads: global numbers of the heads; empty if the content belongs to no head.
        bytes: byte ranges within each row, as (first, one past the last).
        after: the last byte of content before these bytes; None if the region has no content there.
        after_nbytes: bytes of padding between ``after`` and the first of these bytes.
        before: the first byte of content after these bytes; None if the region has no content there.
        before_nbytes: bytes from the first of these bytes to ``before``.
        edges: whether ``after`` is the last byte of its block, and whether ``before`` is the first byte of its block.
        gaps: number of gaps in the padding; ``after`` and ``before`` are the neighbours of the first gap.
        subblocks: opaque sub-blocks within each block; empty if a block has token slots or is one sub-block.
    """

    kind: str
    address: int
    nbytes: int
    region: int
    offset: int
    region_nbytes: int
    component: Component | None = None
    blocks: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    bytes: Spans = ()
    after: Row | None = None
    after_nbytes: int = 0
    before: Row | None = None
    before_nbytes: int = 0
    edges: tuple[bool, bool] = (False, False)
    gaps: int = 1
    subblocks: tuple[int, ...] = ()

    @property
    def row(self) -> Row | None:
        """Coordinates of the first byte of the content; None for padding."""
        if self.component is None:
            return None
        token, head = self.tokens[0] if self.tokens else None, self.heads[0] if self.heads else None
        subblock = self.subblocks[0] if self.subblocks else None
        return Row(self.component.layer, self.component.part, self.blocks[0], token, head, self.bytes[0][0], subblock)

    def __str__(self) -> str:
        return words_of(self)


def locate(layout: KVLayout, address: int, nbytes: int = 1) -> tuple[Place, ...]:
    """Return the coordinates of the bytes at an address: the inverse of :meth:`kvplan.KVLayout.address`.

    Args:
        layout: any layout, also from a dump or a spec.
        address: address of the first byte.
        nbytes: number of bytes to look up.

    Returns:
        Places in order of address. Every byte is in exactly one place. Blocks of one component that hold the same
        tokens, heads and bytes are one place. All padding of a region is one place, too.

    Raises:
        KVPlanError: the address or the size is not valid, or the range crosses too many rows.

    >>> import kvplan
    >>> spec = {"notation": "layer: block token head dim", "address": 4096, "dtype": "fp16",
    ...         "sizes": {"layer": 1, "block": 8, "token": 16, "head": 2, "dim": 64}}
    >>> print(*kvplan.locate(kvplan.KVLayout.from_spec(spec), 4096 + 2 * 4096 + 256 + 130, 16))
    layer 0 kv, block 2, token 1 (of 16), head 1 (of 2), bytes 2-17 (of 128)
    """
    if not isinstance(layout, KVLayout):
        raise KVPlanError(f"layout is a {type(layout).__name__}; locate takes a KVLayout and an address")
    start = integer("address", address, least=0, error=KVPlanError)
    stop = start + integer("nbytes", nbytes, least=1, error=KVPlanError)
    if stop > INT64_MAX:
        raise KVPlanError(f"the range ends at {quoted_address(stop)}, past the largest int64 address")
    places: list[Place] = []
    regions = sorted(layout.regions, key=lambda region: region.address)
    edges = {edge for region in regions for edge in (region.address, region.end) if start < edge < stop}
    bounds = [start, *sorted(edges), stop]
    for first, last in pairwise(bounds):
        holding = [k for k, region in enumerate(regions) if region.address <= first < region.end]
        if holding:  # regions may nest (views of views): take the widest
            widest = max(holding, key=lambda k: regions[k].nbytes)
            places += _inside(layout, regions[widest], widest, first, last)
        else:
            places.append(_outside(regions, first, last))
    return tuple(places)


def _outside(regions: Sequence[Region], start: int, stop: int) -> Place:
    below = max((k for k, r in enumerate(regions) if r.end <= start), key=lambda k: regions[k].end, default=None)
    above = min((k for k, r in enumerate(regions) if r.address >= stop), key=lambda k: regions[k].address, default=None)
    gone = start - regions[below].end if below is not None else INT64_MAX
    left = regions[above].address - stop if above is not None else INT64_MAX
    nearest = below if above is None or (below is not None and gone <= left) else above
    number = nearest or 0  # a layout has a region, and an address outside is before or after a region
    offset = start - regions[number].address
    return Place("outside", start, stop - start, number, offset, regions[number].nbytes)


def _inside(layout: KVLayout, region: Region, number: int, start: int, stop: int) -> list[Place]:
    """Return the places of a range inside one region."""
    found = [
        place
        for component in layout.components
        for place in _content(component, region, number, start, stop)
    ]  # fmt: skip
    missing = stop - start - sum(place.nbytes for place in found)
    if missing:  # no byte has two coordinates, so that all other bytes are padding
        found.append(_padding(layout, region, number, start, stop, missing))
    return sorted(found, key=lambda place: place.address)


def _content(component: Component, region: Region, number: int, start: int, stop: int) -> Iterator[Place]:
    """Yield the places of one component in a range; blocks and rows of equal coverage are one place."""
    first, end = component.hull()
    if stop <= first or end <= start:
        return
    form = component.form
    low, high = start - component.address, stop - component.address
    inner, reach = steps_of(form, blocks=False), span(form.inner)
    tokens, heads, content = extent(form.token), extent(form.head), extent(form.dim)
    whole = (tuple(range(tokens)), tuple(range(heads)), ((0, content),))
    covered: dict[tuple[tuple[int, ...], tuple[int, ...], Spans], list[tuple[int, int]]] = defaultdict(list)
    looked = 0
    for block, at in blocks_in(form, low, high):
        looked += 1
        if low <= at and at + reach < high:
            covered[whole].append((block, at))
            continue
        rows: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for (_, token, head, byte), where, nbytes in pieces(inner, low - at, high - at):
            looked += 1
            check_rows(looked)
            rows[token, head].append((byte, byte + nbytes, where))
        for box, where in _boxes(rows):
            covered[box].append((block, at + where))
        check_rows(looked)
    for (some_tokens, some_heads, spans), held in covered.items():
        nbytes = len(held) * len(some_tokens) * len(some_heads) * sum(b - a for a, b in spans)
        address = component.address + min(at for _, at in held)
        yield Place(
            "content", address, nbytes, number, address - region.address, region.nbytes, component,
            tuple(sorted(block for block, _ in held)),
            () if form.opaque else some_tokens,
            tuple(form.head_start + head for head in some_heads) if form.headed else (),
            spans,
            subblocks=some_tokens if form.subblocks > 1 else (),
        )  # fmt: skip


def _boxes(
    rows: dict[tuple[int, int], list[tuple[int, int, int]]],
) -> Iterator[tuple[tuple[tuple[int, ...], tuple[int, ...], Spans], int]]:
    """Yield few boxes (tokens, heads, bytes) that hold all rows, each with the offset of its first byte."""
    alike: dict[Spans, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for (token, head), held in rows.items():
        spans = tuple(merged((first, last) for first, last, _ in held))
        alike[spans][token][head] = min(where for _, _, where in held)
    for spans, by_token in alike.items():
        by_heads: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for token in sorted(by_token):
            by_heads[tuple(sorted(by_token[token]))].append(token)
        for heads, tokens in by_heads.items():
            yield (tuple(tokens), heads, spans), min(min(by_token[token].values()) for token in tokens)


def _padding(layout: KVLayout, region: Region, number: int, start: int, stop: int, missing: int) -> Place:
    """Return the padding of a range inside one region, with the neighbours of its first gap."""
    runs = sorted(run for component in layout.components for run in runs_in(component, start, stop))
    check_rows(len(runs))
    ends = [start, *(end for _, end in runs)]
    gaps = [(end, first) for end, first in zip(ends, [*(first for first, _ in runs), stop], strict=True) if end < first]
    first = gaps[0][0]
    ends_before = (last_before(component, first) for component in layout.components)
    starts_behind = (first_from(component, first) for component in layout.components)
    below = max((at for at in ends_before if at is not None and at >= region.address), default=None)
    above = min((at for at in starts_behind if at is not None and at < region.end), default=None)
    after, ends_block = (None, False) if below is None else _row_at(layout, below, last=True)
    before, starts_block = (None, False) if above is None else _row_at(layout, above, last=False)
    kind = ("padding" if before else "after") if after else ("before" if before else "unused")
    return Place(
        "padding" if len(gaps) > 1 else kind, first, missing, number, first - region.address, region.nbytes,
        after=after, after_nbytes=0 if below is None else first - below - 1,
        before=before, before_nbytes=0 if above is None else above - first,
        edges=(ends_block, starts_block), gaps=len(gaps),
    )  # fmt: skip


def _row_at(layout: KVLayout, address: int, *, last: bool) -> tuple[Row, bool]:
    """Return the coordinates of one byte of content, and whether it is the last (or first) byte of its block."""
    found = find(layout.components, address)
    if found is None:
        raise KVPlanError(f"{address:#x} holds no content")
    component, coordinates, inside = found
    return row_of(component, coordinates), inside == (span(component.form.inner) if last else 0)


def words_of(place: Place) -> str:
    """Return the description of a place in one line."""
    if place.component is not None:
        return _content_words(place, place.component)
    told = nbytes_text(place.nbytes)
    if place.kind == "outside":
        ended = place.offset >= place.region_nbytes
        away = place.offset - place.region_nbytes if ended else -place.offset - place.nbytes
        far = nbytes_text(away) if away else "right"
        side = f"ends {far} before" if ended else f"begins {far} after"
        return f"{told} outside all regions; the nearest, region {place.region}, {side}"
    if place.kind == "unused":
        return f"{told} of region {place.region}, which holds nothing of this layout"
    if place.gaps > 1:
        return f"{told} of padding in {place.gaps:,} gaps, the first {_neighbours(place)}"
    if place.kind == "padding":
        return f"{told} of padding, {_neighbours(place)}"
    return f"{told} {place.kind} all content of region {place.region}, {_neighbours(place)}"


def _content_words(place: Place, component: Component) -> str:
    form = component.form
    blocks = len(form.table) if form.table is not None else extent(form.block)
    words = [f"layer {component.layer} {component.part}", _some("block", place.blocks, blocks, total=False)]
    if not form.opaque:
        words.append(_some("token", place.tokens, extent(form.token)))
    elif form.subblocks > 1:
        words.append(_some("sub-block", place.subblocks, form.subblocks))
    if form.headed:
        words.append(_some("head", place.heads, extent(form.head), start=form.head_start))
    words.append(_byte_words(place.bytes, extent(form.dim)))
    return ", ".join(words)


def _some(noun: str, numbers: Sequence[int], count: int, *, start: int = 0, total: bool = True) -> str:
    if len(numbers) == count > 1:
        return f"all {count:,} {noun}s"
    of = f" (of {start}-{start + count - 1})" if start else f" (of {count:,})"
    listed = number_ranges(numbers, ", ")
    return f"{noun}{'s' * (len(numbers) > 1)} {listed}{of if total and count > 1 else ''}"


def _byte_words(spans: Spans, count: int) -> str:
    if spans == ((0, count),):
        return f"all {nbytes_text(count)}" if count > 1 else "its one byte"
    listed = ", ".join(str(first) if last - first == 1 else f"{first}-{last - 1}" for first, last in spans)
    single = len(spans) == 1 and spans[0][1] - spans[0][0] == 1
    return f"byte{'s' * (not single)} {listed} (of {count:,})"


def _neighbours(place: Place) -> str:
    words = []
    after, before = place.after, place.before
    same_row = after is not None and before is not None and after._replace(byte=0) == before._replace(byte=0)
    if after is not None:
        away = "right" if not place.after_nbytes else nbytes_text(place.after_nbytes)
        words.append(f"{away} after {row_in_words(after, whole_block=place.edges[0], byte=same_row)}")
    if before is not None:
        named = row_in_words(before, whole_block=place.edges[1], byte=same_row, beside=after)
        words.append(f"{nbytes_text(place.before_nbytes)} before {named}")
    return ", ".join(words)


def row_in_words(row: Row, *, whole_block: bool = False, byte: bool = False, beside: Row | None = None) -> str:
    """Return coordinates in words.

    Args:
        row: coordinates of content.
        whole_block: whether to name only the block.
        byte: whether to name the byte, too.
        beside: coordinates that the text names just before. Coordinates that both have are not repeated.
    """
    words = []
    if not whole_block:
        words += [f"token {row.token}"] if row.token is not None else []
        words += [f"sub-block {row.subblock}"] if row.subblock is not None else []
        words += [f"head {row.head}"] if row.head is not None else []
    words += [f"byte {row.byte}"] if byte else []
    same_part = beside is not None and beside[:2] == row[:2]
    inside = ", ".join(words)
    if same_part and beside is not None and beside.block == row.block and words:
        return inside
    block = f"block {row.block}" + ("" if same_part else f" of layer {row.layer} {row.part}")
    return f"{inside} of {block}" if inside else block
