"""Slices and merges of layouts, and layouts in smaller blocks, over the same memory.

No byte is copied. If the token factors cannot express a view, the result is None. Views of one token always exist.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from kvplan.base.files import Budget
from kvplan.base.numbers import number_ranges
from kvplan.base.values import integers, listed, other_case, quoted
from kvplan.errors import LayoutError
from kvplan.layout.components import Built, Component, Form, once, subblocks_of
from kvplan.layout.disjoint import check_disjoint
from kvplan.layout.strides import cut, normal, offset, offsets_of

Heads = range | tuple[int, ...]  # global numbers of heads, ascending; a tuple if they are not consecutive


def common_heads(held: Sequence[range]) -> range:
    """Return the heads that all ranges have in common; the result may be empty.

    >>> common_heads([range(0, 4), range(2, 8)]), len(common_heads([range(0, 2), range(4, 6)]))
    (range(2, 4), 0)
    """
    return range(max(heads.start for heads in held), min(heads.stop for heads in held))


def joined_heads(ranges: Iterable[range]) -> Heads:
    """Return the numbers of all ranges: a range if they are consecutive, otherwise a tuple.

    >>> joined_heads([range(0, 4), range(2, 8)]), joined_heads([range(7, 8), range(1, 2)])
    (range(0, 8), (1, 7))
    """
    numbers = sorted(set[int]().union(*set(ranges)))
    whole = range(numbers[0], numbers[-1] + 1)
    return whole if len(whole) == len(numbers) else tuple(numbers)


def heads_held(components: Iterable[Component]) -> dict[tuple[int, str], Heads | None]:
    """Return the global numbers of the heads of every (layer, part), or None if it has no head axis.

    Raises:
        LayoutError: two components of one (layer, part) hold one head, or have no head axis.
    """
    forms: dict[tuple[int, str], list[Form]] = defaultdict(list)
    for component in components:
        forms[component.layer, component.part].append(component.form)
    held: dict[tuple[int, str], Heads | None] = {}
    for (layer, part), some in forms.items():
        heads = some[0].heads if len(some) == 1 else joined_heads(form.heads for form in some)
        if len(some) > 1 and (len(heads) < sum(len(form.heads) for form in some) or not all(f.headed for f in some)):
            raise LayoutError(f"layer {layer} {part!r} is held {len(some)} times, and not as heads apart")
        held[layer, part] = heads if some[0].headed else None
    return held


def slice_heads(components: Sequence[Component], heads: Heads) -> list[Component]:
    """Slice components to those of some heads that each holds; components without a head axis are kept whole.

    Raises:
        LayoutError: ``heads`` are no range of step 1 and no tuple, no layer holds one of them, or a split head axis
            cannot express them.
    """
    if not heads or not isinstance(heads, range | tuple) or (isinstance(heads, range) and heads.step != 1):
        raise LayoutError(f"heads is {quoted(heads)}; give a range of step 1 that holds at least one head")
    wanted = [heads] if isinstance(heads, range) else _consecutive(integers("heads", heads))
    headed = [component for component in components if component.form.headed]
    held = joined_heads(component.form.heads for component in headed) if headed else heads
    if not set(heads) <= set(held):
        wanted_text = f"heads {quoted(heads[0])} to {quoted(heads[-1])}"
        raise LayoutError(f"{wanted_text} are not all held by {headed[0]}; it holds {held[0]} to {held[-1]}")

    def cut_out(form: Form) -> list[tuple[Form, int]]:
        mine = [both for some in wanted if (both := common_heads((some, form.heads)))]
        return [_head_slice(form, some) for some in mine] if form.headed else [(form, 0)]

    return _changed(components, cut_out)


def _consecutive(numbers: Sequence[int]) -> list[range]:
    """Return ranges of ascending numbers."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda at: at[1] - at[0])]
    return [range(run[0], run[-1] + 1) for run in runs]


