"""Check that components of a layout share no byte: by a proof if strides nest, otherwise by a search of limited work.

In general, this is a bounded subset sum, whose time is exponential in the number of factors. But the strides of caches
nest: each stride is larger than all bytes that it steps over. One pass over the sorted factors proves that. If strides
do not nest, a search visits every state once, until the budget is used up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from kvplan.base.limits import Budget
from kvplan.errors import LayoutError
from kvplan.layout.address_ranges import check_places
from kvplan.layout.components import Component, Form
from kvplan.layout.strides import Factors, Int64Array, normal, offsets_of, span


def check_disjoint(components: Sequence[Component], budget: Budget | None = None) -> None:
    """Check that no byte belongs to two coordinates.

    Args:
        components: all components of a layout.
        budget: limits of the work for the whole document that contains the layout.

    Raises:
        LayoutError: a component overlaps itself or another component, or the search would take too many steps.
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
    """Return loops from the first address that visit ascending addresses; None if there are no such loops.

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
    if len(factors) == 1:  # the usual case: components of one form, equally spaced
        spaced = _progression(sorted(component.address for component in components))
        if spaced is not None and nests((*spaced, *factors[id(components[0].form)])):
            return
    factors = _without_common(components, factors)
    reach = {key: span(held) for key, held in factors.items()}
    known: dict[tuple[int, int, int], bool] = {}
    active: list[tuple[int, Component]] = []  # (end, component), if the sweep has not passed the end
    for component in sorted(components, key=lambda c: c.address):
        key, start = id(component.form), component.address
        if active:
            budget.use("overlap_steps", len(active))
            active = [entry for entry in active if entry[0] > start]
        for _, other in active:
            case = (id(other.form), key, start - other.address)
            if case not in known:
                known[case] = _meets(other, component, factors[case[0]], factors[key], budget)
            if known[case]:
                raise LayoutError(f"{other} and {component} overlap: they share bytes")
        active.append((start + reach[key] + 1, component))


def _without_common(components: Sequence[Component], factors: dict[int, Factors]) -> dict[int, Factors]:
    """Drop the outer factors that all forms share, as long as each stride is larger than the bytes inside one step.

    Bytes of one such step cannot overlap bytes of the next step, so that comparing one step is enough.

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
    """Check components whose blocks are in a table, by a sweep over the byte range of every (component, block)."""
    forms = {id(c.form): c.form for c in components}
    table = components[0].form.table
    if table is not None and all(form.table == table for form in forms.values()):
        low = min(component.address for component in components)
        high = max(component.address + span(component.form.inner) + 1 for component in components)
        blocks = np.sort(np.array(table, dtype=np.int64))
        if not np.any(np.diff(blocks) < high - low):  # blocks do not overlap, so that comparing one block is enough
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
        budget.use("overlap_steps", len(active))
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
    """Return the bytes from block 0 to each block."""
    if form.table is not None:
        return np.array(form.table, dtype=np.int64)
    return offsets_of(form.block)


def sorted_factors(factors: Iterable[tuple[int, int]]) -> Factors:
    """Return factors in normal form, sorted by stride, the largest first. The set of offsets stays the same.

    >>> sorted_factors(((16, 8), (8, 1), (4, 128)))
    ((512, 1),)
    """
    return normal(sorted(factors, key=lambda factor: -factor[1]))


def nests(factors: Factors) -> bool:
    """Tell whether every stride is larger than the span of all smaller strides. Then no coordinates share an offset.

    >>> nests(((4, 64), (64, 1))), nests(((2, 3), (3, 2))), nests(((4, 0),))
    (True, False, False)
    """
    reach = 0
    for count, stride in sorted(factors, key=lambda factor: factor[1]):
        if count == 1:
            continue
        if stride <= reach:
            return False
        reach += (count - 1) * stride
    return True


