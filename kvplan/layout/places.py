"""From byte addresses back to content: (layer, part, block, token, head, byte), or the padding between content.

A layout adds up one offset for each digit of each axis. The inverse is a search over those digits, the largest stride
first, which skips branches that cannot reach the address. If strides nest, one branch per level remains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvplan.base.files import LIMITS
from kvplan.base.numbers import nbytes_text, number_ranges
from kvplan.base.values import integer
from kvplan.errors import KVPlanError
from kvplan.layout.address_ranges import merged
from kvplan.layout.components import INT64_MAX, Component, Form, Region, quoted_address
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import extent, offsets_of, run_of, span

AXES, BLOCK = range(4), 0
Coordinates = tuple[int, int, int, int]  # (block, token, head, byte), each from 0
Step = tuple[int, int, int, int]  # axis, coordinates per digit, digits, bytes per digit


class Row(NamedTuple):
    """The coordinates of one byte of content.

    Attributes:
        layer: global number of the layer.
        part: name of the part.
        block: block id.
        token: slot within the block; None if the block is opaque.
        head: global number of the head; None if the content belongs to no head.
        byte: number of the byte within the row of that (token, head), from 0.
        subblock: number of the opaque sub-block within the block; None if a block has token slots or is one sub-block.
    """

    layer: int
    part: str
    block: int
    token: int | None
    head: int | None
    byte: int
    subblock: int | None = None


def row_of(component: Component, coordinates: Coordinates) -> Row:
    """Return the coordinates of a byte of a component as a row, with global numbers."""
    form, (block, token, head, byte) = component.form, coordinates
    number = form.head_start + head if form.headed else None
    slot, subblock = None if form.opaque else token, token if form.subblocks > 1 else None
    return Row(component.layer, component.part, block, slot, number, byte, subblock)


# ---- the search ------------------------------------------------------------------------------------------------------


def _steps(form: Form) -> tuple[Step, ...]:
    """Return the factors of all axes, the largest stride first; without blocks that a table holds."""
    steps = []
    for axis, factors in zip(AXES, (form.block, form.token, form.head, form.dim), strict=True):
        place = 1
        for count, stride in reversed(factors):
            steps.append((axis, place, count, stride))
            place *= count
    return tuple(sorted(steps, key=lambda step: -step[3]))


Box = tuple[int, int, tuple[range, ...]]  # block, if a table holds the blocks; address; the digits of each step


def _boxes(component: Component, start: int, stop: int) -> Iterator[Box]:
    """Yield the content of a component between two addresses as boxes, of which each holds a range of every digit.

    >>> rows = Component(0, "kv", 100, Form(block=(), token=((4, 20),), head=(), dim=((16, 1),)))
    >>> list(_boxes(rows, 118, 162))
    [(0, 120, (range(1, 3), range(0, 16))), (0, 160, (range(3, 4), range(0, 2)))]
    """
    steps = _steps(component.form)
    full = tuple(range(count) for _, _, count, _ in steps)
    reaches = [sum((count - 1) * stride for _, _, count, stride in steps[k:]) for k in range(len(steps) + 1)]
    looked = 0

    def walk(k: int, at: int, digits: tuple[range, ...]) -> Iterator[tuple[int, tuple[range, ...]]]:
        nonlocal looked
        looked += 1
        _check_work(looked)
        if start <= at and at + reaches[k] < stop:
            yield at, (*digits, *full[k:])
        elif k < len(steps):
            (_, _, count, stride), reach = steps[k], reaches[k + 1]
            first, last = max(0, -((at + reach - start) // stride)), min(count - 1, (stop - 1 - at) // stride)
            whole = range(max(first, -((at - start) // stride)), min(last, (stop - 1 - at - reach) // stride) + 1)
            if whole:
                yield at + whole.start * stride, (*digits, whole, *full[k + 1 :])
            for digit in range(first, last + 1):
                if digit not in whole:
                    yield from walk(k + 1, at + digit * stride, (*digits, range(digit, digit + 1)))

    for block, at in enumerate(component.form.table or (0,)):
        if start - reaches[0] <= component.address + at < stop:
            for address, digits in walk(0, component.address + at, ()):
                yield block, address, digits


def _check_work(looked: int) -> None:
    if looked > LIMITS.listed:
        raise KVPlanError(f"the range crosses more than {LIMITS.listed:,} rows; ask for fewer bytes")


def nearest(component: Component, address: int, *, after: bool = False) -> tuple[int, Coordinates] | None:
    """Return the last byte of content up to an address, or the first one from it on: its address and coordinates.

    >>> rows = Component(0, "kv", 100, Form(block=(), token=((4, 20),), head=(), dim=((16, 1),)))
    >>> nearest(rows, 119), nearest(rows, 116, after=True), nearest(rows, 99)
    ((115, (0, 0, 0, 15)), (120, (0, 1, 0, 0)), None)
    """
    steps, (low, high) = _steps(component.form), component.hull()
    best: tuple[int, Coordinates] | None = None
    for block, at, digits in _boxes(component, address, high) if after else _boxes(component, low, address + 1):
        where = [block, 0, 0, 0]
        for (axis, place, _, stride), some in zip(steps, digits, strict=True):
            where[axis] += place * some[0 if after else -1]
            at += 0 if after else (len(some) - 1) * stride
        if best is None or (at < best[0] if after else at > best[0]):
            best = at, (where[0], where[1], where[2], where[3])
    return best


def find(components: Iterable[Component], address: int) -> tuple[Component, Coordinates] | None:
    """Return the component and coordinates of one byte; None for a byte of padding."""
    for component in components:
        first, end = component.hull()
        place = nearest(component, address) if first <= address < end else None
        if place is not None and place[0] == address:
            return component, place[1]
    return None


def first_from(component: Component, address: int) -> int | None:
    """Return the address of the first byte of content of a component at an address or after it, or None."""
    place = nearest(component, address, after=True)
    return None if place is None else place[0]


_Spans = tuple[tuple[int, int], ...]  # (first, one past the last), ascending


# ---- places ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of memory: their coordinates, or their position in the padding. :func:`locate` returns places.

    ``str(place)`` describes it in one line.

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
        gaps: number of gaps in the padding; ``after`` and ``before`` are the neighbours of the first gap.
        subblocks: opaque sub-blocks within each block; empty if a block has token slots or is one sub-block.
        text: the place in words.
    """

    kind: str
    address: int
    nbytes: int
    region: int
    offset: int
    region_nbytes: int
    text: str
    component: Component | None = None
    blocks: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    bytes: _Spans = ()
    after: Row | None = None
    after_nbytes: int = 0
    before: Row | None = None
    before_nbytes: int = 0
    gaps: int = 1
    subblocks: tuple[int, ...] = ()

    @property
    def row(self) -> Row | None:
        """Coordinates of the first byte of the content; None for padding."""
        if self.component is None:
            return None
        token, head, subblock = (each[0] if each else None for each in (self.tokens, self.heads, self.subblocks))
        return Row(self.component.layer, self.component.part, self.blocks[0], token, head, self.bytes[0][0], subblock)

    def __str__(self) -> str:
        return self.text


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
    for first, last in pairwise([start, *sorted(edges), stop]):
        holding = [k for k, region in enumerate(regions) if region.address <= first < region.end]
        if holding:  # regions may nest (views of views): take the widest
            widest = max(holding, key=lambda k: regions[k].nbytes)
            places += _inside(layout, regions[widest], widest, first, last)
        else:
            places.append(_outside(regions, first, last))
    return tuple(places)


