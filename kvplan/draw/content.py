"""Find the gaps between the bytes of a block: content of other blocks, or padding."""

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
        nbytes: all of them.
        padding: bytes among them that are content of no block.
    """

    nbytes: int
    padding: int

    @property
    def name(self) -> str:
        """The kind of gap: "padding", or "other blocks" if any content lies there."""
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
    """The content of one allocation, of all blocks.

    Args:
        layout: the layout's plain data.
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
        """Divide the bytes from ``start`` to ``end``, which lie between two bytes of a block, into at most two gaps.

        The first gap is padding only, up to the next content. The second gap is the rest: content of other blocks, and
        padding between it. If strides do not nest, content is not counted, and there is one gap.
        """
        if end <= start:
            return ()
        if not self._nested:  # strides do not nest, so content is not counted: all of it is padding, or none
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
        """Count the bytes from ``end`` to the next content, or to the end of the allocation."""
        following_byte = self._following(end) if self._nested else None
        return (self._end if following_byte is None else following_byte) - end

    def _following(self, start: int) -> int | None:
        found = (first_from(component, start) for component in self._components)
        return min((at for at in found if at is not None and at < self._end), default=None)
