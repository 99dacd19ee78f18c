"""Whether strided byte sets overlap: a proof where strides nest, else a search of bounded work.

In general the question is a bounded subset sum, which takes time exponential in the number of factors. Caches nest:
each stride steps over all that is inside it, which one pass over the sorted factors shows. What does not nest is
searched, each state once, until the budget is used up.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from kvplan.layout.budget import Budget
from kvplan.layout.strides import Factors, normal


def sorted_factors(factors: Iterable[tuple[int, int]]) -> Factors:
    """Factors of the same byte offsets, the largest stride first, those that follow one another as one.

    >>> sorted_factors(((16, 8), (8, 1), (4, 128)))
    ((512, 1),)
    """
    return normal(sorted(factors, key=lambda factor: -factor[1]))


def nests(factors: Factors) -> bool:
    """Whether every stride is larger than all that it steps over, so that no two coordinates share an offset.

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
    """Whether no two coordinates share an offset.

    Raises:
        LayoutError: the budget's steps do not suffice to tell.

    >>> injective(((4, 64), (64, 1))), injective(((4, 63), (64, 1))), injective(((4, 0), (64, 1)))
    (True, False, False)
    """
    if nests(factors):
        return True
    ordered = sorted_factors(factors)
    if ordered[-1][1] == 0:
        return False
    # Two coordinates meet where a leading positive difference is undone by the factors after it.
    search = _Search([(stride, 1 - count, count - 1) for count, stride in ordered], budget or Budget())
    return not any(search.reaches(k, 0, 1) for k in range(len(ordered)))


def meets(a: Factors, b: Factors, distance: int, budget: Budget | None = None) -> bool:
    """Whether two byte sets overlap, set ``b`` beginning ``distance`` bytes after set ``a``.

    Raises:
        LayoutError: the budget's steps do not suffice to tell.

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
STATE = 8  # steps that one state of a search takes; a pair that is looked up takes one


class _Search:
    """Whether a distance is a sum of one multiple of each stride, for terms in descending order of stride."""

    def __init__(self, terms: list[Term], budget: Budget) -> None:
        self._terms, self._budget = terms, budget
        self._low, self._high = [0], [0]  # of the sums of the terms from each one on
        self._common: list[int] = [0]  # the greatest common divisor of their strides
        self._residue: list[tuple[int, int, int]] = []
        for stride, least, most in reversed(terms):
            self._low.insert(0, self._low[0] + stride * least)
            self._high.insert(0, self._high[0] + stride * most)
            common = gcd(self._common[0], stride)
            modulus = self._common[0] // common  # what later terms make are multiples of modulus * common
            self._residue.insert(0, (common, modulus, pow(stride // common, -1, modulus) if modulus > 1 else 0))
            self._common.insert(0, common)
        self._failed: set[tuple[int, int]] = set()

    def reaches(self, k: int, distance: int, at_least: int | None = None) -> bool:
        """Whether terms ``k`` and later make the distance; the multiple of term ``k`` from ``at_least`` on."""
        if k == len(self._terms):
            return distance == 0
        self._budget.steps(STATE)
        stride, least, most = self._terms[k]
        low, high = self._low[k + 1], self._high[k + 1]
        first = max(least if at_least is None else at_least, -((high - distance) // stride))
        last = min(most, (distance - low) // stride)
        common, modulus, inverse = self._residue[k]
        if first > last or distance % common:
            return False
        if modulus == 0:  # the last term
            return True
        # Of the multiples, those count that leave what the later terms can divide: one in each ``modulus``.
        first += (distance // common * inverse - first) % modulus
        if k + 2 == len(self._terms):  # what is left is a multiple of the last stride, and within its bounds
            return first <= last
        for digit in range(first, last + 1, modulus):
            rest = distance - stride * digit
            if (k + 1, rest) not in self._failed:
                if self.reaches(k + 1, rest):
                    return True
                self._failed.add((k + 1, rest))
        return False