def _outside(regions: Sequence[Region], start: int, stop: int) -> Place:
    far = {k: max(region.address - stop, start - region.end) for k, region in enumerate(regions)}
    number = min(far, key=lambda k: far[k])
    region, away = regions[number], nbytes_text(far[number]) if far[number] else "right"
    side = f"ends {away} before" if region.end <= start else f"begins {away} after"
    text = f"{nbytes_text(stop - start)} outside all regions; the nearest, region {number}, {side}"
    return Place("outside", start, stop - start, number, start - region.address, region.nbytes, text)


def _inside(layout: KVLayout, region: Region, number: int, start: int, stop: int) -> list[Place]:
    """Return the places of a range inside one region."""
    found = [(component, list(_boxes(component, start, stop))) for component in layout.components]
    places = [place for component, boxes in found for place in _content(component, region, number, boxes)]
    if sum(place.nbytes for place in places) == stop - start:  # no padding between them
        return sorted(places, key=lambda place: place.address)
    runs = list[tuple[int, int]]()
    for component, boxes in found:
        steps = _steps(component.form)
        for _, at, digits in boxes:
            nbytes, outer = run_of((len(some), stride) for some, (*_, stride) in zip(digits, steps, strict=True))
            _check_work(len(runs) + extent(outer))
            runs += [(at + far, at + far + nbytes) for far in offsets_of(outer).tolist()]
    runs = merged(runs)
    ends, starts = [start, *(end for _, end in runs)], [*(first for first, _ in runs), stop]
    if gaps := [(end, first) for end, first in zip(ends, starts, strict=True) if end < first]:
        places.append(_padding(layout, region, number, gaps))
    return sorted(places, key=lambda place: place.address)