def injective(factors: Factors, budget: Budget | None = None) -> bool:
    """Tell whether no two coordinates share an offset.

    Raises:
        LayoutError: the budget is used up before the answer is known.

    >>> injective(((4, 64), (64, 1))), injective(((4, 63), (64, 1))), injective(((4, 0), (64, 1)))
    (True, False, False)
    """
    if nests(factors):
        return True
    ordered = sorted_factors(factors)
    if ordered[-1][1] == 0:
        return False
    # Two coordinates share an offset if later factors cancel the positive difference of an earlier factor.
    search = _Search([(stride, 1 - count, count - 1) for count, stride in ordered], budget or Budget())
    return not any(search.reaches(k, 0, 1) for k in range(len(ordered)))


def meets(a: Factors, b: Factors, distance: int, budget: Budget | None = None) -> bool:
    """Tell whether two sets of bytes overlap if set ``b`` begins ``distance`` bytes after set ``a``.

    Raises:
        LayoutError: the budget is used up before the answer is known.

    >>> meets(((2, 100), (10, 1)), ((2, 100), (10, 1)), 10)
    False
    >>> meets(((2, 100), (10, 1)), ((2, 100), (10, 1)), 95)
    True
    """
    bounds: dict[int, tuple[int, int]] = {}
    for factors, sign in ((a, 1), (b, -1)):
        for count, stride in sorted_factors(factors):
            low, high = bounds.get(stride, (0, 0))
            bounds[stride] = (low, high + count - 1) if sign > 0 else (low - count + 1, high)
    bounds.pop(0, None)
    terms = sorted(((s, low, high) for s, (low, high) in bounds.items()), reverse=True)
    return _Search(terms, budget or Budget()).reaches(0, distance)


Term = tuple[int, int, int]  # (stride above 0, least multiple, greatest multiple)
STATE = 8  # cost of one state of a search, in steps of the budget; comparing one pair costs 1 step


class _Search:
    """Search whether a distance is a sum that takes one multiple of each stride, within the bounds of its term.

    The terms are in descending order of stride.
    """

    def __init__(self, terms: list[Term], budget: Budget) -> None:
        self._terms, self._budget = terms, budget
        self._low, self._high = [0], [0]  # bounds of the sum of each term and all later terms
        self._common: list[int] = [0]  # the greatest common divisor of the strides of these terms
        self._residue: list[tuple[int, int, int]] = []
        for stride, least, most in reversed(terms):
            self._low.insert(0, self._low[0] + stride * least)
            self._high.insert(0, self._high[0] + stride * most)
            common = gcd(self._common[0], stride)
            modulus = self._common[0] // common  # sums of later terms are multiples of modulus * common
            self._residue.insert(0, (common, modulus, pow(stride // common, -1, modulus) if modulus > 1 else 0))
            self._common.insert(0, common)
        self._failed: set[tuple[int, int]] = set()

    def reaches(self, k: int, distance: int, at_least: int | None = None) -> bool:
        """Tell whether the terms from ``k`` on have such a sum that equals ``distance``.

        The multiple of term ``k`` is then ``at_least`` or more.
        """
        if k == len(self._terms):
            return distance == 0
        self._budget.use("overlap_steps", STATE)
        stride, least, most = self._terms[k]
        low, high = self._low[k + 1], self._high[k + 1]
        first = max(least if at_least is None else at_least, -((high - distance) // stride))
        last = min(most, (distance - low) // stride)
        common, modulus, inverse = self._residue[k]
        if first > last or distance % common:
            return False
        if modulus == 0:  # the last term
            return True
        # The remaining distance must be divisible by the later terms: that holds for every ``modulus``-th multiple.
        first += (distance // common * inverse - first) % modulus
        if k + 2 == len(self._terms):  # the remaining distance is a multiple of the last stride, and in bounds
            return first <= last
        for digit in range(first, last + 1, modulus):
            rest = distance - stride * digit
            if (k + 1, rest) not in self._failed:
                if self.reaches(k + 1, rest):
                    return True
                self._failed.add((k + 1, rest))
        return False
