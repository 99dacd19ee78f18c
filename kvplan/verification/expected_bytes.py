"""The bytes that a transfer moves and their addresses on both sides, from the layouts alone; and strays in words."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Literal, NamedTuple

import numpy as np

from kvplan.layout.components import Component
from kvplan.layout.inverse import Row, row_of
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place, locate, row_in_words
from kvplan.layout.strides import Factors, Int64Array, extent
from kvplan.program.matching import Pair, match
from kvplan.verification.canary import Stray, Stretches
from kvplan.verification.raw_bytes import addresses_of

Side = Literal[0, 1]  # source, destination


class Match(NamedTuple):
    """A pair of components that hold the same content, and the shape of its moved bytes: (tokens, heads, bytes)."""

    pair: Pair
    first: int  # number of its first byte, counted over all pairs
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its tokens and heads."""
        return self.shape[0] * self.shape[1] * self.shape[2]


class Moved:
    """The moved bytes, numbered in the order of pairs, tokens, heads and content.

    Args:
        src, dst: the layouts.
        ids: block ids of both layouts, in order of tokens.

    Attributes:
        matches: one entry per pair of components.
        nbytes: number of moved bytes.
    """

    def __init__(self, src: KVLayout, dst: KVLayout, ids: tuple[Int64Array, Int64Array]) -> None:
        self.layouts, self.ids = (src, dst), ids
        self.matches: list[Match] = []
        self.nbytes = 0
        for pair in match(src.geometry, dst.geometry):
            held = (pair.src.form, ids[0]), (pair.dst.form, ids[1])
            tokens = min(len(some) * extent(form.token) for form, some in held)
            self.matches.append(Match(pair, self.nbytes, (tokens, len(pair.heads), pair.nbytes)))
            self.nbytes += self.matches[-1].nbytes

    def addresses(self, one: Match, side: Side) -> Int64Array:
        """Return the address of every byte of one pair: (tokens, heads, bytes)."""
        _, dim = _placed(one.pair, side)
        return self._rows(one, side, np.arange(dim, dim + one.shape[2]))

    def _rows(self, one: Match, side: Side, content: Int64Array) -> Int64Array:
        component, _ = _placed(one.pair, side)
        blocks, slots = np.divmod(np.arange(one.shape[0], dtype=np.int64), extent(component.form.token))
        heads = np.arange(one.shape[1], dtype=np.int64) + _first_head(one.pair, component)
        return addresses_of(component, self.ids[side][blocks], slots, heads, content)

    def whole_blocks(self) -> Iterator[tuple[Component, Int64Array]]:
        """Yield the addresses of all content of the destination's blocks, moved or not: (tokens, heads, bytes)."""
        for component in self.layouts[1].components:
            yield component, _blocks_of(component, self.ids[1], np.arange(extent(component.form.dim)))

    def taken(self) -> Stretches:
        """Return the stretches of the source's rows and of the destination's whole blocks."""
        several: list[tuple[Int64Array, int]] = []
        for one in self.matches:
            component, dim = _placed(one.pair, 0)
            content, nbytes = pieces_of(component.form.dim, dim, one.shape[2])
            several.append((self._rows(one, 0, content), nbytes))
        for component in self.layouts[1].components:
            content, nbytes = pieces_of(component.form.dim, 0, extent(component.form.dim))
            several.append((_blocks_of(component, self.ids[1], content), nbytes))
        return Stretches.joined(several)

    def coordinate(self, one: Match, at: tuple[int, ...], side: Side) -> Row:
        """Return the coordinate of one byte of a pair, given as (token, head, byte)."""
        (component, dim), (token, head, byte) = _placed(one.pair, side), at
        block, slot = divmod(token, extent(component.form.token))
        first = _first_head(one.pair, component)
        return row_of(component, (int(self.ids[side][block]), slot, head + first, byte + dim))

    def numbered(self, number: int) -> Row:
        """Return the source's coordinate of the moved byte with this number."""
        one = next(one for one in reversed(self.matches) if one.first <= number)
        return self.coordinate(one, tuple(int(k) for k in np.unravel_index(number - one.first, one.shape)), 0)


def _stray_places(stray: Stray, layouts: tuple[KVLayout, KVLayout]) -> tuple[str, Place]:
    """Return the side that owns a stray byte, and the byte's place on that side."""
    dst = locate(layouts[1], stray.address)[0]
    src = locate(layouts[0], stray.address)[0]
    if dst.kind == "outside" or (src.kind == "content" and dst.kind != "content"):
        return "source", src
    return "destination", dst


def stray_row(stray: Stray, layouts: tuple[KVLayout, KVLayout]) -> Row | None:
    """Coordinate of a stray byte in the destination, or None if it is not content of the destination."""
    side, place = _stray_places(stray, layouts)
    return place.row if side == "destination" else None


def stray_in_words(stray: Stray, nbytes: int, layouts: tuple[KVLayout, KVLayout]) -> str:
    """Say in words which byte changed although it must not, with its values before and after."""
    side, place = _stray_places(stray, layouts)
    called = str(place) if place.row is None else row_in_words(place.row, byte=True)
    if stray.before is None:
        return (f"one of {stray.nbytes:,} bytes from {stray.address:#x} of the {side} on was written, though nothing "
                f"belongs there; the first of these bytes is {called}")  # fmt: skip
    values = f"{stray.before:#04x} before, {stray.after:#04x} after"
    more = f"; {nbytes:,} such bytes in all" if nbytes > 1 else ""
    return f"{called} of the {side} was written, though nothing belongs there: {values}{more}"


def _placed(pair: Pair, side: Side) -> tuple[Component, int]:
    """Return the component of one side, and the first moved byte of its rows."""
    return (pair.src, pair.src_dim) if side == 0 else (pair.dst, pair.dst_dim)


def _first_head(pair: Pair, component: Component) -> int:
    """Return the first moved head, counted from the component's first head."""
    return pair.heads.start - component.form.head_start if pair.src.form.headed and pair.dst.form.headed else 0


def _blocks_of(component: Component, ids: Int64Array, content: Int64Array) -> Int64Array:
    slots, heads = np.arange(extent(component.form.token)), np.arange(extent(component.form.head))
    return addresses_of(component, np.repeat(ids, len(slots)), np.tile(slots, len(ids)), heads, content)


def pieces_of(dim: Factors, first: int, nbytes: int) -> tuple[Int64Array, int]:
    """Return the first bytes of the contiguous pieces of a row, and the bytes of each piece.

    >>> pieces_of(((16, 256), (16, 1)), 32, 64)
    (array([32, 48, 64, 80]), 16)
    """
    if len(dim) == 1 and dim[0][1] == 1:
        return np.array([first]), nbytes
    count, stride = dim[-1] if dim else (1, 1)
    each = gcd(count, first, nbytes) if stride == 1 else 1
    return np.arange(first, first + nbytes, each), each
