"""Find the gaps between the bytes of a block. A gap is content of other blocks, or padding."""

from __future__ import annotations

from dataclasses import dataclass

from kvplan.base.limits import Budget
from kvplan.layout.components import Built
from kvplan.layout.disjoint import meets, nests
from kvplan.layout.inverse import first_from
from kvplan.layout.strides import Factors, extent


@dataclass(frozen=True)
class Gap:
    """Bytes between bytes of a block.

    Attributes:
        nbytes: all bytes of the gap.
        padding: bytes of the gap that are content of no block.
    """

    nbytes: int
    padding: int

    @property
    def name(self) -> str:
        """Return "padding", or "other blocks" if the gap holds any content."""
        return "padding" if self.padding == self.nbytes else "other blocks"


def below(factors: Factors, end: int) -> int:
    """Count the offsets of nested factors that are less than ``end``.

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


class Content:
    """The content of all blocks in one allocation.

    Args:
        layout: plain data of the layout.
        memory: addresses of the allocation.
    """

    def __init__(self, layout: Built, memory: range) -> None:
        self._end, self._components = memory.stop, layout.components
        self._budget = Budget()
        self._placed: list[tuple[int, Factors]] = []
        for component in layout.components:
            form = component.form
            for start in form.table or (0,):
                address = component.address + start
                if address in memory:
                    factors = tuple(f for f in (*form.block, *form.inner) if f[0] > 1)
                    self._placed.append((address, tuple(sorted(factors, key=lambda f: -f[1]))))
        self._nested = all(nests(factors) for factors in {factors for _, factors in self._placed})

    def gaps(self, start: int, end: int) -> tuple[Gap, ...]:
        """Divide the bytes from ``start`` to ``end``, between two bytes of a block, into at most two gaps.

        The first gap is padding, up to the next content. The second gap holds content of other blocks, and padding
        between this content. If strides do not nest, content is not counted, and there is one gap.
        """
        if end <= start:
            return ()
        if not self._nested:  # content is not counted: all bytes are padding, or none are
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
        """Return the bytes from ``end`` to the next content, or to the end of the allocation."""
        following_byte = self._following(end) if self._nested else None
        return (self._end if following_byte is None else following_byte) - end

    def _following(self, start: int) -> int | None:
        found = (first_from(component, start) for component in self._components)
        return min((at for at in found if at is not None and at < self._end), default=None)
