"""Rows of words with the places at an address, for the terminal and for a page."""

from __future__ import annotations

from itertools import groupby

from kvplan.base.numbers import count_of, nbytes_text
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place

SHOWN_LINES = 16


def place_rows(layout: KVLayout, places: tuple[Place, ...], address: int, nbytes: int) -> list[tuple[str, str]]:
    """Return the places at an address as rows of words."""
    first = places[0]
    rows = [
        ("layout", f"{layout.notation}{ADDRESSES[layout.addresses]}"),
        ("asked", f"{nbytes_text(nbytes)} at {address:#x}"),
    ]
    if first.kind != "outside":
        of = f"{first.region} of {count_of(len(layout.regions), 'region')}"
        rows.append(("region", f"{of}, {first.offset:,} bytes into its {first.region_nbytes:,}"))
    lines = _lines(places)
    rows += lines[:SHOWN_LINES]
    if len(lines) > SHOWN_LINES:
        rows.append(("", f"and {count_of(len(lines) - SHOWN_LINES, 'more line')}; --json has all of it"))
    return rows


def _lines(places: tuple[Place, ...]) -> list[tuple[str, str]]:
    """Return a line for each place. Consecutive layers with the same content share a line."""
    lines = []
    for _, alike in groupby(enumerate(places), key=lambda numbered: _alike(*numbered)):
        held = [place for _, place in alike]
        first, last = held[0], held[-1]
        words = str(first)
        if first.component is not None and last.component is not None and len(held) > 1:
            many = f"layers {first.component.layer}-{last.component.layer}"
            words = words.replace(f"layer {first.component.layer}", many, 1) + ", of each"
        lines.append((f"{first.address:#x}", words))
    return lines


def _alike(number: int, place: Place) -> tuple[object, ...]:
    """Return a key that is equal for places that differ only in the layer, if the layer ascends with their number."""
    if place.component is None:
        return (number,)
    held = (place.blocks, place.tokens, place.subblocks, place.heads, place.bytes)
    return (place.component.layer - number, place.component.part, place.component.form, *held)
