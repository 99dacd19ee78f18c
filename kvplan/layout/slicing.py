"""Some heads of a component, over the same memory; and how ranges of numbers are printed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError
from kvplan.layout.components import Component, Form
from kvplan.layout.strides import extent, normal, offset


def common_heads(held: Sequence[range]) -> range:
    """The heads that all hold, of at least one; empty where there is none.

    >>> common_heads([range(0, 4), range(2, 8)]), len(common_heads([range(0, 2), range(4, 6)]))
    (range(2, 4), 0)
    """
    return range(max(heads.start for heads in held), min(heads.stop for heads in held))


def heads_held(components: Iterable[Component]) -> dict[tuple[int, str], range | None]:
    """Global numbers of the heads of every (layer, part), whose heads may be several components; None without heads.

    Raises:
        LayoutError: two components of one (layer, part) that do not hold heads after one another.
    """
    ranges: dict[tuple[int, str], list[range | None]] = defaultdict(list)
    for component in components:
        form = component.form
        ranges[component.layer, component.part].append(form.heads if form.headed else None)
    held: dict[tuple[int, str], range | None] = {}
    for (layer, part), some in ranges.items():
        if len(some) == 1:
            held[layer, part] = some[0]
            continue
        ordered = sorted((heads for heads in some if heads is not None), key=lambda heads: heads.start)
        if len(ordered) != len(some) or any(a.stop != b.start for a, b in pairwise(ordered)):
            raise LayoutError(f"layer {layer} {part!r} is held {len(some)} times, and not as heads after one another")
        held[layer, part] = range(ordered[0].start, ordered[-1].stop)
    return held


def slice_heads(components: Sequence[Component], heads: range) -> list[Component]:
    """Components of some heads; those without a head axis are kept whole.

    Raises:
        LayoutError: no range of step 1, heads that are not held, or a range that a split head axis cannot give.
    """
    if not isinstance(heads, range) or heads.step != 1 or not heads:
        raise LayoutError(f"heads is {quoted(heads)}; give a range of step 1 that holds at least one head")
    kept: list[Component] = []
    forms: dict[int, tuple[Form, int]] = {}
    held = heads_held(components)
    for component in components:
        form, all_held = component.form, held[component.layer, component.part]
        if all_held is None:
            kept.append(component)
            continue
        if heads.start < all_held.start or heads.stop > all_held.stop:
            raise LayoutError(
                f"heads {quoted(heads.start)} to {quoted(heads.stop - 1)} are not all held by {component}; it holds "
                f"{all_held.start} to {all_held.stop - 1}"
            )
        mine = common_heads((heads, form.heads))
        if not mine:
            continue
        if id(form) not in forms:
            forms[id(form)] = _head_slice(form, mine)
        sliced, shift = forms[id(form)]
        kept.append(Component(component.layer, component.part, component.address + shift, sliced))
    return kept


def _head_slice(form: Form, heads: range) -> tuple[Form, int]:
    """The form of some heads, and the bytes from its first head to theirs."""
    start, count = heads.start - form.head_start, len(heads)
    offsets = [offset(form.head, start + k) for k in range(count)]
    place, factors = 1, []
    # Rebuild factors from the innermost: whole radices are kept, and the outermost may be cut.
    for size, stride in reversed(form.head):
        if place == count:
            break
        take = min(size, -(-count // place))
        factors.append((take, stride))
        place *= take
    head = normal(reversed(factors))
    if extent(head) != count or any(offset(head, k) + offsets[0] != o for k, o in enumerate(offsets)):
        raise LayoutError(
            f"heads {heads.start} to {heads.stop - 1} cross a boundary of the split head axis {form.head}; slice "
            "within one factor of it, or along whole ones"
        )
    return replace(form, head=head, head_start=heads.start), offsets[0]
