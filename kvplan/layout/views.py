"""A layout's memory seen otherwise: in smaller blocks, or as some of the tokens of each block.

Nothing is copied and no address changes. What factors of the token axis cannot express is None: the caller then asks
for less, and stretches of one token can always be had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvplan.layout.build import Built
from kvplan.layout.components import Component, Form
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import cut, extent, normal, offset


def stretch_of(layouts: Iterable[KVLayout], most: int) -> int:
    """The largest divisor of ``most`` tokens by which the blocks of all of these layouts can be split.

    >>> import numpy as np
    >>> layout = KVLayout.from_tensors("token.0 block token.1 dim", np.zeros((2, 5, 6, 8), np.int8))
    >>> stretch_of([layout], 4), stretch_of([layout], 6)
    (2, 6)
    """
    axes = {c.form.token for layout in layouts for c in layout.components if not c.form.opaque}
    return next(at for at in range(most, 0, -1) if most % at == 0 and all(cut(axis, at) is not None for axis in axes))


def split_blocks(layout: KVLayout, tokens: int) -> KVLayout | None:
    """The same bytes in blocks of so many tokens: block ``b`` becomes ``b * n`` to ``b * n + n - 1``.

    Args:
        layout: all its parts have token slots, unless its blocks stay as they are.
        tokens: divides ``layout.block_tokens``.

    >>> import numpy as np
    >>> layout = KVLayout.from_tensors("block token dim", np.zeros((4, 16, 8), np.int8))
    >>> small = split_blocks(layout, 4)
    >>> small.num_blocks, small.address(layer=0, part="kv", block=5) == layout.address(
    ...     layer=0, part="kv", block=1, token=4)
    (16, True)
    """
    if tokens == layout.block_tokens:
        return layout

    def split(form: Form) -> tuple[Form, int] | None:
        halves = None if form.opaque else cut(form.token, tokens)
        if halves is None:
            return None
        outer, inner = halves
        if form.table is None:
            return replace(form, block=normal((*form.block, *outer)), token=inner), 0
        steps = [offset(outer, k) for k in range(extent(outer))]
        return replace(form, table=tuple(at + step for at in form.table for step in steps), token=inner), 0

    return _with_forms(layout, split, layout.num_blocks * (layout.block_tokens // tokens), tokens)


def some_tokens(layout: KVLayout, part: int, parts: int, interleave: int) -> KVLayout | None:
    """Of every block, the tokens whose stretch of ``interleave`` tokens has number ``part`` modulo ``parts``.

    Args:
        layout: ``interleave * parts`` divides its block_tokens; all its parts have token slots.
        part: 0 to parts - 1.
        parts: shares that the tokens are dealt to in turn.
        interleave: tokens of one turn.

    >>> import numpy as np
    >>> layout = KVLayout.from_tensors("block token dim", np.zeros((4, 16, 8), np.int8))
    >>> third = some_tokens(layout, 2, 4, 2)
    >>> third.block_tokens, third.address(layer=0, part="kv", token=2) == layout.address(layer=0, part="kv", token=12)
    (4, True)
    """

    def pick(form: Form) -> tuple[Form, int] | None:
        stretches = None if form.opaque else cut(form.token, interleave)
        turns = cut(stretches[0], parts) if stretches is not None else None
        if stretches is None or turns is None:
            return None
        return replace(form, token=normal((*turns[0], *stretches[1]))), offset(turns[1], part)

    return _with_forms(layout, pick, layout.num_blocks, layout.block_tokens // parts)


def _with_forms(
    layout: KVLayout, change: Callable[[Form], tuple[Form, int] | None], num_blocks: int, block_tokens: int
) -> KVLayout | None:
    """The layout with every form changed and moved by so many bytes; alike forms stay one object."""
    known: dict[int, tuple[Form, int] | None] = {}
    components = []
    for c in layout.components:
        if id(c.form) not in known:
            known[id(c.form)] = change(c.form)
        changed = known[id(c.form)]
        if changed is None:
            return None
        components.append(Component(c.layer, c.part, c.address + changed[1], changed[0]))
    sizes = {axis: size for axis, size in layout.sizes.items() if not axis.startswith(("token.", "block."))}
    sizes.update(block=num_blocks, token=block_tokens)
    built = Built(tuple(components), layout.regions, num_blocks, block_tokens, sizes, layout.dtype)
    return KVLayout(built, notation=layout.notation, tensors=layout.tensors)
