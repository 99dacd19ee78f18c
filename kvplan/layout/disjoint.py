"""Whether the components of a layout share no byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvplan.errors import LayoutError
from kvplan.layout.budget import Budget
from kvplan.layout.components import Component, Form, check_places
from kvplan.layout.overlap import injective, meets, nests
from kvplan.layout.strides import Factors, Int64Array, offsets_of, span


def check_disjoint(components: Sequence[Component], budget: Budget | None = None) -> None:
    """No byte belongs to two coordinates.

    Args:
        components: all of a layout.
        budget: of the document that they come from.

    Raises:
        LayoutError: naming the component that overlaps itself, or the two that overlap each other; or strides that do
            not nest, and too many ways to look at.
    """
    by_value: dict[Form, Form] = {}
    forms = {key: by_value.setdefault(form, form) for key, form in {id(c.form): c.form for c in components}.items()}
    components = [_with(component, forms[id(component.form)]) for component in components]
    budget = budget or Budget()
    for form, component in {id(c.form): (c.form, c) for c in components}.values():
        try:
            apart = injective((*form.block, *form.inner), budget)
        except LayoutError as error:
            raise LayoutError(f"{component}: {error}") from None
        if not apart:
            raise LayoutError(
                f"{component} overlaps itself: two coordinates share bytes (an expanded dim, or a stride smaller "
                "than what it steps over)"
            )
    if any(form.table is not None for form in by_value):
        _check_tables(components, budget)
    else:
        _check_strided(components, budget)


def _with(component: Component, form: Form) -> Component:
    return component if component.form is form else replace(component, form=form)


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


def _check_strided(components: Sequence[Component], budget: Budget) -> None:
    factors = {id(c.form): (*c.form.block, *c.form.inner) for c in components}
    if len(factors) == 1:  # the everyday case: alike and equally spaced
        spaced = _progression(sorted(component.address for component in components))
        if spaced is not None and nests((*spaced, *factors[id(components[0].form)])):
            return
    factors = _without_common(components, factors)
    reach = {key: span(held) for key, held in factors.items()}
    known: dict[tuple[int, int, int], bool] = {}
    active: list[tuple[int, Component]] = []  # (end, component), those the sweep has not passed
    for component in sorted(components, key=lambda c: c.address):
        key, start = id(component.form), component.address
        budget.steps(len(active))
        active = [entry for entry in active if entry[0] > start]
        for _, other in active:
            case = (id(other.form), key, start - other.address)
            if case not in known:
                known[case] = _meets(other, component, factors[case[0]], factors[key], budget)
            if known[case]:
                raise LayoutError(f"{other} and {component} overlap: they share bytes")
        active.append((start + reach[key] + 1, component))


def _without_common(components: Sequence[Component], factors: dict[int, Factors]) -> dict[int, Factors]:
    """Factors of each form without the outer ones that all share: steps larger than all that lies inside them.

    What lies in one such step is apart from what lies in the next, so that one step stands for all.

    >>> here, there = Form(block=((9, 64),), token=(), head=(), dim=((8, 1),)), Form(((9, 64),), (), (), ((4, 1),))
    >>> some = [Component(0, "k", 0, here), Component(0, "v", 32, there)]
    >>> list(_without_common(some, {id(f): (*f.block, *f.inner) for f in (here, there)}).values())
    [((8, 1),), ((4, 1),)]
    """
    left = {key: sorted(held, key=lambda factor: factor[1]) for key, held in factors.items()}
    low = min(component.address for component in components)
    furthest: dict[int, int] = {}
    for component in components:
        key = id(component.form)
        furthest[key] = max(furthest.get(key, low), component.address)
    while all(left.values()) and len({held[-1] for held in left.values()}) == 1:
        inside = {key: held[:-1] for key, held in left.items()}
        hull = max(furthest[key] + span(tuple(held)) + 1 for key, held in inside.items()) - low
        if hull > next(iter(left.values()))[-1][1]:
            break
        left = inside
    return {key: tuple(held) for key, held in left.items()}


def _meets(one: Component, other: Component, mine: Factors, its: Factors, budget: Budget) -> bool:
    try:
        return meets(mine, its, other.address - one.address, budget)
    except LayoutError as error:
        raise LayoutError(f"{one} and {other}: {error}") from None


def _check_tables(components: Sequence[Component], budget: Budget) -> None:
    """The same, where blocks are looked up: a sweep over (component, block) intervals."""
    forms = {id(c.form): c.form for c in components}
    table = components[0].form.table
    if table is not None and all(form.table == table for form in forms.values()):
        low = min(component.address for component in components)
        high = max(component.address + span(component.form.inner) + 1 for component in components)
        blocks = np.sort(np.array(table, dtype=np.int64))
        if not np.any(np.diff(blocks) < high - low):  # blocks lie apart: one of them stands for all
            alone = {key: replace(form, block=(), table=None) for key, form in forms.items()}
            _check_strided([replace(c, form=alone[id(c.form)]) for c in components], budget)
            return
    counts = [c.form.num_blocks for c in components]
    check_places(sum(counts))
    offsets = {key: _block_offsets(form) for key, form in forms.items()}
    starts = np.concatenate([component.address + offsets[id(component.form)] for component in components])
    spans = np.array([span(c.form.inner) + 1 for c in components], dtype=np.int64)
    owner, first = np.repeat(np.arange(len(components)), counts), np.cumsum(counts) - counts
    ends = starts + spans[owner]
    order = np.argsort(starts, kind="stable")
    covered = np.maximum.accumulate(ends[order])
    if not np.any(starts[order][1:] < covered[:-1]):
        return
    known: dict[tuple[int, int, int], bool] = {}
    active: list[int] = []
    for index in order.tolist():
        budget.steps(len(active))
        active = [k for k in active if ends[k] > starts[index]]
        here = components[owner[index]]
        for k in active:
            there = components[owner[k]]
            case = (id(there.form), id(here.form), int(starts[index] - starts[k]))
            if case not in known:
                known[case] = meets(there.form.inner, here.form.inner, case[2], budget)
            if known[case]:
                numbers = k - first[owner[k]], index - first[owner[index]]
                raise LayoutError(
                    f"{there} of block {numbers[0]} and {here} of block {numbers[1]} overlap: they share bytes"
                )
        active.append(index)


def _block_offsets(form: Form) -> Int64Array:
    """Bytes from block 0 to each block."""
    if form.table is not None:
        return np.array(form.table, dtype=np.int64)
    return offsets_of(form.block)