def _head_slice(form: Form, heads: range) -> tuple[Form, int]:
    """Slice a form to some heads; return it with the bytes from the form's first head to the first of ``heads``."""
    start, count = heads.start - form.head_start, len(heads)
    place, factors = 1, []
    for size, stride in reversed(form.head):  # factors are kept whole, but the outermost may be cut
        take = min(size, -(-count // place))
        factors.append((take, stride))
        place *= take
    head, offsets = normal(reversed(factors)), offsets_of(form.head)[start : start + count]
    if not np.array_equal(offsets_of(head) + offsets[0], offsets):
        crossed = f"heads {heads.start} to {heads.stop - 1} cross a boundary of the split head axis {form.head}"
        raise LayoutError(f"{crossed}; slice within one factor of it, or along whole ones")
    return replace(form, head=head, head_start=heads.start), int(offsets[0])


def _changed(components: Iterable[Component], change: Callable[[Form], Sequence[tuple[Form, int]]]) -> list[Component]:
    """Replace every form by those that ``change`` returns, moved by some bytes. Components go on sharing forms."""
    known: dict[int, Sequence[tuple[Form, int]]] = {}
    changed = []
    for c in components:
        if id(c.form) not in known:
            known[id(c.form)] = change(c.form)
        changed += [Component(c.layer, c.part, c.address + shift, form, c.dtype) for form, shift in known[id(c.form)]]
    return changed


def sliced(
    layout: Built, held: Sequence[int], names: Sequence[str], layers: Any, heads: Heads | None, parts: Any
) -> Built:
    """Keep some layers, heads and parts of a layout of layers ``held`` and parts ``names``; see ``KVLayout.slice``."""
    if layers is not None:
        several = isinstance(layers, Iterable) and getattr(layers, "ndim", True)
        layers = integers("layers", layers if several else (layers,))
    layers, parts = _subset("layers", held, layers), _subset("parts", names, parts)
    kept = [c for c in layout.components if c.layer in layers and c.part in parts]
    if heads is not None:
        kept = slice_heads(kept, heads)
    if not kept:
        raise LayoutError("the slice holds nothing; name at least one layer and part")
    tokens = subblocks_of(kept) if all(c.form.opaque for c in kept) else layout.block_tokens
    dtypes = dict.fromkeys(component.dtype for component in kept)
    dtype = layout.dtype if "" in dtypes else " + ".join(dtypes)
    return layout._replace(components=tuple(kept), block_tokens=tokens, dtype=dtype)


def _subset(name: str, held: Sequence[Any], wanted: Any) -> frozenset[Any]:
    if wanted is None:
        return frozenset(held)
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        wanted = (wanted,)
    missing = [item for item in wanted if item not in held]
    if missing:
        text = number_ranges(held) if name == "layers" else listed(held)
        hint = other_case(missing[0], held) if name == "parts" and isinstance(missing[0], str) else ""
        raise LayoutError(f"{name} [{listed(missing)}] are not held; {name} held are {text}{hint}")
    return frozenset(wanted)


def stretch_of(layouts: Iterable[Built], most: int) -> int:
    """Return the largest divisor of ``most`` tokens by which the blocks of all layouts can be split.

    >>> import numpy as np
    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_tensors("token.0 block token.1 dim", np.zeros((2, 5, 6, 8), np.int8))
    >>> stretch_of([layout.built], 4), stretch_of([layout.built], 6)
    (2, 6)
    """
    axes = {c.form.token for layout in layouts for c in layout.components if not c.form.opaque}
    return next(at for at in range(most, 0, -1) if most % at == 0 and all(cut(axis, at) is not None for axis in axes))


def split_blocks(layout: Built, tokens: int) -> Built | None:
    """Split blocks into smaller ones of ``tokens`` tokens: block ``b`` becomes ``b * n`` to ``b * n + n - 1``.

    Args:
        layout: a layout of which all parts have token slots, unless ``tokens`` is its block_tokens.
        tokens: token slots per smaller block, a divisor of ``layout.block_tokens``.

    >>> import numpy as np
    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_tensors("block token dim", np.zeros((4, 16, 8), np.int8))
    >>> small = KVLayout(split_blocks(layout.built, 4))
    >>> small.num_blocks, small.address(layer=0, part="kv", block=5) == layout.address(
    ...     layer=0, part="kv", block=1, token=4)
    (16, True)
    """
    if tokens == layout.block_tokens:
        return layout

    def split(form: Form) -> list[tuple[Form, int]]:
        halves = None if form.opaque else cut(form.token, tokens)
        if halves is None:
            return []
        outer, inner = halves
        if form.table is None:
            return [(replace(form, block=normal((*form.block, *outer)), token=inner), 0)]
        steps = offsets_of(outer).tolist()
        return [(replace(form, table=tuple(at + step for at in form.table for step in steps), token=inner), 0)]

    return _with_forms(layout, split, layout.num_blocks * (layout.block_tokens // tokens), tokens)


def some_tokens(layout: Built, part: int, parts: int, interleave: int) -> Built | None:
    """Keep one share of the tokens of every block. The shares take stretches of consecutive tokens in turn.

    Args:
        layout: its block_tokens must be a multiple of ``interleave * parts``, and all its parts must have token slots.
        part: number of the share to keep, 0 to parts - 1.
        parts: how many shares there are.
        interleave: consecutive tokens in a stretch.

    Returns:
        The layout of that share; None if the tokens cannot be cut like this.

    >>> import numpy as np
    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_tensors("block token dim", np.zeros((4, 16, 8), np.int8))
    >>> third = KVLayout(some_tokens(layout.built, 2, 4, 2))
    >>> third.block_tokens, third.address(layer=0, part="kv", token=2) == layout.address(layer=0, part="kv", token=12)
    (4, True)
    """

    def pick(form: Form) -> list[tuple[Form, int]]:
        stretches = None if form.opaque else cut(form.token, interleave)
        turns = cut(stretches[0], parts) if stretches is not None else None
        if stretches is None or turns is None:
            return []
        return [(replace(form, token=normal((*turns[0], *stretches[1]))), offset(turns[1], part))]

    return _with_forms(layout, pick, layout.num_blocks, layout.block_tokens // parts)


def _with_forms(
    layout: Built, change: Callable[[Form], Sequence[tuple[Form, int]]], num_blocks: int, block_tokens: int
) -> Built | None:
    components = tuple(_changed(layout.components, change))
    if len(components) < len(layout.components):
        return None
    return layout._replace(components=components, num_blocks=num_blocks, block_tokens=block_tokens)


def merge(layouts: Sequence[Built], budget: Budget | None = None) -> Built:
    """Join several layouts; see :meth:`kvplan.KVLayout.merge`.

    Args:
        layouts: at least one layout.
        budget: limits of the work for the whole document that contains the layouts.
    """
    if not layouts:
        raise LayoutError("merge of no layouts; give at least one")
    first = layouts[0]
    seen: dict[tuple[int, str], int] = {}
    for k, layout in enumerate(layouts):
        if layout.num_blocks != first.num_blocks:
            raise LayoutError(f"layout {k} has {layout.num_blocks} blocks, layout 0 has {first.num_blocks}")
        if layout.device != first.device:
            raise LayoutError(f"layout {k} is on {layout.device}, layout 0 on {first.device}")
        for component in layout.components:
            other = seen.setdefault((component.layer, component.part), k)
            if other != k:
                raise LayoutError(f"layouts {other} and {k} both hold {component}; name the part or the layers")
    components = sorted((c for layout in layouts for c in layout.components), key=lambda c: c.layer)
    tokens = {layout.block_tokens for layout in layouts if not layout.opaque} or {subblocks_of(components)}
    if len(tokens) > 1:
        raise LayoutError(f"block_tokens differ: {sorted(tokens)}; give layouts with blocks of equal size")
    block_tokens = tokens.pop()
    for component in components:
        if component.form.opaque and block_tokens % component.form.subblocks:
            count = component.form.subblocks
            raise LayoutError(f"{component} has {count} sub-blocks; it divides block_tokens, {block_tokens} tokens")
    if len(layouts) > 1:
        check_disjoint(components, budget)
    regions = once([region for layout in layouts for region in layout.regions])
    dtype, notation = (
        " + ".join(dict.fromkeys(text for layout in layouts for text in getattr(layout, name).split(" + ")))
        for name in ("dtype", "notation")
    )
    return Built(tuple(components), regions, first.num_blocks, block_tokens, dtype, notation)
