"""What lies between the bytes of a block: content of other blocks, or nothing of this layout."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.base.limits import Budget
from kvplan.layout.disjoint import meets
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Factors, extent, span


@dataclass(frozen=True)
class Gap:
    """Bytes that are none of this block's.

    Attributes:
        nbytes: from the last byte before to the next byte after.
        padding: of them, bytes that are no content of any block.
    """

    nbytes: int
    padding: int

    @property
    def name(self) -> str:
        """What they are."""
        return "padding" if self.padding == self.nbytes else "other blocks"


def nested(factors: Factors) -> bool:
    """Whether every stride steps over all that is inside it; factors in descending order of stride.

    >>> nested(((2, 64), (4, 16), (16, 1))), nested(((2, 8), (4, 6)))
    (True, False)
    """
    return all(stride > span(factors[k + 1 :]) for k, (_, stride) in enumerate(factors))


def below(factors: Factors, end: int) -> int:
    """How many offsets of nested factors are less than ``end``.

    >>> below(((2, 64), (16, 1)), 70)
    22
    """
    total = 0
    for k, (count, stride) in enumerate(factors):
        if end <= 0:
            return total
        whole = min(end // stride, count - 1)
        total += whole * extent(factors[k + 1 :])
        end -= whole * stride
    return total + (end > 0)


def following(factors: Factors, start: int) -> int | None:
    """The least offset of nested factors from ``start`` on.

    >>> following(((2, 64), (16, 1)), 16), following(((2, 64), (16, 1)), 80)
    (64, None)
    """
    if start <= 0:
        return 0
    if not factors:
        return None
    (count, stride), inner = factors[0], factors[1:]
    whole = min(start // stride, count - 1)
    found = following(inner, start - whole * stride)
    if found is not None:
        return whole * stride + found
    return (whole + 1) * stride if whole + 1 < count else None


class Content:
    """Bytes of content in one allocation, of every block.

    Args:
        layout: whose.
        memory: addresses of the allocation.
    """

    def __init__(self, layout: KVLayout, memory: range) -> None:
        self._end = memory.stop
        self._budget = Budget()
        self._placed: list[tuple[int, Factors]] = []
        for component in layout.components:
            form = component.form
            for start in form.table or (0,):
                address = component.address + start
                if address in memory:
                    factors = tuple(f for f in (*form.block, *form.inner) if f[0] > 1)
                    self._placed.append((address, tuple(sorted(factors, key=lambda f: -f[1]))))
        self._nested = all(nested(factors) for factors in {factors for _, factors in self._placed})

    def gaps(self, start: int, end: int) -> tuple[Gap, ...]:
        """What is in bytes ``start`` to ``end``, none of them this block's: first its padding, then the rest."""
        if end <= start:
            return ()
        if not self._nested:  # too tangled to count: all or nothing
            gap = ((end - start, 1),)
            met = any(meets(gap, factors, address - start, self._budget) for address, factors in self._placed)
            return (Gap(end - start, 0 if met else end - start),)
        first = min(self._following(start) or end, end)
        gaps = [Gap(first - start, first - start)] if first > start else []
        if first < end:
            content = sum(below(f, end - address) - below(f, first - address) for address, f in self._placed)
            gaps.append(Gap(end - first, end - first - content))
        return tuple(gaps)

    def padding_after(self, end: int) -> int:
        """Bytes from ``end`` to the next content, or to the end of the region."""
        following_byte = self._following(end) if self._nested else None
        return (self._end if following_byte is None else following_byte) - end

    def _following(self, start: int) -> int | None:
        found = [(address, following(factors, start - address)) for address, factors in self._placed]
        return min((address + at for address, at in found if at is not None), default=None)
