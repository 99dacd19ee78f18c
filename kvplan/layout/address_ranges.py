"""Ranges of memory: the stretches that content touches, their bounds, and the padding beside them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.files import LIMITS
from kvplan.errors import LayoutError
from kvplan.layout.components import INT64_MAX, Built, Component, Form, Region, quoted_address
from kvplan.layout.strides import offsets_of, span

# Untouched bytes that separate two stretches. Smaller gaps are pinned, too: more registrations and seams cost more.
APART = 64 << 20

Stretch = tuple[int, int]  # (first byte, first byte after)


def merged(stretches: Iterable[Stretch], apart: int = 1) -> list[Stretch]:
    """Sort stretches, and join stretches less than ``apart`` bytes apart; by default, if they touch or overlap.

    >>> merged([(20, 30), (0, 10), (10, 15)])
    [(0, 15), (20, 30)]
    """
    joined: list[Stretch] = []
    for first, last in sorted(stretches):
        if joined and first - joined[-1][1] < apart:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined


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
    touched: list[Stretch] = []
    for component in components:
        nbytes, outer = 1, list[tuple[int, int]]()
        form = component.form
        for count, stride in sorted((*form.block, *form.inner), key=lambda factor: factor[1]):
            if stride - nbytes < apart:
                nbytes += (count - 1) * stride
            else:
                outer.append((count, stride))
        starts = offsets_of(tuple(outer)).tolist() if form.table is None else []
        touched += [(component.address + at, component.address + at + nbytes) for at in starts] or [component.hull()]
    return merged(touched, apart)


def check_ends(regions: Sequence[Region]) -> None:
    """Raise LayoutError if an allocation ends past the largest int64 address: addresses are int64 everywhere."""
    if (end := max(region.end for region in regions)) > INT64_MAX:
        raise LayoutError(f"an allocation ends at {end:#x}, past the largest int64 address")


def check_bounds(components: Sequence[Component], regions: Sequence[Region]) -> None:
    """Check that every byte of every component lies inside one region. Later checks need to look at block ids only.

    Raises:
        LayoutError: a component reaches outside its region; the message names the component, the bytes and the region.
    """
    ordered = sorted(regions, key=lambda region: region.address)
    starts = np.array([region.address for region in ordered], dtype=np.int64)
    ends = np.maximum.accumulate(np.array([region.end for region in ordered], dtype=np.int64))  # regions may nest

    def inside(form: Form, low: int, high: int) -> bool:
        """Tell whether all blocks that begin between two addresses and the table's further ones lie in a region."""
        table = form.table or (0,)
        reach = high - low + 1 + (span(form.inner) if form.table is not None else form.bounds[1])
        if low + min(table) < 0 or low + max(table) + reach > INT64_MAX:
            return False
        firsts = np.array(table, dtype=np.int64) + low
        at = np.maximum(np.searchsorted(starts, firsts, side="right") - 1, 0)
        return bool(np.all((firsts >= starts[at]) & (firsts + reach <= ends[at])))

    alike: dict[int, list[Component]] = {}
    for component in components:
        alike.setdefault(id(component.form), []).append(component)
    looked = 0
    for form, group in ((group[0].form, group) for group in alike.values()):
        addresses = [component.address for component in group]
        if inside(form, min(addresses), max(addresses)):
            continue
        looked += len(group) * len(form.table or ())
        check_places(looked)
        for component in group:
            if not inside(form, component.address, component.address):
                first, end = map(quoted_address, component.hull())
                why = "a stride, size or block count is too large"
                raise LayoutError(f"{component} reaches bytes [{first}, {end}), outside its allocation: {why}")


def check_places(looked: int) -> None:
    """Check the number of blocks that are looked up one by one, so that all lookups end in seconds.

    Raises:
        LayoutError: there are too many blocks.
    """
    if looked > LIMITS.places:
        raise LayoutError(f"over {LIMITS.places:,} blocks at no single stride; describe fewer blocks or layers")


# ---- padding ---------------------------------------------------------------------------------------------------------


class Padding(NamedTuple):
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
        reach = span((*component.form.block, *component.form.inner)) + 1
        for offset in component.form.table or (0,):
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
    taken, end, step = 0, -1, 0
    for component in sorted(layout.components, key=lambda component: component.address):
        form = component.form
        stride = form.block[0][1] if len(form.block) == 1 else 0
        alone = component.address >= end
        if stride <= span(form.inner) or (stride != step and not alone):
            return None
        taken += stride * alone
        end, step = max(end, component.hull()[1]), stride
    return taken - layout.block_nbytes if taken >= layout.block_nbytes else None
