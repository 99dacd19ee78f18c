"""What lies at an address, in words for whoever debugs a corrupted block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplan.base.numbers import nbytes_text, number_ranges
from kvplan.layout.components import Component
from kvplan.layout.strides import extent

if TYPE_CHECKING:
    from kvplan.layout.where import Place, Row, Spans

# What is said of a layout's addresses, by :attr:`kvplan.KVLayout.addresses`.
ADDRESSES = {"memory": "", "dump": ", addresses of the process that saved it", "spec": ", made-up addresses"}


def words_of(place: Place) -> str:
    """One line, however long."""
    if place.component is not None:
        return _content(place, place.component)
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


def _content(place: Place, component: Component) -> str:
    form = component.form
    blocks = len(form.table) if form.table is not None else extent(form.block)
    words = [f"layer {component.layer} {component.part}", _some("block", place.blocks, blocks, total=False)]
    if not form.opaque:
        words.append(_some("token", place.tokens, extent(form.token)))
    elif form.subblocks > 1:
        words.append(_some("sub-block", place.subblocks, form.subblocks))
    if form.headed:
        words.append(_some("head", place.heads, extent(form.head), start=form.head_start))
    words.append(_bytes(place.bytes, extent(form.dim)))
    return ", ".join(words)


def _some(noun: str, numbers: Sequence[int], count: int, *, start: int = 0, total: bool = True) -> str:
    if len(numbers) == count > 1:
        return f"all {count:,} {noun}s"
    of = f" (of {start}-{start + count - 1})" if start else f" (of {count:,})"
    listed = number_ranges(numbers, ", ")
    return f"{noun}{'s' * (len(numbers) > 1)} {listed}{of if total and count > 1 else ''}"


def _bytes(spans: Spans, count: int) -> str:
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
    """A coordinate.

    Args:
        row: of content.
        whole_block: name no more than the block.
        byte: name the byte, too.
        beside: what was named before; what both share is not said again.
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