def _content(component: Component, region: Region, number: int, boxes: Iterable[Box]) -> Iterator[Place]:
    """Yield the places of the boxes of one component; blocks of equal coverage are one place."""
    form, steps = component.form, _steps(component.form)
    alike: dict[tuple[_Spans, _Spans, _Spans], list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
    for block, address, digits in boxes:
        numbers, *inside = (_spans(steps, digits, axis) for axis in AXES)
        key = inside[0], inside[1], inside[2]
        alike[key].append((address, _every(numbers) if form.table is None else (block,)))
    for (some_tokens, some_heads, spans), held in alike.items():
        token, head = _every(some_tokens), _every(some_heads)
        address, blocks = min(at for at, _ in held), tuple(sorted(block for _, some in held for block in some))
        nbytes = len(blocks) * len(token) * len(head) * sum(last - first for first, last in spans)
        tokens, subblocks = () if form.opaque else token, token if form.subblocks > 1 else ()
        heads = tuple(form.head_start + at for at in head) if form.headed else ()
        words = [f"layer {component.layer} {component.part}", _some("block", blocks, range(form.num_blocks), of=False)]
        words += [_some("token", tokens, range(extent(form.token)))] * (not form.opaque)
        words += [_some("sub-block", subblocks, range(form.subblocks))] * bool(subblocks)
        words += [_some("head", heads, form.heads)] * form.headed
        yield Place(
            "content", address, nbytes, number, address - region.address, region.nbytes,
            ", ".join([*words, _byte_words(spans, extent(form.dim))]), component, blocks, tokens, heads, spans,
            subblocks=subblocks,
        )  # fmt: skip


def _padding(layout: KVLayout, region: Region, number: int, gaps: Sequence[tuple[int, int]]) -> Place:
    """Return the padding of a range inside one region, with the neighbours of its first gap."""
    at, nbytes = gaps[0][0], sum(end - start for start, end in gaps)
    last, after, ends = _neighbour(layout, region, at, after=False)
    first, before, begins = _neighbour(layout, region, at, after=True)
    row = after is not None and before is not None and after._replace(byte=0) == before._replace(byte=0)
    words = []
    if after is not None:
        away = nbytes_text(at - last - 1) if at - last > 1 else "right"
        words.append(f"{away} after {row_in_words(after, whole_block=ends, byte=row)}")
    if before is not None:
        named = row_in_words(before, whole_block=begins, byte=row, beside=after)
        words.append(f"{nbytes_text(first - at)} before {named}")
    kind = {(False, False): "unused", (True, False): "after", (False, True): "before", (True, True): "padding"}[
        after is not None, before is not None
    ]
    text = f"{kind} all content of region {number}, {', '.join(words)}"
    if len(gaps) > 1:
        kind, text = "padding", f"of padding in {len(gaps):,} gaps, the first {', '.join(words)}"
    elif kind == "padding":
        text = f"of padding, {', '.join(words)}"
    elif kind == "unused":
        text = f"of region {number}, which holds nothing of this layout"
    return Place(
        kind, at, nbytes, number, at - region.address, region.nbytes, f"{nbytes_text(nbytes)} {text}",
        after=after, after_nbytes=at - last - 1 if after else 0,
        before=before, before_nbytes=first - at if before else 0, gaps=len(gaps),
    )  # fmt: skip


def _neighbour(layout: KVLayout, region: Region, at: int, *, after: bool) -> tuple[int, Row | None, bool]:
    """Return the content beside a gap, and whether it is the last or the first byte of its block."""
    near = ((component, nearest(component, at, after=after)) for component in layout.components)
    inside = [(*place, c) for c, place in near if place is not None and region.address <= place[0] < region.end]
    if not inside:
        return 0, None, False
    address, where, component = (min if after else max)(inside, key=lambda each: each[0])
    block = component.address + component.form.block_offset(where[BLOCK])
    edge = block if after else block + span(component.form.inner)
    return address, row_of(component, where), address == edge


def _spans(steps: Sequence[Step], digits: Sequence[range], axis: int) -> _Spans:
    """Return the coordinates of a box along one axis, as (first, one past the last)."""
    spans = [(0, 1)]
    for (of, place, _, _), some in sorted(zip(steps, digits, strict=True), key=lambda each: each[0]):
        if of == axis and spans == [(0, place)]:
            spans = [(some.start * place, some.stop * place)]
        elif of == axis:
            spans = merged((first + digit * place, last + digit * place) for digit in some for first, last in spans)
    return tuple(spans)


def _every(spans: _Spans) -> tuple[int, ...]:
    return tuple(number for first, last in spans for number in range(first, last))


def _some(noun: str, numbers: Sequence[int], every: range, *, of: bool = True) -> str:
    if len(numbers) == len(every) > 1:
        return f"all {len(every):,} {noun}s"
    total = f" (of {every[0]}-{every[-1]})" if every.start else f" (of {len(every):,})"
    return f"{noun}{'s' * (len(numbers) > 1)} {number_ranges(numbers, ', ')}{total if of and len(every) > 1 else ''}"


def _byte_words(spans: _Spans, count: int) -> str:
    if spans == ((0, count),):
        return f"all {nbytes_text(count)}" if count > 1 else "its one byte"
    single = len(spans) == 1 and spans[0][1] - spans[0][0] == 1
    listed = ", ".join(str(first) if last - first == 1 else f"{first}-{last - 1}" for first, last in spans)
    return f"byte{'s' * (not single)} {listed} (of {count:,})"


def row_in_words(row: Row, *, whole_block: bool = False, byte: bool = False, beside: Row | None = None) -> str:
    """Return coordinates in words.

    Args:
        row: coordinates of content.
        whole_block: whether to name only the block.
        byte: whether to name the byte, too.
        beside: coordinates that the text names just before. Coordinates that both have are not repeated.
    """
    named = {"token": row.token, "sub-block": row.subblock, "head": row.head} if not whole_block else {}
    words = [f"{noun} {number}" for noun, number in named.items() if number is not None]
    inside = ", ".join(words + [f"byte {row.byte}"] * byte)
    same_part = beside is not None and beside[:2] == row[:2]
    if same_part and beside is not None and beside.block == row.block and inside:
        return inside
    block = f"block {row.block}" + ("" if same_part else f" of layer {row.layer} {row.part}")
    return f"{inside} of {block}" if inside else block
