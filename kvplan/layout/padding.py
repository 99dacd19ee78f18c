"""Padding of a layout: bytes of its memory that are not content, inside blocks, between blocks and around them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kvplan.layout.address_ranges import merged
from kvplan.layout.components import Built, Component, Region
from kvplan.layout.strides import span


@dataclass(frozen=True, slots=True)
class Padding:
    """Bytes in the allocations of a layout that are not content.

    Attributes:
        nbytes: padding in the allocations that hold content.
        between_nbytes, before_nbytes, after_nbytes: the shares of ``nbytes`` between, before and after all content of
            one allocation.
        unused_nbytes: bytes of allocations without content of this layout; not in the counts above.
        memory_nbytes: bytes of the allocations that hold content.
        block_nbytes: padding per block: the bytes that one more block takes, less its content. None if blocks have no
            common number: blocks of a table, or a block axis that is split or lies inside other axes.
    """

    nbytes: int
    between_nbytes: int
    before_nbytes: int
    after_nbytes: int
    unused_nbytes: int
    memory_nbytes: int
    block_nbytes: int | None

    @property
    def share(self) -> float:
        """Padding as a share of the allocations that hold content, from 0 to 1."""
        return self.nbytes / self.memory_nbytes


def padding_of(layout: Built) -> Padding:
    """Return the padding of a layout.

    An allocation is the whole storage of a tensor, or a region of a dump. In a spec it ends with the last element.

    >>> import numpy as np
    >>> from kvplan import KVLayout
    >>> pages = np.zeros((3, 80), np.int8)
    >>> found = padding_of(KVLayout.from_tensors("block dim", pages[:, :64]).built)
    >>> found.nbytes, found.share, found.between_nbytes, found.after_nbytes, found.block_nbytes
    (48, 0.2, 32, 16, 16)
    """
    memory = stretches_of(layout.regions)
    starts = [stretch.start for stretch in memory]
    hulls: dict[int, tuple[int, int]] = {}
    for component in layout.components:
        form = component.form
        reach = span((*form.block, *form.inner)) + 1
        for offset in form.table or (0,):
            first = component.address + offset
            at = bisect_right(starts, first) - 1
            low, high = hulls.get(at, (first, first + reach))
            hulls[at] = (min(low, first), max(high, first + reach))
    total, content = sum(len(memory[at]) for at in hulls), layout.num_blocks * layout.block_nbytes
    return Padding(
        total - content,
        sum(high - low for low, high in hulls.values()) - content,
        sum(low - memory[at].start for at, (low, _) in hulls.items()),
        sum(memory[at].stop - high for at, (_, high) in hulls.items()),
        sum(map(len, memory)) - total,
        total,
        _of_each_block(layout),
    )


def stretches_of(regions: Sequence[Region]) -> list[range]:
    """Return the address range of each allocation. Regions that share bytes are views of one allocation.

    >>> stretches_of([Region(0, 64), Region(32, 64), Region(96, 8)])
    [range(0, 96), range(96, 104)]
    """
    return [range(*stretch) for stretch in merged(((region.address, region.end) for region in regions), apart=0)]


def _of_each_block(layout: Built) -> int | None:
    """Return the padding per block; None if interleaved components have different steps from block to block."""
    taken, reach, step = 0, -1, 0
    for component in sorted(layout.components, key=lambda component: component.address):
        stride = _block_stride(component)
        if stride is None:
            return None
        first, end = component.hull()
        if first >= reach:
            taken += stride
        elif stride != step:
            return None
        reach, step = max(reach, end), stride
    return taken - layout.block_nbytes if taken >= layout.block_nbytes else None


def _block_stride(component: Component) -> int | None:
    """Return the bytes from each block to the next; None if a block does not end before the next block begins."""
    form = component.form
    if form.table is not None or len(form.block) != 1 or form.block[0][1] <= span(form.inner):
        return None
    return form.block[0][1]
