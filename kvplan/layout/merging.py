"""Join several layouts into one with all their components, and with each region once."""

from __future__ import annotations

from collections.abc import Sequence

from kvplan.base.files import Budget
from kvplan.errors import LayoutError
from kvplan.layout.components import Built, once, subblocks_of
from kvplan.layout.disjoint import check_disjoint


def merged(layouts: Sequence[Built], budget: Budget | None = None) -> Built:
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
    tokens = {layout.block_tokens for layout in layouts if not layout.opaque}
    if len(tokens) > 1:
        raise LayoutError(f"block_tokens differ: {sorted(tokens)}; give layouts with blocks of equal size")
    block_tokens = max(tokens, default=0) or subblocks_of(c for layout in layouts for c in layout.components)
    for component in (c for layout in layouts for c in layout.components if c.form.opaque):
        if block_tokens % component.form.subblocks:
            raise LayoutError(f"{component} has {component.form.subblocks} sub-blocks a block of {block_tokens} "
                              "tokens; their number divides the tokens")  # fmt: skip
    components = tuple(sorted((c for layout in layouts for c in layout.components), key=lambda c: c.layer))
    if len(layouts) > 1:
        check_disjoint(components, budget)
    regions = once([region for layout in layouts for region in layout.regions])
    dtype = " + ".join(dict.fromkeys(name for layout in layouts for name in layout.dtype.split(" + ")))
    notation = " + ".join(dict.fromkeys(one for layout in layouts for one in layout.notation.split(" + ")))
    return Built(components, regions, first.num_blocks, block_tokens, dtype, notation)
