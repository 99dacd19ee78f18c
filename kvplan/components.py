"""What a layout is made of: regions of memory, and one strided view for each (layer, part)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from kvplan.algebra import Factors, extent, injective, meets, offset, span
from kvplan.errors import LayoutError

INT64_MAX = 2**63 - 1

# Of addresses that are not this process's memory, by where they come from.
NOT_HERE = {
    "spec": "virtual (made up, of a spec)",
    "dump": "those of the process that saved the dump, or pickled the layout",
}


@dataclass(frozen=True, slots=True)
class Region:
    """One allocation, or the part of one that a layout may touch.

    Attributes:
        address: first byte.
        nbytes: bytes from there on.
        device: ``"cpu"``, ``"cuda:0"``, ...
        pinned: page-locked host memory, which a GPU can reach.
        writable: False for read-only arrays.
        virtual: addresses are made up (a spec): nothing can be moved.
        seams: addresses inside that no descriptor may cross, ascending.
        owner: keeps the memory alive; never compared.
        recorded: addresses are those of the process that saved a dump, or pickled the layout: nothing can be moved
            from here.
        held: how to ask a tensor whether this is still its memory, or what keeps an array from letting go of it; never
            compared.
    """

    address: int
    nbytes: int
    device: str = "cpu"
    pinned: bool = False
    writable: bool = True
    virtual: bool = False
    seams: tuple[int, ...] = ()
    owner: Any = field(default=None, compare=False, repr=False)
    recorded: bool = False
    held: Any = field(default=None, compare=False, repr=False)

    @property
    def end(self) -> int:
        """First byte after the region."""
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class Form:
    """The shape that many components share: factors of every axis, strides in bytes, and no address.

    Attributes:
        block: factors of the block axis; ``()`` where ``table`` says where blocks are, or where there is one block.
        token: factors of the token slots of a block; ``()`` for one.
        head: factors of the heads held here.
        dim: factors of the content of one (token, head), counted in bytes.
        head_start: global number of the first head.
        headed: whether the notation has a head axis; content without one belongs to no head.
        opaque: whether the notation has no token axis: a block moves whole or not at all.
        table: bytes from block 0 to each block, where blocks are separate allocations.
    """

    block: Factors
    token: Factors
    head: Factors
    dim: Factors
    head_start: int = 0
    headed: bool = True
    opaque: bool = False
    table: tuple[int, ...] | None = None

    @property
    def heads(self) -> range:
        """Global numbers of the heads held here."""
        return range(self.head_start, self.head_start + extent(self.head))

    @property
    def num_blocks(self) -> int:
        """Blocks there are."""
        return len(self.table) if self.table is not None else extent(self.block)

    @property
    def block_nbytes(self) -> int:
        """Bytes of content a block."""
        return extent(self.token) * extent(self.head) * extent(self.dim)

    @property
    def inner(self) -> Factors:
        """Factors of everything inside a block."""
        return (*self.token, *self.head, *self.dim)

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last byte that any block touches, relative to the component's address."""
        reach = span(self.inner)
        if self.table is not None:
            return min(self.table), max(self.table) + reach
        return 0, span(self.block) + reach

    def block_offset(self, block: int) -> int:
        """Bytes from block 0 to ``block``."""
        return self.table[block] if self.table is not None else offset(self.block, block)


@dataclass(frozen=True, slots=True)
class Component:
    """One (layer, part) of a cache: a form, placed at an address.

    Attributes:
        layer: global number of the layer.
        part: ``"k"``, ``"v"``, ``"kv"`` or a named extra.
        address: of block 0, token 0, first head, first byte.
    """

    layer: int
    part: str
    address: int
    form: Form

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part!r}"

    def hull(self) -> tuple[int, int]:
        """First byte, and first byte after the last."""
        low, high = self.form.bounds
        return self.address + low, self.address + high + 1


def check_bounds(components: Iterable[Component], regions: Sequence[Region]) -> None:
    """Every byte of every component lies inside one region; afterwards, checking block ids is enough.

    Raises:
        LayoutError: naming the component, its reach, and the region it leaves.
    """
    ordered = sorted(regions, key=lambda region: region.address)
    starts = [region.address for region in ordered]
    # Regions may nest (views of views): of those that begin early enough, the one that reaches furthest.
    furthest: list[Region] = []
    for region in ordered:
        furthest.append(max(region, furthest[-1], key=lambda r: r.end) if furthest else region)
    for component in components:
        form = component.form
        reach = span(form.inner) + 1 if form.table is not None else form.bounds[1] + 1
        for first in {component.address + t for t in form.table} if form.table is not None else {component.address}:
            region = furthest[max(bisect_right(starts, first) - 1, 0)]
            if first < region.address or first + reach > region.end:
                raise LayoutError(
                    f"{component} reaches bytes [{first:#x}, {first + reach:#x}), outside its allocation "
                    f"[{region.address:#x}, {region.end:#x}): a stride, size or block count is too large"
                )
            if region.end > INT64_MAX:
                raise LayoutError(f"{component} ends at {region.end:#x}, past the largest int64 address")


