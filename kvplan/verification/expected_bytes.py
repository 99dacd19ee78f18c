"""The bytes that a transfer of some blocks moves: where each lies on both sides, by the layouts alone; and strays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from kvplan.layout.components import Component
from kvplan.layout.inverse import Row
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place, locate, row_in_words
from kvplan.layout.strides import Factors, Int64Array, extent
from kvplan.program.matching import Pair, match
from kvplan.verification.canary import Stray, Stretches
from kvplan.verification.raw_bytes import addresses_of

Side = Literal[0, 1]  # source, destination


class Match(NamedTuple):
    """One pair of components, and how many bytes of it move: (tokens, heads, bytes)."""

    pair: Pair
    first: int  # number of its first byte, over all pairs
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Of all its tokens and heads."""
        return self.shape[0] * self.shape[1] * self.shape[2]


class Moved:
    """Bytes moved, numbered in the order of pairs, tokens, heads, content.

    Args:
        src, dst: the layouts.
        ids: block ids of both, in order of tokens.

    Attributes:
        matches: one for each pair of components.
        nbytes: in all.
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
        """Of every byte of one pair: (tokens, heads, bytes)."""
        _, dim = _placed(one.pair, side)
        return self._rows(one, side, np.arange(dim, dim + one.shape[2]))

    def _rows(self, one: Match, side: Side, content: Int64Array) -> Int64Array:
        component, _ = _placed(one.pair, side)
        blocks, slots = np.divmod(np.arange(one.shape[0], dtype=np.int64), extent(component.form.token))
        heads = np.arange(one.shape[1], dtype=np.int64) + _first_head(one.pair, component)
        return addresses_of(component, self.ids[side][blocks], slots, heads, content)

    def whole_blocks(self) -> Iterator[tuple[Component, Int64Array]]:
        """Addresses of all that the destination's blocks hold, moved or not: (tokens, heads, bytes)."""
        for component in self.layouts[1].components:
            yield component, _blocks_of(component, self.ids[1], np.arange(extent(component.form.dim)))

    def taken(self) -> Stretches:
        """Where the source's rows and the destination's whole blocks lie."""
        several: list[tuple[Int64Array, int]] = []
        for one in self.matches:
            component, dim = _placed(one.pair, 0)
            content, nbytes = _pieces(component.form.dim, dim, one.shape[2])
            several.append((self._rows(one, 0, content), nbytes))
        for component in self.layouts[1].components:
            content, nbytes = _pieces(component.form.dim, 0, extent(component.form.dim))
            several.append((_blocks_of(component, self.ids[1], content), nbytes))
        return Stretches.joined(several)

    def coordinate(self, one: Match, at: tuple[int, ...], side: Side) -> Row:
        """Of one byte of a pair, given as (token, head, byte)."""
        (component, dim), (token, head, byte) = _placed(one.pair, side), at
        return row_of(component, self.ids[side], token, head + _first_head(one.pair, component), byte + dim)

    def numbered(self, number: int) -> Row:
        """Coordinate in the source of one byte, by its number."""
        one = next(one for one in reversed(self.matches) if one.first <= number)
        return self.coordinate(one, tuple(int(k) for k in np.unravel_index(number - one.first, one.shape)), 0)


def row_of(component: Component, ids: Int64Array, token: int, head: int, byte: int) -> Row:
    """Coordinate of one byte; ``token`` counts through the blocks of ``ids``, ``head`` from the component's first."""
    form = component.form
    block, slot = divmod(token, extent(form.token))
    return Row(
        component.layer,
        component.part,
        int(ids[block]),
        None if form.opaque else slot,
        form.head_start + head if form.headed else None,
        byte,
        slot if form.subblocks > 1 else None,
    )


def _stray_places(stray: Stray, layouts: tuple[KVLayout, KVLayout]) -> tuple[str, Place]:
    """Whose memory a stray byte is, and what it is there."""
    dst = locate(layouts[1], stray.address)[0]
    src = locate(layouts[0], stray.address)[0]
    if dst.kind == "outside" or (src.kind == "content" and dst.kind != "content"):
        return "source", src
    return "destination", dst


def stray_row(stray: Stray, layouts: tuple[KVLayout, KVLayout]) -> Row | None:
    """Its coordinate in the destination, if it is content of that."""
    side, place = _stray_places(stray, layouts)
    return place.row if side == "destination" else None


def stray_in_words(stray: Stray, nbytes: int, layouts: tuple[KVLayout, KVLayout]) -> str:
    """Which byte changed that should not have, and from what to what."""
    side, place = _stray_places(stray, layouts)
    called = str(place) if place.row is None else row_in_words(place.row, byte=True)
    if stray.before is None:
        return (f"one of {stray.nbytes:,} bytes from {stray.address:#x} of the {side} on was written, though nothing "
                f"belongs there; the first of them is {called}")  # fmt: skip
    values = f"{stray.before:#04x} before, {stray.after:#04x} after"
    more = f"; {nbytes:,} bytes were, in all" if nbytes > 1 else ""
    return f"{called} of the {side} was written, though nothing belongs there: {values}{more}"


def _placed(pair: Pair, side: Side) -> tuple[Component, int]:
    """The component of one side, and the first byte of its rows that moves."""
    return (pair.src, pair.src_dim) if side == 0 else (pair.dst, pair.dst_dim)


def _first_head(pair: Pair, component: Component) -> int:
    """Of the heads moved, the first, counted from the component's own first."""
    return pair.heads.start - component.form.head_start if pair.src.form.headed and pair.dst.form.headed else 0


def _blocks_of(component: Component, ids: Int64Array, content: Int64Array) -> Int64Array:
    slots, heads = np.arange(extent(component.form.token)), np.arange(extent(component.form.head))
    return addresses_of(component, np.repeat(ids, len(slots)), np.tile(slots, len(ids)), heads, content)


def _pieces(dim: Factors, first: int, nbytes: int) -> tuple[Int64Array, int]:
    """First bytes of contiguous pieces of a row, and the bytes of each."""
    if len(dim) == 1 and dim[0][1] == 1:
        return np.array([first]), nbytes
    return np.arange(first, first + nbytes), 1
