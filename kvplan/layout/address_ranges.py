"""Find the stretches of memory that components touch, cut them into registrations, and check their bounds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from kvplan.base.files import LIMITS
from kvplan.errors import LayoutError
from kvplan.layout.components import INT64_MAX, Component, Form, Region, quoted_address
from kvplan.layout.strides import Factors, span

# Untouched bytes that separate two stretches. Smaller gaps are pinned, too: more registrations and seams cost more.
APART = 64 << 20

Stretch = tuple[int, int]  # (first byte, first byte after)


def stretches(components: Iterable[Component], apart: int | None = None) -> list[Stretch]:
    """Return the stretches of memory that components touch, ascending; blocks of a table count as one stretch.

    Args:
        components: components of one layout.
        apart: least number of untouched bytes between two stretches; by default 64 MiB.

    >>> from kvplan import KVLayout
    >>> pool = KVLayout.from_spec({"notation": "kv layer block dim", "dtype": "int8", "address": 4096,
    ...                            "sizes": {"layer": 4, "block": 10, "dim": 100}})
    >>> stretches(pool.slice(layers=[1, 2]).components, apart=2000)
    [(5096, 7096), (9096, 11096)]
    >>> stretches(pool.slice(layers=[1, 2]).components)
    [(5096, 11096)]
    """
    apart = APART if apart is None else apart
    groups: dict[int, list[Component]] = {}  # forms are shared, so that ids find most equal forms
    for component in components:
        groups.setdefault(id(component.form), []).append(component)
    found: list[Stretch] = []
    for group in groups.values():
        form = group[0].form
        if form.table is not None:
            found += [component.hull() for component in group]
            continue
        nbytes, outer = _piece(form, apart)
        # Merged before they are repeated: layers side by side in a block are one stretch of every block.
        bases = merged([(component.address, component.address + nbytes) for component in group], apart)
        steps = [0]
        for count, stride in outer:
            steps = [step + k * stride for step in steps for k in range(count)]
        found += [(first + step, last + step) for step in steps for first, last in bases]
    return merged(found, apart)


def _piece(form: Form, apart: int) -> tuple[int, Factors]:
    """Return the bytes of one stretch of a form, and the factors that repeat the stretch."""
    nbytes, outer = 1, []
    for count, stride in sorted((*form.block, *form.inner), key=lambda factor: factor[1]):
        if stride - nbytes < apart:
            nbytes += (count - 1) * stride
        else:
            outer.append((count, stride))
    return nbytes, tuple(outer)


def merged(found: Iterable[Stretch], apart: int = 1) -> list[Stretch]:
    """Sort stretches, and join stretches less than ``apart`` bytes apart; by default, if they touch or overlap.

    >>> merged([(20, 30), (0, 10), (10, 15)])
    [(0, 15), (20, 30)]
    """
    joined: list[Stretch] = []
    for first, last in sorted(found):
        if joined and first - joined[-1][1] < apart:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


def check_bounds(components: Sequence[Component], regions: Sequence[Region]) -> None:
    """Check that every byte of every component lies inside one region. Later checks need to look at block ids only.

    Raises:
        LayoutError: a component reaches outside its region; the message names the component, the bytes and the region.
    """
    ordered = sorted(regions, key=lambda region: region.address)
    starts = [region.address for region in ordered]
    # Regions may nest (views of views): for each start, keep the region with the largest end up to there.
    furthest: list[Region] = []
    for region in ordered:
        furthest.append(max(region, furthest[-1], key=lambda r: r.end) if furthest else region)
    inside = _held_tables(components, starts, furthest)
    reaches: dict[int, int] = {}  # by form: bytes to the end of a block, or of all strided blocks
    looked = 0
    for component in components:
        form = component.form
        if id(form) in inside:
            continue
        if id(form) not in reaches:
            reaches[id(form)] = 1 + (span(form.inner) if form.table is not None else form.bounds[1])
        reach = reaches[id(form)]
        looked += form.num_blocks if form.table is not None else 0
        check_places(looked)
        for first in {component.address + t for t in form.table} if form.table is not None else (component.address,):
            region = furthest[max(bisect_right(starts, first) - 1, 0)]
            if first < region.address or first + reach > region.end:
                raise LayoutError(
                    f"{component} reaches bytes [{quoted_address(first)}, {quoted_address(first + reach)}), outside "
                    f"its allocation [{region.address:#x}, {region.end:#x}): a stride, size or block count is too large"
                )
            if region.end > INT64_MAX:
                raise LayoutError(f"{component} ends at {region.end:#x}, past the largest int64 address")


def check_places(looked: int) -> None:
    """Check the number of blocks that are looked up one by one, so that all lookups end in seconds.

    Raises:
        LayoutError: there are too many blocks.
    """
    if looked > LIMITS.places:
        raise LayoutError(
            f"blocks lie in separate allocations or at no single stride, and over {LIMITS.places:,} pairs of component "
            "and block are listed; describe fewer blocks or layers, or blocks at one stride"
        )


def _held_tables(components: Sequence[Component], starts: Sequence[int], furthest: Sequence[Region]) -> frozenset[int]:
    """Return the ids of the table forms of which each block lies in one region, in all their components."""
    hulls: dict[int, tuple[Form, int, int]] = {}
    for component in components:
        form = component.form
        if form.table is not None:
            _, low, high = hulls.get(id(form), (form, component.address, component.address))
            hulls[id(form)] = form, min(low, component.address), max(high, component.address)
    if not hulls or max(region.end for region in furthest) > INT64_MAX:
        return frozenset()
    begins = np.array(starts, dtype=np.int64)
    lows, ends = (np.array([getattr(r, name) for r in furthest], dtype=np.int64) for name in ("address", "end"))
    held = []
    for form, low, high in hulls.values():
        table = form.table or ()
        last = high + span(form.inner) + 1
        if low + min(table) < 0 or last + max(table) > INT64_MAX:
            continue
        blocks = np.array(table, dtype=np.int64)
        at = np.maximum(np.searchsorted(begins, blocks + low, side="right") - 1, 0)
        if bool(np.all((blocks + low >= lows[at]) & (blocks + last <= ends[at]))):
            held.append(id(form))
    return frozenset(held)