def check_disjoint(components: Sequence[Component]) -> None:
    """No byte belongs to two coordinates.

    Raises:
        LayoutError: naming the component that overlaps itself, or the two that overlap each other.
    """
    for form, component in {component.form: component for component in components}.items():
        if not injective((*form.block, *form.inner)):
            raise LayoutError(
                f"{component} overlaps itself: two coordinates share bytes (an expanded dim, or a stride smaller "
                "than what it steps over)"
            )
    if any(component.form.table is not None for component in components):
        _check_disjoint_tables(components)
    else:
        _check_disjoint_strided(components)


def _progression(addresses: Sequence[int]) -> Factors | None:
    """Factors that give ascending addresses as loops from the first, or None.

    >>> _progression((0, 8, 100, 108, 200, 208))
    ((3, 100), (2, 8))
    """
    if len(addresses) == 1:
        return ()
    step = addresses[1] - addresses[0]
    count = 1
    while count < len(addresses) and addresses[count] - addresses[count - 1] == step:
        count += 1
    if len(addresses) % count:
        return None
    heads = addresses[::count]
    if any(addresses[k] != heads[k // count] + k % count * step for k in range(len(addresses))):
        return None
    outer = _progression(heads)
    return None if outer is None else (*outer, (count, step))


def touching_seams(regions: Sequence[Region]) -> tuple[int, ...]:
    """Where pinned allocations touch: they are two registrations, and no copy may span them."""
    ordered = sorted(regions, key=lambda region: region.address)
    return tuple(a.end for a, b in pairwise(ordered) if a.end == b.address and (a.pinned or b.pinned))


def _check_disjoint_strided(components: Sequence[Component]) -> None:
    if len({id(component.form) for component in components}) == 1:  # the everyday case: equally spaced and alike
        spaced = _progression(sorted(component.address for component in components))
        form = components[0].form
        if spaced is not None and injective((*spaced, *form.block, *form.inner)):
            return
    known: dict[tuple[int, int, int], bool] = {}
    active: list[tuple[int, Component]] = []  # (end, component), those the sweep has not passed
    forms: dict[int, Factors] = {}
    for component in sorted(components, key=lambda c: c.address):
        start, end = component.hull()
        active = [entry for entry in active if entry[0] > start]
        key = id(component.form)
        forms.setdefault(key, (*component.form.block, *component.form.inner))
        for _, other in active:
            case = (id(other.form), key, component.address - other.address)
            if case not in known:
                known[case] = meets(forms[case[0]], forms[key], case[2])
            if known[case]:
                raise LayoutError(f"{other} and {component} overlap: they share bytes")
        active.append((end, component))


def _check_disjoint_tables(components: Sequence[Component]) -> None:
    """The same, where blocks are looked up: a sweep over (component, block) intervals."""
    if len({component.form.table for component in components}) == 1 and components[0].form.table is not None:
        low = min(component.address for component in components)
        high = max(component.address + span(component.form.inner) + 1 for component in components)
        blocks = np.sort(np.array(components[0].form.table, dtype=np.int64))
        if not np.any(np.diff(blocks) < high - low):  # blocks lie apart: one of them stands for all
            alone = {id(c.form): replace(c.form, block=(), table=None) for c in components}
            _check_disjoint_strided([replace(c, form=alone[id(c.form)]) for c in components])
            return
    counts = [c.form.num_blocks for c in components]
    starts = np.array(
        [c.address + c.form.block_offset(b) for c, count in zip(components, counts, strict=True) for b in range(count)],
        dtype=np.int64,
    )
    spans = np.array([span(c.form.inner) + 1 for c in components], dtype=np.int64)
    owner, first = np.repeat(np.arange(len(components)), counts), np.cumsum(counts) - counts
    ends = starts + spans[owner]
    order = np.argsort(starts, kind="stable")
    covered = np.maximum.accumulate(ends[order])
    if not np.any(starts[order][1:] < covered[:-1]):
        return
    known: dict[tuple[Factors, Factors, int], bool] = {}
    active: list[int] = []
    for index in order.tolist():
        active = [k for k in active if ends[k] > starts[index]]
        here = components[owner[index]]
        for k in active:
            there = components[owner[k]]
            case = (there.form.inner, here.form.inner, int(starts[index] - starts[k]))
            if case not in known:
                known[case] = meets(*case)
            if known[case]:
                numbers = k - first[owner[k]], index - first[owner[index]]
                raise LayoutError(
                    f"{there} of block {numbers[0]} and {here} of block {numbers[1]} overlap: they share bytes"
                )
        active.append(index)
